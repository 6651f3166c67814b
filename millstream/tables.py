"""Tables: the latest value of each key, stored by the broker as a compacted topic."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from millstream.errors import ConfigError, Undecodable
from millstream.events.json_value import read_json
from millstream.events.undecodable import DECODE_FAILURES, OnUndecodable, reason_of
from millstream.messaging import Event, NewEvent, PublishOptions, ReadPlan, Start, Topic

if TYPE_CHECKING:
    from millstream.messaging.reading.past import Past

__all__ = ["Change", "Entry", "PastTable", "Table"]


@dataclass(frozen=True, slots=True)
class Entry:
    """The value of a key."""

    key: str
    value: Any
    revision: int  # the offset of the event that set it
    timestamp: datetime

    def json(self) -> Any:
        """The value, read as JSON; NotJson if it is none."""
        return read_json(self.value, lambda: f"key {self.key!r}, revision {self.revision}")


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a key; `value` is None when it was deleted."""

    key: str
    value: Any
    revision: int
    timestamp: datetime
    partition: int

    @property
    def deleted(self) -> bool:
        return self.value is None

    def json(self) -> Any:
        """The value, read as JSON; NotJson if it is none or deleted."""
        return read_json(self.value, lambda: f"key {self.key!r}, revision {self.revision}")


class Table:
    """The latest value of each key. Writes are acknowledged; a revision makes them conditional.

    A conditional write succeeds for one of several writers: the others get WrongSequence, or
    Unconfirmed if the broker was lost in the meantime and it is unknown which write won. Within a
    key readers see changes in the order of writing, but may skip values that were replaced.
    """

    def __init__(self, topic: Topic) -> None:
        if topic.settings.history is None:
            raise ConfigError(
                f"'{topic.name}' keeps every event, so it is not a table: create it with "
                f"create_table, or as a topic with history=1"
            )
        self.topic = topic

    @property
    def name(self) -> str:
        """The table's name, which is its topic's."""
        return self.topic.name

    def __repr__(self) -> str:
        return f"<Table {self.name}>"

    async def put(self, key: str, value: Any, *, revision: int | None = None) -> int:
        """Set a key's value and return its new revision.

        With `revision` only if that is still the key's latest (0: only if it never had a value).
        """
        if value is None:
            raise ConfigError(f"key {key!r}: None means deleted; use delete()")
        return await self._write(key, value, revision)

    async def delete(self, key: str, *, revision: int | None = None) -> int:
        """Delete a key; readers that follow the table see the deletion."""
        return await self._write(key, None, revision)

    async def put_many(self, values: dict[str, Any]) -> dict[str, int]:
        """Set several keys, many in flight; return their revisions. Not atomic."""
        receipts = await self.topic.publish_many(
            NewEvent(value, key) for key, value in values.items()
        )
        return {key: receipt.offset for key, receipt in zip(values, receipts, strict=True)}

    async def _write(self, key: str, value: Any, revision: int | None) -> int:
        if revision is None:
            return (await self.topic.publish(value, key)).offset
        options = PublishOptions(expected_last=revision)
        return (await self.topic.publish(value, key, options=options)).offset

    async def get(self, key: str) -> Entry | None:
        """The key's value, or None when it has none."""
        event = await self.topic.last(key)
        return None if event is None or _value(event) is None else _entry(event)

    async def revision(self, key: str) -> int:
        """The key's latest revision, which may be a deletion; 0 if it never had a value."""
        event = await self.topic.last(key)
        return 0 if event is None else event.offset

    async def entries(
        self, keys: Sequence[str] = (), *, undecodable: OnUndecodable = "fail"
    ) -> AsyncIterator[Entry]:
        """All current values, or those of some keys, each key once.

        Not a snapshot: a key that is written in the meantime has its old or its new value; one that
        exists the whole time is never missing. A value that cannot be decoded raises Undecodable;
        `undecodable="drop"` continues without it.
        """
        async for event in self.topic.latest(keys, undecodable=undecodable):
            if _value(event) is not None:
                yield _entry(event)

    async def changes(
        self,
        keys: Sequence[str] = (),
        *,
        start: Start = Start.LAST_PER_KEY,
        undecodable: OnUndecodable = "fail",
    ) -> AsyncIterator[Change]:
        """The current values, then every change as it happens, forever."""
        plan = ReadPlan(start=start, keys=keys, follow=True, undecodable=undecodable)
        async for event in self.topic.read(plan):
            if event.key is not None:
                value = _value(event)
                yield Change(event.key, value, event.offset, event.timestamp, event.partition)

    async def as_dict(self, *, undecodable: OnUndecodable = "fail") -> dict[str, Any]:
        """All current values by key."""
        return {e.key: e.value async for e in self.entries(undecodable=undecodable)}

    async def at(self, time: datetime) -> PastTable:
        """The table as it was at a time: `await (await table.at(time)).get("42")`.

        The time is that of storing, by the broker's clock, not the time of events; changes of the
        same microsecond are included. A time in the future is refused; up to ten seconds of it mean
        now, because clocks differ. HistoryGone if the table did not exist at that time.
        """
        return PastTable(self.name, await self.topic.past(time))


class PastTable:
    """A table as it was at a time; it does not change. From `await table.at(time)`.

    A table keeps `history` values of each key, so what a key was may not be known any more: then
    HistoryGone is raised, never a wrong value. Only two removals cannot be noticed: of a value that
    was published with a time to live of its own, and of a single message by other tools.
    """

    def __init__(self, name: str, past: Past) -> None:
        self.name = name
        self._past = past

    @property
    def time(self) -> datetime:
        """The time, in UTC; never later than the broker's clock was."""
        return self._past.time

    def __repr__(self) -> str:
        return f"<PastTable {self.name} at {self.time.isoformat()}>"

    async def get(self, key: str) -> Entry | None:
        """The value that the key had; None when it had none. It takes as long in any table."""
        event = await self._past.last(key)
        return None if event is None or _value(event) is None else _entry(event)

    async def entries(
        self, keys: Sequence[str] = (), *, undecodable: OnUndecodable = "fail"
    ) -> AsyncIterator[Entry]:
        """All values that keys had, or those of some keys, each key once.

        If the values of some keys are not known any more, HistoryGone is raised after all others.
        """
        async for event in self._past.events(keys, undecodable):
            if _value(event) is not None:
                yield _entry(event)

    async def as_dict(self, *, undecodable: OnUndecodable = "fail") -> dict[str, Any]:
        """All values by key; HistoryGone if one of them is not known any more."""
        return {e.key: e.value async for e in self.entries(undecodable=undecodable)}


def _value(event: Event) -> Any:
    """The value of an event; the error of one that cannot be decoded has its position."""
    try:
        return event.value
    except DECODE_FAILURES as error:
        raise Undecodable(event.topic, *event.position, reason_of(error)) from error


def _entry(event: Event) -> Entry:
    return Entry(event.key or "", event.value, event.offset, event.timestamp)
