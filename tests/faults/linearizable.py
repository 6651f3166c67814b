"""Is a table linearizable? One key at a time, by trying every order that real time allows.

The method of Wing and Gong with Lowe's memory of states that led nowhere. A key is a register of
the last write's name; a conditional write needs the write it saw to be the present one. A write
whose outcome is unknown may take effect at any time after it started, or never.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from tests.faults.checker import Findings
from tests.faults.history import Record

__all__ = ["Operation", "check_table", "linearizable", "only_reads_are_stale", "operations_of"]

NEVER: Final = 1 << 62  # the end of an operation that never ended
STATES_MAX: Final = (
    500_000  # of one key; beyond that the result is "not decided", which is reported
)


@dataclass(frozen=True, slots=True)
class Operation:
    """One call: when it ran, what it requested and what it got."""

    kind: Literal["read", "write"]
    start: int
    end: int
    value: str | None  # read: what was found; write: the name of the write
    expected: str | None = None  # write: the write that must be the current one
    outcome: Literal["ok", "refused", "unknown"] = "ok"


def linearizable(operations: Sequence[Operation]) -> bool | None:
    """Whether some order explains every answer; None if it takes too long to decide."""
    ops = sorted(operations, key=lambda op: op.start)
    must = frozenset(n for n, op in enumerate(ops) if op.outcome != "unknown")
    seen: set[tuple[frozenset[int], str | None]] = set()
    stack: list[tuple[frozenset[int], str | None]] = [(frozenset(), None)]
    while stack:
        done, state = stack.pop()
        if (done, state) in seen:
            continue
        if len(seen) >= STATES_MAX:
            return None
        seen.add((done, state))
        left = must - done
        if not left:
            return True
        # An operation cannot come before one that ended before it started.
        horizon = min(ops[n].end for n in left)
        for number, op in enumerate(ops):
            if op.start > horizon:
                break
            if number not in done and _fits(op, state):
                after = op.value if _writes(op) else state
                stack.append((done | {number}, after))
    return False


def _writes(op: Operation) -> bool:
    return op.kind == "write" and op.outcome != "refused"


def _fits(op: Operation, state: str | None) -> bool:
    if op.kind == "read":
        return op.value == state
    return (op.expected == state) == (op.outcome != "refused")


def operations_of(records: Iterable[Record]) -> dict[str, list[Operation]]:
    """The operations on each key, from the records of the clients."""
    started: dict[str, Record] = {}
    found: dict[str, list[Operation]] = defaultdict(list)
    for record in records:
        what = record["what"]
        if what in ("read", "write"):
            started[record["op"]] = record
        elif what in ("read-ok", "ok", "refused", "unknown") and "op" in record:
            start = started.pop(record["op"])
            if start["what"] == "read":
                if what == "read-ok":
                    found[start["key"]].append(
                        Operation("read", start["t"], record["t"], record["value"])
                    )
                continue
            end = NEVER if what == "unknown" else record["t"]
            found[start["key"]].append(
                Operation("write", start["t"], end, start["op"], start["expected"], what)
            )
    for start in started.values():  # their process was killed
        if start["what"] == "write":
            found[start["key"]].append(
                Operation("write", start["t"], NEVER, start["op"], start["expected"], "unknown")
            )
    return found


def only_reads_are_stale(operations: Sequence[Operation]) -> bool:
    """Whether the writes are linearizable, and every read returns a state that the key had.

    With several copies a leader that was frozen or cut off answers for a moment as if it still led:
    then reads and refusals are about the past. What it would accept is not stored.
    """
    writes = [op for op in operations if _writes(op)]
    started = {op.value: op.start for op in writes}
    reads = [op for op in operations if op.kind == "read" and op.value is not None]
    known = all(op.value in started and started[op.value] < op.end for op in reads)
    return known and linearizable(writes) is True


def check_table(records: Iterable[Record], *, copies: int = 1) -> Findings:
    """Every key is linearizable, and no two writers succeeded in replacing the same write.

    With several replicas this holds for writes; stale reads are counted.
    """
    findings = Findings()
    for key, ops in operations_of(records).items():
        writes = [op for op in ops if op.kind == "write"]
        findings.counts["operations"] += len(ops)
        findings.counts["acked"] += sum(op.outcome == "ok" for op in writes)
        findings.counts["refused"] += sum(op.outcome == "refused" for op in writes)
        findings.counts["unknown"] += sum(op.outcome == "unknown" for op in writes)
        replaced: set[str | None] = set()
        for op in writes:
            if op.outcome == "ok" and op.expected in replaced:
                findings.problem("doubled", f"{key}: two writes replaced {op.expected}")
            if op.outcome == "ok":
                replaced.add(op.expected)
        answer = linearizable(ops)
        if answer is False and copies > 1 and only_reads_are_stale(ops):
            findings.counts["keys with an old read"] += 1
        elif answer is None:
            findings.counts["keys not decided"] += 1
        elif not answer:
            findings.problem("claimed", f"{key}: no order of its {len(ops)} operations explains it")
        else:
            findings.counts["keys linearizable"] += 1
    return findings
