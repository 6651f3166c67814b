"""An event store: aggregates, their events, and the states that follow from them."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, TypeAlias

from millstream.closing import Opening
from millstream.errors import AggregateDeleted, AggregateNotFound, ConfigError, VersionConflict
from millstream.event_store.appending import AggregateHead, Appender
from millstream.event_store.change import AggregateChange
from millstream.event_store.changing import Changes, decided
from millstream.event_store.ending import ARCHIVE_SUFFIX, AggregateEnding, Archive
from millstream.event_store.event_types import EventTypes
from millstream.event_store.events import (
    ANY,
    NEW,
    Append,
    AppendReceipt,
    Clock,
    Expected,
    Loaded,
    StoredEvent,
    Unchanged,
)
from millstream.event_store.folding import Folding
from millstream.event_store.ids import check_id
from millstream.event_store.loading import Loader, Moment
from millstream.event_store.messages import AppendMessage
from millstream.event_store.personal import PersonalData
from millstream.event_store.reading import AggregateReader
from millstream.event_store.snapshots import Snapshots
from millstream.events.event import Event, PlainEvent
from millstream.events.start import Start
from millstream.events.undecodable import OnUndecodable
from millstream.messaging import ReadPlan, Subscription, Topic
from millstream.schemas.registry.stores import StoreSchemas

__all__ = ["EventStore", "Query", "StoreParts"]

UPDATE_TRIES: Final = 10
# From a state to the event or events that follow; may also be asynchronous.
Decision: TypeAlias = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class StoreParts:
    """What a store is made of; `open_store` puts them together."""

    topic: Topic
    schemas: StoreSchemas
    types: EventTypes
    folding: Folding | None  # None: it was opened without a class of states
    snapshots: Snapshots | None  # None: its states cannot be stored
    snapshot_every: int | None
    open_archive: Callable[[bool], Awaitable[Topic]]  # with True: create it if there is none
    personal: PersonalData


class Query:
    """The events of a pattern of ids, and the expectation that there are no others by then."""

    def __init__(self, events: list[StoredEvent], unchanged: Unchanged) -> None:
        self.events = events
        self.unchanged = unchanged


class EventStore:
    """Aggregates as sequences of events. An append is stored completely or not at all, once.

    Versions count 1, 2, 3 for each aggregate. Order: of each aggregate, and of all events in a
    store with one partition. Nothing that was acknowledged is lost, within the durability of the
    receipt. Opened by `mill.event_store(...)`.
    """

    def __init__(self, parts: StoreParts) -> None:
        topic, types, snapshots = parts.topic, parts.types, parts.snapshots
        self.name = topic.name
        self.topic = topic  # the topic that holds the events
        self.types = types  # the types of events, and how each version is read
        self.folding = parts.folding
        self._schemas = parts.schemas
        self._personal = parts.personal
        self._every = parts.snapshot_every
        self._reader = AggregateReader(topic.handle, types, self._learn)
        self._appender = Appender(self.name, topic.handle, topic.acks, types, self._reader)
        archive = Archive(self.name + ARCHIVE_SUFFIX, parts.open_archive, types, self._learn)
        self._loader = Loader(self.name, self._reader, self.folding, snapshots, archive)
        self._ending = AggregateEnding(topic, self._reader, self._appender, snapshots, archive)

    def __repr__(self) -> str:
        return f"<EventStore {self.name}, {len(self.types.events)} type(s) of events>"

    async def _learn(self, appends: list[AppendMessage]) -> None:
        """Look up what appends need to be decoded: new versions of events, keys of persons."""
        await self._personal.learn(body for append in appends for _, body in append.lines)
        for append in appends:
            for tag, _ in append.lines:
                if not self.types.knows(tag):
                    name, _ = self.types.name_of(tag)
                    event = await self._schemas.event(name)
                    if event is not None:
                        self.types.learn(event)

    # -- writing ----------------------------------------------------------------------------

    async def append(
        self,
        id: str,
        events: Sequence[Any],
        expected: Expected = ANY,
        **details: Any,
    ) -> AppendReceipt:
        """Store events of an aggregate, all together, if it has the expected version.

        `expected` is a version, NEW, ANY or Unchanged(...); VersionConflict carries the actual one.
        `details` are those of Append: headers, timestamp, append_id, correlation_id, causation_id.
        An append whose answer was lost is recognised by its id: it is not stored twice, and not
        called a conflict. With an `append_id` of your own that also holds when you repeat it, with
        the same expectation.
        """
        return await self._appender.append(Append(id, events, expected, **details))

    async def append_all(self, appends: Sequence[Append]) -> list[AppendReceipt]:
        """Store appends to several aggregates, all of them or none; at most 1,000.

        They must be in one partition, as all are in a store with one.
        """
        return await self._appender.append_all(appends)

    async def delete(self, id: str, expected: Expected = ANY, *, reusable: bool = False) -> None:
        """Remove the events of an aggregate, permanently.

        Its end stays in the store as its last version: readers of all events see it, and the
        aggregate takes no more appends. With `reusable` that is removed as well: the id can begin
        again with version 1. AggregateNotFound if it has no events.
        """
        await self._ending.delete(check_id(id), expected, reusable)

    async def archive(self, id: str) -> None:
        """Move the events of an aggregate to the topic `<store>-archive`.

        `load` and `events` still find them; `all`, subscriptions and projections see the end of the
        aggregate, and it takes no more appends.
        """
        await self._ending.archive(check_id(id))

    async def erase(self, person: str) -> bool:
        """Make the personal data of a person unreadable, for ever; False if there are none.

        Fields that are marked `Annotated[str, Personal()]` are stored encrypted with a key of their
        person. This removes the key: in the log, in copies of it and in files made from it they can
        no longer be read, and events have `Personal.erased` instead. Other processes notice within
        5 seconds. Tables of projections hold what their functions have put there: rebuild them.
        """
        return await self._personal.erase(person)

    def change(self, id: str, *, tries: int = UPDATE_TRIES, **details: Any) -> AggregateChange:
        """`async with store.change("a1") as account`: commands, appended when the block ends.

        A command is a method that returns the event it decides on, or several. An aggregate without
        events has the initial state. If another append is faster, the same calls are made on the
        newer state, up to `tries` times; if one of them then returns something else, or an
        attribute that the block has read has another value, VersionConflict is raised. If the block
        raises, nothing is stored.
        """
        return AggregateChange(self, check_id(id), tries, details)

    async def update(
        self, id: str, function: Decision, *, tries: int = UPDATE_TRIES, **details: Any
    ) -> Loaded[Any]:
        """Append what a function of the state returns: an event, several, or none.

        If another append is faster, the function is called again with the newer state, up to
        `tries` times, then VersionConflict is raised.
        """
        for attempt in range(tries):
            loaded = await self.load_or_new(id)
            result = function(copy.deepcopy(loaded.state))
            if hasattr(result, "__await__"):
                result = await result
            events = [] if result is None or result == [] else decided(result, self.types)
            if events is None:
                raise ConfigError(
                    f"update: the function returned {result!r:.60}, which is no event of store "
                    f"'{self.name}', nor a list of them"
                )
            try:
                return await self.append_to(loaded, events, **details)
            except VersionConflict:
                if attempt == tries - 1:
                    raise
        raise ConfigError(f"tries {tries!r}: give 1 or more")

    async def append_to(
        self, loaded: Loaded[Any], events: Sequence[Any], **details: Any
    ) -> Loaded[Any]:
        """Internal: append to an aggregate as it was loaded; the aggregate after it."""
        if not events:
            return loaded
        receipt = await self.append(loaded.id, events, loaded.version or NEW, **details)
        if receipt.first_version != loaded.version + 1:
            # It was stored before, after events that are not in this state or are in it already.
            return await self.load(loaded.id, receipt.version)
        return await self._loader.after(loaded, events, receipt, self._every)

    def changes_on(self, loaded: Loaded[Any]) -> Changes:
        """Internal: what collects the events of a block, on a copy of a loaded state."""
        return Changes(loaded.state, self._loader.need_folding(), self.types)

    def is_event(self, value: Any) -> bool:
        """Whether a value is an event of this store."""
        return self.types.is_event(value)

    # -- reading ----------------------------------------------------------------------------

    async def load(
        self, id: str, at: int | datetime | None = None, *, clock: Clock = "stored"
    ) -> Loaded[Any]:
        """The state of an aggregate, now, after a version, or as of a time.

        A time means when events were stored, to the microsecond and included; with `clock="event"`
        the time that they were given: those that were given a later time are left out.
        AggregateNotFound if it has no events, or had none then; AggregateDeleted if it was deleted.
        """
        loaded, count, previous = await self._loader.load(check_id(id), Moment.of(at, clock))
        if at is None:
            head = AggregateHead(loaded.version, loaded.offset, previous=previous)
            self._appender.remember(id, head)
            await self._loader.keep(loaded, count, self._every)
        return loaded

    async def load_or_new(self, id: str) -> Loaded[Any]:
        """Like `load`, but an aggregate without events has the initial state and version 0."""
        try:
            return await self.load(id)
        except AggregateDeleted:
            raise
        except AggregateNotFound:
            return Loaded(id, self._loader.need_folding().make(), 0, 0)

    async def events(
        self,
        id: str,
        *,
        start: int = 1,
        backward: bool = False,
        limit: int | None = None,
        follow: bool = False,
        undecodable: OnUndecodable = "fail",
    ) -> AsyncIterator[StoredEvent]:
        """The events of an aggregate from a version on; `backward`: the newest first.

        `limit` is the greatest number of events. Nothing if the aggregate does not exist. With
        `follow` it continues with events that are stored later, up to the end of the aggregate.
        `undecodable` is as in ReadPlan: an append that cannot be decoded is left out as a whole.
        """
        if limit is not None and limit < 1:
            raise ConfigError(f"limit {limit!r}: give 1 or more")
        if follow and backward:
            raise ConfigError("choose one of backward and follow")
        check_id(id)
        if follow:
            events = self._following(id, start, limit, undecodable)
        else:
            report = ReadPlan(undecodable=undecodable).report()
            events = self._loader.events(id, start, limit, backward, report)
        async for event in events:
            yield event

    async def _following(
        self, id: str, start: int, limit: int | None, undecodable: OnUndecodable
    ) -> AsyncIterator[StoredEvent]:
        left = limit
        async for events in self._reader.events(self._reader.following(id, undecodable)):
            for event in events:
                if event.version >= start:
                    yield event
                    left = None if left is None else left - 1
                if left == 0 or event.deleted:
                    return

    async def query(self, pattern: str) -> Query:
        """The events of all aggregates whose ids match a pattern, and an expectation about them.

        For decisions that rest on several aggregates: `append(..., expected=query.unchanged)` is
        refused if any of them got an event since. `*` stands for one part of an id, `>` for the
        rest. Only in a store with one partition.
        """
        if self.topic.partitions > 1:
            raise ConfigError(
                f"query: store '{self.name}' has {self.topic.partitions} partitions, and the "
                f"broker checks expectations in one. Create the store with one partition"
            )
        plan = ReadPlan(subjects=self._reader.subjects(pattern))
        events = [event async for group in self._reader.events(plan) for event in group]
        last = max((event.offset for event in events), default=0)
        return Query(events, Unchanged(pattern, last))

    async def all(
        self,
        *,
        start: Start = Start.ALL,
        category: str | None = None,
        follow: bool = False,
        partitions: Sequence[int] | None = None,
        undecodable: OnUndecodable = "fail",
    ) -> AsyncIterator[StoredEvent]:
        """The events of all aggregates in the order of storing; of one partition each.

        `category` is the first part of an id: only `account`, `account.1` and so on. With
        `follow` it continues with events that are stored later, forever. `undecodable` is as in
        ReadPlan: an append that cannot be decoded is left out as a whole.
        """
        subjects = () if category is None else self._reader.category(category)
        plan = ReadPlan(
            start=start,
            follow=follow,
            partitions=partitions,
            subjects=subjects,
            undecodable=undecodable,
        )
        async for events in self._reader.events(plan):
            for event in events:
                yield event

    def subscribe(self, name: str, **settings: Any) -> Opening[Subscription]:
        """A durable subscription: `async with store.subscribe("mail") as subscription`.

        A delivery holds the events of one append: `await store.events_in(delivery)`.
        """
        return self.topic.subscribe(name, **settings)

    async def events_in(self, event: Event) -> list[StoredEvent]:
        """The events of an append that a subscription, group or process has delivered."""
        if not isinstance(event, PlainEvent):
            raise ConfigError(f"{event!r} is not an append of store '{self.name}'")
        return await self._reader.decode(self.topic.handle.partitions[event.partition], event.raw)

    async def snapshot(self, id: str) -> int:
        """Store a snapshot of an aggregate as it is now; returns its version."""
        loaded = (await self._loader.load(check_id(id), Moment())).loaded
        await self._loader.put_snapshot(loaded)
        return loaded.version
