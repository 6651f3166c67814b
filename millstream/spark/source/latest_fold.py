"""The latest row of each key: folds changes into rows, in memory for the keys and not the changes.

Rows arrive in the order of their partition. They are collected until they take as much memory as
the rows that are kept, and then reduced to the last one of each key, so that the work is in
proportion to the changes, and the memory to the keys.

A change may lack columns that have kept their value (`unchanged`): they are those of the last
earlier change of its key that has them. The first change of a key that comes from a changed key
has no earlier one; it continues the row whose deletion is a part of the same change.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

__all__ = [
    "COMMIT",
    "GONE",
    "NUMBER",
    "TRUNCATE",
    "UNCHANGED",
    "CommitPosition",
    "LatestRows",
    "MissingValue",
]

# Columns of the fold, beside those of the result.
COMMIT: Final = "_commit"  # uint64: where the change is in its source
NUMBER: Final = "_number"  # int64: of the change within its commit
GONE: Final = "_gone"  # bool: the key has no row after it
TRUNCATE: Final = "_truncate"  # bool: no key has a row after it
UNCHANGED: Final = "_unchanged"  # list<string>: columns that the row lacks

WAITING_BYTES: Final = 128 * 1024 * 1024  # of changes: fewer are not worth a fold
_OF_CHANGES: Final = (GONE, TRUNCATE, UNCHANGED)


class CommitPosition(NamedTuple):
    """Where a change is in its source: positions of one source can be compared."""

    commit: int
    number: int


class MissingValue(NamedTuple):
    """A column that kept a value which no earlier change has."""

    key: bytes | str
    column: str


class LatestRows:
    """The rows of a partition after all changes that were added."""

    def __init__(
        self,
        rows: list[pa.RecordBatch] | None = None,
        gone: CommitPosition | None = None,
        waiting_limit: int = WAITING_BYTES,
    ) -> None:
        """`rows` and `gone`: an earlier fold that is continued."""
        self._waiting_limit = waiting_limit
        self._rows = rows or []  # one for each key, complete
        self._waiting: list[pa.RecordBatch] = []  # changes since then
        self._kept_bytes = sum(batch.nbytes for batch in self._rows)
        self._waiting_bytes = 0
        self.truncated = gone  # every change before it is gone
        self.added = 0
        # The last change deleted a row: the next may be the other half of a key change.
        self.ends_with_deletion = False
        self.missing: MissingValue | None = None  # the first one, if there is any

    def add(self, batch: pa.RecordBatch) -> None:
        """The next changes of the partition."""
        if not batch.num_rows:
            return
        self._waiting.append(batch)
        self._waiting_bytes += batch.nbytes
        self.added += batch.num_rows
        self.ends_with_deletion = bool(batch.column(GONE)[-1].as_py())
        if self._waiting_bytes >= max(self._waiting_limit, self._kept_bytes):
            count = batch.num_rows - self.ends_with_deletion
            self._waiting[-1] = batch.slice(0, count)
            self._fold()
            if self.ends_with_deletion:  # both halves of a key change are folded together
                self._waiting, self._waiting_bytes = [batch.slice(count)], 1

    def truncate(self, position: CommitPosition) -> None:
        """Remove the rows of all changes before a position."""
        self._fold()
        if self.truncated is None or position > self.truncated:
            self.truncated = position
            self._rows = [b.filter(pa.array(~_before(b, position))) for b in self._rows]

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, one for each key, with the columns of the result and of positions."""
        self._fold()
        yield from (batch for batch in self._rows if batch.num_rows)

    # -- folding --------------------------------------------------------------------------

    def _fold(self) -> None:
        if not self._waiting:
            return
        window = _Window(self._rows, self._waiting)
        self._rows, self._waiting = [], []
        alive = self._without_truncated(window)
        keep = window.last_of_keys(alive) & ~window.gone
        whole = [*self._kept(window, keep & ~window.lacking)]
        lacking = np.flatnonzero(keep & window.lacking)
        if len(lacking):
            filled, missing = _Filled(window, alive).rows(lacking)
            whole.append(filled)
            self.missing = self.missing or missing
        self._rows = whole
        self._kept_bytes = sum(batch.nbytes for batch in whole)
        self._waiting_bytes = 0

    def _kept(self, window: _Window, keep: Any) -> Iterator[pa.RecordBatch]:
        for batch, start, end in window.parts():
            part = keep[start:end]
            found = batch if part.all() else batch.filter(pa.array(part))
            if found.num_rows:
                yield found.drop_columns([n for n in _OF_CHANGES if n in found.schema.names])

    def _without_truncated(self, window: _Window) -> Any:
        """Which changes count: all but truncations and what they removed."""
        truncates = window.column(TRUNCATE)
        alive = ~truncates
        if truncates.any():
            commit, number = window.positions()
            rows = np.flatnonzero(truncates).tolist()
            position, at = max(
                (CommitPosition(int(commit[row]), int(number[row])), row) for row in rows
            )
            if self.truncated is None or position >= self.truncated:
                self.truncated = position
                # At the same position, or if positions are not known, the order is what counts.
                same = (commit[:at] == position.commit) & (number[:at] == position.number)
                alive[:at] &= ~same
        if self.truncated is not None:
            alive &= ~window.before(self.truncated)
        return alive


