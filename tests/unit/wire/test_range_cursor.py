"""The decisions of reading a range, without a server: time and answers are given."""

from __future__ import annotations

import pytest

from millstream.errors import (
    ApiError,
    AuthenticationFailed,
    ConnectError,
    ConnectFailed,
    ConnectionClosed,
    LimitReached,
    MillstreamError,
    NoResponders,
    PermissionDenied,
    RequestTimeout,
    TopicNotFound,
)
from millstream.wire.api import ClusterInfo, ConsumerInfo, ErrorCode, Refusal, error_from
from millstream.wire.range_cursor import (
    CATCH_UP_SECONDS,
    RECOVERY_SECONDS_MAX,
    UNRELATED_SECONDS,
    Range,
    RangeCursor,
    Step,
)

PATIENCE = 60.0
ATTEMPT = 5.0
ALONE = ConsumerInfo(name="c", num_pending=100)
CLUSTER = ClusterInfo(name="C", leader="n1")
NOT_FOUND = error_from(Refusal(404, ErrorCode.STREAM_NOT_FOUND, "stream not found"))
NO_LEADER = error_from(Refusal(503, ErrorCode.NO_LEADER, "no leader"))
FULL = error_from(Refusal(400, ErrorCode.MAX_CONSUMERS, "maximum consumers limit reached"))
BAD_FILTER = ApiError(400, 10093, "consumer filter subject is not valid")


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def cursor_of(clock: Clock, what: Range | None = None) -> RangeCursor:
    return RangeCursor(what or Range(1, 11), PATIENCE, ATTEMPT, clock)


def opened(clock: Clock, what: Range | None = None, info: ConsumerInfo = ALONE) -> RangeCursor:
    cursor = cursor_of(clock, what)
    cursor.opened(info)
    return cursor


def delivered(*pairs: tuple[int, int], pending: int = 100) -> list[bytes]:
    """Ack addresses of (delivery number, sequence); `pending` follow the last one."""
    return [
        b"$JS.ACK.s.c.1.%d.%d.1700000000000000000.%d" % (sequence, number, pending)
        for number, sequence in pairs
    ]


def take(cursor: RangeCursor, replies: list[bytes]) -> slice | None:
    return cursor.take(len(replies), replies.__getitem__)


# -- a range from start to end --------------------------------------------------------------


def test_a_new_cursor_opens_a_consumer_and_an_empty_range_is_done(clock: Clock) -> None:
    assert cursor_of(clock).step() is Step.OPEN
    assert cursor_of(clock, Range(5, 5)).step() is Step.END
    assert cursor_of(clock, Range(5, None)).step() is Step.OPEN


def test_a_range_ends_with_its_last_sequence(clock: Clock) -> None:
    cursor = opened(clock)
    assert take(cursor, delivered(*((n, n) for n in range(1, 6)))) == slice(0, 5)
    assert (cursor.step(), cursor.next_sequence) == (Step.READ, 6)
    assert take(cursor, delivered(*((n, n) for n in range(6, 11)))) == slice(0, 5)
    assert (cursor.step(), cursor.next_sequence) == (Step.END, 11)


def test_messages_after_the_end_are_cut_off(clock: Clock) -> None:
    cursor = opened(clock)
    part = take(cursor, delivered((1, 7), (2, 9), (3, 12), (4, 13)))
    assert part == slice(0, 2)
    assert (cursor.step(), cursor.next_sequence) == (Step.END, 11)


def test_a_range_whose_remaining_messages_were_deleted_ends(clock: Clock) -> None:
    cursor = opened(clock)
    assert take(cursor, delivered((1, 30), (2, 31))) == slice(0, 0)
    assert cursor.done


def test_without_copies_a_consumer_that_has_nothing_more_ends_the_range(clock: Clock) -> None:
    cursor = opened(clock)
    take(cursor, delivered((1, 4), pending=0))
    assert cursor.step() is Step.END
    assert opened(clock, info=ConsumerInfo(num_pending=0)).step() is Step.END


