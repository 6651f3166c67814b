"""The topic of one captured table: its schema follows the table, its writer stores exactly once."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import pyarrow as pa
import pyarrow.compute as pc

from millstream.cdc.change_values import (
    FRAME_COLUMNS,
    frame_of,
    grown,
    padded,
    record_of,
    row_of,
)
from millstream.cdc.masks import Masks
from millstream.cdc.model import RowChanges, TableShape
from millstream.cdc.settings import CaptureSettings
from millstream.cdc.state import Interval, States, TableRecord
from millstream.errors import (
    BreakingChange,
    CaptureError,
    ConfigError,
    Incompatible,
    PayloadTooLarge,
    SourceUnreachable,
    TopicNotFound,
)
from millstream.events import changes as ch
from millstream.events.packs.packing import Packing
from millstream.events.positions import Positions
from millstream.messaging.publishing.writer import Writer
from millstream.messaging.topic import Topic
from millstream.mill import Mill
from millstream.schemas import types as t

__all__ = ["TableTopic", "writer_name"]

PACKS: Final = Packing(max_events=10_000, max_bytes=4 * 1024 * 1024, linger=0.2, large_alone=True)
_NUMBER: Final = pa.uint64()
_TIME: Final = pa.timestamp("us", "UTC")
# A note has 1 KiB. JSON writes a letter with up to 6 bytes, and the other fields need room too.
KEY_LETTERS: Final = 128
EDGES_KEPT: Final = 3  # besides the newest: those that the stored note may mean
IsAfter = Callable[[TableShape, pa.RecordBatch, Sequence[str]], pa.Array]


def writer_name(capture: str) -> str:
    """The name of a capture's writer, in every topic."""
    return f"cdc-{capture}"


@dataclass(frozen=True, slots=True)
class _Found:
    """What there is of a table when its topic is opened."""

    mill: Mill
    record: TableRecord
    row: t.Record
    writer: Writer


def _masks_of(settings: CaptureSettings, shape: TableShape) -> Masks:
    return Masks(shape, settings.settings_of(shape.full_name).mask, settings.mask_key)


async def _topic_of(
    mill: Mill, settings: CaptureSettings, shape: TableShape, name: str
) -> tuple[Topic, t.Record]:
    """The topic, and the record of the rows in its latest schema."""
    masked = _masks_of(settings, shape).shape
    try:
        topic = await mill.topic(name)
    except TopicNotFound:
        record = record_of(masked.columns, masked.name, settings.format)
        topic = await mill.create_topic(name, schema=record)
    found = await mill.schemas.find(name)
    latest = None if found is None else (await mill.schemas.schemas_of(found))[-1].record
    row = None if latest is None else row_of(latest, settings.format)
    if row is None or topic.settings.partitions != 1:
        raise ConfigError(
            f"table {shape.full_name}: topic '{name}' exists and is not one of {settings.format} "
            f"with one partition. Choose another topic for the table in its settings, or delete "
            f"this one"
        )
    return topic, row


async def _writer_of(topic: Topic, settings: CaptureSettings) -> Writer:
    return await topic.writer(writer_name(settings.name), PACKS).open()