def _before(batch: pa.RecordBatch, position: CommitPosition) -> Any:
    commit, number = _positions(batch)
    return (commit < position.commit) | ((commit == position.commit) & (number < position.number))


def _positions(batch: pa.RecordBatch) -> tuple[Any, Any]:
    return tuple(batch.column(n).to_numpy(zero_copy_only=False) for n in (COMMIT, NUMBER))


class _Window:
    """The kept rows and the changes since, with their numbers in the order of the partition."""

    def __init__(self, rows: list[pa.RecordBatch], changes: list[pa.RecordBatch]) -> None:
        self._batches = [*rows, *changes]
        self._old = len(rows)
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)])
        self.count = int(self._starts[-1])
        self.names: list[str] = self._batches[-1].schema.names
        self.keys = pa.chunked_array([batch.column("key") for batch in self._batches])
        self.gone = self.column(GONE)
        self.lacking = self._lacking()

    def parts(self) -> Iterator[tuple[pa.RecordBatch, int, int]]:
        """The batches, each with the numbers of its first row and of the one after its last."""
        yield from zip(self._batches, self._starts[:-1], self._starts[1:], strict=True)

    def column(self, name: str) -> Any:
        """A boolean column of changes; kept rows have none, which is false."""
        found = np.zeros(self.count, bool)
        for number, (batch, start, end) in enumerate(self.parts()):
            if number >= self._old:
                found[start:end] = batch.column(name).to_numpy(zero_copy_only=False)
        return found

    def _lacking(self) -> Any:
        found = np.zeros(self.count, bool)
        for number, (batch, start, end) in enumerate(self.parts()):
            if number < self._old or batch.column(UNCHANGED).null_count == batch.num_rows:
                continue
            sizes = pc.fill_null(pc.list_value_length(batch.column(UNCHANGED)), 0)
            found[start:end] = sizes.to_numpy(zero_copy_only=False) > 0
        return found

    def last_of_keys(self, alive: Any) -> Any:
        """Which of these rows are the last ones of their key."""
        numbers = np.flatnonzero(alive)
        keys = self.keys if len(numbers) == self.count else self.keys.filter(pa.array(alive))
        keyed = pa.table({"key": keys, "row": pa.array(numbers)})
        # Tasks run side by side: threads of one would take the processor from the others.
        grouped = pa.TableGroupBy(keyed, "key", use_threads=False).aggregate([("row", "max")])
        found = np.zeros(self.count, bool)
        found[grouped.column("row_max").to_numpy()] = True
        return found

    # -- positions ---------------------------------------------------------------------------

    def positions(self) -> tuple[Any, Any]:
        """The commit and the number of every row."""
        parts = [_positions(batch) for batch in self._batches]
        return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])

    def before(self, position: CommitPosition) -> Any:
        """Which rows are before a position."""
        return np.concatenate([_before(batch, position) for batch in self._batches])

    # -- rows -----------------------------------------------------------------------------

    def taken(self, rows: Any, columns: list[str]) -> pa.RecordBatch:
        """Some rows, by number, in that order."""
        order = np.argsort(rows, kind="stable")
        wanted = np.asarray(rows)[order]
        parts = []
        for batch, start, end in self.parts():
            low, high = np.searchsorted(wanted, [start, end])
            if low < high:
                parts.append(batch.select(columns).take(pa.array(wanted[low:high] - start)))
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        return pa.concat_batches(parts).take(pa.array(back))

    def lacks(self, column: str, rows: Any) -> Any:
        """Which of these rows, whose numbers grow, lack a column."""
        found = np.zeros(len(rows), bool)
        for number, (batch, start, end) in enumerate(self.parts()):
            low, high = np.searchsorted(rows, [start, end])
            if number < self._old or low == high:
                continue
            lists = batch.column(UNCHANGED).take(pa.array(rows[low:high] - start))
            parents = pc.list_parent_indices(lists).to_numpy()
            named = pc.equal(lists.flatten(), column).to_numpy(zero_copy_only=False)
            found[low + parents[named]] = True
        return found

    def unchanged_names(self, rows: Any) -> list[str]:
        """Every column that one of these rows lacks."""
        names: set[str] = set()
        for number, (batch, start, end) in enumerate(self.parts()):
            low, high = np.searchsorted(rows, [start, end])
            if number >= self._old and low < high:
                lists = batch.column(UNCHANGED).take(pa.array(rows[low:high] - start))
                names.update(pc.unique(lists.flatten()).to_pylist())
        return sorted(names)


