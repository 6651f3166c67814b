"""Reading a stream from a position on, in order and without gaps, across reconnects.

The server forgets what an unacknowledged reader received, so after any doubt (a lost connection, a
silence, a jump in the delivery numbers) the lane starts a new consumer at its own next position.

A consumer reads the copy of the node that it lives on, which may be behind: that it has nothing
more to give does not end a range. In a cluster only the leader's word does.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Final

from millstream.deadline import Deadline
from millstream.errors import (
    ApiError,
    ConnectError,
    MillstreamError,
    NoResponders,
    PermissionDenied,
    RequestTimeout,
    TopicNotFound,
)
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.aio.pull_consumer import Prefetch, PullConsumer, Signal
from millstream.wire.api import (
    NANOSECONDS,
    RETRY,
    ConsumerConfig,
    ConsumerInfo,
    parse_ack_address,
)
from millstream.wire.message import RawMessage
from millstream.wire.protocol import unique_token

__all__ = ["OrderedConsumer", "Range"]

# The server drops a reader that does not come back within this time.
INACTIVE_SECONDS: Final = 60
# In a cluster a consumer may be given to a server that has just died: nobody answers for that one,
# however often it is asked for. After this long another one is.
GIVEN_AWAY_SECONDS: Final = 3.0
REOPEN_PAUSE_SECONDS: Final = 0.1
REOPEN_SECONDS_MAX: Final = 120.0
# A consumer on a copy that is behind gets so long to go on by itself, then another is tried.
CATCH_UP_SECONDS: Final = 1.0
CONFIRM_PAUSE_SECONDS: Final = 0.02
# A restarting server answers "not found" until it has recovered its streams.
RECOVERY_SECONDS_MAX: Final = 10.0
READ_AHEAD: Final = Prefetch(messages=5000, bytes=16 * 1024 * 1024)


@dataclass(frozen=True, slots=True)
class Range:
    """What to read of a stream: sequences in [start, end), of some subjects or all."""

    start: int = 1
    end: int | None = None  # None: go on with what is stored later
    start_time: str | None = None  # RFC 3339; instead of `start`
    deliver: str | None = None  # "last_per_subject", "last" or "new"; instead of `start`
    subjects: tuple[str, ...] = ()
    headers_only: bool = False


class OrderedConsumer:
    """Delivers the messages of a range, each once and in order, then says that it is done."""

    def __init__(
        self,
        jetstream: JetStream,
        stream: str,
        what: Range,
        signal: Signal | None = None,
        prefetch: Prefetch = READ_AHEAD,
    ) -> None:
        self._jetstream = jetstream
        self._connection = jetstream.connection
        self._stream = stream
        self.what = what
        self._prefetch = prefetch
        self.signal = signal or Signal()
        self._lane: PullConsumer | None = None
        self._salvaged: list[RawMessage] = []  # delivered before the connection was lost
        self._next = what.start  # the next sequence to deliver
        self._expected = 1  # the consumer's next delivery number
        self._skip_below = 0  # sequences that were delivered before the consumer was renewed
        self._consumer = ""
        self._opening: asyncio.Task[None] | None = None
        self._copied = False  # the consumer may live on another node than the leader
        self._confirming: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        self.done = what.end is not None and what.end <= what.start
        self.closed = False
        self._connection.on_disconnected.append(self._disconnected)

    @property
    def next_sequence(self) -> int:
        """Where a reader that stops now would go on."""
        return self._next

    async def open(self) -> None:
        """Start reading; raises when the stream does not exist."""
        if not self.done:
            await self._open_consumer()

    def peek(self) -> list[RawMessage]:
        """The messages that `take_now` would give, one call after the other."""
        waiting = [] if self._lane is None else self._lane.peek()
        return [*self._salvaged, *waiting]

    def take_now(self, at_most: int) -> list[RawMessage]:
        """Up to `at_most` messages that are here; empty means wait for the signal, or done."""
        if self._error is not None and not self._salvaged:
            raise self._error
        if self.done:
            return []
        if self._salvaged:
            taken, self._salvaged = self._salvaged[:at_most], self._salvaged[at_most:]
        elif self._lane is None:
            self._reopen()
            return []
        else:
            try:
                taken = self._lane.take_now(at_most)
            except ApiError:
                self._lose_lane()
                self._reopen()
                return []
        return self._checked(taken) if taken else taken

    def _checked(self, taken: list[RawMessage]) -> list[RawMessage]:
        """The messages if they follow on what was taken before; cut at the end of the range."""
        first, last = parse_ack_address(taken[0].reply), parse_ack_address(taken[-1].reply)
        jumped = first.consumer_sequence != self._expected
        if jumped or last.consumer_sequence - first.consumer_sequence != len(taken) - 1:
            self._lose_lane()
            self._salvaged.clear()
            self._reopen()
            return []
        self._expected = last.consumer_sequence + 1
        self._next = last.sequence + 1
        end = self.what.end
        if end is not None and last.sequence >= end - 1:
            self.done = True
            if last.sequence >= end:
                taken = [m for m in taken if parse_ack_address(m.reply).sequence < end]
                self._next = end
            self.close()
        elif end is not None and last.pending == 0:
            self._end_of_copy()
        if first.sequence < self._skip_below:
            taken = [m for m in taken if parse_ack_address(m.reply).sequence >= self._skip_below]
        return taken

    async def ends_unreadable(self) -> bool:
        """Whether the server counts messages up to the end of the range and has none to give.

        That is a damaged file: a consumer then waits for what never comes. Ask when nothing has
        come for a while.
        """
        if self.done or self.what.end is None or self._lane is None or self.peek():
            return False
        position = self._next
        used_up = await self._used_up()
        return used_up and self._next == position and not self.done and not self.peek()

    async def _used_up(self) -> bool:
        """Whether the leader has no message of the rest of the range; False: nobody can say."""
        end = self.what.end or 0
        for subject in self.what.subjects or (">",):
            ask = {"seq": self._next, "next_by_subj": subject}
            try:
                found = await self._jetstream.get_message(self._stream, ask)
            except (ApiError, ConnectError, NoResponders, RequestTimeout):
                return False  # the lane itself waits out what it can
            if found is not None and found.sequence < end:
                return False
        return True

    def _end_of_copy(self) -> None:
        """The consumer has nothing more of the range: its end, if no other copy has more."""
        if not self._copied:
            self.done = True
            self.close()
        elif self._confirming is None or self._confirming.done():
            self._confirming = asyncio.get_running_loop().create_task(self._confirm_end())

    async def _confirm_end(self) -> None:
        """End the range when its leader says so; until then wait, and look at other copies."""
        position, patience, limit = 0, Deadline(0), Deadline(0)
        while not self.closed:
            if self._next != position or self.peek():  # it goes on, or the reader has to
                position = self._next
                patience, limit = Deadline(CATCH_UP_SECONDS), Deadline(REOPEN_SECONDS_MAX)
            elif limit.passed:
                verb = f"{self._jetstream.prefix}.CONSUMER.MSG.NEXT.{self._stream}"
                self._error = RequestTimeout(verb, REOPEN_SECONDS_MAX)
                self.signal.set()
                return
            elif await self._is_end() and self._next == position and not self.peek():
                self.done, self._confirming = True, None
                self.close()
                return
            elif patience.passed and self._lane is not None:
                self._lose_lane()
                self._reopen()
                patience = Deadline(CATCH_UP_SECONDS)
            await asyncio.sleep(CONFIRM_PAUSE_SECONDS)

    async def _is_end(self) -> bool:
        try:
            return await self._used_up()
        except PermissionDenied:
            return True  # who may not ask the leader has to believe the copy

    def close(self) -> None:
        """Stop and remove the consumer; safe to call twice."""
        if self.closed:
            return
        self.closed = True
        self._lose_lane()
        if self._opening is not None:
            self._opening.cancel()
        if self._confirming is not None:
            self._confirming.cancel()
        if self._disconnected in self._connection.on_disconnected:
            self._connection.on_disconnected.remove(self._disconnected)
        self._forget_consumer()
        self.signal.set()

    # -- the consumer behind it -----------------------------------------------------------

    async def _open_consumer(self) -> None:
        info = await self._new_consumer()
        self._consumer, self._expected = info.name, 1
        if self.closed:
            self._forget_consumer()
            return
        self._copied = info.cluster is not None
        if info.num_pending == 0 and self.what.end is not None and not self._copied:
            self.done = True
            self.close()
            return
        # An unreplicated consumer dies with its node and is not missed: its position is here.
        self._lane = PullConsumer(
            *(self._jetstream, self._stream, info.name, self._prefetch, self.signal),
            disposable=True,
        )
        if info.num_pending == 0 and self.what.end is not None:
            self._end_of_copy()

    async def _new_consumer(self) -> ConsumerInfo:
        deadline = Deadline(self._connection.settings.request_timeout)
        while True:
            config = self._config()
            patience = deadline.left(at_most=GIVEN_AWAY_SECONDS)
            try:
                return await self._jetstream.create_consumer(self._stream, config, timeout=patience)
            except RequestTimeout as error:
                self._consumer = config.name
                self._forget_consumer()
                if deadline.passed:
                    raise RequestTimeout(error.subject, deadline.seconds) from error

    def _config(self) -> ConsumerConfig:
        what = self.what
        config = ConsumerConfig(
            name=f"read-{unique_token(12)}",
            ack_policy="none",
            mem_storage=True,
            num_replicas=1,
            inactive_threshold=INACTIVE_SECONDS * NANOSECONDS,
            headers_only=what.headers_only,
        )
        if what.deliver is not None:
            config.deliver_policy = what.deliver
        elif what.start_time is not None:
            config.deliver_policy = "by_start_time"
            config.opt_start_time = what.start_time
        elif self._next > 1:
            config.deliver_policy = "by_start_sequence"
            config.opt_start_seq = self._next
        if not what.subjects and what.deliver == "last_per_subject":
            config.filter_subject = ">"  # the server wants it said
        elif len(what.subjects) == 1:
            config.filter_subject = what.subjects[0]
        elif what.subjects:
            config.filter_subjects = list(what.subjects)
        return config

    def _forget_consumer(self) -> None:
        """Tell the server; when that is lost, the consumer ends by itself a little later."""
        if self._consumer and self._connection.connected:
            verb = f"{self._jetstream.prefix}.CONSUMER.DELETE.{self._stream}.{self._consumer}"
            self._connection.publish(verb.encode(), b"")
        self._consumer = ""

    def _disconnected(self) -> None:
        self._lose_lane()
        self.signal.set()

    def _lose_lane(self) -> None:
        if self._lane is not None:
            self._salvaged.extend(self._lane.stop())
            self._lane = None

    def _reopen(self) -> None:
        if self.closed or (self._opening is not None and not self._opening.done()):
            return
        self._opening = asyncio.get_running_loop().create_task(self._open_again())

    async def _open_again(self) -> None:
        self._continue_by_position()
        deadline, recovery = Deadline(REOPEN_SECONDS_MAX), Deadline(RECOVERY_SECONDS_MAX)
        while True:
            try:
                await self._connection.wait_connected(deadline)
                await self._open_consumer()
            except MillstreamError as error:
                if deadline.passed or not self._passes(error, recovery):
                    self._error = error
                    self.signal.set()
                    return
                await asyncio.sleep(REOPEN_PAUSE_SECONDS)
            else:
                self.signal.set()
                return

    def _passes(self, error: MillstreamError, recovery: Deadline) -> bool:
        """Whether it may work the next time: an election, a restart, a lost connection."""
        if isinstance(error, TopicNotFound):
            return not recovery.passed
        if isinstance(error, ApiError):
            return error.err_code in RETRY
        temporary = isinstance(error, ConnectError | NoResponders | RequestTimeout)
        return temporary and not self._connection.closed

    def _continue_by_position(self) -> None:
        """Start at the next sequence, whatever the first start was.

        Only the last event of each key is not a range: it is asked for again, and what was
        delivered before is skipped.
        """
        if self.what.deliver == "last_per_subject":
            self._skip_below = self._next
        elif self._next > self.what.start or self._expected > 1:
            self.what = replace(self.what, start_time=None, deliver=None)
