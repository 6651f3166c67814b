"""A checker that cannot fail proves nothing: each must find every fault in these histories."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults.checker import (
    Findings,
    Stored,
    check_deliveries,
    check_group,
    check_once_awake,
    check_outputs,
    check_publishes,
    check_writer,
    seen_events,
)
from tests.faults.history import History, Record, body_of, id_of, read_histories
from tests.faults.linearizable import (
    Operation,
    check_table,
    linearizable,
    only_reads_are_stale,
)
from tests.faults.nemesis import FAULTS, schedule
from tests.faults.report import summary_of, total_of, write_report
from tests.faults.supervisor import Orders


def publishes(count: int = 4) -> list[Record]:
    records: list[Record] = []
    for number in range(1, count + 1):
        name = f"p.0:k:{number}"
        records.append({"what": "invoke", "id": name})
        records.append({"what": "ok", "id": name, "partition": 0, "offset": number})
    return records


def log(*numbers: int) -> list[Stored]:
    return [Stored(f"p.0:k:{n}", "k", 0, index) for index, n in enumerate(numbers, 1)]


def test_a_correct_history_of_publishes_passes() -> None:
    found = check_publishes(publishes(), log(1, 2, 3, 4))
    assert found.sound
    assert (found.counts["acked"], found.counts["events"]) == (4, 4)


@pytest.mark.parametrize(
    ("stored", "problem"),
    [
        (log(1, 2, 3), "lost"),
        ([*log(1, 2, 3, 4), Stored("p.0:k:4", "k", 0, 5)], "doubled"),
        (log(1, 3, 2, 4), "reordered"),
        ([*log(1, 2, 3, 4), Stored("p.0:k:99", "k", 0, 5)], "phantom"),
        ([*log(1, 2, 3), Stored("p.0:k:4", "k", 0, 9)], "claimed"),
        ([*log(1, 2, 3, 4), Stored(None, "k", 0, 5)], "corrupt"),
    ],
)
def test_each_fault_of_a_log_is_reported(stored: list[Stored], problem: str) -> None:
    assert problem in check_publishes(publishes(), stored).problems


def test_an_unknown_publish_may_be_stored_or_not_but_a_refused_one_may_not() -> None:
    unknown = [{"what": "invoke", "id": "p.0:k:1"}, {"what": "unknown", "id": "p.0:k:1"}]
    assert check_publishes(unknown, []).sound
    assert check_publishes(unknown, log(1)).sound
    refused = [{"what": "invoke", "id": "p.0:k:1"}, {"what": "refused", "id": "p.0:k:1"}]
    assert check_publishes(refused, []).sound
    assert check_publishes(refused, log(1)).problems == {"claimed": 1}


def written(*numbers: int) -> list[Stored]:
    return [Stored(f"w:k:{n}", "k", 0, index) for index, n in enumerate(numbers, 1)]


@pytest.mark.parametrize(
    ("stored", "problem"),
    [
        (written(1, 2, 4), "lost"),
        (written(1, 2), "lost"),
        (written(1, 2, 3, 3), "doubled"),
        (written(1, 3, 2), "reordered"),
        (written(1, 2, 3, 4, 5, 6), "phantom"),
    ],
)
def test_each_fault_of_a_writer_is_reported(stored: list[Stored], problem: str) -> None:
    records: list[Record] = [
        {"what": "given", "writer": "w", "position": 5},
        {"what": "flushed", "writer": "w", "position": 3},
    ]
    assert check_writer(records, written(1, 2, 3)).sound
    assert check_writer(records, written(1, 2, 3, 4)).sound
    assert problem in check_writer(records, stored).problems


def test_skipped_invented_and_changed_deliveries_are_reported() -> None:
    seen: list[Record] = [{"what": "delivered", "id": f"p.0:k:{n}", "offset": n} for n in (1, 2, 2)]
    found = check_deliveries(seen, log(1, 2))
    assert found.sound
    assert found.counts["redelivered"] == 1
    assert check_deliveries(seen, log(1, 2, 3)).problems == {"skipped": 1}
    assert check_deliveries(seen, log(1)).problems == {"phantom": 1}
    changed = [*seen, {"what": "delivered", "id": None, "offset": 3}]
    assert check_deliveries(changed, log(1, 2)).problems == {"corrupt": 1}


def call(what: str, number: int, epoch: int = 1) -> Record:
    return {"what": what, "id": f"p.0:k:{number}", "key": "k", "partition": 0, "epoch": epoch}


def handled(*numbers: int) -> list[Record]:
    return [call(what, number) for number in numbers for what in ("start", "end")]


def test_what_a_process_repeats_after_its_ack_and_what_is_given_up_is_reported() -> None:
    def note(what: str, who: str) -> Record:
        return {"what": what, "who": who, "id": "p.0:k:1"}

    once = [note("delivered", "a"), note("settled", "a"), note("delivered", "b")]
    assert check_once_awake(once, []).sound
    again = [*once, note("delivered", "a")]
    assert check_once_awake(again, []).problems == {"repeated": 1}
    assert check_once_awake(once, ["p.0:k:1"]).problems == {"given up": 1}


def test_events_that_a_topic_does_not_keep_are_known_by_their_receipts_and_deliveries() -> None:
    handled = {"what": "delivered", "id": "p.0:k:5", "partition": 0, "offset": 5}
    records = [*publishes(), handled, handled]
    assert seen_events(records) == log(1, 2, 3, 4, 5)
    other = {**handled, "offset": 6}
    found = check_publishes(records, seen_events([*records, other]))
    assert found.problems["doubled"] == 1


def test_the_seed_chooses_a_retention_unless_one_is_ordered(tmp_path: Path) -> None:
    choices = ("limits", "interest")
    seeds = [Orders("publish", seed, 0, tmp_path).retention_of(*choices) for seed in range(20)]
    assert {*seeds} == {*choices}
    assert Orders("publish", 1, 0, tmp_path, "interest").retention_of(*choices) == "interest"
    assert Orders("publish", 1, 0, tmp_path, "workqueue").retention_of(*choices) == "limits"


def test_each_fault_of_a_group_is_reported() -> None:
    assert check_group(handled(1, 2, 3), log(1, 2, 3)).sound
    assert check_group(handled(1, 2, 2, 3), log(1, 2, 3)).counts["redelivered"] == 1
    assert "reordered" in check_group(handled(1, 3, 2), log(1, 2, 3)).problems
    assert check_group(handled(1, 2), log(1, 2, 3)).problems == {"skipped": 1}
    assert "phantom" in check_group(handled(1, 2), log(1)).problems
    overlap = [call("start", 1), call("start", 1), call("end", 1)]
    assert "overlapped" in check_group(overlap, log(1)).problems
    again = [call("start", 1), call("stopped", 1), call("start", 1), call("end", 1)]
    assert check_group(again, log(1)).sound
    assert check_group(again[:2], log(1)).problems == {"skipped": 1}


def test_an_older_epoch_is_refused_and_the_present_one_is_not() -> None:
    late = [
        *handled(1),
        *[call(w, 2, 2) for w in ("start", "end")],
        call("start", 2),
        call("end", 2),
    ]
    found = check_group(late, log(1, 2))
    assert found.sound
    assert found.counts["refused by epoch"] == 2


def test_outputs_must_be_a_function_of_the_inputs() -> None:
    def function(name: str) -> list[str]:
        return [f"{name}>0"]

    def made(*numbers: int) -> list[Stored]:
        return [Stored(f"p.0:k:{n}>0", "k", 0, index) for index, n in enumerate(numbers, 1)]

    inputs = log(1, 2, 3)
    assert check_outputs(inputs, made(1, 2, 3), function).sound
    assert check_outputs(inputs, made(1, 3), function).problems == {"lost": 1}
    assert check_outputs(inputs, made(1, 2, 3, 3), function).problems == {"doubled": 1}
    assert check_outputs(inputs, made(2, 1, 3), function).problems == {"reordered": 1}
    assert check_outputs(inputs, made(1, 2, 3, 4), function).problems == {"phantom": 1}


def write(name: str, expected: str | None, start: int, end: int, outcome: str = "ok") -> Operation:
    return Operation("write", start, end, name, expected, outcome)  # type: ignore[arg-type]


def read(value: str | None, start: int, end: int) -> Operation:
    return Operation("read", start, end, value)


def test_linearizable_registers_pass_and_others_fail() -> None:
    assert linearizable([write("a", None, 0, 1), read("a", 2, 3)])
    assert not linearizable([write("a", None, 0, 1), read(None, 2, 3)])  # stale
    assert linearizable([write("a", None, 0, 9), read(None, 1, 2), read("a", 3, 4)])
    assert not linearizable([write("a", None, 0, 9), read("a", 1, 2), read(None, 3, 4)])  # back
    two = [write("a", None, 0, 5), write("b", None, 1, 6)]
    assert not linearizable(two)  # both replaced nothing
    assert linearizable([two[0], write("b", None, 1, 6, "refused")])
    assert not linearizable([write("b", None, 1, 6, "refused")])  # refused for no reason


def test_a_stale_read_is_distinguished_from_a_wrong_one() -> None:
    """cluster-tables, seed 305: a frozen leader answered before it learned of its successor."""
    writes = [write("a", None, 0, 1), write("b", "a", 2, 3)]
    assert only_reads_are_stale([*writes, read("a", 4, 5), read(None, 6, 7)])
    assert only_reads_are_stale([*writes, write("c", "b", 4, 5, "refused")])
    assert not only_reads_are_stale([*writes, read("c", 4, 5)])
    assert not only_reads_are_stale([writes[0], read("b", 1, 2), write("b", "a", 3, 4)])
    assert not only_reads_are_stale([writes[0], write("b", None, 2, 3)])
    for copies, problems in ((1, {"claimed": 1}), (3, {})):
        records: list[Record] = [
            {"t": 0, "what": "write", "op": "a", "key": "k", "expected": None},
            {"t": 1, "what": "ok", "op": "a"},
            {"t": 2, "what": "read", "op": "r", "key": "k"},
            {"t": 3, "what": "read-ok", "op": "r", "value": None},
        ]
        assert check_table(records, copies=copies).problems == problems


def test_an_unknown_write_may_take_effect_late_or_never() -> None:
    unknown = write("a", None, 0, 1 << 62, "unknown")
    assert linearizable([unknown, read(None, 1, 2), read("a", 3, 4)])
    assert linearizable([unknown, read(None, 1, 2), read(None, 3, 4)])
    assert not linearizable([unknown, read("a", 1, 2), read(None, 3, 4)])


def test_a_long_history_of_one_key_is_decided_quickly() -> None:
    chance = random.Random(4)
    ops, last, now = [], None, 0
    for number in range(400):
        now += 10
        if chance.random() < 0.5:
            ops.append(read(last, now, now + 25))
            now += 30
        else:
            ops.append(write(f"w{number}", last, now, now + 5))
            last = f"w{number}"
    assert linearizable(ops)
    assert not linearizable([*ops, read("w0", now + 100, now + 101)] if last != "w0" else [])


def test_two_winners_over_one_revision_count_as_doubled() -> None:
    records: list[Record] = []
    for time, name in enumerate(("a", "b")):
        start = {"t": time * 10, "what": "write", "op": name, "key": "k", "expected": None}
        records += [start, {"t": time * 10 + 1, "what": "ok", "op": name}]
    assert check_table(records).problems == {"doubled": 1, "claimed": 1}


def test_a_schedule_depends_only_on_its_seed() -> None:
    kinds = list(FAULTS)
    first = schedule(random.Random("1"), kinds, 60)
    assert first == schedule(random.Random("1"), kinds, 60)
    assert first != schedule(random.Random("2"), kinds, 60)
    assert {step.fault for step in first[: len(kinds)]} <= set(kinds)


def test_a_changed_byte_is_found_anywhere() -> None:
    body = body_of("p0.1:k3:77")
    assert id_of(body) == "p0.1:k3:77"
    for index in range(len(body)):
        changed = bytearray(body)
        changed[index] ^= 1
        assert id_of(bytes(changed)) is None
    assert id_of(body[:-1]) is None


def test_a_history_keeps_complete_notes_and_a_report_shows_them(tmp_path: object) -> None:
    from pathlib import Path

    folder = Path(str(tmp_path))
    history = History(folder, "nemesis")
    history.note("fault", kind="cut", length=1)
    history.note("healed", kind="cut")
    history.close()
    with (folder / "nemesis.jsonl").open("ab") as file:
        file.write(b'{"t": 1, "who": "half')
    assert [record["what"] for record in read_histories(folder)] == ["fault", "healed"]
    found = Findings()
    found.counts["fault: cut"] += 1
    found.problem("lost", "<b>one</b>")
    summary = summary_of(Orders("publish", 7, 60, folder), found, 61.0)
    page = write_report(folder, summary).read_text()
    assert "&lt;b&gt;one" in page
    assert '<rect class="fault"' in page
    total = total_of([summary, summary])
    assert (total["lost"], total["faults"]) == (2, {"cut": 2})