class TableTopic:
    """Takes the rows and changes of a table, in the order of their positions."""

    def __init__(
        self, states: States, settings: CaptureSettings, shape: TableShape, found: _Found
    ) -> None:
        self._states, self._settings, self._mill = states, settings, found.mill
        self._format = settings.format
        self.table = shape.full_name
        self.name = found.record.topic
        self.writer = found.writer
        self.events = 0  # written here, without the snapshot
        self.rows = 0  # of the snapshot, also before a restart
        self._shape = shape  # as the source has it
        self._followed: TableShape | None = None  # what the topic's schema is known to fit
        self._masks = _masks_of(settings, shape)
        self._record = found.record
        self._row = found.row  # of the topic's latest schema
        self._point = 0  # changes of commits at or after it are never part of the snapshot
        self._known_points()

    @classmethod
    async def opened(
        cls, mill: Mill, states: States, settings: CaptureSettings, shape: TableShape
    ) -> Self:
        """Create the topic of a table if it is missing, and claim its writer."""
        name = settings.topic_of(shape.namespace, shape.name)
        record = await states.table(shape.full_name)
        if record is not None and record.topic != name:
            raise ConfigError(
                f"table {shape.full_name}: its changes are in topic '{record.topic}', and the "
                f"settings say '{name}'. Change that back, or begin the table again: "
                f"'millstream cdc reset --table {shape.full_name} --yes'"
            )
        if record is None or (record.identity and shape.identity != record.identity):
            # New, or a table of the same name that was made since: its snapshot begins again.
            columns = {c.name: c.identity for c in shape.columns}
            record = TableRecord(name, list(shape.key), columns, identity=shape.identity)
            await states.put_table(shape.full_name, record)
        topic, row = await _topic_of(mill, settings, shape, name)
        writer = await _writer_of(topic, settings)
        return cls(states, settings, shape, _Found(mill, record, row, writer))

    @property
    def position(self) -> tuple[int, int]:
        """That of the last stored change; (0, 0) before the first."""
        found = self.writer.position
        return found if isinstance(found, tuple) else (0, 0)

    async def close(self) -> None:
        """Leave what is not stored unstored: the source sends it again."""
        await self.writer.abandon()

    # -- the snapshot ---------------------------------------------------------------------

    def _note(self) -> dict[str, Any]:
        """What was stored with the last rows of this table's snapshot; empty: none were."""
        text = self.writer.note
        note: dict[str, Any] = json.loads(text) if text else {}
        return note if self._record.base and note.get("base") == self._record.base else {}

    @property
    def snapshot_done(self) -> bool:
        """Whether every row of the snapshot is stored."""
        return bool(self._note().get("done"))

    async def begin_snapshot(self, shape: TableShape, point: int) -> list[str] | None:
        """Begin or continue the snapshot with a view at `point`: the key to continue after."""
        await self._follow(shape)
        note = self._note()
        if note and self.position > (self._record.base, note["rows"] + 1):
            note = {}  # changes were written since: rows cannot be put before them
        attempt, edge = (note["attempt"] + 1, self._edge(note)) if note else (0, None)
        # An attempt whose rows were never stored does not count.
        intervals = [*self._record.intervals[:attempt], Interval(edge, point)]
        base = self._record.base if note else point - 1
        if not note and self.position >= (base, 1):
            raise CaptureError(
                f"table {self.table}: topic '{self.name}' is at {self.position[0]:,}, and its "
                f"database only at {point:,}: the topic has changes of another database, or of a "
                f"later state of this one. Delete it: 'millstream cdc reset --yes'"
            )
        self.rows = note.get("rows", 0)
        await self._keep(dataclasses.replace(self._record, base=base, intervals=intervals))
        if not note and self.position != (0, 0):
            await self._empty(base)
        self._known_points()
        return edge

    def _edge(self, note: dict[str, Any]) -> list[str]:
        """The last key that a note means."""
        found: list[str] | None = note["key"]
        return self._record.edges[str(note["rows"])] if found is None else found

    async def _keep_edge(self, rows: int, key: list[str]) -> None:
        """Keep a key for a note that is stored next; the note before it may be the last one."""
        edges = [*self._record.edges.items()][-EDGES_KEPT:]
        await self._keep(dataclasses.replace(self._record, edges={**dict(edges), str(rows): key}))

    async def _empty(self, base: int) -> None:
        """What the topic has from before is gone for its readers."""
        if self._format == "rows":
            raise CaptureError(
                f"table {self.table}: topic '{self.name}' has rows of an earlier snapshot, and "
                f"a topic of rows cannot say that they are gone. Delete it: "
                f"'millstream cdc reset --table {self.table} --yes'"
            )
        one = pa.array([ch.TRUNCATE])
        await self._write(self._marked(one, pa.nulls(1, self._shape.row_type), base, 1))

    def _marked(self, op: pa.Array, rows: pa.StructArray, base: int, first: int) -> RowChanges:
        count = len(op)
        positions = Positions.up_to((base, first + count - 1), count)
        return RowChanges(
            self._shape,
            op=op,
            after=rows,
            commit=positions.major,
            place=positions.minor,
            time=pa.nulls(count, _TIME),
        )

    async def write_rows(self, rows: pa.RecordBatch, last_key: list[str]) -> None:
        """Store rows of the snapshot, and that they are stored, in one step."""
        record, count = self._record, rows.num_rows
        is_long = sum(map(len, last_key)) > KEY_LETTERS
        if is_long:
            await self._keep_edge(self.rows + count, last_key)
        note = {
            "base": record.base,
            "attempt": len(record.intervals) - 1,
            "key": None if is_long else last_key,
            "rows": self.rows + count,
        }
        read = pa.repeat(pa.scalar(ch.READ), count)
        # Place 1 is for the event that empties the topic.
        changes = self._marked(read, rows.to_struct_array(), record.base, self.rows + 2)
        await self._write(changes, json.dumps(note, ensure_ascii=False), whole=True)
        self.rows += count

    async def finish_snapshot(self) -> None:
        """Store that the snapshot is complete."""
        note = {"base": self._record.base, "done": True, "rows": self.rows}
        await self.writer.advance((self._record.base, self.rows + 2), json.dumps(note))

    # -- changes --------------------------------------------------------------------------

    async def write(self, changes: RowChanges, is_after: IsAfter) -> None:
        """Write changes; those that are in the snapshot already are left out."""
        wanted = await self._not_in_snapshot(changes, is_after)
        if len(wanted) and changes.table != self._followed:
            await self._follow(changes.table)
        if self._format == "rows":
            self._check_whole(wanted)
        if len(wanted):
            await self._write(wanted, whole=self._settings.whole_transactions)
            self.events += len(wanted)

    async def _write(
        self, changes: RowChanges, note: str | None = None, whole: bool = False
    ) -> None:
        frame = frame_of(padded(self._masks.applied(changes), self._row), self._format)
        try:
            await self.writer.write_batch(
                frame,
                positions=(changes.commit, changes.place),
                columns=FRAME_COLUMNS[self._format],
                note=note,
                whole=whole,
            )
        except PayloadTooLarge as error:
            raise self._too_large(frame, error) from error

    def _too_large(self, frame: pa.RecordBatch, error: PayloadTooLarge) -> CaptureError:
        largest = max(range(frame.num_rows), key=lambda row: frame.slice(row, 1).nbytes)
        key = frame.column("key")[largest].as_py()
        return CaptureError(
            f"table {self.table}: the event of the row with key {key!r} has {error.size:,} bytes, "
            f"and the broker takes at most {error.limit:,}. Raise its max_payload, or leave out "
            f"the large column: exclude = [...] for the table"
        )

    def _check_whole(self, changes: RowChanges) -> None:
        """A row cannot say which of its columns were not sent: null would be a lie."""
        if pc.any(pc.equal(changes.op, ch.TRUNCATE)).as_py():
            raise CaptureError(
                f"table {self.table} was truncated, and a topic of rows cannot say that all rows "
                f"are gone. Begin the table again ('millstream cdc reset --table {self.table} "
                f"--yes'), set truncate = 'ignore', or use format = 'changes'"
            )
        unchanged = changes.unchanged
        if unchanged is None or unchanged.null_count == len(unchanged):
            return
        column = unchanged.flatten()[0].as_py()
        raise CaptureError(
            f"table {self.table}: an update came without the large value of column '{column}', "
            f"which it did not touch. A topic of rows needs whole rows: run ALTER TABLE "
            f"{self.table} REPLICA IDENTITY FULL and begin the table again ('millstream cdc reset "
            f"--table {self.table} --yes'), leave the column out, or use format = 'changes'"
        )

    def _known_points(self) -> None:
        self._point = max((one.point for one in self._record.intervals), default=0)

    async def _not_in_snapshot(self, changes: RowChanges, is_after: IsAfter) -> RowChanges:
        """Changes whose rows were read by the snapshot before the change was committed."""
        if not len(changes) or changes.commit[0].as_py() >= self._point:
            return changes
        points = pa.repeat(pa.scalar(self._record.intervals[0].point, _NUMBER), len(changes))
        if len(self._record.intervals) > 1:
            await self._check_truncated(changes)
            keys = self._keys(changes)
            for interval in self._record.intervals[1:]:
                if interval.edge is not None:
                    after = is_after(changes.table, keys, interval.edge)
                    points = pc.if_else(after, pa.scalar(interval.point, _NUMBER), points)
        return changes.filter(pc.greater_equal(changes.commit, points))

    async def _check_truncated(self, changes: RowChanges) -> None:
        """A TRUNCATE between two attempts means the rows of the first and not those of the last."""
        first = min(one.point for one in self._record.intervals)
        between = pc.and_(
            pc.greater_equal(changes.commit, pa.scalar(first, _NUMBER)),
            pc.less(changes.commit, pa.scalar(self._point, _NUMBER)),
        )
        if pc.any(pc.and_(between, pc.equal(changes.op, ch.TRUNCATE))).as_py():
            await self._keep(dataclasses.replace(self._record, base=0, intervals=[]))
            raise SourceUnreachable(
                f"table {self.table} was truncated between two attempts of its snapshot, which "
                f"must begin again"
            )

    def _keys(self, changes: RowChanges) -> pa.RecordBatch:
        columns = []
        for name in changes.table.key:
            column = pc.struct_field(changes.after, name)
            if changes.before is not None:
                column = pc.coalesce(column, pc.struct_field(changes.before, name))
            columns.append(column)
        return pa.RecordBatch.from_arrays(columns, names=list(changes.table.key))

    # -- the schema -----------------------------------------------------------------------

    async def _follow(self, shape: TableShape) -> None:
        """Let the topic's schema follow the table, or stop with the column that cannot."""
        self._check_renamed(shape)
        if list(shape.key) != self._record.key:
            raise BreakingChange(
                self.table, ", ".join(shape.key), f"the key was {', '.join(self._record.key)}"
            )
        masks = _masks_of(self._settings, shape)
        columns = grown(self._row, masks.shape.columns)
        record = record_of(columns, masks.shape.name, self._format)
        row = row_of(record, self._format) or self._row
        if row != self._row:
            await self._next_version(record)
        # The stream may be behind the catalog, which then does not know the column any more.
        now = {c.name: c.identity for c in shape.columns if c.identity}
        known = {**dict.fromkeys((c.name for c in shape.columns), 0), **self._record.columns, **now}
        if known != self._record.columns:
            await self._keep(dataclasses.replace(self._record, columns=known))
        self._shape, self._masks, self._row = shape, masks, row
        self._followed = shape

    async def _next_version(self, record: t.Record) -> None:
        await self.writer.flush()
        try:
            await self._mill.schemas.register(self.name, record)
        except Incompatible as error:
            first = error.problems[0]
            raise BreakingChange(
                self.table, first.field.rpartition(".")[2] or first.field, first.message
            ) from error
        await self.writer.close()
        self.writer = await _writer_of(await self._mill.topic(self.name), self._settings)

    def _check_renamed(self, shape: TableShape) -> None:
        had = {number: name for name, number in self._record.columns.items() if number}
        names = {column.name for column in shape.columns}
        for column in shape.columns:
            old = had.get(column.identity)
            if old is not None and old != column.name and old not in names:
                raise BreakingChange(self.table, column.name, f"it was renamed from '{old}'")

    async def _keep(self, record: TableRecord) -> None:
        await self._states.put_table(self.table, record)
        self._record = record