def test_a_range_without_an_end_continues_when_nothing_is_pending(clock: Clock) -> None:
    cursor = opened(clock, Range(1), ConsumerInfo(num_pending=0, cluster=CLUSTER))
    assert cursor.step() is Step.READ
    take(cursor, delivered((1, 1), pending=0))
    assert cursor.step() is Step.READ


@pytest.mark.parametrize(
    "jump",
    [
        delivered((4, 4), (5, 5)),  # the first of the batch is not the next one
        delivered((3, 3), (5, 5)),  # one within it is missing
        delivered((2, 2)),  # delivered before
    ],
)
def test_a_jump_in_the_delivery_numbers_reads_again_from_the_next_sequence(
    clock: Clock, jump: list[bytes]
) -> None:
    cursor = opened(clock)
    take(cursor, delivered((1, 1), (2, 2)))
    assert take(cursor, jump) is None
    assert (cursor.step(), cursor.next_sequence) == (Step.OPEN, 3)
    assert cursor.config().opt_start_seq == 3
    cursor.opened(ALONE)
    assert take(cursor, delivered((1, 3), (2, 5))) == slice(0, 2)


# -- which consumer -------------------------------------------------------------------------


def test_every_consumer_has_a_name_of_its_own(clock: Clock) -> None:
    cursor = cursor_of(clock)
    assert len({cursor.config().name for _ in range(10)}) == 10


def test_a_consumer_that_replaces_another_starts_by_sequence(clock: Clock) -> None:
    cursor = opened(clock, Range(start_time="2026-01-01T00:00:00Z", subjects=("a",)))
    first = cursor.config()
    assert (first.deliver_policy, first.filter_subject) == ("by_start_time", "a")
    take(cursor, delivered((1, 40)))
    cursor.consumer_lost()
    again = cursor.config()
    assert (again.deliver_policy, again.opt_start_seq) == ("by_start_sequence", 41)
    assert again.opt_start_time is None


def test_the_last_messages_of_subjects_are_asked_for_again_and_those_taken_are_skipped(
    clock: Clock,
) -> None:
    cursor = opened(clock, Range(1, 11, deliver="last_per_subject"))
    assert cursor.config().filter_subject == ">"
    take(cursor, delivered((1, 2), (2, 5)))
    cursor.consumer_lost()
    assert cursor.config().deliver_policy == "last_per_subject"
    cursor.opened(ALONE)
    assert take(cursor, delivered((1, 2), (2, 5), (3, 7), (4, 10))) == slice(2, 4)
    assert cursor.done


def test_what_was_taken_is_skipped_also_when_reading_it_again_is_interrupted(clock: Clock) -> None:
    cursor = opened(clock, Range(1, 11, deliver="last_per_subject"))
    take(cursor, delivered((1, 2), (2, 5), (3, 7)))
    for _ in range(2):
        cursor.consumer_lost()
        cursor.opened(ALONE)
        part = take(cursor, delivered((1, 2)))
        assert part is not None
        assert part.start == part.stop
        assert cursor.next_sequence == 8
    assert take(cursor, delivered((2, 5), (3, 7), (4, 10))) == slice(2, 3)


def test_a_follower_that_has_the_last_messages_of_subjects_gets_every_later_one(
    clock: Clock,
) -> None:
    """Asked for the last ones again, the server would leave out what was replaced meanwhile."""
    cursor = opened(clock, Range(deliver="last_per_subject"), ConsumerInfo(num_pending=2))
    take(cursor, delivered((1, 2), pending=1))
    cursor.consumer_lost()
    assert cursor.config().deliver_policy == "last_per_subject"
    cursor.opened(ConsumerInfo(num_pending=2))
    assert take(cursor, delivered((1, 2), (2, 5), pending=0)) == slice(1, 2)
    cursor.consumer_lost()
    again = cursor.config()
    assert (again.deliver_policy, again.opt_start_seq) == ("by_start_sequence", 6)


