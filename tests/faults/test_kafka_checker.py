"""Each check of topics that Kafka's clients use finds every fault in these histories."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults.history import Record
from tests.faults.kafka_checker import (
    Seen,
    check_commits,
    check_members,
    check_names,
    check_produced,
    check_readers,
    skipped_by_members,
)


def name(number: int, key: str = "a") -> str:
    return f"k0.0:{key}:{number}"


def sent(number: int, offset: int, partition: int = 0, key: str = "a") -> list[Record]:
    facts = {"who": "k0.0", "via": "kafka", "id": name(number, key)}
    return [
        {"what": "invoke", **facts},
        {"what": "ok", **facts, "partition": partition, "offset": offset},
    ]


def produced(*numbers: int) -> list[Record]:
    return [record for number in numbers for record in sent(number, number - 1)]


def log(*numbers: int) -> list[Seen]:
    return [Seen(0, offset, name(number)) for offset, number in enumerate(numbers)]


def read(who: str, *events: tuple[int, str | None], what: str = "seen") -> Record:
    return {"what": what, "who": who, "partition": 0, "events": [[*one] for one in events]}


# -- producers --------------------------------------------------------------------------------


def test_a_true_history_of_producers_passes() -> None:
    found = check_produced(produced(1, 2, 3), log(1, 2, 3), {})
    assert found.sound, found.examples
    assert (found.counts["acked"], found.counts["operations"], found.counts["events"]) == (3, 3, 3)


@pytest.mark.parametrize(
    ("final", "problem"),
    [
        (log(1, 2), "lost"),
        ([*log(1, 2, 3), Seen(0, 3, name(3))], "doubled"),
        (log(1, 3, 2), "reordered"),
        ([*log(1, 2), Seen(1, 0, name(3))], "reordered"),
        ([*log(1, 2, 3), Seen(0, 3, name(9))], "phantom"),
    ],
)
def test_each_fault_of_a_log_is_found(final: list[Seen], problem: str) -> None:
    assert problem in check_produced(produced(1, 2, 3), final, {}).problems


def test_events_of_other_senders_are_no_phantoms_and_may_be_in_any_order() -> None:
    others = [Seen(0, 3, "p0.0:a:2"), Seen(0, 4, "p0.0:a:1")]
    assert check_produced(produced(1, 2, 3), [*log(1, 2, 3), *others], {}).sound


def test_what_is_removed_counts_as_stored_if_it_was_before_the_start() -> None:
    final = [Seen(0, 2, name(3))]
    found = check_produced(produced(1, 2, 3), final, {0: 2})
    assert found.sound, found.examples
    assert found.counts["removed unread"] == 2
    assert check_produced(produced(1, 2, 3), final, {0: 1}).problems["lost"]
    seen = [*produced(1, 2), read("r", (0, name(1)), (1, name(2)))]
    assert check_produced(seen, [], {0: 2}).sound


def test_what_was_read_once_must_be_there_at_the_end() -> None:
    records = [*produced(1), read("r", (0, name(1)), (1, name(2)))]
    invoked = [record for record in produced(2) if record["what"] == "invoke"]
    assert check_produced([*records, *invoked], log(1, 2), {}).sound
    assert check_produced([*records, *invoked], log(1), {}).problems == {"lost": 1}


def test_a_fatal_error_is_a_problem_and_an_unknown_outcome_is_not() -> None:
    facts = {"who": "k0.0", "via": "kafka", "id": name(2)}
    unknown = [{"what": "invoke", **facts}, {"what": "unknown", **facts, "error": "timed out"}]
    assert check_produced([*produced(1), *unknown], log(1), {}).sound
    assert check_produced([*produced(1), *unknown], log(1, 2), {}).sound
    fatal = {"what": "fatal", "who": "k0.0", "via": "kafka", "error": "out of order"}
    assert check_produced([*produced(1), fatal], log(1), {}).problems == {"fatal": 1}


def test_a_receipt_without_an_offset_names_none() -> None:
    records = sent(1, -1)
    assert check_names(records, log(1)).sound
    assert check_produced(records, log(1), {}).counts["receipts without offset"] == 1
    assert check_produced(records, [], {}).problems == {"lost": 1}


# -- offsets ----------------------------------------------------------------------------------


def test_an_offset_that_names_two_events_is_found_wherever_they_were_seen() -> None:
    assert check_names([*produced(1, 2), read("r", (0, name(1)))], log(1, 2)).sound
    handled = read("m", (1, name(9)), what="handled")
    for records in ([handled], [read("r", (1, name(9)))], sent(9, 1)):
        assert check_names(records, log(1, 2)).problems["renamed"] == 1
    assert check_names([], [*log(1), Seen(0, 0, name(2))]).problems["renamed"] == 1
    assert check_names([], [*log(1), Seen(1, 0, name(2))]).sound


def test_an_event_with_two_offsets_is_found_even_if_one_is_removed() -> None:
    assert check_names([read("r", (0, name(1)))], [Seen(0, 7, name(1))]).problems["doubled"] == 1
    assert check_names(sent(1, 3), log(1)).problems["doubled"] == 1


def test_what_was_removed_before_anybody_got_an_answer_may_be_stored_again() -> None:
    asked, told = sent(1, 7)
    seen, removed = read("r", (0, name(1))), {"what": "removed", "who": "x", "partition": 0}
    final = [Seen(0, 7, name(1))]
    for records, is_true in (
        ([asked, seen, removed, told], True),
        ([asked, seen, told, removed], False),
        ([removed, asked, seen, told], False),
        ([asked, seen, {**removed, "partition": 1}, told], False),
        ([asked, seen, removed, told, read("r", (9, name(1)))], False),
    ):
        found = check_names(records, final)
        assert {*found.problems} == (set() if is_true else {"doubled"})
        assert found.counts["stored again"] or not is_true
    second = sent(2, 8)
    both = read("r", (0, name(1)), (1, name(2)))
    again = [asked, second[0], both, removed, told, second[1]]
    assert check_produced(again, [Seen(0, 7, name(1)), Seen(0, 8, name(2))], {0: 5}).sound
    assert not check_produced(again, [Seen(0, 8, name(1)), Seen(0, 7, name(2))], {0: 5}).sound


def test_changed_bytes_are_found() -> None:
    assert check_names([read("r", (0, None))], []).problems == {"corrupt": 1}
    assert check_names([], [Seen(0, 0, None)]).problems == {"corrupt": 1}


def test_a_reader_that_goes_back_is_found() -> None:
    first = read("r", (0, "a"), (1, "b"))
    assert check_readers([first, read("r", (5, "c"))]).sound
    assert check_readers([first, read("r", (1, "b"))]).problems == {"backwards": 1}
    assert check_readers([first, read("another life", (0, "a"))]).sound
    assert check_readers([read("r", (1, "b"), (0, "a"))]).problems == {"backwards": 1}


# -- groups -----------------------------------------------------------------------------------


def assigned(who: str, *partitions: int) -> Record:
    return {"what": "assigned", "who": who, "partitions": [*partitions]}


def handled(who: str, *offsets: int) -> Record:
    return read(who, *((offset, f"e{offset}") for offset in offsets), what="handled")


def commit(who: str, offset: int) -> list[Record]:
    facts: dict[str, Any] = {"who": who, "offsets": [[0, offset]]}
    return [{"what": "committing", **facts}, {"what": "settled", **facts}]


ENTIRE = [Seen(0, offset, f"e{offset}") for offset in range(4)]


def test_a_true_history_of_a_group_passes() -> None:
    records = [
        assigned("m0", 0),
        handled("m0", 0, 1),
        *commit("m0", 2),
        handled("m0", 2),  # and it is killed
        assigned("m1", 0),
        handled("m1", 2, 3),
        *commit("m1", 4),
    ]
    found = check_members(records, ENTIRE)
    assert found.sound, found.examples
    assert (found.counts["deliveries"], found.counts["redelivered"]) == (5, 1)
    assert check_commits(records, {0: 4}).sound


def test_what_no_member_handled_is_found() -> None:
    records = [assigned("m0", 0), handled("m0", 0, 1, 3)]
    assert check_members(records, ENTIRE).problems == {"skipped": 1}
    assert skipped_by_members(records, ENTIRE) == {ENTIRE[2]}


def test_what_was_committed_is_not_handled_again() -> None:
    records = [assigned("m0", 0), handled("m0", 0, 1), *commit("m0", 2)]
    again = [*records, assigned("m1", 0), handled("m1", 1, 2, 3)]
    assert check_members(again, ENTIRE).problems == {"repeated": 1}


def test_a_commit_that_is_answered_after_a_takeover_binds_nobody() -> None:
    asked, told = commit("m0", 2)
    records = [assigned("m0", 0), handled("m0", 0, 1), asked, assigned("m1", 0), told]
    assert check_members([*records, handled("m1", 0, 1, 2, 3)], ENTIRE).sound


def test_a_member_handles_nothing_twice_unless_it_is_given_the_partition_again() -> None:
    records = [assigned("m0", 0), handled("m0", 0, 1, 2, 3)]
    assert check_members([*records, handled("m0", 3)], ENTIRE).problems == {"repeated": 1}
    assert check_members([*records, assigned("m0", 0), handled("m0", 3)], ENTIRE).sound


def test_a_member_handles_only_what_it_was_given() -> None:
    records = [assigned("m0", 1), handled("m0", 0, 1, 2, 3)]
    assert check_members(records, ENTIRE).problems == {"overlapped": 4}


def test_a_committed_offset_that_goes_back_is_found() -> None:
    records = [*commit("m0", 2), *commit("m1", 1)]
    assert check_commits(records, {0: 2}).problems == {"returned": 1}
    assert check_commits(commit("m0", 2), {0: 1}).problems == {"returned": 1}
    assert check_commits(commit("m0", 2), {}).problems == {"returned": 1}
    assert check_commits(commit("m0", 2), {0: 3}).sound  # of an answer that was lost


def test_a_commit_that_was_begun_earlier_may_be_answered_later() -> None:
    asked, told = commit("m0", 1)
    assert check_commits([asked, *commit("m1", 2), told], {0: 2}).sound
