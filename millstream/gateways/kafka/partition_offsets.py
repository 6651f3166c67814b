"""The offsets of one partition, kept up to date while others write to it, too.

A consumer of headers counts the events of every message that is stored. A checkpoint is written
now and then, and before offsets are handed out that the last one does not cover: see
`checkpoints.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from millstream.errors import DataLoss, MillstreamError
from millstream.gateways.kafka.checkpoints import Checkpoint, Overtaken, PartitionCheckpoints
from millstream.gateways.kafka.offset_index import NO_EVENTS, OffsetIndex
from millstream.gateways.kafka.pack_notes import MessageNotes, PackNotes
from millstream.gateways.kafka.producer_state import ProducerStates
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.aio.ordered_consumer import OrderedConsumer
from millstream.wire.aio.pull_consumer import Prefetch, Signal
from millstream.wire.api import StreamInfo, parse_ack_address
from millstream.wire.message import RawMessage
from millstream.wire.range_cursor import Range

__all__ = ["PartitionOffsets"]

_log = logging.getLogger("millstream.gateways.kafka")

TAKEN_AT_ONCE: Final = 2000
AHEAD: Final = Prefetch(messages=10_000, bytes=8 * 1024 * 1024)
# Offsets that a checkpoint covers ahead; a new one is written when half of them are used.
RESERVED: Final = 10_000_000
# More events than packs of this gateway have that are under way at a time.
UNDER_WAY_MAX: Final = 1_000_000
SAVE_SECONDS: Final = 5.0
SAVE_MESSAGES: Final = 1000
# While catching up: if nothing comes for so long, the leader is asked whether there is more.
QUIET_SECONDS: Final = 0.1
# How old what is known of the head of the log may be.
HEAD_SECONDS: Final = 5.0


class PartitionOffsets:
    """What is known of a partition's messages: their offsets, times, and producers."""

    def __init__(
        self, jetstream: JetStream, stream: str, prefix: str, checkpoints: PartitionCheckpoints
    ) -> None:
        self._jetstream = jetstream
        self._checkpoints = checkpoints
        self.stream = stream
        self.notes = MessageNotes(prefix)
        self.index = OffsetIndex()
        self.producers = ProducerStates()
        self.leader_epoch = 0
        self.first_sequence = 1  # of the stream, as last seen
        self.failed: MillstreamError | None = None  # it has to be opened again
        self._created = ""
        self._start_offset = 0  # the log begins there at least
        self._reserved = 0
        self._after_gap = 0  # while catching up: where offsets go on if messages are missing
        # While catching up: the message after the last gap, and the smallest offset it may have.
        self._skipped: tuple[int, int] | None = None
        self._saved_sequence = 0  # what the last checkpoint knows
        self._saving = asyncio.Lock()
        self._head_at = 0.0
        self._signal = Signal()
        self._consumer: OrderedConsumer | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._passed: list[tuple[int, asyncio.Future[None]]] = []  # who waits for a sequence
        self._watchers: set[Callable[[], object]] = set()
        self._save_due = asyncio.Event()

    # -- opening and closing --------------------------------------------------------------

    async def open(self) -> None:
        """Read the checkpoint, and count what was stored after it."""
        try:
            await self._open()
        except BaseException:
            await self._stop()
            raise

    async def _open(self) -> None:
        checkpoint = await self._checkpoints.load()
        asked = time.monotonic()
        info = await self._jetstream.stream_info(self.stream)
        self._created = info.created
        if checkpoint is not None and checkpoint.created != info.created:
            await self._checkpoints.discard()  # of another stream, which had the same name
            checkpoint = None
        first = max(1, info.state.first_seq)
        if checkpoint is None:
            self.index = OffsetIndex(first, first - 1)
        else:
            await self._restore(checkpoint, info)
        self.first_sequence = first
        self._saved_sequence = self.index.next_sequence
        consumer = await self._catch_up(info.state.last_seq)
        self._head(info, 0, asked)  # more is counted by now
        left_open = checkpoint is not None and checkpoint.reserved > checkpoint.end_offset
        if left_open or self.index.end_offset > self._reserved:
            # Who left it open may live: when it stops, it must not give back what is ours by now.
            await self.save()
        self._jetstream.connection.on_connected.append(self._reconnected)
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._follow(consumer)),
            loop.create_task(self._keep_saved()),
        ]

    async def _restore(self, checkpoint: Checkpoint, info: StreamInfo) -> None:
        first, last = max(1, info.state.first_seq), info.state.last_seq
        self.index = await self._checkpoints.index(checkpoint)
        self.producers.restore(checkpoint.producers)
        self._reserved = checkpoint.reserved
        self._start_offset = checkpoint.start_offset
        self.leader_epoch = checkpoint.leader_epoch
        if self.index.next_sequence > last + 1:
            _log.error(
                "stream '%s' ends at %d, but had %d before: the broker lost what was stored. "
                "Offsets continue at %d, so that none names two events",
                *(self.stream, last, self.index.next_sequence - 1, self._reserved),
            )
            is_known = last + 1 >= self.index.first_sequence
            self.producers.cut(self.index.base_offset(last + 1) if is_known else 0)
            self.producers.lost_track()
            self.index.cut(last + 1)
            self.index.skip_to(self._reserved)
            self.leader_epoch += 1
        elif checkpoint.reserved > checkpoint.end_offset:
            # What came after the checkpoint may have been handed out, and may be gone by now.
            self._after_gap = checkpoint.reserved
        if self.index.next_sequence < first:
            self._gap(first)

    async def _catch_up(self, last: int) -> OrderedConsumer:
        """Count what is stored up to a sequence; what comes after it is read from the consumer."""
        start = self.index.next_sequence
        what = Range(start=start, headers_only=True, over_loss=True)
        consumer = OrderedConsumer(self._jetstream, self.stream, what, self._signal, AHEAD)
        self._consumer = consumer
        try:
            await consumer.open()
            while self.index.next_sequence <= last:
                taken = consumer.take_now(TAKEN_AT_ONCE)
                if taken:
                    self.note(taken)
                    await asyncio.sleep(0)
                elif not await self._signal.wait(QUIET_SECONDS):
                    await self._skip_missing_end(last)
        except BaseException:
            consumer.close()
            raise
        self._after_gap, self._skipped = 0, None
        return consumer

    async def _skip_missing_end(self, last: int) -> None:
        """The last messages may be deleted: then nothing more comes."""
        ask = {"seq": self.index.next_sequence, "next_by_subj": ">"}
        found = await self._jetstream.get_message(self.stream, ask)
        if found is None and self.index.next_sequence <= last:
            self._gap(last + 1)

    async def close(self) -> None:
        """Stop, and note that no other offsets were handed out."""
        await self._stop()
        if self.failed is None:
            with contextlib.suppress(MillstreamError, Overtaken):
                await self._save(self.index.end_offset)
        self._give_up_waiting()

    async def _stop(self) -> None:
        if self._reconnected in self._jetstream.connection.on_connected:
            self._jetstream.connection.on_connected.remove(self._reconnected)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._consumer is not None:
            self._consumer.close()

    def fail(self, error: MillstreamError) -> None:
        """It cannot go on; whoever needs it opens it again."""
        if self.failed is None:
            self.failed = error
            _log.warning("partition '%s' is closed: %s", self.stream, error)
            self._give_up_waiting()
            self._changed()

    def _give_up_waiting(self) -> None:
        for _, waiter in self._passed:
            if not waiter.done():
                waiter.set_exception(
                    self.failed or MillstreamError(f"'{self.stream}' was closed meanwhile")
                )
                waiter.exception()
        self._passed.clear()

    # -- what is known --------------------------------------------------------------------

    @property
    def end_offset(self) -> int:
        """The offset of the next event, as far as a checkpoint covers it."""
        return min(self.index.end_offset, self._reserved)

    @property
    def place(self) -> tuple[int, int]:
        """The offset that the next message has, and its sequence; every pack of ours says it."""
        return self.index.end_offset, self.index.next_sequence

    @property
    def start_offset(self) -> int:
        """The first offset of the log, as last seen."""
        first = min(max(self.first_sequence, self.index.first_sequence), self.index.next_sequence)
        return min(max(self._start_offset, self.index.base_offset(first)), self.end_offset)

    def watch(self, callback: Callable[[], object]) -> None:
        """Call it when there are new offsets, or none any more."""
        self._watchers.add(callback)

    def unwatch(self, callback: Callable[[], object]) -> None:
        """Do not call it any more."""
        self._watchers.discard(callback)

    async def known(self, sequence: int) -> None:
        """Return when a message is counted, and all before it."""
        if self.index.next_sequence > sequence:
            return
        if self.failed is not None:
            raise self.failed
        waiter = asyncio.get_running_loop().create_future()
        self._passed.append((sequence, waiter))
        while not (await asyncio.wait([waiter], timeout=HEAD_SECONDS))[0]:
            # It may be removed already; then it does not come, and nothing may come after it.
            with contextlib.suppress(MillstreamError):
                await self.look_at_head(0)
                await self._skip_missing_end(sequence)
                self._grown()
        waiter.result()

    async def covered(self, offset: int) -> None:
        """Return when offsets before this one may be handed out."""
        while self._reserved < offset:
            await self.save()

    async def look_at_head(self, max_age: float = HEAD_SECONDS) -> None:
        """Learn what retention removed, unless what is known is at most so many seconds old."""
        if time.monotonic() - self._head_at < max_age:
            return
        counted = self.index.next_sequence  # more may be, before the answer is here
        asked = time.monotonic()
        self._head(await self._jetstream.stream_info(self.stream), counted, asked)

    def _head(self, info: StreamInfo, counted: int, asked: float) -> None:
        self._head_at = asked
        if info.created != self._created:
            self.fail(MillstreamError(f"stream '{self.stream}' was deleted and made again"))
            return
        if info.state.last_seq + 1 < counted:
            self.fail(DataLoss(f"stream '{self.stream}' ends before what was read of it"))
            return
        first = max(1, info.state.first_seq)
        if first > self.first_sequence:
            self.first_sequence = first
            if first > self.index.next_sequence:
                self._gap(first)
                self._grown()
            self.index.trim(first)
            self._save_due.set()

    def start_at(self, offset: int) -> None:
        """The log begins at this offset from now on, or later."""
        self._start_offset = max(self._start_offset, offset)

    # -- growing --------------------------------------------------------------------------

    def note(self, messages: Sequence[RawMessage]) -> None:
        """Count messages, in order; those that are counted already are left out."""
        index, notes = self.index, self.notes
        for raw in messages:
            sequence = parse_ack_address(raw.reply).sequence
            if sequence < index.next_sequence:
                continue
            if sequence > index.next_sequence:
                self._gap(sequence)
            pack = notes.pack(raw)
            if pack is None:
                index.add_plain(notes.plain_ms(raw))
            else:
                self._look_at_place(pack)
                self._add_pack(pack)
        self._grown()

    def note_own(self, sequence: int, pack: PackNotes) -> bool:
        """Count a pack that this gateway has stored, if it is the next message."""
        if sequence != self.index.next_sequence:
            return False
        self._add_pack(pack)
        self._grown()
        return True

    def _add_pack(self, pack: PackNotes) -> None:
        base = self.index.add_pack(pack.events, pack.max_ms)
        for batch, row in pack.batches:
            self.producers.stored(batch, base + row)

    def _gap(self, sequence: int) -> None:
        """Messages before this one are missing: deleted, or never counted."""
        before = self.index.end_offset
        self.index.add_run(sequence, NO_EVENTS)
        own = any(waited < sequence for waited, _ in self._passed)
        if own:
            # What this gateway has just stored is among them. It is answered with the offsets that
            # follow: nothing else may get them.
            self.index.skip_to(self.index.end_offset + UNDER_WAY_MAX)
        if own or self._after_gap:
            self.producers.lost_track()
        if self._after_gap:
            self._skipped = sequence, before  # what is missing may be claims, without any event
            self.index.skip_to(self._after_gap)
            self._after_gap = 0

    def _look_at_place(self, pack: PackNotes) -> None:
        """After a gap: the first pack that tells of an offset after it gives them all back."""
        if self._skipped is None or pack.place is None:
            return
        (first, least), (offset, sequence) = self._skipped, pack.place
        if first <= sequence <= self.index.next_sequence:
            base = self.index.base_offset(first)
            lower = self.index.base_offset(sequence) - offset
            if 0 < lower <= base - least:
                self.index.lower(first, lower)
                self.producers.lower(base, lower)
                self._after_gap = self._reserved  # there may be another gap
            self._skipped = None

    def _grown(self) -> None:
        following = self.index.next_sequence
        if self._passed:
            waiting = [one for one in self._passed if one[0] >= following]
            for sequence, waiter in self._passed:
                if sequence < following and not waiter.done():
                    waiter.set_result(None)
            self._passed = waiting
        due = self.index.end_offset + RESERVED // 2 > self._reserved
        if due or following - self._saved_sequence >= SAVE_MESSAGES:
            self._save_due.set()
        self._changed()

    def _changed(self) -> None:
        for callback in tuple(self._watchers):
            callback()

    async def _follow(self, consumer: OrderedConsumer) -> None:
        try:
            while True:
                taken = consumer.take_now(TAKEN_AT_ONCE)
                if taken:
                    self.note(taken)
                else:
                    await self._signal.wait()
                # What waits for answers goes first: mostly this is only what we stored ourselves.
                await asyncio.sleep(0)
        except MillstreamError as error:
            self.fail(error)
        except Exception as error:
            _log.exception("counting the messages of '%s' failed", self.stream)
            self.fail(MillstreamError(str(error)))

    def _reconnected(self) -> None:
        self._head_at = 0.0
        self._save_due.set()  # it looks at the log, which may be another one by now

    # -- checkpoints ----------------------------------------------------------------------

    async def _keep_saved(self) -> None:
        while self.failed is None:
            # Not `wait_for`: before Python 3.12 it forgets that its task is cancelled if there is
            # something to do at the same moment.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SAVE_SECONDS):
                    await self._save_due.wait()
            self._save_due.clear()
            try:
                if not self._head_at:
                    await self.look_at_head()
                if self._saved_sequence != self.index.next_sequence or (
                    self.index.end_offset + RESERVED // 2 > self._reserved
                ):
                    await self.save()
            except MillstreamError as error:
                _log.warning("the checkpoint of '%s' was not stored: %s", self.stream, error)
                await asyncio.sleep(1.0)
            except Exception as error:
                _log.exception("the checkpoint of '%s' was not stored", self.stream)
                self.fail(MillstreamError(str(error)))

    async def save(self) -> None:
        """Write a checkpoint of what is known now."""
        await self._save(self.index.end_offset + RESERVED)

    async def _save(self, reserved: int) -> None:
        async with self._saving:
            if self.failed is not None:
                raise self.failed
            sequence = self.index.next_sequence
            try:
                await self._checkpoints.save(
                    self.index,
                    self.producers,
                    created=self._created,
                    reserved=reserved,
                    start_offset=self._start_offset,
                    first_sequence=self.first_sequence,
                    leader_epoch=self.leader_epoch,
                )
            except Overtaken:
                error = MillstreamError(
                    f"another gateway has stored a checkpoint of '{self.stream}' since"
                )
                self.fail(error)
                raise error from None
            self._saved_sequence, self._reserved = sequence, reserved
            self._changed()
