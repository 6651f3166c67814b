"""The fold of changes to the latest row of each key, against a plain model of a table."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest

from millstream.events import changes as ch
from millstream.spark.source.change_schema import ChangeColumns, RowColumns
from millstream.spark.source.latest_fold import CommitPosition, LatestRows, MissingValue

ROW = pa.struct([("id", pa.int64()), ("name", pa.string()), ("note", pa.string())])
SCHEMA = pa.schema([("key", pa.binary()), ("value", ROW), ("offset", pa.int64())])
COLUMNS = ChangeColumns(SCHEMA, ROW)

Event = dict[str, Any]


def change(op: str, id: int | None, row: dict[str, Any] | None, at: tuple[int, int]) -> Event:
    """A change, whose row lacks the columns that it does not name."""
    lacks = None if row is None else [n for n in ("name", "note") if n not in row] or None
    after = None if row is None else {"id": id, **row}
    source = {ch.COMMIT: at[0], ch.NUMBER: at[1] or None}
    value = {ch.OP: op, ch.AFTER: after, ch.UNCHANGED: lacks, ch.SOURCE: source}
    return {"key": None if id is None else b"%d" % id, "value": value, "offset": at[0]}


def folded(events: list[Event], size: int, limit: int, again: int = 0) -> dict[int, Any]:
    """The rows after events that arrive in batches; `again`: continued from a fold of so many."""
    rows = LatestRows(waiting_limit=limit)
    for start in range(0, len(events), size):
        if again and start >= again and not rows.ends_with_deletion:
            rows, again = LatestRows(list(rows.batches()), rows.truncated, limit), 0
        batch = pa.RecordBatch.from_pylist(events[start : start + size], schema=COLUMNS.schema)
        rows.add(COLUMNS.of(batch))
    found = [row["value"] for batch in rows.batches() for row in batch.to_pylist()]
    assert rows.missing is None
    assert len({row["id"] for row in found}) == len(found)
    return {row["id"]: row for row in found}


def history(chance: random.Random, count: int) -> tuple[list[Event], dict[int, Any]]:
    """Changes of a table, with keys that change and columns that are not sent; and its rows."""
    table: dict[int, Any] = {}
    events: list[Event] = []
    for commit in range(1, count):
        id, new = chance.randrange(9), chance.randrange(9)
        text = str(commit)
        dice = chance.random()
        if id not in table:
            table[id] = {"id": id, "name": text, "note": chance.choice([text, None])}
            events.append(change("c", id, {**table[id]}, (commit, 1)))
        elif dice < 0.15:
            del table[id]
            events.append(change("d", id, None, (commit, 1)))
        elif dice < 0.35 and new not in table:  # a key change
            row = table[new] = {**table.pop(id), "id": new, "name": text}
            sent = {"name": text} if chance.random() < 0.7 else {**row}
            events.append(change("d", id, None, (commit, 1)))
            events.append(change("u", new, sent, (commit, 1)))
        elif dice < 0.37:
            table.clear()
            events.append(change("t", None, None, (commit, 1)))
        else:
            sent = {chance.choice(["name", "note"]): chance.choice([text, None])}
            table[id] |= sent
            events.append(change("u", id, sent, (commit, 1)))
    return events, table


@pytest.mark.parametrize("seed", range(40))
def test_the_fold_of_changes_is_the_table(seed: int) -> None:
    chance = random.Random(seed)
    events, table = history(chance, 200)
    size, limit = chance.choice([1, 3, 17, 500]), chance.choice([1, 2000, 10**9])
    assert folded(events, size, limit, again=chance.choice([0, 60])) == table


def test_a_value_that_no_earlier_change_has_is_reported() -> None:
    events = [change("u", 1, {"name": "a"}, (5, 1)), change("c", 2, {"name": "b"}, (6, 1))]
    rows = LatestRows()
    rows.add(COLUMNS.of(pa.RecordBatch.from_pylist(events, schema=COLUMNS.schema)))
    assert len([row for batch in rows.batches() for row in batch.to_pylist()]) == 2
    assert rows.missing == MissingValue(b"1", "note")


def test_a_truncation_in_another_partition_removes_what_was_committed_before_it() -> None:
    full = {"name": "x", "note": "y"}
    events = [
        change("r", 1, full, (4, 0)),
        change("c", 2, full, (5, 1)),
        change("c", 3, full, (5, 3)),
        change("c", 4, full, (6, 1)),
    ]
    rows = LatestRows()
    rows.add(COLUMNS.of(pa.RecordBatch.from_pylist(events, schema=COLUMNS.schema)))
    rows.truncate(CommitPosition(5, 2))
    keys = [row["key"] for batch in rows.batches() for row in batch.to_pylist()]
    assert sorted(keys) == [b"3", b"4"]
    late = [change("c", 5, full, (5, 1)), change("c", 6, full, (7, 1))]  # of another lane
    rows.add(COLUMNS.of(pa.RecordBatch.from_pylist(late, schema=COLUMNS.schema)))
    keys = [row["key"] for batch in rows.batches() for row in batch.to_pylist()]
    assert sorted(keys) == [b"3", b"4", b"6"]


def test_rows_are_folded_by_their_headers_where_these_say_more_than_the_order() -> None:
    columns = RowColumns(SCHEMA, ROW)

    def event(id: int | None, name: str | None, commit: str, op: str = "u") -> Event:
        marks = [(ch.OP_HEADER, op.encode()), (ch.POSITION_HEADER, commit.encode())]
        marks.append((ch.TRANSACTION_HEADER, b"77 3/9"))
        value = None if name is None else {"id": id, "name": name}
        key = None if id is None else b"%d" % id
        headers = [{"key": n, "value": text} for n, text in marks]
        return {"key": key, "value": value, "offset": 1, "headers": headers}

    events = [
        event(1, "a", "10"),
        event(None, None, "11", "t"),
        event(2, "b", "12"),
        event(2, "c", "13"),
        event(3, "d", "\xff"),
        event(3, None, "14", "d"),
    ]
    batch = pa.RecordBatch.from_pylist(events, schema=columns.schema)
    rows = LatestRows()
    rows.add(columns.of(batch))
    found = [row for batch in rows.batches() for row in batch.to_pylist()]
    assert [
        (row["key"], row["value"]["name"], row["_commit"], row["_number"]) for row in found
    ] == [(b"2", "c", 13, 3)]
    assert rows.truncated == CommitPosition(11, 3)
    marks = batch.select(["key", "headers"])
    assert columns.truncations(marks).to_pylist() == [{"_commit": 11, "_number": 3}]
