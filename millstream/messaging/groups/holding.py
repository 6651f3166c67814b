"""One partition while this member owns it: read, handed out by key, parked, committed."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Iterator
from datetime import datetime
from enum import Enum
from typing import Final

import msgspec

from millstream.deadline import now_ns
from millstream.errors import ConfigError, DataLoss, MillstreamError, WrongSequence
from millstream.events.classify import is_for_another
from millstream.events.event import Partition, nanoseconds_of, place_of
from millstream.events.subject import key_token
from millstream.messaging.groups.context import MemberContext
from millstream.messaging.groups.event import (
    AnyGroupEvent,
    BrokenPack,
    PackGroupEvent,
    group_events,
)
from millstream.messaging.groups.records import (
    ParkedAt,
    PartitionProgress,
    PartitionRecord,
    Position,
)
from millstream.messaging.groups.store import Stored
from millstream.messaging.groups.workers import KeyQueue
from millstream.messaging.subscriptions.subscription import Reject
from millstream.wire.aio.interest_hold import InterestHold
from millstream.wire.aio.ordered_consumer import OrderedConsumer
from millstream.wire.aio.pull_consumer import Prefetch
from millstream.wire.api import parse_ack_address
from millstream.wire.message import RawMessage
from millstream.wire.range_cursor import Range

__all__ = ["Holding", "HoldingState", "MemberContext", "order_token"]

_log = logging.getLogger("millstream.messaging")

TAKE_MESSAGES: Final = 256
# For each owned partition; two missed heartbeats mean that the node which served it is gone.
READ_AHEAD: Final = Prefetch(messages=1000, bytes=4 * 1024 * 1024, heartbeat=1.0)
COMMIT_SECONDS: Final = 5.0
# Only its owner changes a record and, rarely, an operator who unparks a key.
COMMIT_ATTEMPTS: Final = 20
# After this many owners in a row died without progress, events are handed out one by one to find
# the one that kills them.
DEATHS_CAREFUL: Final = 2
STRIKES_MAX: Final = 2
# This many are handed out one by one, then as usual again.
CAREFUL_EVENTS: Final = 200
# Bytes of parked keys in one record, which is written with every commit.
PARKED_BYTES_MAX: Final = 256 * 1024
STORE_AGAIN_SECONDS: Final = 1.0


class HoldingState(Enum):
    """Whether events are handed out, only finished, or neither."""

    OPEN = "open"
    DRAINING = "draining"
    CLOSED = "closed"


def order_token(key: str) -> str:
    """The name of a key in a record; one too long for a subject token is named by its hash."""
    try:
        return key_token(key)
    except ConfigError:
        return "#" + hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


class Holding:
    """One owned partition. Its epoch is the fencing token of everything handed out under it."""

    def __init__(
        self,
        member: MemberContext,
        partition: Partition,
        stored: Stored[PartitionRecord],
        hold: InterestHold | None = None,
    ) -> None:
        self.partition = partition.number
        self.state = HoldingState.OPEN
        self._member = member
        self._stream, self._partition = partition.stream, partition
        self._hold = hold  # keeps the events of an interest topic until they are committed
        self._stored = stored
        self._taken = stored.record
        self._progress = PartitionProgress(stored.record)
        self._parked = dict(stored.record.parked)
        self._fingerprint = stored.record.mark
        self._trying: Position | None = None
        self._careful = 0  # events still to be handed out one by one
        self._keys: dict[str, KeyQueue] = {}
        self._incoming: Iterator[AnyGroupEvent] = iter(())
        self._reader: OrderedConsumer | None = None
        self._hungry = False  # stopped reading because the buffer was full
        self._writing = asyncio.Lock()
        self._running = 0
        self._idle: asyncio.Future[None] | None = None

    # -- for the events and the workers ---------------------------------------------------

    @property
    def epoch(self) -> int:
        return self._taken.epoch

    @property
    def handing_out(self) -> bool:
        return self.state is HoldingState.OPEN

    def started(self) -> None:
        self._running += 1

    def ended(self) -> None:
        self._running -= 1
        if not self._running and self._idle is not None:
            self._idle.set_result(None)
            self._idle = None

    # -- life -----------------------------------------------------------------------------

    async def open(self) -> None:
        """Start reading at the last owner's position; DataLoss when the log was replaced."""
        await self.check_log()
        start = self._taken.position[0]
        await self._let_go()
        state = (await self._member.jetstream.stream_info(self._stream)).state
        if state.first_seq > start:
            _log.warning(
                "group %s: offsets %d to %d of %s were removed before they were handled",
                *(self._member.store.group, start, state.first_seq - 1, self._stream),
            )
        if self._taken.trying is not None or (
            self._taken.deaths >= DEATHS_CAREFUL and state.last_seq >= start
        ):
            self._careful = CAREFUL_EVENTS
        member = self._member
        what = Range(start, over_loss=not member.settings.fail_on_data_loss)
        reader = OrderedConsumer(member.jetstream, self._stream, what, member.signal, READ_AHEAD)
        try:
            await reader.open()
        except BaseException:
            reader.close()
            raise
        if self.handing_out:
            self._reader = reader
            member.signal.set()
        else:
            reader.close()

    async def check_log(self) -> None:
        """Raise DataLoss when the log was cut or replaced: its offsets have other events then."""
        offset, time_ns = self._fingerprint
        jetstream = self._member.jetstream
        if not offset:
            return
        found = await jetstream.get_message(self._stream, {"seq": offset})
        if found is None:
            lost = (await jetstream.stream_info(self._stream)).state.last_seq < offset
        else:
            stored_ns = nanoseconds_of(datetime.fromisoformat(found.time))
            lost = stored_ns // 1000 != time_ns // 1000
        if lost:
            raise DataLoss(
                f"stream '{self._stream}' no longer has the message {offset} that group "
                f"'{self._member.store.group}' read: the log was cut or replaced. Move the group "
                f"with seek to where it should continue"
            )

    def hold(self) -> None:
        """Hand out nothing more; running handlers may end."""
        if self.state is HoldingState.OPEN:
            self.state = HoldingState.DRAINING
            self._stop_timers()

    async def drain(self) -> None:
        """Hand out nothing more, and return when the running handlers have ended."""
        self.hold()
        while self._running:
            if self._idle is None:
                self._idle = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._idle)

    def close(self) -> None:
        """Stop immediately: released, or lost to another member."""
        if self.state is HoldingState.CLOSED:
            return
        self.state = HoldingState.CLOSED
        self._stop_timers()
        if self._reader is not None:
            self._reader.close()
        self._member.workers.cancel(self)

    def _stop_timers(self) -> None:
        for queue in self._keys.values():
            queue.stop_waiting()

    # -- reading --------------------------------------------------------------------------

    async def learn(self) -> None:
        """Load the schemas of what has arrived, before it is taken."""
        if self._partition.learn is not None and self._reader is not None:
            await self._partition.learn(self._reader.peek())

    def fill(self) -> None:
        """Take what has arrived, as far as it fits into the buffer."""
        if self.state is not HoldingState.OPEN or self._reader is None:
            return
        limit = 1 if self._careful else self._member.settings.buffer
        while len(self._progress) < limit:
            event = next(self._incoming, None)
            if event is None:
                taken = self._reader.take_now(TAKE_MESSAGES)
                if not taken:
                    self._hungry = False
                    return
                self._incoming = self._events(taken)
                continue
            offset, index = event.offset, event.index
            if self._progress.wants((offset, index)):
                self._progress.add((offset, index))
                self._offer(event)
            if isinstance(event, PackGroupEvent) and index + 1 < event.message.pack.count:
                self._progress.read_up_to((offset, index + 1))
            else:
                self._progress.read_up_to((offset + 1, 0))
        self._hungry = True
        if not self._careful:
            self._make_room()

    def _events(self, messages: list[RawMessage]) -> Iterator[AnyGroupEvent]:
        for raw in messages:
            address = parse_ack_address(raw.reply)
            self._fingerprint = (address.sequence, address.timestamp_ns)
            if not is_for_another(raw.headers, self._member.store.group):
                yield from group_events(self, self._partition, raw)
            self._progress.read_up_to((address.sequence + 1, 0))

    def _offer(self, event: AnyGroupEvent) -> None:
        # In a foreign stream the subject stands in for the key.
        key = event.subject if self._partition.prefix is None else event.key
        if isinstance(event, BrokenPack):
            queue = KeyQueue(self, None)
            queue.given_up = event.reason
        elif key is None:
            queue = KeyQueue(self, None)
        else:
            queue = self._keys.get(key) or self._new_queue(key)
        queue.events.append(event)
        if self._taken.strikes >= STRIKES_MAX and (event.offset, event.index) == self._taken.trying:
            queue.error = "its handler ended the process, more than once"
            queue.park_due = True
        if queue.failures and len(queue.events) > self._member.settings.key_buffer:
            self._park_early(queue)
        self._member.workers.add(queue)

    def _new_queue(self, key: str) -> KeyQueue:
        queue = self._keys[key] = KeyQueue(self, key)
        if self._parked and (at := self._parked.get(order_token(key))) is not None:
            queue.given_up = f"its key has been parked since offset {at.offset}.{at.index}"
        return queue

    def _make_room(self) -> None:
        """When failing keys fill most of the buffer, park the largest of them early."""
        failing = [
            queue for queue in self._keys.values() if queue.failures and queue.given_up is None
        ]
        held = sum(len(queue.events) for queue in failing)
        if held * 2 > self._member.settings.buffer:
            self._park_early(max(failing, key=lambda queue: len(queue.events)))

    def _park_early(self, queue: KeyQueue) -> None:
        if not queue.park_due and queue.given_up is None and self._may_park():
            queue.park_due = True
            queue.stop_waiting()
            self._member.workers.add(queue)

    # -- handling -------------------------------------------------------------------------

    async def process(self, queue: KeyQueue) -> None:
        """One attempt to handle the first event of a key."""
        event = queue.events[0]
        if queue.park_due and queue.given_up is None:
            settled = await self._park(queue, event)
        elif queue.given_up is not None:
            settled = await self._dead_letter(queue, event, queue.error or queue.given_up)
            if settled:
                self._member.log_given_up(event, queue.given_up)
        else:
            settled = await self._handle(queue, event)
        if not settled or self.state is HoldingState.CLOSED:
            return
        queue.events.popleft()
        queue.failures, queue.error, queue.cause, queue.park_due = 0, "", None, False
        if queue.key is not None and not queue.events:
            self._keys.pop(queue.key, None)
        self._progress.done((event.offset, event.index))
        self._member.handled += 1
        self._careful = max(0, self._careful - 1)
        if self._hungry:
            self._member.signal.set()

    async def _handle(self, queue: KeyQueue, event: AnyGroupEvent) -> bool:
        settings = self._member.settings
        event.attempt = queue.failures + 1
        try:
            if self._careful:
                if not await self._call_alone(queue, event):
                    return False
            else:
                await self._member.call(event)
        except Reject as rejected:
            queue.failed(rejected)
            self._member.log_failure(queue, event, last=True)
            return await self._dead_letter(queue, event, str(rejected) or "rejected")
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            queue.failed(error, f"the handler was cancelled from inside: {error!r}")
        except Exception as error:
            queue.failed(error)
        else:
            return True
        crowded = len(queue.events) > settings.key_buffer and self._may_park()
        last = queue.failures >= settings.max_attempts or queue.park_due or crowded
        self._member.log_failure(queue, event, last)
        if last:
            return await self._park(queue, event)
        self._again(queue, settings.delay_after(queue.failures))
        if self._hungry and not self._careful:
            self._make_room()
        return False

    async def _call_alone(self, queue: KeyQueue, event: AnyGroupEvent) -> bool:
        """Commit what is tried, so that a successor knows what ended this process."""
        async with self._member.careful:
            self._trying = (event.offset, event.index)
            try:
                if not await self._commit_or_wait(queue):
                    return False
                await self._member.call(event)
            finally:
                self._trying = None
            try:
                await self.commit()
            except MillstreamError as error:
                _log.info("group %s: not committed yet: %s", self._name, error)
            except asyncio.CancelledError:
                # Handlers are being stopped, and this one has ended: do not call it again.
                if task := asyncio.current_task():
                    task.uncancel()
            return True

    async def _commit_or_wait(self, queue: KeyQueue) -> bool:
        try:
            return await self.commit()
        except MillstreamError as error:
            _log.info("group %s: not committed, trying again: %s", self._name, error)
            self._again(queue, STORE_AGAIN_SECONDS)
            return False

    def _again(self, queue: KeyQueue, seconds: float) -> None:
        if self.state is HoldingState.OPEN:
            self._member.workers.add_later(queue, seconds)

    async def _park(self, queue: KeyQueue, event: AnyGroupEvent) -> bool:
        """Park the key: commit that first, then dead-letter its events."""
        if queue.key is not None:
            token = order_token(queue.key)
            if token not in self._parked and not self._may_park():
                _log.warning(
                    "group %s: %s is retried forever, because %d keys are parked",
                    *(self._name, place_of(event), len(self._parked)),
                )
                queue.park_due = False
                self._again(queue, self._member.settings.backoff[-1])
                return False
            queue.park_due = True
            self._parked.setdefault(token, ParkedAt(event.offset, event.index, now_ns()))
            if not await self._commit_or_wait(queue):
                return False
            _log.warning("group %s: parked the key of %s", self._name, place_of(event))
            queue.given_up = f"its key has been parked since offset {event.offset}.{event.index}"
            queue.park_due = False
        return await self._dead_letter(queue, event, queue.error)

    def _may_park(self) -> bool:
        return (
            len(self._parked) < self._member.settings.max_parked
            and sum(map(len, self._parked)) < PARKED_BYTES_MAX
        )

    async def _dead_letter(self, queue: KeyQueue, event: AnyGroupEvent, reason: str) -> bool:
        try:
            await self._member.dead_letters.store(event, reason, queue.failures)
        except MillstreamError as error:
            _log.warning("group %s: dead letter not stored, trying again: %s", self._name, error)
            self._again(queue, STORE_AGAIN_SECONDS)
            return False
        return True

    @property
    def _name(self) -> str:
        return self._member.store.group

    # -- committing -----------------------------------------------------------------------

    async def commit(self, release: bool = False) -> bool:
        """Store what is done; False when the partition belongs to another member by now."""
        if not await self._store_record(release):
            return False
        await self._let_go()
        return True

    async def _let_go(self) -> None:
        if self._hold is not None:
            await self._hold.move(self._stored.record.position[0])

    async def _store_record(self, release: bool) -> bool:
        store = self._member.store
        async with self._writing:
            for _ in range(COMMIT_ATTEMPTS):
                if self.state is HoldingState.CLOSED:
                    return False
                record = self._next_record(release)
                if record == self._stored.record:
                    return True
                try:
                    revision = await store.put_partition(
                        self.partition, record, self._stored.revision, COMMIT_SECONDS
                    )
                except WrongSequence:
                    if not self.adopt(await store.partition(self.partition)):
                        return False
                else:
                    self._stored = Stored(revision, record)
                    if release:
                        self.close()  # a commit that is due now would make it ours again
                    return True
        return False

    def _next_record(self, release: bool) -> PartitionRecord:
        position, high, unfinished = self._progress.state()
        return msgspec.structs.replace(
            self._stored.record,
            owner="" if release else self._taken.owner,
            position=position,
            high=high,
            open=unfinished,
            parked=dict(self._parked),
            mark=self._fingerprint,
            trying=self._trying,
            strikes=self._taken.strikes if self._trying == self._taken.trying else 0,
            deaths=self._taken.deaths if position == self._taken.position or self._careful else 0,
        )

    def adopt(self, found: Stored[PartitionRecord] | None) -> bool:
        """Adopt what others changed in the record (unparked keys); False when we lost it."""
        if found is not None and found.revision <= self._stored.revision:
            return True  # an old snapshot
        mine = (self._taken.owner, self._taken.epoch)
        if found is None or (found.record.owner, found.record.epoch) != mine:
            if self.state is not HoldingState.CLOSED:
                _log.warning("group %s: lost partition %d", self._name, self.partition)
            self.close()
            return False
        for token in self._stored.record.parked.keys() - found.record.parked.keys():
            self._parked.pop(token, None)
            for key, queue in self._keys.items():
                if order_token(key) == token:
                    queue.given_up, queue.failures, queue.park_due = None, 0, False
        self._stored = found
        return True
