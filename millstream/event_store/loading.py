"""Loading aggregates: a snapshot where there is one, then the events after it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from millstream.errors import AggregateDeleted, AggregateNotFound, ConfigError
from millstream.event_store.ending import Archive
from millstream.event_store.events import AppendReceipt, Clock, Loaded, StoredEvent
from millstream.event_store.folding import Folding
from millstream.event_store.messages import AppendMessage
from millstream.event_store.reading import AggregateReader
from millstream.event_store.snapshots import Snapshots
from millstream.events.event import datetime_of, nanoseconds_of, whole_microsecond

__all__ = ["Loader", "Moment"]

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


def _end_of(snapshot: Loaded[Any]) -> tuple[int, int | None]:
    """The event that a snapshot ends with: its version and time of storing."""
    return snapshot.version, snapshot.stored_ns


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

    async def load(self, id: str, moment: Moment) -> tuple[Loaded[Any], int]:
        """An aggregate at a moment, and how many events were read for it.

        A deleted one raises AggregateDeleted, also as of a time when it had events: they are gone.
        """
        snapshot: Loaded[Any] | None = None
        if self._snapshots is None or not await self._snapshots.exist():
            pass
        elif moment.is_now:
            # Side by side: often the last append is all that is missing.
            snapshot, (head, _) = await asyncio.gather(
                self._snapshots.get(id), self._reader.head(id)
            )
            if head is not None and not head.ends:
                loaded = await self._after_head(id, snapshot, head)
                if loaded is not None:
                    return loaded
        else:
            snapshot = await self._snapshot(id, moment)
        if snapshot is not None:
            try:
                return await self._read(id, moment, snapshot)
            except _NotOfThisLog:
                _log.warning(
                    "store %s: a snapshot is newer than the log, and not used", self._store
                )
        return await self._read(id, moment, None)

    async def _after_head(
        self, id: str, snapshot: Loaded[Any] | None, head: AppendMessage
    ) -> tuple[Loaded[Any], int] | None:
        """The aggregate, if its last append is all that follows after the snapshot; else None."""
        done = 0 if snapshot is None else snapshot.version
        if snapshot is not None:
            last = head
            if head.offset != snapshot.offset:
                before = await self._reader.at(head.partition.number, snapshot.offset)
                if before is None or before.id != id:
                    return None
                last = before
            if _end_of(snapshot) != (last.last, last.stored_ns):
                return None
            if last is head:
                return snapshot, 0
        if head.first != done + 1:
            return None
        folding = self.need_folding()
        state = folding.make() if snapshot is None else snapshot.state
        for event in await self._reader.events_in(head):
            state = folding.fold(state, event.data)
        key_ids = head.key_ids if snapshot is None else head.key_ids | snapshot.key_ids
        times = (head.timestamp_ns, head.stored_ns)
        loaded = Loaded(id, state, head.last, head.offset, *times, frozenset(key_ids))
        return loaded, head.last - done

    async def _read(
        self, id: str, moment: Moment, snapshot: Loaded[Any] | None
    ) -> tuple[Loaded[Any], int]:
        folding = self.need_folding()
        state = folding.make() if snapshot is None else snapshot.state
        last: StoredEvent | None = None
        count = 0
        key_ids = set() if snapshot is None else set(snapshot.key_ids)
        fold, now = folding.fold, moment.is_now
        async for events in self._history(id, snapshot, key_ids=key_ids):
            for event in events:
                if now or moment.includes(event):
                    state, last = fold(state, event.data), event
                    count += 1
        loaded = snapshot
        if last is not None:
            times = (last.timestamp_ns, last.stored_ns)
            loaded = Loaded(id, state, last.version, last.offset, *times, frozenset(key_ids))
        if loaded is None:
            raise AggregateNotFound(self._store, id, str(moment))
        if moment.version is not None and loaded.version < moment.version:
            when = f"{moment}: its last version is {loaded.version}"
            raise AggregateNotFound(self._store, id, when)
        return loaded, count

    async def _history(
        self,
        id: str,
        snapshot: Loaded[Any] | None = None,
        *,
        version: int = 1,
        key_ids: set[str] | None = None,
    ) -> AsyncIterator[list[StoredEvent]]:
        """The events of an aggregate, after a snapshot; AggregateDeleted when they are gone.

        The append that a snapshot ends with is read again: after a restore, or in a store that was
        created again under the same name, it may be another one. `key_ids` collects those of the
        persons whose data are in the events.
        """
        done = 0 if snapshot is None else snapshot.version
        start = 1 if snapshot is None else snapshot.offset
        seen = snapshot is None
        async for events in self._reader.events_of(id, start, version, key_ids):
            if not seen and snapshot is not None and events:
                known = [event for event in events if event.offset == snapshot.offset]
                if not known or _end_of(snapshot) != (known[-1].version, known[-1].stored_ns):
                    break
                seen = True
                events = events[len(known) :]
            if events and events[-1].deleted:
                if events[-1].data.archived_to is None:
                    raise AggregateDeleted(self._store, id)
                yield events[:-1]
                done = events[-2].version if len(events) > 1 else done
                found = False
                async for archived in (await self._archive.reader()).events_of(id, key_ids=key_ids):
                    found = found or bool(archived)
                    yield [event for event in archived if event.version > done]
                if not found:
                    raise AggregateDeleted(self._store, id)
                return
            yield events
            done = events[-1].version if events else done
        if not seen:
            raise _NotOfThisLog

    async def _snapshot(self, id: str, moment: Moment) -> Loaded[Any] | None:
        if self._snapshots is None:
            return None
        found = await self._snapshots.get(id)
        return found if found is not None and moment.holds(found) else None

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
        self, id: str, start: int, limit: int | None, backward: bool
    ) -> AsyncIterator[StoredEvent]:
        """The events of an aggregate, in one of two directions."""
        if backward:
            # The broker finds messages forward only: the newest are kept while it is read.
            newest: deque[StoredEvent] = deque(maxlen=limit)
            async for event in self._forward(id, start):
                newest.append(event)
            for event in reversed(newest):
                yield event
            return
        count = 0
        async for event in self._forward(id, start):
            yield event
            count += 1
            if count == limit:
                return

    async def _forward(self, id: str, start: int) -> AsyncIterator[StoredEvent]:
        async for events in self._history(id, version=start):
            for event in events:
                if event.version >= start:
                    yield event