# -- copies ---------------------------------------------------------------------------------


def doubtful(clock: Clock) -> RangeCursor:
    """A reader whose copy has nothing more after sequence 4 of 10."""
    copied = ConsumerInfo(num_pending=4, cluster=CLUSTER)
    cursor = opened(clock, Range(1, 11, subjects=("a", "b")), copied)
    take(cursor, delivered((1, 1), (2, 4), pending=0))
    return cursor


def test_the_end_of_a_copy_is_confirmed_by_the_leader(clock: Clock) -> None:
    cursor = doubtful(clock)
    assert cursor.step() is Step.ASK_LEADER
    assert list(cursor.questions()) == [
        {"seq": 5, "next_by_subj": "a"},
        {"seq": 5, "next_by_subj": "b"},
    ]
    assert [cursor.is_more(n) for n in (None, 7, 10, 11)] == [False, True, True, False]
    assert cursor.leader_answered(False) == 0
    assert cursor.step() is Step.END


@pytest.mark.parametrize("more", [True, None])
def test_a_lagging_copy_gets_time_to_catch_up_then_another_is_tried(
    clock: Clock, more: bool | None
) -> None:
    cursor = doubtful(clock)
    assert cursor.leader_answered(more)
    assert cursor.step() is Step.ASK_LEADER
    assert cursor.nothing_came()
    assert cursor.step() is Step.ASK_LEADER
    clock.now += CATCH_UP_SECONDS
    assert cursor.leader_answered(more)
    assert cursor.step() is Step.OPEN
    cursor.opened(ConsumerInfo(num_pending=0, cluster=CLUSTER))
    assert cursor.leader_answered(more)
    assert cursor.step() is Step.ASK_LEADER  # this one gets its time too


def test_reading_continues_from_a_copy_that_caught_up(clock: Clock) -> None:
    cursor = doubtful(clock)
    cursor.leader_answered(True)
    assert take(cursor, delivered((3, 5), pending=3)) == slice(0, 1)
    assert cursor.step() is Step.READ


def test_a_copy_that_never_catches_up_is_given_up(clock: Clock) -> None:
    cursor = doubtful(clock)
    for _ in range(int(PATIENCE)):
        assert cursor.leader_answered(True) is not None
        clock.now += 1
        cursor.opened(ConsumerInfo(num_pending=0, cluster=CLUSTER))
    assert cursor.leader_answered(True) is None


def test_messages_that_wait_for_the_reader_are_progress(clock: Clock) -> None:
    cursor = doubtful(clock)
    cursor.leader_answered(True)
    for _ in range(5):
        clock.now += UNRELATED_SECONDS - 1
        cursor.progress()
    assert cursor.leader_answered(True)
    assert cursor.step() is Step.ASK_LEADER


def test_a_user_that_may_not_ask_the_leader_believes_the_copy(clock: Clock) -> None:
    cursor = doubtful(clock)
    assert cursor.leader_failed(PermissionDenied("publish to", "$JS.API")) is False
    assert cursor.leader_failed(NoResponders("x")) is None
    assert cursor.leader_failed(NOT_FOUND) is None
    with pytest.raises(MillstreamError, match="other"):
        cursor.leader_failed(MillstreamError("other"))


# -- errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        ConnectError("lost"),
        ConnectFailed("refused"),
        RequestTimeout("x", 3),
        NoResponders("x"),
        NO_LEADER,
        FULL,
    ],
)
def test_transient_errors_are_retried_until_the_time_runs_out(
    clock: Clock, error: MillstreamError
) -> None:
    cursor = opened(clock)
    take(cursor, delivered((1, 1)))
    start = clock.now
    while clock.now - start < PATIENCE:
        assert cursor.failed(error)
        assert (cursor.step(), cursor.next_sequence) == (Step.OPEN, 2)
        clock.now += 5
    assert cursor.failed(error) is None


