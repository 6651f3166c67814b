"""Every decision of reading a range of a stream; no sockets, no tasks, no sleeping.

The asynchronous and the blocking reader ask a cursor what to do next (`step`), do it, and report
what came of it: a consumer (`opened`), messages (`take`), nothing (`nothing_came`), the leader's
answer (`leader_answered`, `leader_failed`) or an error (`failed`). So a rule about a lost
connection, a server that recovers or a copy that lags is written once and holds for both.

The server keeps no position for an unacknowledged reader. After any doubt (a lost connection, a
silence, a jump in the delivery numbers) reading continues with a new consumer at the cursor's own
next sequence.

A consumer reads the copy of the node that it lives on, which may lag: that it has nothing more to
give does not end a range. In a cluster only the leader's answer does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, Final

from millstream.deadline import Deadline
from millstream.errors import (
    ApiError,
    AuthenticationFailed,
    ConnectError,
    ConnectionClosed,
    MillstreamError,
    NoResponders,
    PermissionDenied,
    RequestTimeout,
)
from millstream.wire.api import (
    NANOSECONDS,
    RETRY,
    ConsumerConfig,
    ConsumerInfo,
    ErrorCode,
    parse_ack_address,
)
from millstream.wire.lost import check
from millstream.wire.protocol import unique_token

__all__ = [
    "CONFIRM_PAUSE_SECONDS",
    "GIVEN_AWAY_SECONDS",
    "Range",
    "RangeCursor",
    "Step",
    "check_loss",
]

# The server removes a consumer that nobody pulls from for this long.
INACTIVE_SECONDS: Final = 60
# In a cluster a consumer may be assigned to a server that has just died: no request for that name
# is ever answered. After this long another name is tried.
GIVEN_AWAY_SECONDS: Final = 3.0
# Between two attempts to get a consumer.
REOPEN_PAUSE_SECONDS: Final = 0.1
# A restarting server answers "not found" until it has recovered its streams.
RECOVERY_SECONDS_MAX: Final = 10.0
# A consumer on a lagging copy gets this long to catch up, then another one is tried.
CATCH_UP_SECONDS: Final = 1.0
# Between two questions to the leader whether the range ends.
CONFIRM_PAUSE_SECONDS: Final = 0.02
# A failure this long after the one before it has nothing to do with it.
UNRELATED_SECONDS: Final = 30.0

# Refusals that pass while the cluster elects a leader, or when other readers are done.
_PASSING: Final = RETRY | {ErrorCode.MAX_CONSUMERS}


@dataclass(frozen=True, slots=True)
class Range:
    """What to read of a stream: sequences in [start, end), of some subjects or all."""

    start: int = 1
    end: int | None = None  # None: continue with what is stored later
    start_time: str | None = None  # RFC 3339; instead of `start`
    deliver: str | None = None  # "last_per_subject", "last" or "new"; instead of `start`
    subjects: tuple[str, ...] = ()
    headers_only: bool = False
    over_loss: bool = False  # continue after messages that the broker has lost


def check_loss(what: Range, config: Mapping[str, Any], start: int) -> None:
    """DataLoss if a range, read from `start` on, has messages that the broker has lost."""
    if not what.over_loss and what.deliver not in ("last", "new"):
        check(config, start, what.end)


class Step(Enum):
    """What a reader has to do next."""

    OPEN = auto()  # create a consumer with `config()`
    READ = auto()  # take messages from the consumer
    ASK_LEADER = auto()  # its copy has nothing more: ask the leader `questions()`
    END = auto()  # the range is complete


class _Trouble:
    """How long reading has failed without any progress."""

    def __init__(self, seconds: float, attempt: float, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.limit = Deadline(seconds, clock)
        self._recovery: Deadline | None = None
        self._apart = UNRELATED_SECONDS + attempt  # the next failure may take that long
        self.failed_again()

    @property
    def past(self) -> bool:
        """Whether a failure now would start a new failure period."""
        return self._unrelated.passed

    def failed_again(self) -> None:
        self._unrelated = Deadline(self._apart, self._clock)

    def refused_too_long(self, refused: bool) -> bool:
        """Whether a server that may be recovering has refused long enough to be believed."""
        if not refused:
            self._recovery = None  # it was away since: its time to recover starts again
            return False
        if self._recovery is None:
            self._recovery = Deadline(RECOVERY_SECONDS_MAX, self._clock)
        return self._recovery.passed


class RangeCursor:
    """Where the reader of one range is, and what it does next."""

    def __init__(
        self,
        what: Range,
        patience: float,
        attempt: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.what = what
        self.next_sequence = what.start  # where a reader that stops now would continue
        self.pending = 0  # messages that the consumer has after those taken
        self.done = what.end is not None and what.end <= what.start
        self._patience = patience  # seconds of failures without progress
        self._attempt = attempt  # seconds that one request may wait for its answer
        self._clock = clock
        self._replicas = 1  # it may die with its node: the position is kept here
        self._open = False
        self._expected = 1  # the consumer's next delivery number
        self._skip_below = 0  # sequences that were delivered before the consumer was replaced
        self._copied = False  # the consumer may live on another node than the leader
        self._in_doubt = False  # its copy has nothing more, which may not be the end
        self._catch_up = Deadline(0, clock)
        self._trouble: _Trouble | None = None

    def step(self) -> Step:
        """What the reader has to do next."""
        if self.done:
            return Step.END
        if not self._open:
            return Step.OPEN
        return Step.ASK_LEADER if self._in_doubt else Step.READ

    # -- the consumer ---------------------------------------------------------------------

    def config(self) -> ConsumerConfig:
        """The consumer to create, each time under a new name."""
        what = self.what
        config = ConsumerConfig(
            name=f"read-{unique_token(12)}",
            ack_policy="none",
            mem_storage=True,
            num_replicas=self._replicas,
            inactive_threshold=INACTIVE_SECONDS * NANOSECONDS,
            headers_only=what.headers_only,
        )
        if what.deliver is not None:
            config.deliver_policy = what.deliver
        elif what.start_time is not None:
            config.deliver_policy = "by_start_time"
            config.opt_start_time = what.start_time
        elif self.next_sequence > 1:
            config.deliver_policy = "by_start_sequence"
            config.opt_start_seq = self.next_sequence
        if not what.subjects and what.deliver == "last_per_subject":
            config.filter_subject = ">"  # this policy needs a filter
        elif len(what.subjects) == 1:
            config.filter_subject = what.subjects[0]
        elif what.subjects:
            config.filter_subjects = list(what.subjects)
        return config

    def adapted_to(self, error: ApiError) -> bool:
        """Whether the server takes another `config()` than the one it refused: ask again."""
        if error.err_code != ErrorCode.REPLICAS_OF_STREAM or not self._replicas:
            return False
        self._replicas = 0  # as many as the stream, as interest streams and work queues demand
        return True

    def position_in_doubt(self) -> str | None:
        """The time from which on the next consumer reads, if its position is not known yet."""
        return self.what.start_time if self.what.deliver is None else None

    def check_loss(self, config: Mapping[str, Any], start: int | None = None) -> None:
        """DataLoss if the rest of the range has messages that the broker has lost.

        `start`: the position, where it is known by its time only.
        """
        check_loss(self.what, config, max(self.next_sequence, start or 0))

    def opened(self, info: ConsumerInfo) -> None:
        """The server created the consumer."""
        self._open, self._expected = True, 1
        self._copied = info.cluster is not None
        if self.what.end is None:
            self._trouble = None  # without an end it may be a long time until a message comes
        self._left(info.num_pending)

    def consumer_lost(self) -> None:
        """The consumer is gone or in doubt; the next one starts at the next sequence.

        Only the last event of each key is not a range: it is read again from the beginning, and
        what was delivered before is skipped.
        """
        self._open = self._in_doubt = False
        what = self.what
        if what.deliver == "last_per_subject":
            self._skip_below = self.next_sequence
        elif self.next_sequence > what.start or self._expected > 1:
            self.what = replace(what, start_time=None, deliver=None)

    # -- messages -------------------------------------------------------------------------

    def take(self, count: int, reply_of: Callable[[int], bytes]) -> slice | None:
        """Which of `count` messages (one or more) are for the reader; None: one was lost.

        `reply_of` gives the ack address of a message by its index. Only a few are looked at.
        """
        first, last = parse_ack_address(reply_of(0)), parse_ack_address(reply_of(count - 1))
        jumped = first.consumer_sequence != self._expected
        if jumped or last.consumer_sequence - first.consumer_sequence != count - 1:
            self.consumer_lost()
            return None
        self._expected = last.consumer_sequence + 1
        self.next_sequence = max(last.sequence + 1, self._skip_below)
        self._trouble = None
        low, high, end = 0, count, self.what.end
        if end is not None and last.sequence >= end - 1:
            self.done = True
            if last.sequence >= end:
                high = _first_from(end, count, reply_of)
                self.next_sequence = end
        else:
            self._left(last.pending)
        if first.sequence < self._skip_below:
            low = _first_from(self._skip_below, high, reply_of)
        return slice(low, high)

    def nothing_came(self) -> float | None:
        """The consumer gave nothing: how long to wait before the next step; None: give up.

        What it promised is deleted by now, or its copy has not caught up: a new one shows.
        """
        if not self._in_doubt:
            self.consumer_lost()
        return self._wait(CONFIRM_PAUSE_SECONDS)

    def _left(self, pending: int) -> None:
        """The consumer has `pending` messages after those that were taken."""
        self.pending = pending
        self._in_doubt = False
        if pending:
            return
        if self.what.end is None:
            if self.what.deliver == "last_per_subject":
                # The last ones are delivered; from here on a follower gets every message.
                self.what = replace(self.what, deliver=None)
        elif self._copied:
            self._in_doubt = True
            self._catch_up = Deadline(CATCH_UP_SECONDS, self._clock)
        else:
            self.done = True

    # -- the end, as the leader knows it --------------------------------------------------

    def questions(self) -> Iterator[dict[str, Any]]:
        """Requests for the next message of the rest of the range, one for each subject."""
        for subject in self.what.subjects or (">",):
            yield {"seq": self.next_sequence, "next_by_subj": subject}

    def is_more(self, sequence: int | None) -> bool:
        """Whether an answer to such a question (None: no message) is a message of the range."""
        return sequence is not None and sequence < (self.what.end or 0)

    def leader_failed(self, error: MillstreamError) -> bool | None:
        """What an unanswered question means, as an argument of `leader_answered`."""
        if isinstance(error, PermissionDenied):
            return False  # a user that may not ask the leader has to believe the copy
        if isinstance(error, ApiError | ConnectError | NoResponders | RequestTimeout):
            return None
        raise error

    def leader_answered(self, more: bool | None) -> float | None:
        """How long to wait before the next step; None: give up.

        `more`: whether the leader has more of the range; None: unknown.
        """
        if more is False:
            self.done = True
            return 0.0
        if self._catch_up.passed:
            self.consumer_lost()
        return self._wait(CONFIRM_PAUSE_SECONDS)

    def progress(self) -> None:
        """Messages arrived that the reader has not taken yet."""
        self._trouble = None
        self._catch_up = Deadline(CATCH_UP_SECONDS, self._clock)

    # -- errors ---------------------------------------------------------------------------

    def failed(self, error: MillstreamError) -> float | None:
        """How long to wait before the next step; None: give up. Raises what will not pass."""
        self.consumer_lost()
        if not _may_pass(error):
            raise error
        pause = self._wait(REOPEN_PAUSE_SECONDS)
        refused = isinstance(error, ApiError) and error.err_code not in _PASSING
        if self._troubled().refused_too_long(refused) or (refused and pause is None):
            raise error
        return pause

    def _troubled(self) -> _Trouble:
        if self._trouble is None or self._trouble.past:
            self._trouble = _Trouble(self._patience, self._attempt, self._clock)
        return self._trouble

    def _wait(self, seconds: float) -> float | None:
        trouble = self._troubled()
        trouble.failed_again()
        return None if trouble.limit.passed else seconds


def _may_pass(error: MillstreamError) -> bool:
    """Whether it may work the next time: an election, a restart, a lost connection."""
    if isinstance(error, AuthenticationFailed | ConnectionClosed):
        return False
    if isinstance(error, ApiError) and error.err_code == ErrorCode.WORK_QUEUE_NEEDS_ACKS:
        return False
    return isinstance(error, ApiError | ConnectError | NoResponders | RequestTimeout)


def _first_from(sequence: int, count: int, reply_of: Callable[[int], bytes]) -> int:
    """The index of the first message at or after a sequence; they are in order."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if parse_ack_address(reply_of(middle)).sequence < sequence:
            low = middle + 1
        else:
            high = middle
    return low
