"""What must be true of a capture: pure functions over its topics, the audit and the tables.

The kinds of problem:

lost        committed in the database and not in the topic
doubled     more than once in the topic
reordered   positions that do not grow
phantom     in the topic and never committed
torn        a transaction whose numbers and total do not agree
misfit      a change that does not fit the row as it was before
unequal     a row that differs from the source: that of the topic, or that of the sink
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, Final, NamedTuple
from uuid import UUID

from millstream.events import changes as ch
from tests.faults.checker import Findings

__all__ = ["Audited", "Change", "Folded", "check_capture", "check_copy", "check_fold", "fold"]

Row = Mapping[str, Any]
MOVED: Final = "k"  # in the audit: an update that changed the key
XIDS: Final = 1 << 32  # PostgreSQL's own numbers of transactions have no more bits in its log


class Change(NamedTuple):
    """One event of a topic of changes."""

    partition: int
    key: str
    op: str
    before: Row | None
    after: Row | None
    unchanged: Sequence[str]
    commit: int
    transaction: str | None
    number: int | None
    total: int | None
    time: Any = None

    @classmethod
    def of(cls, partition: int, key: bytes | str, value: Row) -> Change:
        """From an event as it was read."""
        source = value[ch.SOURCE]
        return cls(
            partition,
            key.decode() if isinstance(key, bytes) else key,
            value[ch.OP],
            value[ch.BEFORE],
            value[ch.AFTER],
            value[ch.UNCHANGED] or (),
            source[ch.COMMIT],
            source[ch.TRANSACTION],
            source[ch.NUMBER],
            source[ch.TOTAL],
            source[ch.TIME],
        )


class Audited(NamedTuple):
    """One row of the audit, in the order of its numbers."""

    table: str
    op: str  # "c", "u", "d", MOVED
    uid: int
    version: int
    transaction: int
    lsn: int  # before that of the commit


class Step(NamedTuple):
    """A change with the row it is about: a deletion has nothing but the key."""

    table: str
    change: Change
    uid: int
    version: int  # after the change; of a deletion the last


@dataclass
class Folded:
    """A topic, applied change by change."""

    rows: dict[str, dict[str, Any]] = field(default_factory=dict)  # by key
    steps: list[Step] = field(default_factory=list)


def key_of(row: Row, key: Sequence[str]) -> str:
    """The key that the event of a row must have."""
    if len(key) == 1:
        return str(row[key[0]])
    return json.dumps([str(row[name]) for name in key], ensure_ascii=False, separators=(",", ":"))


# -- one topic ----------------------------------------------------------------------------


def fold(
    table: str, changes: Iterable[Change], key: Sequence[str], findings: Findings, full: bool
) -> Folded:
    """Apply the changes of a topic. `full`: the table sends whole rows as `before`."""
    folded = Folded()
    last: dict[int, tuple[int, int, bool]] = {}
    for change in changes:
        findings.counts["events"] += 1
        findings.counts[f"{table}: {change.op}"] += 1
        if change.op != ch.READ:
            _check_growth(table, change, last, findings)
        _apply(table, change, key, folded, findings)
        if full and change.before is not None:
            findings.counts["whole rows before"] += 1
    return folded


def _check_growth(
    table: str, change: Change, last: dict[int, tuple[int, int, bool]], findings: Findings
) -> None:
    """A changed key is a deletion and a new row that share a number; else positions grow."""
    place = (change.commit, change.number or 0, change.op != ch.DELETE)
    if change.partition in last and place <= last[change.partition]:
        kind = "doubled" if place == last[change.partition] else "reordered"
        findings.problem(kind, f"{table}: {place} after {last[change.partition]}: {change}"[:300])
    last[change.partition] = place


def _apply(
    table: str, change: Change, key: Sequence[str], folded: Folded, findings: Findings
) -> None:
    rows, known = folded.rows, folded.rows.get(change.key)
    name = f"{table} {change.key} at {change.commit}/{change.number}"
    if change.op == ch.DELETE:
        if known is None:
            findings.problem("misfit", f"{name}: deleted, and there was no such row")
            return
        _check_before(name, change, known, key, findings)
        folded.steps.append(Step(table, change, known["uid"], known["version"]))
        del rows[change.key]
        return
    if change.after is None:
        findings.problem("misfit", f"{name}: '{change.op}' has no row")
        return
    if change.key != key_of(change.after, key):
        findings.problem("misfit", f"{name}: the row has the key {key_of(change.after, key)}")
    if (change.op == ch.UPDATE) != (known is not None):
        state = "was not there" if known is None else "was there"
        findings.problem("misfit", f"{name}: '{change.op}' of a row that {state}")
    if known is not None:
        _check_before(name, change, known, key, findings)
    row = dict(change.after)
    for column in change.unchanged:
        findings.counts["unchanged values"] += 1
        if row[column] is not None:
            findings.problem("misfit", f"{name}: {column} is unchanged and has a value")
        if known is None:
            findings.problem("misfit", f"{name}: {column} is unchanged in a new row")
        else:
            row[column] = known.get(column)
    folded.steps.append(Step(table, change, row["uid"], row["version"]))
    rows[change.key] = row


def _check_before(
    name: str, change: Change, known: Row, key: Sequence[str], findings: Findings
) -> None:
    if change.before is None:
        return
    for column, value in change.before.items():
        same = canonical(value) == canonical(known.get(column))
        if not same and (value is not None or column in key):
            findings.problem("misfit", f"{name}: {column} was {known.get(column)!r:.80}")


# -- topics against the audit ------------------------------------------------------------------


def check_capture(
    folded: Mapping[str, Folded], audit: Sequence[Audited], point: int, findings: Findings
) -> None:
    """Every version of every row is there once, in order, and every transaction is complete.

    Commits before `point` may be part of the snapshot instead: of its last attempt.
    """
    steps = [step for one in folded.values() for step in one.steps]
    ends: dict[int, int] = {}  # of transactions: no later than their commits
    for entry in audit:
        ends[entry.transaction] = max(ends.get(entry.transaction, 0), entry.lsn)
    settled = {number for number, lsn in ends.items() if lsn >= point}
    findings.counts["transactions after the snapshot"] += len(settled)
    _check_versions(steps, audit, settled, findings)
    _check_transactions(steps, audit, settled, findings)


def _check_versions(
    steps: Sequence[Step], audit: Sequence[Audited], settled: set[int], findings: Findings
) -> None:
    committed: dict[tuple[str, int], list[Audited]] = defaultdict(list)
    for entry in audit:
        committed[entry.table, entry.uid].append(entry)
    found: dict[tuple[str, int], list[Step]] = defaultdict(list)
    for step in steps:
        if step.change.op != ch.DELETE:
            found[step.table, step.uid].append(step)
    for row in found.keys() - committed.keys():
        findings.problem("phantom", f"{row}: never committed")
    for row, entries in committed.items():
        _check_row(row, entries, found.get(row, []), settled, findings)


def _check_row(
    row: tuple[str, int],
    entries: Sequence[Audited],
    steps: Sequence[Step],
    settled: set[int],
    findings: Findings,
) -> None:
    """The versions of one row: each once, in order, from the first that was captured on.

    A row whose key changed while the snapshot was read may have been read under both keys, or
    under none; then only what it was at the end of the snapshot must be there.
    """
    wanted = {entry.version: entry for entry in entries if entry.op != ch.DELETE}
    versions = [step.version for step in steps]
    findings.counts["versions"] += len(versions)
    for step in steps:
        op, entry = step.change.op, wanted.get(step.version)
        if entry is None:
            findings.problem("phantom", f"{row}: version {step.version} was never committed")
        elif op not in {ch.READ, ch.CREATE if entry.op == MOVED else entry.op}:
            findings.problem("misfit", f"{row}: version {step.version} came as '{op}'")
    for version, count in Counter(versions).items():
        if count > 1:
            findings.problem("doubled", f"{row}: version {version}, {count} times")
    early = [entry for entry in entries if entry.transaction not in settled]
    needed = {v for v, entry in wanted.items() if entry.transaction in settled}
    if early and early[-1].op != ch.DELETE:
        needed.add(early[-1].version)
    moved = any(entry.op == MOVED for entry in early)
    if not moved and versions:
        needed.update(range(versions[0], max(wanted) + 1))
        if steps[0].change.op != ch.READ and versions[0] != 1:
            findings.problem("lost", f"{row}: begins with version {versions[0]}")
    if needed - set(versions):
        findings.problem("lost", f"{row}: versions {sorted(needed - set(versions))!s:.60}")
    late = versions if not moved else [v for v in versions if v in needed]
    if late != sorted(late):
        findings.problem("reordered", f"{row}: versions {late!s:.60}")


def _check_transactions(
    steps: Sequence[Step], audit: Sequence[Audited], settled: set[int], findings: Findings
) -> None:
    committed: dict[int, Counter[tuple[Any, ...]]] = defaultdict(Counter)
    for entry in audit:
        committed[entry.transaction % XIDS][_mark(entry)] += 1
    found: dict[int, list[Step]] = defaultdict(list)
    for step in steps:
        if step.change.op != ch.READ:
            found[int(step.change.transaction or 0) % XIDS].append(step)
    for number, parts in found.items():
        _check_whole(number, parts, committed.get(number, Counter()), findings)
    for number in (one % XIDS for one in settled):
        numbers = {step.change.number for step in found.get(number, [])}
        total = committed[number].total()
        if numbers != set(range(1, total + 1)):
            findings.problem(
                "lost", f"transaction {number}: {len(numbers)} of {total} rows, {numbers!s:.60}"
            )


def _mark(entry: Audited) -> tuple[Any, ...]:
    return entry.table, entry.uid, entry.version, entry.op


def _check_whole(
    number: int, steps: Sequence[Step], committed: Counter[tuple[Any, ...]], findings: Findings
) -> None:
    """What is there of one transaction agrees with itself and with the audit."""
    commits = {(s.change.commit, s.change.time, s.change.total) for s in steps}
    if len(commits) != 1:
        findings.problem("torn", f"transaction {number} has {len(commits)} commits: {commits}")
    (_, _, total) = next(iter(commits))
    if total != committed.total():
        findings.problem(
            "torn", f"transaction {number}: total {total}, committed {committed.total()}"
        )
    by_number: dict[int | None, list[Step]] = defaultdict(list)
    for step in steps:
        by_number[step.change.number].append(step)
    for place, parts in by_number.items():
        ops = "".join(sorted(step.change.op for step in parts))
        single = ops in {ch.CREATE, ch.UPDATE, ch.DELETE}
        moved = ops == ch.CREATE + ch.DELETE and len({(s.table, s.uid) for s in parts}) == 1
        if not single and not moved:
            findings.problem("torn", f"transaction {number}: number {place} came as '{ops}'")
        for step in parts:
            kinds = {ch.CREATE: (ch.CREATE, MOVED), ch.DELETE: (ch.DELETE,)}
            allowed = kinds.get(step.change.op, (step.change.op,))
            marks = [(step.table, step.uid, step.version, op) for op in allowed]
            if step.change.op == ch.DELETE:  # a move has the next version
                marks.append((step.table, step.uid, step.version + 1, MOVED))
            if not any(mark in committed for mark in marks):
                findings.problem("phantom", f"transaction {number} did not: {step!s:.200}")


# -- tables --------------------------------------------------------------------------------


def check_fold(table: str, folded: Folded, source: Mapping[str, Row], findings: Findings) -> None:
    """The topic, applied, is the source table, column by column; both by key."""
    findings.counts["rows"] += len(source)
    _compare(f"{table}: topic", folded.rows, source, findings)


def check_copy(
    table: str, copy: Mapping[str, Row], source: Mapping[str, Row], findings: Findings
) -> None:
    """The sink's table is the source table, column by column; both by key."""
    findings.counts["rows of the copy"] += len(copy)
    _compare(f"{table}: sink", copy, source, findings)


def _compare(
    name: str, found: Mapping[str, Row], source: Mapping[str, Row], findings: Findings
) -> None:
    for key in source.keys() - found.keys():
        findings.problem("unequal", f"{name} has no row {key}")
    for key in found.keys() - source.keys():
        findings.problem("unequal", f"{name} has a row {key} that the source has not")
    for key in source.keys() & found.keys():
        for column, value in source[key].items():
            other = found[key].get(column)
            if canonical(value) != canonical(other):
                text = f"{name} {key}.{column}: {other!r:.60}, in the source {value!r:.60}"
                findings.problem("unequal", text)


def canonical(value: Any) -> Any:
    """The same for values that are the same, whichever driver they came from."""
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat() if value.tzinfo else value.isoformat()
    if isinstance(value, date | UUID):
        return str(value)
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, memoryview | bytearray):
        return bytes(value)
    if isinstance(value, dict):
        return {name: canonical(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [canonical(item) for item in value]
    return value
