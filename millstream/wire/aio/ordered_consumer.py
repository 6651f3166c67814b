"""Reading a range of a stream in order and without gaps, across reconnects.

A `RangeCursor` makes the decisions; this is the I/O around it: a pull consumer that reads ahead, a
task that replaces a lost one, and a task that asks the leader where the range ends.
"""

from __future__ import annotations

import asyncio
from typing import Final

from millstream.deadline import Deadline
from millstream.errors import ApiError, MillstreamError, PermissionDenied, RequestTimeout
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.aio.pull_consumer import Prefetch, PullConsumer, Signal
from millstream.wire.lost import lost_ranges
from millstream.wire.message import RawMessage
from millstream.wire.range_cursor import (
    CONFIRM_PAUSE_SECONDS,
    GIVEN_AWAY_SECONDS,
    Range,
    RangeCursor,
    Step,
)

__all__ = ["OrderedConsumer"]

# Seconds of failures without progress before reading ends with an error.
PATIENCE_SECONDS: Final = 120.0
READ_AHEAD: Final = Prefetch(messages=5000, bytes=16 * 1024 * 1024)


class OrderedConsumer:
    """Delivers the messages of a range, each once and in order, then is `done`."""

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
        attempt = self._connection.settings.request_timeout
        self._cursor = RangeCursor(what, PATIENCE_SECONDS, attempt)
        self._prefetch = prefetch
        self.signal = signal or Signal()
        self._pull: PullConsumer | None = None
        self._salvaged: list[RawMessage] = []  # delivered before the connection was lost
        self._consumer = ""
        self._opening: asyncio.Task[None] | None = None
        self._confirming: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        self.closed = False
        self._connection.on_disconnected.append(self._disconnected)

    @property
    def done(self) -> bool:
        """Whether every message of the range was taken."""
        return self._cursor.done

    @property
    def what(self) -> Range:
        return self._cursor.what

    @property
    def next_sequence(self) -> int:
        """Where a reader that stops now would continue."""
        return self._cursor.next_sequence

    # -- for the reader -------------------------------------------------------------------

    async def open(self) -> None:
        """Start reading; raises when the stream does not exist."""
        deadline = Deadline(self._connection.settings.request_timeout)
        while not self.done:
            try:
                await self._open_consumer(deadline)
                return
            except RequestTimeout as error:
                if deadline.passed:
                    raise RequestTimeout(error.subject, deadline.seconds) from error

    def peek(self) -> list[RawMessage]:
        """The messages that `take_now` would give, one call after the other."""
        waiting = [] if self._pull is None else self._pull.peek()
        return [*self._salvaged, *waiting]

    def take_now(self, at_most: int) -> list[RawMessage]:
        """Up to `at_most` messages that have arrived; empty: wait for the signal, or done."""
        if self._error is not None and not self._salvaged:
            raise self._error
        if self.done:
            return []
        if self._salvaged:
            taken, self._salvaged = self._salvaged[:at_most], self._salvaged[at_most:]
        elif self._pull is None:
            self._reopen()
            return []
        else:
            try:
                taken = self._pull.take_now(at_most)
            except ApiError as error:
                if self._cursor.nothing_came() is None:
                    self._error = error
                    raise
                self._replace_consumer()
                return []
        return self._checked(taken) if taken else taken

    def _checked(self, taken: list[RawMessage]) -> list[RawMessage]:
        """The messages that are for the reader; none when one before them was lost."""
        part = self._cursor.take(len(taken), lambda index: taken[index].reply)
        if part is None:
            self._replace_consumer()
            self._salvaged.clear()  # they come again
            return []
        self._follow_cursor()
        if part.start == part.stop:
            self.signal.set()  # all of them were taken before: more may be waiting
        return taken if part.stop - part.start == len(taken) else taken[part]

    async def ends_unreadable(self) -> bool:
        """Whether the server counts messages up to the end of the range and has none to give.

        That is a damaged file: a consumer then waits for what never comes. Ask when nothing has
        come for a while.
        """
        if not self._promised or self.what.end is None or self._pull is None or self.peek():
            return False
        position = self.next_sequence
        try:
            used_up = not await self._ask_leader()
            return used_up and self._promised and self._is_at(position)
        except MillstreamError:
            return False  # reading itself waits out what it can

    @property
    def _promised(self) -> bool:
        """Whether the consumer has more; where its copy has not, the leader's answer ends it."""
        return self._cursor.step() is Step.READ

    def end(self) -> None:
        """Leave the rest of the range out."""
        self._cursor.done = True
        self.close()

    def close(self) -> None:
        """Stop and remove the consumer; safe to call twice."""
        if self.closed:
            return
        self.closed = True
        self._stop_pull()
        if self._opening is not None:
            self._opening.cancel()
        if self._confirming is not None:
            self._confirming.cancel()
        if self._disconnected in self._connection.on_disconnected:
            self._connection.on_disconnected.remove(self._disconnected)
        self._forget_consumer()
        self.signal.set()

    # -- the consumer ---------------------------------------------------------------------

    async def _open_consumer(self, deadline: Deadline) -> None:
        await self._check_loss(deadline)
        patience = deadline.left(at_most=GIVEN_AWAY_SECONDS)
        config = self._cursor.config()
        self._forget_consumer()  # the one before it may live, and would be kept for a minute
        try:
            info = await self._jetstream.create_consumer(self._stream, config, timeout=patience)
        except RequestTimeout:
            self._consumer = config.name
            self._forget_consumer()
            raise
        except ApiError as error:
            if not self._cursor.adapted_to(error):
                raise
            await self._open_consumer(deadline)
            return
        self._consumer = info.name
        if self.closed:
            self._forget_consumer()
            return
        self._cursor.opened(info)
        if not self.done:
            self._pull = PullConsumer(
                *(self._jetstream, self._stream, info.name, self._prefetch, self.signal),
                disposable=True,
            )
        self._follow_cursor()

    async def _check_loss(self, deadline: Deadline) -> None:
        """DataLoss if the broker has lost some of what comes next; a restart may have shown it."""
        patience = max(GIVEN_AWAY_SECONDS, deadline.left())
        try:
            config = (await self._jetstream.stream_info(self._stream, patience)).config
            start = None
            time = self._cursor.position_in_doubt()
            if time is not None and lost_ranges(config):
                start = await self._jetstream.sequence_at(self._stream, time)
        except PermissionDenied:
            return  # a user that may not ask gets no warning
        self._cursor.check_loss(config, start)

    def _follow_cursor(self) -> None:
        """Close at the end of the range; have it confirmed where it is in doubt."""
        step = self._cursor.step()
        if step is Step.END:
            self.close()
        elif step is Step.ASK_LEADER and (self._confirming is None or self._confirming.done()):
            self._confirming = asyncio.get_running_loop().create_task(self._confirm_end())

    def _forget_consumer(self) -> None:
        """Ask the server to remove it; if that is lost, the server does it later."""
        if self._consumer and self._connection.connected:
            verb = f"{self._jetstream.prefix}.CONSUMER.DELETE.{self._stream}.{self._consumer}"
            self._connection.publish(verb.encode(), b"")
        self._consumer = ""

    def _disconnected(self) -> None:
        self._stop_pull()
        self.signal.set()

    def _stop_pull(self) -> None:
        if self._pull is not None:
            self._salvaged.extend(self._pull.stop())
            self._pull = None

    def _replace_consumer(self) -> None:
        self._stop_pull()
        self._reopen()

    def _reopen(self) -> None:
        if self.closed or (self._opening is not None and not self._opening.done()):
            return
        self._opening = asyncio.get_running_loop().create_task(self._open_again())

    async def _open_again(self) -> None:
        self._cursor.consumer_lost()
        while not self.closed:
            deadline = Deadline(self._connection.settings.request_timeout)
            try:
                await self._connection.wait_connected(deadline)
                await self._open_consumer(deadline)
                break
            except MillstreamError as error:
                pause = self._pause_after(error)
                if pause is None:
                    self._error = error
                    break
            await asyncio.sleep(pause)
        self.signal.set()

    def _pause_after(self, error: MillstreamError) -> float | None:
        try:
            return self._cursor.failed(error)
        except MillstreamError:
            return None

    # -- the end --------------------------------------------------------------------------

    async def _confirm_end(self) -> None:
        """Ask the leader until it says that the range ends, or the consumer has more of it."""
        cursor = self._cursor
        while not self.closed and cursor.step() is Step.ASK_LEADER:
            pause: float | None = CONFIRM_PAUSE_SECONDS
            if self.peek():
                cursor.progress()  # the reader has to take them first
            else:
                position = self.next_sequence
                try:
                    more = await self._leader_has_more()
                except MillstreamError as error:
                    self._error = error
                    self.signal.set()
                    return
                if self._is_at(position) and cursor.step() is Step.ASK_LEADER:
                    pause = cursor.leader_answered(more)
            if cursor.step() is Step.END:
                self._confirming = None  # closing cancels it
                self.close()
                return
            if cursor.step() is Step.OPEN:
                self._replace_consumer()
            if pause is None:
                verb = f"{self._jetstream.prefix}.CONSUMER.MSG.NEXT.{self._stream}"
                self._error = RequestTimeout(verb, PATIENCE_SECONDS)
                self.signal.set()
                return
            await asyncio.sleep(pause)

    async def _leader_has_more(self) -> bool | None:
        """Whether the leader has more of the range; None: unknown."""
        try:
            return await self._ask_leader()
        except MillstreamError as error:
            return self._cursor.leader_failed(error)

    async def _ask_leader(self) -> bool:
        for ask in self._cursor.questions():
            found = await self._jetstream.get_message(self._stream, ask)
            if self._cursor.is_more(None if found is None else found.sequence):
                return True
        return False

    def _is_at(self, position: int) -> bool:
        """Whether nothing was taken or arrived since."""
        return self.next_sequence == position and not self.done and not self.peek()
