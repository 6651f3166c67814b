"""The checker of captures finds every fault in this topic, and none in the true one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.cdc_checker import (
    Audited,
    Change,
    Folded,
    check_capture,
    check_copy,
    check_fold,
    fold,
    key_of,
)
from tests.faults.checker import Findings

KEY = ("id",)
POINT = 100
Topic = list[Change]


def row(id: int, uid: int, version: int, body: str | None = None) -> dict[str, Any]:
    return {"id": id, "uid": uid, "version": version, "body": body}


def read(id: int, uid: int, version: int) -> Change:
    after = row(id, uid, version, "large")
    return Change(0, str(id), "r", None, after, (), POINT - 1, None, None, None)


def change(op: str, id: int, after: Any, place: tuple[int, int], *unchanged: str) -> Change:
    """A change of transaction 7 at position 200, of three rows, or of 8 at 300, of two."""
    commit, number = place
    transaction, total = {200: ("7", 3), 300: ("8", 2)}[commit]
    before = {**row(id, 0, 0), "uid": None, "version": None} if op == "d" else None
    return Change(0, str(id), op, before, after, unchanged, commit, transaction, number, total)


def topic() -> Topic:
    return [
        read(1, 11, 3),
        read(2, 12, 1),
        change("u", 1, row(1, 11, 4), (200, 1), "body"),
        change("c", 3, row(3, 13, 1, "new"), (200, 2)),
        change("d", 2, None, (200, 3)),
        change("d", 1, None, (300, 1)),
        change("c", 5, row(5, 11, 5, "large"), (300, 1)),
        change("u", 3, row(3, 13, 2, "newer"), (300, 2)),
    ]


AUDIT = [
    *(Audited("orders", "c" if v == 1 else "u", 11, v, v, v * 10) for v in (1, 2, 3)),
    Audited("orders", "c", 12, 1, 4, 40),
    Audited("orders", "c", 14, 1, 5, 50),  # gone before the snapshot
    Audited("orders", "d", 14, 1, 5, 60),
    Audited("orders", "u", 11, 4, 7, 150),
    Audited("orders", "c", 13, 1, 7, 160),
    Audited("orders", "d", 12, 1, 7, 170),
    Audited("orders", "k", 11, 5, 8, 250),
    Audited("orders", "u", 13, 2, 8, 260),
]
SOURCE = {"5": row(5, 11, 5, "large"), "3": row(3, 13, 2, "newer")}


def found(changes: Topic, audit: list[Audited] | None = None) -> Findings:
    findings = Findings()
    folded: Folded = fold("orders", changes, KEY, findings, full=False)
    check_capture({"orders": folded}, AUDIT if audit is None else audit, POINT, findings)
    check_fold("orders", folded, SOURCE, findings)
    return findings


def test_a_true_topic_has_no_problems() -> None:
    findings = found(topic())
    assert findings.sound, findings.examples
    assert findings.counts["unchanged values"] == 1
    assert findings.counts["transactions after the snapshot"] == 2


def test_a_key_of_several_columns_is_a_json_array_of_texts() -> None:
    assert key_of({"a": 'x"', "b": 1}, ("a", "b")) == '["x\\"","1"]'


@pytest.mark.parametrize("index", range(8))
def test_each_event_that_is_missing_is_noticed(index: int) -> None:
    changes = topic()
    del changes[index]
    assert not found(changes).sound


@pytest.mark.parametrize("index", range(8))
def test_each_event_that_came_twice_is_noticed(index: int) -> None:
    changes = topic()
    changes.insert(index, changes[index])
    assert not found(changes).sound


@pytest.mark.parametrize("index", range(2, 7))
def test_two_changes_in_the_wrong_order_are_noticed(index: int) -> None:
    changes = topic()
    changes[index], changes[index + 1] = changes[index + 1], changes[index]
    assert not found(changes).sound


def _set(index: int, **fields: Any) -> Callable[[Topic], None]:
    def work(changes: Topic) -> None:
        changes[index] = changes[index]._replace(**fields)

    return work


FAULTS: dict[str, tuple[Callable[[Topic], None], str]] = {
    "a value that a new key left behind": (_set(6, after=row(5, 11, 5)), "unequal"),
    "a value to keep in a row that is new": (_set(6, unchanged=("body",)), "misfit"),
    "a value that is null and was not": (_set(7, after=row(3, 13, 2)), "unequal"),
    "a value that is not the source's": (_set(7, after=row(3, 13, 2, "other")), "unequal"),
    "a version that was never committed": (_set(7, after=row(3, 13, 9)), "phantom"),
    "a row that was never committed": (_set(3, after=row(3, 99, 1)), "phantom"),
    "a total that is too large": (_set(4, total=4), "torn"),
    "a number twice": (_set(4, number=2), "torn"),
    "a commit that belongs to no other row": (_set(4, commit=201), "torn"),
    "a transaction that did not do it": (_set(7, transaction="7"), "phantom"),
    "a key of another row": (_set(7, key="4"), "misfit"),
    "an update as an insert": (_set(7, op="c"), "misfit"),
    "an insert as an update": (_set(3, op="u"), "misfit"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_noticed(name: str) -> None:
    damage, kind = FAULTS[name]
    changes = topic()
    damage(changes)
    assert found(changes).problems[kind]


def test_a_short_life_after_the_snapshot_must_be_there() -> None:
    short = [Audited("orders", "c", 15, 1, 9, 400), Audited("orders", "d", 15, 1, 9, 410)]
    assert found(topic(), [*AUDIT, *short]).problems["lost"]


def test_a_row_that_moved_behind_the_snapshot_is_no_problem() -> None:
    moved = [
        Audited("orders", "c", 15, 1, 91, 60),
        Audited("orders", "k", 15, 2, 92, 70),  # from a key that was not read yet to one that was
        Audited("orders", "k", 15, 3, 93, 80),  # and to one that was read with this version
    ]
    changes = topic()
    changes.insert(2, read(600, 15, 3))
    passing = [
        Change(0, "4", "c", None, row(4, 15, 2), (), 75, "92", 1, 1),
        Change(0, "4", "d", row(4, 15, 2), None, (), 85, "93", 1, 1),
    ]
    changes[3:3] = passing
    findings = Findings()
    folded = fold("orders", changes, KEY, findings, full=False)
    check_capture({"orders": folded}, [*AUDIT, *moved], POINT, findings)
    assert findings.sound, findings.examples


def test_a_copy_is_compared_column_by_column() -> None:
    findings = Findings()
    copy = {"5": row(5, 11, 5, None), "4": row(4, 1, 1)}
    check_copy("orders", copy, SOURCE, findings)
    assert findings.problems["unequal"] == 3
