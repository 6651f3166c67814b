"""Topics of changes and of rows for tests, written as a capture writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

import millstream
from millstream.events import changes as ch
from millstream.events.row_buffer import Columns
from millstream.schemas import types as t

START = datetime(2026, 1, 1, tzinfo=UTC)


def row_type(columns: Mapping[str, t.Type]) -> t.Record:
    fields = (t.Field(name, t.Nullable(of=kind), None) for name, kind in columns.items())
    return t.Record(name="row", fields=tuple(fields))


def change_type(row: t.Record) -> t.Record:
    source = t.Record(
        name="source",
        fields=(
            t.Field(ch.TABLE, t.String()),
            t.Field(ch.COMMIT, t.Int(64, signed=False)),
            t.Field(ch.TRANSACTION, t.Nullable(of=t.String()), None),
            t.Field(ch.NUMBER, t.Nullable(of=t.Int()), None),
            t.Field(ch.TOTAL, t.Nullable(of=t.Int()), None),
            t.Field(ch.TIME, t.Nullable(of=t.Timestamp()), None),
        ),
    )
    return t.Record(
        name="change",
        fields=(
            t.Field(ch.OP, t.String()),
            t.Field(ch.BEFORE, t.Nullable(of=row), None),
            t.Field(ch.AFTER, t.Nullable(of=row), None),
            t.Field(ch.UNCHANGED, t.Nullable(of=t.List(item=t.String())), None),
            t.Field(ch.SOURCE, source),
        ),
    )


@dataclass
class Change:
    """One change of the table items(id, name, note)."""

    op: str
    id: int | None = None
    row: dict[str, Any] | None = None  # without its id
    unchanged: Sequence[str] = ()
    commit: int = 0  # 0: one more than the change before
    number: int | None = 1
    old: dict[str, Any] = field(default_factory=dict)  # of `before`, besides the id


ITEM = row_type({"id": t.Int(), "name": t.String(), "note": t.String()})


class Writing:
    """Writes changes of the table items to a topic, and knows the rows that result."""

    def __init__(self, url: str, topic: str = "items") -> None:
        self.url, self.topic = url, topic
        self.commit = 0
        self.place = 0
        self.rows: dict[int, dict[str, Any]] = {}

    def create(self, **settings: Any) -> None:
        with millstream.blocking.connect(self.url) as mill:
            mill.create_topic(self.topic, schema=change_type(ITEM), **settings)

    def write(self, *changes: Change, pack: int = 4) -> None:
        """Store changes in packs of at most so many."""
        frames = [self._frame(changes[n : n + pack]) for n in range(0, len(changes), pack)]
        with (
            millstream.blocking.connect(self.url) as mill,
            mill.topic(self.topic).writer("cdc-items") as writer,
        ):
            for frame in frames:
                columns = Columns(value="value", key="key")
                writer.write_batch(frame, positions=("commit", "place"), columns=columns)
                writer.flush()

    def _frame(self, changes: Sequence[Change]) -> pa.Table:
        made = [self._event(change) for change in changes]
        item = [("id", pa.int64()), ("name", pa.string()), ("note", pa.string())]
        source = [
            *((ch.TABLE, pa.string()), (ch.COMMIT, pa.uint64()), (ch.TRANSACTION, pa.string())),
            *((ch.NUMBER, pa.int64()), (ch.TOTAL, pa.int64())),
            (ch.TIME, pa.timestamp("us", "UTC")),
        ]
        value = [
            (ch.OP, pa.string()),
            (ch.BEFORE, pa.struct(item)),
            (ch.AFTER, pa.struct(item)),
            (ch.UNCHANGED, pa.list_(pa.string())),
            (ch.SOURCE, pa.struct(source)),
        ]
        others = [("key", pa.string()), ("commit", pa.int64()), ("place", pa.int64())]
        schema = pa.schema([("value", pa.struct(value)), *others])
        return pa.Table.from_pylist(made, schema=schema)

    def _event(self, change: Change) -> dict[str, Any]:
        if not change.commit or change.commit > self.commit:
            self.commit = change.commit or self.commit + 1
            self.place = 0
        self.place += 1
        before, after = self._apply(change)
        value = {
            ch.OP: change.op,
            ch.BEFORE: before,
            ch.AFTER: after,
            ch.UNCHANGED: list(change.unchanged) or None,
            ch.SOURCE: {
                ch.TABLE: "public.items",
                ch.COMMIT: self.commit,
                ch.TRANSACTION: None if change.number is None else f"tx{self.commit}",
                ch.NUMBER: change.number,
                ch.TOTAL: None if change.number is None else 1,
                ch.TIME: START + timedelta(seconds=self.commit),
            },
        }
        key = None if change.id is None else str(change.id)
        return {"value": value, "key": key, "commit": self.commit, "place": self.place}

    def _apply(self, change: Change) -> tuple[Any, Any]:
        if change.op == ch.TRUNCATE:
            self.rows.clear()
            return None, None
        assert change.id is not None
        if change.op == ch.DELETE:
            self.rows.pop(change.id, None)
            return {"id": change.id, **change.old}, None
        given = {"id": change.id, **(change.row or {})}
        known = self.rows.get(change.id, {})
        kept = {name: known[name] for name in change.unchanged if name in known}
        self.rows[change.id] = {"name": None, "note": None, **given, **kept}
        return (change.old or None), given