@pytest.mark.parametrize("refusal", [NOT_FOUND, BAD_FILTER])
def test_a_refusal_is_believed_when_a_recovering_server_would_be_done(
    clock: Clock, refusal: ApiError
) -> None:
    cursor = opened(clock)
    start = clock.now
    while clock.now - start < RECOVERY_SECONDS_MAX:
        assert cursor.failed(refusal)
        clock.now += 1
    with pytest.raises(type(refusal)):
        cursor.failed(refusal)


def test_the_time_to_recover_starts_when_the_server_is_back(clock: Clock) -> None:
    cursor = opened(clock)
    for _ in range(4):
        assert cursor.failed(ConnectFailed("refused"))
        clock.now += 5
    assert cursor.failed(NOT_FOUND)
    clock.now += RECOVERY_SECONDS_MAX - 1
    assert cursor.failed(ConnectFailed("refused"))  # away once more
    clock.now += 2
    assert cursor.failed(NOT_FOUND)


def test_a_refusal_is_raised_unchanged_when_the_time_runs_out_first(clock: Clock) -> None:
    cursor = RangeCursor(Range(1, 11), 2.0, ATTEMPT, clock)
    assert cursor.failed(NOT_FOUND)
    clock.now += 2
    with pytest.raises(TopicNotFound):
        cursor.failed(NOT_FOUND)


@pytest.mark.parametrize(
    "error",
    [
        AuthenticationFailed("no"),
        ConnectionClosed("closed"),
        PermissionDenied("publish to", "x"),
        MillstreamError("else"),
    ],
)
def test_permanent_errors_are_raised(clock: Clock, error: MillstreamError) -> None:
    with pytest.raises(type(error)):
        opened(clock).failed(error)


def test_progress_ends_a_failure_period(clock: Clock) -> None:
    cursor = opened(clock)
    assert cursor.failed(NO_LEADER)
    clock.now += PATIENCE - 1
    cursor.opened(ALONE)
    take(cursor, delivered((1, 1)))
    clock.now += 2
    assert cursor.failed(NO_LEADER)


def test_a_consumer_that_delivers_nothing_is_not_progress(clock: Clock) -> None:
    cursor = opened(clock)
    start = clock.now
    while clock.now - start < PATIENCE:
        assert cursor.nothing_came() is not None
        assert cursor.step() is Step.OPEN
        clock.now += 1
        cursor.opened(ALONE)
    assert cursor.nothing_came() is None


def test_a_failure_long_after_the_last_one_starts_a_new_failure_period(clock: Clock) -> None:
    """A reader that is busy between two windows does not use up its patience."""
    cursor = opened(clock)
    assert cursor.failed(ConnectError("lost"))
    cursor.opened(ALONE)
    clock.now += 10 * PATIENCE
    assert cursor.failed(ConnectError("lost"))


def test_without_an_end_a_new_consumer_ends_a_failure_period(clock: Clock) -> None:
    """There may be nothing to deliver for days."""
    cursor = opened(clock, Range(1))
    for _ in range(20):
        assert cursor.failed(ConnectError("lost"))
        clock.now += 10
        cursor.opened(ConsumerInfo(num_pending=0))


def test_limits_that_are_not_about_consumers_are_believed_after_a_while(clock: Clock) -> None:
    cursor = opened(clock)
    full = error_from(Refusal(503, ErrorCode.INSUFFICIENT_RESOURCES, "insufficient resources"))
    assert cursor.failed(full)
    clock.now += RECOVERY_SECONDS_MAX
    with pytest.raises(LimitReached):
        cursor.failed(full)


def test_failures_of_requests_that_wait_long_for_an_answer_are_one_trouble(clock: Clock) -> None:
    attempt = 3 * UNRELATED_SECONDS
    cursor = RangeCursor(Range(1, 11), 4 * attempt, attempt, clock)
    for _ in range(4):
        assert cursor.failed(RequestTimeout("x", attempt))
        clock.now += attempt
    assert cursor.failed(RequestTimeout("x", attempt)) is None
