"""The checker of event stores finds every fault in these histories, and no others."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from tests.faults.history import Record
from tests.faults.ledger import Deposited, amount_of, events_of, fold
from tests.faults.linearizable import Operation, linearizable
from tests.faults.store_checker import NEVER, Look, Placed, StoredMark, check_order, check_store

# Four appends: a new account, a second one, a transfer between them, two events by any version.
APPENDS: dict[str, list[list[Any]]] = {
    "w.1": [["a", "new", 2]],
    "w.2": [["b", "new", 1]],
    "w.3": [["a", 2, 1], ["b", "any", 1]],
    "w.4": [["b", "any", 2]],
}


def log() -> list[StoredMark]:
    stored: list[StoredMark] = []
    versions: dict[str, int] = {}
    offset = 0
    for name, parts in APPENDS.items():
        for part, (id, _, count) in enumerate(parts):
            offset += 1
            for event in events_of(name, part, count, out=part < len(parts) - 1):
                versions[id] = versions.get(id, 0) + 1
                stored.append(StoredMark(id, versions[id], offset, event))
    return stored


def told() -> list[Record]:
    """What the writers were told, in a world without faults; one thing every ten ticks."""
    records: list[Record] = []
    for name, parts in APPENDS.items():
        now = len(records) * 10
        begun = {"t": now, "what": "append", "op": name, "kind": "", "parts": parts}
        places = []
        for part, _ in enumerate(parts):
            marks = [one for one in log() if one.event.mark.startswith(f"{name}/{part}.")]
            places.append([marks[0].version, marks[-1].version, marks[0].offset])
        done = {"t": now + 5, "what": "ok", "op": name, "receipts": places}
        records += [begun, done]
    return records


def load(id: str, version: int, at: int = 1000, state: list[int] | None = None) -> list[Record]:
    true = fold(one.event for one in log() if one.id == id and one.version <= version).facts
    return [
        {"t": at, "what": "read", "op": f"r{at}", "id": id},
        {
            "t": at + 5,
            "what": "read-ok",
            "op": f"r{at}",
            "version": version,
            "state": state or true,
        },
    ]


def answered(name: str, **facts: Any) -> list[Record]:
    """The same with another answer to one append."""
    changed = [r for r in told() if not (r["what"] == "ok" and r["op"] == name)]
    (begun,) = [r for r in changed if r["op"] == name]
    return [*changed, {"t": begun["t"] + 5, "op": name, **facts}]


def test_a_correct_history_passes() -> None:
    found = check_store([*told(), *load("a", 3), *load("b", 4, 1010)], log())
    assert found.sound, dict(found.examples)
    assert (found.counts["acked"], found.counts["loads"], found.counts["events"]) == (4, 2, 7)
    assert found.counts["aggregates linearizable"] == 2


def without(*marks: str) -> list[StoredMark]:
    return [one for one in log() if one.event.mark not in marks]


def repeated(mark: str) -> list[StoredMark]:
    """One event stored again, at the end of its aggregate, as if it were another append."""
    (event,) = [one for one in log() if one.event.mark == mark]
    last = max(one.version for one in log() if one.id == event.id)
    return [*log(), event._replace(version=last + 1, offset=99)]


def swapped() -> list[StoredMark]:
    """The last two appends to `b` the other way round."""
    order = {2: 4, 3: 2, 4: 3}
    offsets = {2: 5, 3: 4, 4: 4}
    return [
        one._replace(version=order[one.version], offset=offsets[one.version])
        if one.id == "b" and one.version > 1
        else one
        for one in log()
    ]


@pytest.mark.parametrize(
    ("stored", "problem"),
    [
        (without("w.4/0.0", "w.4/0.1"), "lost"),
        (without("w.1/0.0", "w.1/0.1"), "gap"),
        (without("w.4/0.1"), "torn"),
        (without("w.3/1.0"), "torn"),
        (without("w.3/0.0"), "unbalanced"),
        (repeated("w.1/0.1"), "doubled"),
        (repeated("w.3/1.0"), "unbalanced"),
        ([*log(), StoredMark("b", 5, 99, events_of("w.9", 0, 1, out=False)[0])], "phantom"),
        ([*log(), StoredMark("c", 1, 99, Deposited(1, "no mark"))], "phantom"),
        (
            [log()[0]._replace(event=Deposited(amount_of("w.1") + 1, "w.1/0.0")), *log()[1:]],
            "corrupt",
        ),
        ([one._replace(version=9) if one == log()[-1] else one for one in log()], "gap"),
        ([one._replace(offset=9) if one.offset == 5 else one for one in log()], "claimed"),
        (swapped(), "reordered"),
    ],
)
def test_each_fault_of_a_log_is_reported(stored: list[StoredMark], problem: str) -> None:
    assert problem in check_store(told(), stored).problems


def test_an_append_that_took_another_version_than_it_expected_is_reported() -> None:
    for expected in ("new", 1):
        records = [
            {**r, "parts": [["a", expected, 1], ["b", "any", 1]]}
            if r["what"] == "append" and r["op"] == "w.3"
            else r
            for r in told()
        ]
        assert check_store(records, log()).problems == {"overrun": 1}


def test_an_unknown_append_may_be_stored_or_not_but_a_conflict_may_not() -> None:
    unknown = answered("w.4", what="unknown")
    assert check_store(unknown, log()).sound
    assert check_store(unknown, without("w.4/0.0", "w.4/0.1")).sound
    assert check_store(unknown, without("w.4/0.0")).problems["torn"] == 1
    conflict = answered("w.4", what="conflict", id="b", actual=2)
    assert check_store(conflict, without("w.4/0.0", "w.4/0.1")).sound
    assert check_store(conflict, log()).problems == {"claimed": 1}
    killed = [r for r in told() if not (r["what"] == "ok" and r["op"] == "w.4")]
    assert check_store(killed, log()).sound


def test_what_is_repeated_is_one_append() -> None:
    begun = next(r for r in told() if r["op"] == "w.4")
    done = {"t": 500, "what": "ok", "op": "w.4", "receipts": [[3, 4, 5]]}
    records = [*answered("w.4", what="unknown"), {**begun, "t": 400}, done]
    found = check_store(records, log())
    assert found.sound
    assert found.counts["repeated appends"] == 1
    false = {"t": 500, "what": "conflict", "op": "w.4", "id": "b", "actual": 4}
    assert check_store([*records[:-1], false], log()).problems == {"claimed": 1}
    assert "doubled" in check_store(records, repeated("w.4/0.0")).problems


def test_false_answers_to_loads_and_false_conflicts_are_reported() -> None:
    assert check_store([*told(), *load("a", 3, state=[1, 2, 3])], log()).problems == {
        "wrong state": 1
    }
    assert check_store([*told(), *load("a", 2)], log()).problems == {"stale": 1}
    assert check_store([*told(), *load("a", 2)], log(), copies=3).counts["stale answers"] == 1
    assert check_store([*told(), *load("a", 1)], log()).problems["torn"] == 1
    assert check_store([*told(), *load("a", 7)], log()).problems["torn"] == 1
    early = sorted([*told(), *load("b", 4, at=1)], key=lambda record: record["t"])
    assert check_store(early, log()).problems == {"claimed": 1}
    refused = {"t": 905, "what": "conflict", "op": "w.8", "id": "a", "actual": 0}
    begun = {"t": 900, "what": "append", "op": "w.8", "kind": "", "parts": [["a", 3, 1]]}
    assert check_store([*told(), begun, refused], log()).problems == {"stale": 1}
    change = answered("w.4", what="ok", receipts=[[3, 4, 5]], state=[0, 4, 0])
    assert check_store(change, log()).problems == {"wrong state": 1}


# -- the order of one aggregate, against the search over all orders --------------------------


def as_operations(appends: list[Placed], looks: list[Look]) -> list[Operation]:
    """The same for `linearizable`: a register whose writes replace the one before."""
    names: dict[int, str | None] = {0: None, **{one.last: str(one.last) for one in appends}}
    found, last = [], 0
    for one in appends:
        name, before = names[one.last], names[last]
        write = Operation("write", one.start, one.end, name, before)
        found.append(write if one.end < NEVER else replace(write, outcome="unknown"))
        last = one.last
    return [*found, *(Operation("read", at.start, at.end, names[at.version]) for at in looks)]


def some_history(chance: random.Random) -> tuple[list[Placed], list[Look]]:
    """Operations around a moment each, in the right order; then one is perhaps moved."""
    appends, looks = [], []
    version, now = 0, 100
    for _ in range(chance.randrange(1, 9)):
        now += chance.randrange(1, 20)
        start, end = now - chance.randrange(30), now + chance.randrange(30)
        if chance.random() < 0.5:
            first, version = version + 1, version + chance.randrange(1, 3)
            appends.append(Placed(first, version, start, end))
        else:
            looks.append(Look(version, start, end))
    moved = chance.randrange(-60, 60)
    if looks and chance.random() < 0.4:
        at = looks.pop(chance.randrange(len(looks)))
        looks.append(at._replace(start=at.start + moved, end=at.end + moved))
    elif appends and chance.random() < 0.4:
        number = chance.randrange(len(appends))
        one = appends[number]
        appends[number] = one._replace(start=one.start + moved, end=one.end + moved)
    return appends, looks


def test_the_order_of_an_aggregate_is_decided_as_by_a_search_over_all_orders() -> None:
    chance = random.Random(14)
    answers = []
    for _ in range(2000):
        appends, looks = some_history(chance)
        by_search = linearizable(as_operations(appends, looks))
        assert by_search is not None
        assert by_search == (not check_order(appends, looks)), (appends, looks)
        answers.append(by_search)
    assert 200 < sum(answers) < 1800  # both kinds were tried


def test_an_append_without_an_answer_may_have_happened_at_any_later_time() -> None:
    lost = Placed(1, 1, 10, NEVER)
    late = [lost, Placed(2, 2, 100, 110)]
    assert not check_order(late, [Look(0, 50, 60), Look(1, 70, 80)])
    assert check_order(late, [Look(1, 50, 60), Look(0, 70, 80)])[0][0] == "stale"
    assert linearizable(as_operations(late, [Look(0, 50, 60), Look(1, 70, 80)]))
    assert not linearizable(as_operations(late, [Look(1, 50, 60), Look(0, 70, 80)]))
