"""Loading aggregates: a snapshot where there is one, then the events after it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, NamedTuple

from millstream.errors import (
    AggregateDeleted,
    AggregateNotFound,
    ConfigError,
    MillstreamError,
    Undecodable,
)
from millstream.event_store.ending import Archive
from millstream.event_store.events import AppendReceipt, Clock, Loaded, StoredEvent
from millstream.event_store.folding import Folding
from millstream.event_store.format import PREVIOUS_MAX, next_previous
from millstream.event_store.messages import AppendMessage
from millstream.event_store.reading import AggregateReader
from millstream.event_store.snapshots import Snapshots
from millstream.events.event import datetime_of, nanoseconds_of, whole_microsecond
from millstream.events.undecodable import Report

__all__ = ["LoadResult", "Loader", "Moment"]

# Offsets from one append to the next, on average, from which on the broker takes longer to search
# for the next one than to answer another request: it looks at each message between them.
FAR_OFFSETS: Final = 500
# Events of a history that is read from its end: they are held until the first is found.
BACK_EVENTS_MAX: Final = 10_000

_log = logging.getLogger("millstream.event_store")


@dataclass(frozen=True, slots=True)
class Moment:
    """Up to where an aggregate is loaded: everything, a version, or a time by one of two clocks."""

    version: int | None = None
    time_ns: int | None = None
    clock: Clock = "stored"

    @classmethod
    def of(cls, at: int | datetime | None, clock: Clock) -> Moment:
        """The moment that the arguments of `load` mean."""
        if clock not in ("stored", "event"):
            raise ConfigError(f"clock {clock!r}: choose stored or event")
        if isinstance(at, datetime):
            return cls(None, whole_microsecond(nanoseconds_of(at)), clock)
        if at is not None and (isinstance(at, bool) or not isinstance(at, int) or at < 1):
            raise ConfigError(f"at {at!r:.60}: give a version from 1 on, or a datetime with a zone")
        return cls(at)

    def holds(self, snapshot: Loaded[Any]) -> bool:
        """Whether a snapshot has nothing in it that is after this moment."""
        if self.version is not None:
            return snapshot.version <= self.version
        if self.time_ns is None:
            return True
        # By the event's own clock a snapshot may hold events with a later time than its last one.
        stored = snapshot.stored_ns
        return self.clock == "stored" and stored is not None and stored <= self.time_ns

    def includes(self, event: StoredEvent) -> bool:
        """Whether an event is in the state at this moment."""
        if self.version is not None:
            return event.version <= self.version
        if self.time_ns is None:
            return True
        time = event.stored_ns if self.clock == "stored" else event.timestamp_ns
        return time <= self.time_ns

    @property
    def is_now(self) -> bool:
        return self.version is None and self.time_ns is None

    def __str__(self) -> str:
        if self.is_now:
            return ""
        if self.time_ns is None:
            return f" at version {self.version}"
        return f" as of {datetime_of(self.time_ns).isoformat()}"


class _NotOfThisLog(Exception):
    """A snapshot does not fit the events that are stored."""


def _ends_with(snapshot: Loaded[Any], known: list[StoredEvent]) -> bool:
    """Whether these are the events that a snapshot ends with, and not others at the same offset."""
    if not known:
        return False
    return (known[-1].version, known[-1].stored_ns) == (snapshot.version, snapshot.stored_ns)


def _is_quick(head: AppendMessage, snapshot: Loaded[Any] | None) -> bool:
    """Whether what follows after a snapshot is found sooner from the last append back."""
    done = 0 if snapshot is None else snapshot.version
    previous = head.previous
    if head.first - done > BACK_EVENTS_MAX:
        return False
    if len(previous) < PREVIOUS_MAX:
        return True  # there are no others
    if snapshot is not None and snapshot.offset >= previous[-1]:
        return True  # one round trip
    return head.offset - previous[-1] > FAR_OFFSETS * len(previous)


class LoadResult(NamedTuple):
    """What a load has found."""

    loaded: Loaded[Any]
    events: int  # how many were read for it
    previous: str  # what the next append says of those before it


class _Work:
    """An aggregate while its events are folded into a state."""

    def __init__(
        self, id: str, moment: Moment, snapshot: Loaded[Any] | None, folding: Folding
    ) -> None:
        self.id, self.moment, self.snapshot = id, moment, snapshot
        self.count = 0
        # Of the persons whose data are in it.
        self.key_ids: set[str] = set() if snapshot is None else set(snapshot.key_ids)
        self._fold = folding.fold
        self._state = folding.make() if snapshot is None else snapshot.state
        self._last: StoredEvent | None = None

    def take(self, events: list[StoredEvent]) -> None:
        """Fold the next events, as far as they are in the state at the moment."""
        fold, state, moment = self._fold, self._state, self.moment
        if not moment.is_now:
            events = [event for event in events if moment.includes(event)]
        for event in events:
            state = fold(state, event.data)
        if events:
            self._state, self._last = state, events[-1]
            self.count += len(events)

    @property
    def loaded(self) -> Loaded[Any] | None:
        """The aggregate; None: it has no events up to the moment."""
        last = self._last
        if last is None:
            return self.snapshot
        known = (last.version, last.offset, last.timestamp_ns, last.stored_ns)
        return Loaded(self.id, self._state, *known, frozenset(self.key_ids))


class Loader:
    """Loads the aggregates of one store."""

    def __init__(
        self,
        store: str,
        reader: AggregateReader,
        folding: Folding | None,
        snapshots: Snapshots | None,
        archive: Archive,
    ) -> None:
        self._store = store
        self._reader = reader
        self._folding = folding
        self._snapshots = snapshots
        self._archive = archive

    def need_folding(self) -> Folding:
        """How states follow from events; a ConfigError when the store was opened without."""
        if self._folding is None:
            raise ConfigError(
                f"store '{self._store}' was opened without a class of states: "
                f"event_store({self._store!r}, Account, events=[...])"
            )
        return self._folding

    async def load(self, id: str, moment: Moment) -> LoadResult:
        """An aggregate at a moment.

        A deleted one raises AggregateDeleted, also as of a time when it had events: they are gone.
        """
        snapshot, head = await self._snapshot_and_head(id)
        if head is None:
            await self._reader.check_loss(id)
            raise AggregateNotFound(self._store, id, str(moment))
        if snapshot is not None and not moment.holds(snapshot):
            snapshot = None
        work = self._work(id, moment, snapshot)
        events = await self._back_from(head, snapshot, work.key_ids)
        if events is not None:
            work.take(events)
            return self._result(work, head)
        if snapshot is not None:
            try:
                return await self._read(work, head)
            except _NotOfThisLog:
                _log.warning(
                    "store %s: a snapshot is newer than the log, and not used", self._store
                )
        return await self._read(self._work(id, moment, None), head)

    async def _snapshot_and_head(self, id: str) -> tuple[Loaded[Any] | None, AppendMessage | None]:
        snapshots, reader = self._snapshots, self._reader
        address = None if snapshots is None else await snapshots.address(id)
        if snapshots is None or address is None:
            found = await reader.last_with(id)
            return None, await reader.last(id) if found is None else found[0]
        partition, subject = address
        found = await reader.last_with(id, (partition.stream, subject))
        if found is None:
            snapshot, head = await asyncio.gather(snapshots.get(id), reader.last(id))
            return snapshot, head
        head, message = found
        return await snapshots.read(id, partition, message), head

    async def _back_from(
        self, head: AppendMessage, snapshot: Loaded[Any] | None, key_ids: set[str]
    ) -> list[StoredEvent] | None:
        """The events after a snapshot, found from the last append back; None: read them forward."""
        if head.ends or not _is_quick(head, snapshot):
            return None
        offset = 1 if snapshot is None else snapshot.offset
        await self._reader.check_loss(head.id, offset)
        try:
            groups = [await self._reader.events_in(head)]
        except MillstreamError:
            return None  # those before it come first
        key_ids |= head.key_ids
        if head.offset > offset:
            async for events in self._reader.events_before(head, offset, key_ids):
                groups.append(events)
        found = [event for events in reversed(groups) for event in events]
        if snapshot is None:
            return found if found[0].version == 1 else None
        known = [event for event in found if event.offset == offset]
        return found[len(known) :] if _ends_with(snapshot, known) else None

    def _work(self, id: str, moment: Moment, snapshot: Loaded[Any] | None) -> _Work:
        return _Work(id, moment, snapshot, self.need_folding())

    async def _read(self, work: _Work, head: AppendMessage) -> LoadResult:
        async for events in self._history(work.id, work.snapshot, key_ids=work.key_ids):
            work.take(events)
        return self._result(work, head)

    def _result(self, work: _Work, head: AppendMessage) -> LoadResult:
        moment, loaded = work.moment, work.loaded
        if loaded is None:
            raise AggregateNotFound(self._store, work.id, str(moment))
        if moment.version is not None and loaded.version < moment.version:
            when = f"{moment}: its last version is {loaded.version}"
            raise AggregateNotFound(self._store, work.id, when)
        same = head.offset == loaded.offset
        previous = head.next_previous if same else next_previous("", loaded.offset)
        return LoadResult(loaded, work.count, previous)

    async def _history(
        self,
        id: str,
        snapshot: Loaded[Any] | None = None,
        *,
        version: int = 1,
        key_ids: set[str] | None = None,
        report: Report | None = None,
    ) -> AsyncIterator[list[StoredEvent]]:
        """The events of an aggregate, after a snapshot; AggregateDeleted when they are gone.

        The append that a snapshot ends with is read again: after a restore, or in a store that was
        created again under the same name, it may be another one. `key_ids` collects those of the
        persons whose data are in the events.
        """
        done = 0 if snapshot is None else snapshot.version
        start = 1 if snapshot is None else snapshot.offset
        seen = snapshot is None
        async for events in self._reader.events_of(id, start, version, key_ids, report):
            if not seen and snapshot is not None and events:
                known = [event for event in events if event.offset == snapshot.offset]
                if not _ends_with(snapshot, known):
                    break
                seen = True
                events = events[len(known) :]
            if events and events[-1].deleted:
                if events[-1].data.archived_to is None:
                    raise AggregateDeleted(self._store, id)
                yield events[:-1]
                done = events[-2].version if len(events) > 1 else done
                found = False
                reader = await self._archive.reader()
                async for archived in reader.events_of(id, key_ids=key_ids, report=report):
                    found = found or bool(archived)
                    yield [event for event in archived if event.version > done]
                if not found:
                    raise AggregateDeleted(self._store, id)
                return
            yield events
            done = events[-1].version if events else done
        if not seen:
            raise _NotOfThisLog

    # -- snapshots --------------------------------------------------------------------------

    async def keep(self, loaded: Loaded[Any], tail: int, every: int | None) -> None:
        """Store a snapshot when many events had to be read."""
        if every is not None and tail >= every and self._snapshots is not None:
            await self._snapshots.try_put(loaded)

    async def put_snapshot(self, loaded: Loaded[Any]) -> None:
        """Store a snapshot that was asked for."""
        if self._snapshots is None:
            self.need_folding().state_codec(1)  # says why there are none
            raise ConfigError(f"store '{self._store}' has no snapshots")
        await self._snapshots.put(loaded)

    async def after(
        self, loaded: Loaded[Any], events: Sequence[Any], receipt: AppendReceipt, every: int | None
    ) -> Loaded[Any]:
        """An aggregate after an append; with a snapshot when it is due."""
        state = loaded.state
        for event in events:
            state = self.need_folding().fold(state, event)
        after = Loaded(loaded.id, state, receipt.version, receipt.offset)
        if every is not None and receipt.version // every > loaded.version // every:
            found = await self._reader.at(receipt.partition, receipt.offset)
            if found is not None and self._snapshots is not None:
                after = replace(
                    after,
                    timestamp_ns=found.timestamp_ns,
                    stored_ns=found.stored_ns,
                    key_ids=loaded.key_ids | found.key_ids,
                )
                await self._snapshots.try_put(after)
        return after

    # -- events -----------------------------------------------------------------------------

    async def events(
        self, id: str, start: int, limit: int | None, backward: bool, report: Report | None
    ) -> AsyncIterator[StoredEvent]:
        """The events of an aggregate, in one of two directions."""
        if backward:
            found = self._backward(id, start, limit, report)
        else:
            found = self._forward(id, start, report)
        count = 0
        async for event in found:
            yield event
            count += 1
            if count == limit:
                return

    async def _backward(
        self, id: str, start: int, limit: int | None, report: Report | None
    ) -> AsyncIterator[StoredEvent]:
        """The newest events first; at least as many as the limit, if there are so many."""
        before: int | None = None  # the version of the last one
        if limit is not None:
            async for events in self._groups_back(id, report):
                for event in reversed(events):
                    if event.version < start:
                        return
                    yield event
                before = events[0].version
        if before is not None and before <= start:
            return
        # The broker finds the others forward only: the newest are kept while they are read.
        newest: deque[StoredEvent] = deque(maxlen=limit)
        async for event in self._forward(id, start, report):
            if before is None or event.version < before:
                newest.append(event)
        for event in reversed(newest):
            yield event

    async def _groups_back(
        self, id: str, report: Report | None
    ) -> AsyncIterator[list[StoredEvent]]:
        """The newest events, as far as they are found from the last append back."""
        try:
            head = await self._reader.last(id)
            events = [] if head is None or head.ends else await self._reader.events_in(head)
        except Undecodable:
            if report is None:
                raise
            return
        if head is not None and events:
            yield events
            async for events in self._reader.events_before(head):
                yield events

    async def _forward(
        self, id: str, start: int, report: Report | None
    ) -> AsyncIterator[StoredEvent]:
        async for events in self._history(id, version=start, report=report):
            for event in events:
                if event.version >= start:
                    yield event
