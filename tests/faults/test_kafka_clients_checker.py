"""The checker of Kafka clients finds every fault in these histories, and none in the true one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.checker import Findings
from tests.faults.history import Record
from tests.faults.kafka_clients_checker import (
    Logged,
    check_answered,
    check_commits,
    check_group,
    check_offsets,
    check_produced,
    check_readers,
    check_same,
    unprocessed,
)

# A producer of six values (the last one has no answer), one event of the SDK, a gap at offset 3.
LOG = [
    Logged(0, 0, "p0.0:1"),
    Logged(0, 1, "p0.0:3"),
    Logged(0, 2, "s0.0:k0:1"),
    Logged(0, 4, "p0.0:5"),
    Logged(1, 0, "p0.0:2"),
    Logged(1, 1, "p0.0:4"),
    Logged(1, 2, "p0.0:6"),
]
Run = tuple[list[Record], list[Logged]]


def note(who: str, what: str, t: int = 0, **facts: Any) -> Record:
    return {"t": t, "who": who, "what": what, **facts}


def ok(number: int, partition: int, offset: int) -> Record:
    facts: dict[str, Any] = {"id": f"p0.0:{number}", "partition": partition, "offset": offset}
    return note("p0.0", "ok", kafka=True, **facts)


def seen(who: str, partition: int, *numbers: int) -> Record:
    events = [[e.offset, e.id] for e in LOG if e.partition == partition]
    return note(who, "seen", partition=partition, events=[events[n] for n in numbers])


def commit(start: int, t: int, *offsets: tuple[int, int], who: str = "m0.0") -> Record:
    what = "settled" if who.startswith("m") else "committed"
    return note(who, what, t, start=start, offsets=[list(pair) for pair in offsets])


def run() -> Run:
    records = [
        note("p0.0", "sent", first=1, last=6),
        note("s0.0", "invoke", id="s0.0:k0:1"),
        *(ok(1, 0, 0), ok(3, 0, 1), ok(5, 0, 4), ok(2, 1, 0), ok(4, 1, 1)),
        note("m0.0", "assigned", partitions=[0, 1]),
        seen("m0.0", 0, 0, 1),
        seen("m0.0", 1, 0, 1, 2),
        commit(10, 20, (0, 2), (1, 3)),
        commit(21, 22, (0, 2), (1, 3), who="f0.0"),
        note("m0.0", "assigned", partitions=[1]),
        note("m1.0", "assigned", partitions=[0]),
        seen("m1.0", 0, 2, 3),
        commit(30, 40, (0, 5), who="m1.0"),
        seen("f0.0", 0, 0, 1, 2, 3),
        seen("f0.0", 1, 0, 1, 2),
        note("p0.0", "refused", id="p0.0:6", error="late"),
        note("p0.0", "end"),
    ]
    return records, list(LOG)


def found(records: list[Record], log: list[Logged], stored: list[str | None]) -> Findings:
    findings = check_produced(records, log).add(check_answered(records))
    findings.add(check_offsets(records, log)).add(check_same(log, stored))
    findings.add(check_readers(records, log)).add(check_commits(records))
    return findings.add(check_group(records, log))


def judged(records: list[Record], log: list[Logged]) -> Findings:
    return found(records, log, [event.id for event in log])


def test_a_true_run_has_no_problems() -> None:
    findings = judged(*run())
    assert findings.sound, findings.examples
    assert findings.counts["operations"] == 6
    assert findings.counts["acked"] == 5
    assert findings.counts["events"] == 6
    assert findings.counts["offsets"] == 7


@pytest.mark.parametrize("index", [0, 1, 3, 4, 5])
def test_each_acknowledged_value_that_is_missing_is_lost(index: int) -> None:
    records, log = run()
    del log[index]
    assert check_produced(records, log).problems == {"lost": 1}


def test_a_value_without_an_answer_may_be_missing() -> None:
    records, log = run()
    del log[6]
    assert check_produced(records, log).sound


@pytest.mark.parametrize("index", range(7))
@pytest.mark.parametrize("where", [(0, 5), (1, 3)])
def test_each_value_that_is_there_twice_is_doubled(index: int, where: tuple[int, int]) -> None:
    records, log = run()
    log.append(Logged(*where, log[index].id))
    assert check_produced(records, log).problems["doubled"] == 1


@pytest.mark.parametrize(("one", "two"), [(0, 1), (1, 3), (4, 5), (5, 6)])
def test_two_values_in_the_wrong_order_are_noticed(one: int, two: int) -> None:
    records, log = run()
    log[one], log[two] = log[one]._replace(id=log[two].id), log[two]._replace(id=log[one].id)
    assert check_produced(records, log).problems["reordered"]


def test_values_that_were_never_sent_or_were_changed_are_noticed() -> None:
    for name in ("p0.0:7", "p0.0:0", "p0.1:1", "s0.0:k0:2"):
        records, log = run()
        log.append(Logged(0, 5, name))
        assert check_produced(records, log).problems["phantom"] == 1, name
    records, log = run()
    log.append(Logged(0, 5, None))
    assert check_produced(records, log).problems == {"corrupt": 1}


def test_a_value_without_an_answer_is_noticed_if_the_producer_came_to_its_end() -> None:
    records, _ = run()
    ended = [r for r in records if r["what"] != "refused"]
    assert check_answered(ended).problems == {"stuck": 1}
    assert check_answered([r for r in ended if r["what"] != "end"]).sound  # it was killed


def _more(*records: Record) -> Callable[[Run], None]:
    return lambda run: run[0].extend(records)


def _instead(what: str, *records: Record) -> Callable[[Run], None]:
    def change(run: Run) -> None:
        run[0][:] = [r for r in run[0] if r["what"] != what]
        run[0].extend(records)

    return change


def _event(offset: int, name: str | None) -> Record:
    return note("f0.1", "seen", partition=0, events=[[offset, name]])


FAULTS: dict[str, tuple[Callable[[Run], None], str]] = {
    "an offset with another value for one reader": (_more(_event(1, "p0.0:5")), "repeated"),
    "an offset with two values, both gone": (
        _more(_event(9, "p0.0:5"), _event(9, "p0.0:1")),
        "repeated",
    ),
    "an answer with the offset of another value": (_more(ok(5, 0, 1)), "repeated"),
    "an answer with an offset that nothing has": (_more(ok(5, 0, 3)), "claimed"),
    "an answer with another partition": (_more(ok(5, 1, 4)), "claimed"),
    "an offset that a reader gets twice": (_more(seen("f0.0", 0, 3)), "reordered"),
    "offsets that go back": (_more(seen("f0.1", 0, 1, 0)), "reordered"),
    "a reader that passes over an event": (_more(seen("f0.1", 0, 1, 3)), "skipped"),
    "a member that passes over an event": (
        _more(note("m0.0", "assigned", partitions=[0]), seen("m0.0", 0, 0, 2)),
        "skipped",
    ),
    "an event that is read and is not in the log": (_more(_event(5, "p0.0:6")), "phantom"),
    "an event that is read with other bytes": (_more(_event(5, None)), "corrupt"),
    "a commit below an earlier one": (_more(commit(50, 60, (0, 4))), "reverted"),
    "a look-up below a commit": (_more(commit(50, 60, (1, 2), who="f0.0")), "reverted"),
    "a commit below a look-up": (
        _instead("settled", commit(50, 60, (1, 2), who="m1.0")),
        "reverted",
    ),
    "a commit beyond what was processed": (_more(commit(50, 60, (0, 6))), "claimed"),
    "an event that the group has not processed": (
        lambda run: run[0].remove(seen("m1.0", 0, 2, 3)),
        "skipped",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_noticed(name: str) -> None:
    damage, kind = FAULTS[name]
    damaged = run()
    damage(damaged)
    assert judged(*damaged).problems[kind]


def test_commits_at_the_same_time_have_no_order() -> None:
    records, log = run()
    records.append(commit(35, 60, (0, 4), who="m0.0"))
    assert judged(records, log).sound


def test_an_answer_without_an_offset_is_no_claim() -> None:
    records, log = run()
    records.append(ok(5, 0, -1))
    assert check_offsets(records, log).sound


def test_what_a_group_reads_again_is_counted() -> None:
    records, log = run()
    records += [note("m1.0", "assigned", partitions=[1]), seen("m1.0", 1, 1, 2)]
    findings = judged(records, log)
    assert findings.sound
    assert findings.counts["processed again"] == 2


@pytest.mark.parametrize("index", range(7))
def test_kafka_clients_and_the_sdk_read_the_same(index: int) -> None:
    stored = [event.id for event in LOG]
    assert check_same(LOG, stored).sound
    assert check_same(LOG, stored[:index] + stored[index + 1 :]).problems == {"unequal": 1}
    assert check_same(LOG, [*stored, stored[index]]).problems == {"unequal": 1}
    assert check_same(LOG[:index] + LOG[index + 1 :], stored).problems == {"unequal": 1}


def test_what_a_reader_lacks_is_known_by_its_name() -> None:
    records, log = run()
    assert unprocessed(records, log) == unprocessed(records, log, "f") == []
    assert unprocessed(records, log, "m0") == [log[2], log[3]]