class _Filled:
    """Fills the columns that rows lack."""

    def __init__(self, window: _Window, alive: Any) -> None:
        self._window = window
        self._alive = alive

    def rows(self, lacking: Any) -> tuple[pa.RecordBatch, MissingValue | None]:
        """The rows of these numbers, complete, and the first value that was not found."""
        window = self._window
        names = [n for n in window.names if n not in _OF_CHANGES]
        found = window.taken(lacking, names)
        missing: MissingValue | None = None
        if "value" not in names or not pa.types.is_struct(found.schema.field("value").type):
            return found, None
        kind = found.schema.field("value").type
        fields = [kind.field(n) for n in range(kind.num_fields)]
        children = {f.name: pc.struct_field(found.column("value"), f.name) for f in fields}
        for name in window.unchanged_names(lacking):
            if name not in children:
                continue  # a column that is not read
            which = np.flatnonzero(window.lacks(name, lacking))
            origin = self._origins(lacking[which], name)
            if (origin < 0).any() and missing is None:
                lost = lacking[which[np.flatnonzero(origin < 0)[0]]]
                missing = MissingValue(window.keys[int(lost)].as_py(), name)
            children[name] = self._patched(children[name], name, which, origin)
        value = pa.StructArray.from_arrays([children[f.name] for f in fields], fields=fields)
        at = found.schema.get_field_index("value")
        return found.set_column(at, found.schema.field(at), value), missing

    def _patched(self, array: pa.Array, name: str, which: Any, origin: Any) -> pa.Array:
        """The column with the values of the rows of origin at some positions."""
        known = origin >= 0
        if not known.any():
            return array
        values = self._window.taken(origin[known], ["value"]).column("value")
        both = pa.concat_arrays([array, pc.struct_field(values, name)])
        order = np.arange(len(array))
        order[which[known]] = len(array) + np.arange(int(known.sum()))
        return both.take(pa.array(order))

    def _origins(self, rows: Any, name: str) -> Any:
        """For each row the last earlier one that has the column; -1 if there is none.

        The rows of a key go back to its deletion. If none of them has the column, and the first
        of them is the second half of a key change, the rows of the old key are looked at.
        """
        window, found = self._window, np.full(len(rows), -1)
        wanted = [(n, int(row)) for n, row in enumerate(rows)]
        for _ in range(window.count):  # each round goes one key change back
            if not wanted:
                break
            runs = _Runs(window, self._alive, [row for _, row in wanted], name)
            older = []
            for number, row in wanted:
                origin, first = runs.back_from(row)
                if origin >= 0:
                    found[number] = origin
                elif first >= 0:
                    older.append((number, first))
            deletions = self._deletions([first for _, first in older])
            wanted = [(n, deletions[first]) for n, first in older if first in deletions]
        return found

    def _deletions(self, firsts: list[int]) -> dict[int, int]:
        """The deletion that is the first half of the same key change, by row."""
        if not firsts:
            return {}
        window = self._window
        commit, number = window.positions()
        gone = np.flatnonzero(window.gone & self._alive)
        known = {(int(commit[at]), int(number[at])): int(at) for at in gone.tolist()}
        positions = {first: (int(commit[first]), int(number[first])) for first in firsts}
        found = {
            first: known.get(position, first)
            for first, position in positions.items()
            if position[1]
        }
        return {first: deletion for first, deletion in found.items() if deletion < first}


class _Runs:
    """The changes of some keys, each key's in their order."""

    def __init__(self, window: _Window, alive: Any, rows: list[int], name: str) -> None:
        wanted = window.keys.take(pa.array(sorted(set(rows))))
        near = pc.is_in(window.keys, value_set=wanted.combine_chunks())
        numbers = np.flatnonzero(near.to_numpy() & alive)
        codes = window.keys.take(pa.array(numbers)).combine_chunks().dictionary_encode().indices
        by_key = np.lexsort((numbers, codes.to_numpy()))
        lacks, gone = window.lacks(name, numbers)[by_key], window.gone[numbers][by_key]
        self._numbers = numbers[by_key]
        starts = np.flatnonzero(np.diff(codes.to_numpy()[by_key], prepend=-1))
        positions = np.arange(len(numbers))
        # The last position at or before each one that has the column, ends a run, or starts a key.
        self._has = np.maximum.accumulate(np.where(~lacks & ~gone, positions, -1))
        self._end = np.maximum.accumulate(np.where(gone, positions, -1))
        self._start = starts[np.searchsorted(starts, positions, side="right") - 1]
        self._place = {int(row): n for n, row in enumerate(self._numbers.tolist())}

    def back_from(self, row: int) -> tuple[int, int]:
        """The nearest earlier row with the column, or -1; and the first row of the run, or -1.

        `row` lacks the column, or is the deletion that ended the run.
        """
        at = self._place[row] - 1
        if at < 0 or at < self._start[at + 1]:
            return -1, row
        end = max(int(self._end[at]) + 1, int(self._start[at]))
        if end > at:
            return -1, row
        has = int(self._has[at])
        return (int(self._numbers[has]), -1) if has >= end else (-1, int(self._numbers[end]))
