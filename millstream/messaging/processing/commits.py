"""Commits of a process with tables: rows, outputs and input positions, all of them or none.

One table holds the record of the process. Every stream that is written to has a fence.

1. Claim all fences; from now on no older process of this name stores anything.
2. Read the record. It says how far the input is, and what the last commit had for other streams.
3. A fence holds the number of the commit, and how many units of it its stream has. Store those
   units of the last commit that are missing: now everything before is complete.
4. A commit is one atomic batch in the record's stream: the record, the redo with everything that
   other streams have to store, rows of its own, the fence. What is in it will be stored, by this
   process or by the next one of its name; what is not in it never was.
5. Store the units of the other streams, each under its fence, one after the other in each stream.
   Repeat from 4.

If everything is for the record's own stream and fits one batch, there is no redo and no step 5.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Mapping, Sequence

import msgspec

from millstream.errors import ConfigError, DataLoss
from millstream.events.fence import WRITER_HEADER, FenceState
from millstream.events.fence_writer import FenceWriter, ReadLast, Steps
from millstream.events.packs.pack import EncodedPack
from millstream.events.subject import PACK_TOKEN
from millstream.messaging.processing.record import (
    CommitRecord,
    InputPosition,
    other_kind,
    read_record,
    record_subject,
    state_subject,
)
from millstream.messaging.processing.redo import (
    HEADER_BYTES,
    ROWS_MAX,
    StreamUnits,
    Unit,
    chunks_of,
    read_redo,
    redo_subject,
    units_of,
    write_redo,
)
from millstream.messaging.processing.settings import ProcessParts, ProcessTarget
from millstream.messaging.publishing.fenced_lane import FencedLane
from millstream.messaging.topics.lookup import stream_subjects
from millstream.wire.message import OutgoingMessage, StoredMessage
from millstream.wire.protocol import parse_headers

__all__ = ["Commits", "Part", "StreamKey"]

StreamKey = tuple[str, int]  # a topic or table, and its partition


class _OwnersFence(FenceWriter):
    """The fence of a table that a process reads and changes: no process of another name has it."""

    def __init__(self, subject: str, writer: str, table: str) -> None:
        super().__init__(subject, writer)
        self._table = table

    def look(self) -> Steps[FenceState]:
        found = yield ReadLast(self.subject)
        if not isinstance(found, StoredMessage):
            return FenceState()
        _check_owner(found, self.writer, self._table)
        return (yield from super().look())


class _OwnersLane(FencedLane):
    """Stores units in a table that the process owns."""

    def own(self, subject: str, process: str, table: str) -> None:
        """Refuse a table of another process from now on."""
        self._fence = _OwnersFence(subject, process, table)


def _check_owner(found: StoredMessage, process: str, table: str) -> None:
    owner = parse_headers(found.headers).get(WRITER_HEADER)
    if owner != process:
        raise ConfigError(
            f"table '{table}' is the state of process '{owner}', and process '{process}' would "
            f"change it too: a table has one owner. Use another table, or the name of its owner"
        )


class Part:
    """What a commit has for one stream."""

    __slots__ = ("packs", "rows")

    def __init__(self) -> None:
        self.rows: list[OutgoingMessage] = []
        self.packs: list[EncodedPack] = []


class _Stream:
    """One stream that is written to, and its fence."""

    def __init__(self, output: ProcessTarget, number: int, process: str, owned: bool) -> None:
        target = output.target
        self.output = output
        self.name = target.partitions[number].stream
        self.prefix = target.shape.prefixes[number]
        subject = state_subject(self.prefix, None if owned else process)
        place = target.jetstream, target.publisher, self.name, subject, process, target.acks
        if owned:
            lane = _OwnersLane(*place)
            lane.own(subject, process, output.name)
        self.fence = lane if owned else FencedLane(*place)

    async def complete(self, unit: int, units: Sequence[Unit], home: str) -> None:
        """Store those units of a commit that the stream does not have yet, one after the other."""
        state = self.fence.state
        first = _units_done(state) if state.position == unit else 0
        for number, one in enumerate(units[first:], first + 1):
            note = f"{number}@{home}"
            await self.fence.store(one.encoded(), unit, note, beside=one.messages())


def _units_done(state: FenceState) -> int:
    return int(state.note.partition("@")[0] or 0)


class Commits:
    """Stores the commits of one process."""

    def __init__(self, name: str, parts: ProcessParts) -> None:
        self._name = name
        self._parts = parts
        owned = [(output, True) for output in parts.tables.values()]
        written = [(output, False) for output in parts.outputs]
        self._streams: dict[StreamKey, _Stream] = {
            (output.name, number): _Stream(output, number, name, own)
            for output, own in (*owned, *written)
            for number in range(len(output.target.partitions))
        }
        # Where the record may be: in the first partition of a table, the first table preferred.
        tables = [output for output, _ in (*owned, *written) if output.is_table]
        self._homes = [self._streams[output.name, 0] for output in tables]
        self._home = self._homes[0]
        self._jetstream = self._home.output.target.jetstream
        self._writes = [output.name for output, _ in (*owned, *written)]
        self._unit = 0

    # -- starting -------------------------------------------------------------------------

    async def open(self, input_stream: str) -> dict[str, InputPosition]:
        """Steps 1 to 3; returns how far each input stream is handled."""
        await self._check_targets()
        streams = self._streams.values()
        claims = (stream.fence.claim(input_stream) for stream in streams)
        await asyncio.gather(*claims)
        record = await self._find_record()
        if record is None:
            await self._check_first()
            return {}
        self._unit = record.unit
        await self._complete(record)
        return dict(record.positions)

    async def _check_targets(self) -> None:
        """Refuse to write to a table that another process reads and changes."""
        for output in self._parts.outputs:
            for number in range(len(output.target.partitions) if output.is_table else 0):
                stream = self._streams[output.name, number]
                ask = {"last_by_subj": state_subject(stream.prefix, None)}
                found = await self._jetstream.get_message(stream.name, ask)
                if found is not None:
                    _check_owner(found, self._name, output.name)

    async def _check_first(self) -> None:
        """Refuse to begin where a process of this name has written from topics to topics."""
        for (name, _), stream in self._streams.items():
            start = f"{stream.prefix}.{PACK_TOKEN}."
            fence = re.compile(rf"{re.escape(start + self._name)}-\d+(\.from-.*)?")
            async for subject, _ in stream_subjects(self._jetstream, stream.name, f"{start}>"):
                if fence.fullmatch(subject):
                    raise other_kind(self._name, name)

    async def _find_record(self) -> CommitRecord | None:
        """The record of the last commit, in whichever table it is; None: there was no commit."""
        records: list[CommitRecord] = []
        for home in self._homes:
            ask = {"last_by_subj": record_subject(home.prefix, self._name)}
            found = await self._jetstream.get_message(home.name, ask)
            if found is not None:
                record = read_record(found, home.name)
                if not records or record.unit > records[0].unit:
                    records, self._home = [record], home
        unit = records[0].unit if records else 0
        furthest = max(self._streams.values(), key=lambda stream: stream.fence.state.position)
        reached = furthest.fence.state
        if reached.position > unit:
            home_name = reached.note.partition("@")[2]
            raise ConfigError(
                f"'{furthest.name}' has commit {reached.position} of process '{self._name}', whose "
                f"record is in '{home_name}' at commit {unit if records else 'none'}: either that "
                f"table was recreated or restored, or it is no longer among the tables and "
                f"targets. Give the process the same tables as before, or start again with "
                f"another name and new tables"
            )
        if records and self._home.fence.state.position != unit:
            raise DataLoss(
                f"table '{self._home.output.name}' has the record of commit {unit} of process "
                f"'{self._name}', and its fence is at {self._home.fence.state.position}: the log "
                f"lost what was acknowledged. Check the disk"
            )
        return records[0] if records else None

    async def _complete(self, record: CommitRecord) -> None:
        """Store what the last commit had for other streams and they do not have."""
        chunks: list[bytes] = []
        for number in range(record.chunks):
            ask = {"last_by_subj": redo_subject(self._home.prefix, self._name, number)}
            found = await self._jetstream.get_message(self._home.name, ask)
            chunks.append(b"" if found is None else found.payload)
        by_name = {stream.name: stream for stream in self._streams.values()}
        for units in read_redo(record, chunks):
            stream = by_name.get(units.stream)
            if stream is None:
                raise ConfigError(
                    f"the last commit of process '{self._name}' is not complete: it has outputs "
                    f"for '{units.stream}', which is no target any more. Run it once more with "
                    f"the targets it had"
                )
            await stream.complete(record.unit, units.units, self._home.name)

    # -- committing -----------------------------------------------------------------------

    async def store(
        self, parts: Mapping[StreamKey, Part], positions: Mapping[str, InputPosition]
    ) -> None:
        """Steps 4 and 5: store everything that a commit has."""
        unit, home = self._unit + 1, self._home
        others = {self._streams[key]: _units(part) for key, part in parts.items()}
        own_units = others.pop(home, [])
        redo, chunks = self._redo(others)
        own = own_units[0].messages() if len(own_units) == 1 else []
        if own_units and (not own or len(own) + len(chunks) > ROWS_MAX - 1):
            others[home], own = own_units, []
            redo, chunks = self._redo(others)
        record = CommitRecord(
            *(unit, self._name, self._writes, dict(positions)),
            *(len(chunks), len(redo), zlib.crc32(redo)),
        )
        written = self._written(record)
        await home.fence.store([], unit, f"0@{home.name}", beside=[*own, *chunks, written])
        self._unit = unit
        stores = (stream.complete(unit, units, home.name) for stream, units in others.items())
        await asyncio.gather(*stores)

    def _written(self, record: CommitRecord) -> OutgoingMessage:
        """The message of a record; ConfigError when its table takes only smaller ones."""
        output = self._home.output
        data = msgspec.json.encode(record)
        if len(data) + HEADER_BYTES > output.message_max:
            raise ConfigError(
                f"the record of process '{self._name}', with the positions of "
                f"{len(record.positions):,} input partitions, has {len(data):,} bytes, and table "
                f"'{output.name}' takes messages of at most {output.message_max:,}: allow larger "
                f"ones, or let several processes share the partitions"
            )
        return OutgoingMessage(record_subject(self._home.prefix, self._name).encode(), b"", data)

    def _redo(
        self, others: Mapping[_Stream, list[Unit]]
    ) -> tuple[bytes, Sequence[OutgoingMessage]]:
        """What these streams have to store, and the messages that hold it."""
        home = self._home
        redo = write_redo([StreamUnits(s.name, units) for s, units in others.items()])
        chunks = enumerate(chunks_of(redo, home.output.message_max))
        return redo, [
            OutgoingMessage(redo_subject(home.prefix, self._name, number).encode(), b"", chunk)
            for number, chunk in chunks
        ]


def _units(part: Part) -> list[Unit]:
    packs = [Unit.of_packs(part.packs)] if part.packs else []
    return [*packs, *units_of(part.rows)]
