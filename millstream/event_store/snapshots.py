"""Snapshots: the state of an aggregate at some version, so that only what follows has to be read.

They are a shortcut and nothing else: one that is missing, damaged, or made with other fields of the
state is ignored, and the aggregate is loaded from its first event.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from millstream.deadline import Deadline
from millstream.errors import MillstreamError, TopicNotFound, Undecodable
from millstream.event_store.events import Loaded
from millstream.event_store.folding import StateCodec
from millstream.event_store.ids import tokens_of
from millstream.event_store.personal import PersonalData
from millstream.event_store.privacy import key_ids_in
from millstream.events.event import Partition, PlainEvent
from millstream.events.subject import partition_of
from millstream.messaging.reading.latest import subject_of_key
from millstream.tables import Table
from millstream.wire.message import RawMessage

__all__ = ["SNAPSHOTS_SUFFIX", "Snapshots"]

SNAPSHOTS_SUFFIX: Final = "-snapshots"

# Another process may create the table at any time; until it is found, loading takes a bit longer.
ABSENT_SECONDS: Final = 5.0

_log = logging.getLogger("millstream.event_store")


class _Record(msgspec.Struct):
    """A snapshot as it is stored."""

    schema: str  # of the state, and the version of the fold
    version: int
    offset: int
    timestamp_ns: int
    stored_ns: int
    state: msgspec.Raw


_RECORD: Final = msgspec.json.Decoder(_Record)


class Snapshots:
    """The snapshots of a store's aggregates, in a table of their own."""

    def __init__(
        self,
        open_table: Callable[[bool], Awaitable[Table]],
        codec: StateCodec,
        personal: PersonalData,
    ) -> None:
        self._open = open_table  # with True: create it if there is none
        self._codec = codec
        self._personal = personal
        self._table: Table | None = None
        self._absent: Deadline | None = (
            None  # there was no table, and for so long none is looked for
        )

    async def get(self, id: str) -> Loaded[Any] | None:
        """The aggregate as its snapshot has it; None when there is none that can be used."""
        table = await self._found()
        if table is None:
            return None
        try:
            entry = await table.get(tokens_of(id))
        except Undecodable as error:
            _log.warning("a snapshot of store %s is not used: %s", self._name, error)
            return None
        return None if entry is None else await self._opened(id, entry.value)

    async def address(self, id: str) -> tuple[Partition, str] | None:
        """The partition and subject of an aggregate's snapshot; None: there are no snapshots."""
        table = await self._found()
        if table is None:
            return None
        partitions, key = table.topic.handle.partitions, tokens_of(id)
        partition = partitions[partition_of(key, len(partitions))]
        return partition, subject_of_key(partition, key)

    async def read(
        self, id: str, partition: Partition, message: RawMessage | None
    ) -> Loaded[Any] | None:
        """Like `get`, with the message that was found on its subject."""
        event = None if message is None else PlainEvent(partition, message)
        if event is None or event.is_damaged or event.is_deletion:
            return None
        return await self._opened(id, event.value)

    async def _opened(self, id: str, value: bytes) -> Loaded[Any] | None:
        try:
            data = await self._personal.opened_state(value)
            if data is None:
                return None  # it holds what was erased
            record = _RECORD.decode(data)
            if record.schema != self._codec.fingerprint:
                return None
            state = self._codec.decode(bytes(record.state))
        except (msgspec.DecodeError, ValueError) as error:
            _log.warning("a snapshot of store %s is not used: %s", self._name, error)
            return None
        times = (record.timestamp_ns, record.stored_ns)
        key_ids = frozenset(key_ids_in(value))
        return Loaded(id, state, record.version, record.offset, *times, key_ids)

    async def put(self, loaded: Loaded[Any]) -> None:
        """Store a snapshot; an older one replaces a newer one without harm."""
        record = _Record(
            self._codec.fingerprint,
            loaded.version,
            loaded.offset,
            loaded.timestamp_ns or 0,
            loaded.stored_ns or 0,
            msgspec.Raw(self._codec.encode(loaded.state)),
        )
        data = await self._personal.sealed_state(msgspec.json.encode(record), loaded.key_ids)
        await (await self._created()).put(tokens_of(loaded.id), data)

    async def try_put(self, loaded: Loaded[Any]) -> None:
        """The same for a snapshot that nobody asked for: a failure is only logged."""
        try:
            await self.put(loaded)
        except MillstreamError as error:
            _log.warning("a snapshot of store %s was not stored: %s", self._name, error)

    async def delete(self, id: str) -> None:
        """Remove the snapshot of an aggregate that ends."""
        table = await self._found()
        if table is not None:
            await table.delete(tokens_of(id))

    async def _created(self) -> Table:
        if self._table is None:
            self._table = await self._open(True)
        return self._table

    async def _found(self) -> Table | None:
        """The table; that there is none is remembered for a while."""
        if self._table is None and (self._absent is None or self._absent.passed):
            try:
                self._table = await self._open(False)
            except TopicNotFound:
                self._absent = Deadline(ABSENT_SECONDS)
        return self._table

    @property
    def _name(self) -> str:
        return "?" if self._table is None else self._table.name.removesuffix(SNAPSHOTS_SUFFIX)
