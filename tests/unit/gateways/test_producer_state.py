"""Kafka's rules for the batches of idempotent producers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.gateways.kafka.producer_state import (
    ProducerStates,
    SentBatch,
    Verdict,
    last_sequence,
)
from millstream.gateways.kafka.protocol import ErrorCode

END = 2**31 - 1


def batch(first: int, last: int, *, producer: int = 7, epoch: int = 0) -> SentBatch:
    return SentBatch(producer, epoch, first, last)


def error_of(states: ProducerStates, sent: SentBatch) -> ErrorCode:
    judged = states.judge(sent)
    assert judged.verdict is Verdict.REFUSED
    assert judged.text
    return judged.error


def filled(count: int) -> ProducerStates:
    states = ProducerStates()
    for number in range(count):
        states.stored(batch(number * 10, number * 10 + 9), number * 100)
    return states


def test_any_batch_of_an_unknown_producer_is_taken() -> None:
    assert ProducerStates().judge(batch(1234, 1240)).verdict is Verdict.NEW


def test_the_next_batch_is_taken_and_one_after_a_gap_is_not() -> None:
    states = filled(3)
    assert states.judge(batch(30, 31)).verdict is Verdict.NEW
    assert error_of(states, batch(31, 32)) is ErrorCode.out_of_order_sequence_number
    assert error_of(states, batch(29, 32)) is ErrorCode.out_of_order_sequence_number


def test_copies_of_the_last_five_batches_get_their_old_offset_and_older_ones_an_error() -> None:
    states = filled(8)
    for number in range(3, 8):
        judged = states.judge(batch(number * 10, number * 10 + 9))
        assert (judged.verdict, judged.offset) == (Verdict.STORED, number * 100)
    for number in range(3):
        copy = batch(number * 10, number * 10 + 9)
        assert error_of(states, copy) is ErrorCode.duplicate_sequence_number


def test_an_older_epoch_is_refused_and_a_newer_one_begins_at_zero() -> None:
    states = ProducerStates()
    states.stored(batch(0, 9, epoch=3), 0)
    assert error_of(states, batch(10, 11, epoch=2)) is ErrorCode.invalid_producer_epoch
    assert error_of(states, batch(10, 11, epoch=4)) is ErrorCode.out_of_order_sequence_number
    assert states.judge(batch(0, 1, epoch=4)).verdict is Verdict.NEW
    states.stored(batch(0, 1, epoch=4), 10)
    assert states.judge(batch(0, 1, epoch=4)).offset == 10
    assert states.judge(batch(2, 3, epoch=4)).verdict is Verdict.NEW
    assert error_of(states, batch(0, 9, epoch=3)) is ErrorCode.invalid_producer_epoch


def test_sequence_numbers_continue_with_zero_after_the_last() -> None:
    assert last_sequence(END - 1, 4) == 2 - 1
    states = ProducerStates()
    states.stored(batch(END - 5, END), 50)
    assert states.judge(batch(0, 3)).verdict is Verdict.NEW
    states.stored(batch(0, 3), 56)
    assert states.judge(batch(END - 5, END)).offset == 50
    assert error_of(states, batch(END - 20, END - 6)) is ErrorCode.duplicate_sequence_number
    assert error_of(states, batch(6, 7)) is ErrorCode.out_of_order_sequence_number


def test_a_copy_of_a_batch_that_is_under_way_shares_its_answer() -> None:
    states = ProducerStates()
    answer = object()
    states.accept(batch(0, 9), answer)
    judged = states.judge(batch(0, 9))
    assert judged.verdict is Verdict.UNDER_WAY
    assert judged.answer is answer
    assert states.judge(batch(10, 19)).verdict is Verdict.NEW
    assert error_of(states, batch(11, 19)) is ErrorCode.out_of_order_sequence_number


def test_a_batch_that_failed_leaves_the_state_as_it_was() -> None:
    states = filled(1)
    states.accept(batch(10, 19), object())
    states.settle(batch(10, 19))
    assert states.judge(batch(10, 19)).verdict is Verdict.NEW
    assert error_of(states, batch(20, 29)) is ErrorCode.out_of_order_sequence_number


def test_a_stored_batch_is_not_under_way_any_more() -> None:
    states = ProducerStates()
    states.accept(batch(0, 9), object())
    states.accept(batch(10, 19), object())
    states.stored(batch(0, 9), 5)
    states.settle(batch(0, 9))
    assert states.judge(batch(0, 9)).offset == 5
    assert states.judge(batch(10, 19)).verdict is Verdict.UNDER_WAY
    assert states.judge(batch(20, 21)).verdict is Verdict.NEW


def test_an_epoch_that_is_under_way_counts() -> None:
    states = filled(1)
    states.accept(batch(0, 4, epoch=1), object())
    assert error_of(states, batch(10, 19)) is ErrorCode.invalid_producer_epoch
    assert states.judge(batch(5, 6, epoch=1)).verdict is Verdict.NEW
    states.forget_under_way()
    assert states.judge(batch(10, 19)).verdict is Verdict.NEW


def test_the_producer_that_wrote_least_recently_is_forgotten_first() -> None:
    states = ProducerStates(limit=2)
    states.stored(batch(0, 0, producer=1), 0)
    states.stored(batch(0, 0, producer=2), 1)
    states.stored(batch(1, 1, producer=1), 2)
    states.stored(batch(0, 0, producer=3), 3)
    assert states.judge(batch(77, 77, producer=2)).verdict is Verdict.NEW
    assert states.judge(batch(0, 0, producer=1)).offset == 0
    assert states.judge(batch(0, 0, producer=3)).offset == 3


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(1, 9)), max_size=60))
def test_what_is_kept_and_restored_judges_the_same(steps: list[tuple[int, int, int]]) -> None:
    states = ProducerStates(limit=3)
    ends: dict[tuple[int, int], int] = {}
    sent = []
    for offset, (producer, epoch, count) in enumerate(steps):
        first = ends.get((producer, epoch), 0)
        one = SentBatch(producer, epoch, first, last_sequence(first, count))
        if states.judge(one).verdict is Verdict.NEW:
            states.stored(one, offset)
            ends[producer, epoch] = one.last + 1
            sent.append(one)
    restored = ProducerStates(limit=3)
    restored.restore(states.kept())
    assert list(restored.kept()) == list(states.kept())
    for one in sent:
        assert restored.judge(one) == states.judge(one)


@pytest.mark.parametrize("first", [0, 5, END - 3])
def test_a_batch_is_never_stored_twice_nor_after_a_gap(first: int) -> None:
    """Whatever order copies arrive in, what is taken continues what was taken."""
    states = ProducerStates()
    expected = first
    for count in (3, 1, 4, 1, 5, 9, 2, 6):
        one = batch(expected, last_sequence(expected, count))
        assert states.judge(one).verdict is Verdict.NEW
        states.stored(one, 0)
        assert states.judge(one).verdict is Verdict.STORED
        expected = (one.last + 1) % 2**31


def test_when_batches_may_be_stored_unseen_whatever_follows_is_taken_once() -> None:
    states = filled(3)
    states.lost_track()
    kept = ProducerStates()
    kept.restore(states.kept())
    for one in (states, kept):
        assert one.judge(batch(20, 29)).verdict is Verdict.STORED
        assert one.judge(batch(30, 39)).verdict is Verdict.NEW
        assert one.judge(batch(70, 79)).verdict is Verdict.NEW
        assert one.judge(batch(7, 8, epoch=1)).verdict is Verdict.NEW
        assert error_of(one, batch(5, 6)) is ErrorCode.duplicate_sequence_number
        one.accept(batch(70, 79), None)
        assert one.judge(batch(80, 89)).verdict is Verdict.NEW
        assert error_of(one, batch(90, 99)) is ErrorCode.out_of_order_sequence_number
        one.settle(batch(70, 79))
        one.stored(batch(70, 79), 700)
        assert error_of(one, batch(90, 99)) is ErrorCode.out_of_order_sequence_number
        one.lost_track()
        one.cut(300)
        assert one.judge(batch(20, 29)).verdict is Verdict.STORED
        one.cut(0)
        assert list(one.kept()) == []


def test_the_offsets_of_stored_batches_can_be_made_smaller() -> None:
    states = filled(3)
    states.lower(100, 40)
    offsets = [states.judge(batch(first, first + 9)).offset for first in (0, 10, 20)]
    assert offsets == [0, 60, 160]
