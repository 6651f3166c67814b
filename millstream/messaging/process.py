"""Consume, transform, produce: outputs and input position in one atomic commit.

Each partition of the input is followed by position and has a fence on every partition of the
output. A commit stores the outputs of some input messages together with the offset of the last of
them. After a crash the input is read again from the lowest position; what a fence has stored is
recognised by its position and left out.

1. Claim the fences; the lowest stored position is where reading starts.
2. Check that the input still holds the message seen last: a log that lost it is an error.
3. Call the function for each event and collect its outputs by output partition.
4. Make packs of all outputs; an output that fits no pack takes its event's other outputs with it.
5. Store each partition's packs and the input offset as one unit; repeat from 3.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from millstream.deadline import Deadline
from millstream.errors import (
    ConfigError,
    DataLoss,
    MillstreamError,
    ProcessFailed,
    Unfit,
)
from millstream.events.classify import is_for_another
from millstream.events.event import Event, NewEvent, Partition, PlainEvent, place_of
from millstream.events.fence import fence_subject
from millstream.events.packs.pack import EncodedPack
from millstream.events.packs.packing import Packing
from millstream.events.row_buffer import RowBuffer
from millstream.events.start import Start
from millstream.events.subject import check_name
from millstream.events.undecodable import DECODE_FAILURES
from millstream.events.unpack import events_in
from millstream.failure_log import FailureLog, check_handler
from millstream.messaging.dead_letters.store import DeadLetterStore, default_dead_letter_topic
from millstream.messaging.publishing.fenced_lane import FencedLane
from millstream.messaging.publishing.target import PackTarget
from millstream.messaging.reading.replay import ReadPlan, read_messages
from millstream.settings import hold_seconds
from millstream.wire.aio.interest_hold import InterestHold, hold_on
from millstream.wire.api import parse_ack_address
from millstream.wire.batch import BATCH_BYTES_MAX
from millstream.wire.interest import needs_hold
from millstream.wire.message import RawMessage, stored_ns_of

__all__ = ["Process", "ProcessSettings", "Transform"]

# A unit must stay below what the server stores together; half leaves room for headers.
UNIT_BYTES_MAX: Final = BATCH_BYTES_MAX // 2

# An output partition without outputs stores the position of the input after this many messages:
# that is how much is read again, at most, after a crash.
BEHIND_MAX: Final = 10_000

Transform = Callable[[Event], Any | Awaitable[Any]]

_log = logging.getLogger("millstream.messaging")


# Large enough for one commit to be one pack: several are stored as an atomic batch, which costs an
# unreplicated file stream 15 ms.
COMMIT_PACKING: Final = Packing(max_events=20_000, max_bytes=4 * 1024 * 1024)


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """How often a process commits and what it does with an event that fails."""

    name: str  # of two processes with the same name the newer fences out the older
    commit_every: float = 0.1  # seconds between commits at most
    commit_events: int = 10_000  # outputs between commits at most
    on_error: Literal["stop", "dead_letter"] = "stop"
    partitions: tuple[int, ...] | None = None  # of the input; None: all, in parallel
    packing: Packing = COMMIT_PACKING
    fail_on_data_loss: bool = True  # stop at events that the broker has lost; False: go on

    def __post_init__(self) -> None:
        check_name("process", self.name)
        hold_seconds(self, "commit_every")
        if self.on_error not in ("stop", "dead_letter"):
            raise ConfigError(f"on_error {self.on_error!r}: choose stop or dead_letter")
        if self.commit_every <= 0 or self.commit_events < 1:
            raise ConfigError("commit_every and commit_events must be greater than zero")


class _Output(NamedTuple):
    """One output that waits for its commit, and the event it came from."""

    new: NewEvent
    event: Event


class _UnfitOutput(Exception):
    """An output cannot be written to its topic."""

    def __init__(self, event: Event, error: MillstreamError) -> None:
        self.event, self.error = event, error
        super().__init__(str(error))


class _Fence:
    """The fence of one input partition on one output partition, and what waits for it."""

    def __init__(self, fenced: FencedLane, target: PackTarget, packing: Packing) -> None:
        self.fenced = fenced
        self.waiting: list[_Output] = []
        self.done = 0  # input offset up to which the outputs were stored before this start
        self._packing = packing
        self._target = target

    def packs(self) -> list[EncodedPack]:
        """The waiting outputs as packs; an output that does not fit is named with its event."""
        if not self.waiting:
            return []
        buffer = RowBuffer(self._target.value_type)
        for new, event in self.waiting:
            try:
                if new.headers is None and new.timestamp is None and new.id is None:
                    buffer.add(new.value, new.key)
                else:
                    buffer.add_event(new.value, new.key, new.headers, new.timestamp, new.id)
            except MillstreamError as error:
                raise _UnfitOutput(event, error) from error
        try:
            batch = buffer.build(buffer.drain())
        except Unfit as error:
            raise _UnfitOutput(self.waiting[error.row or 0].event, error) from error
        target, packing = self._target, self._packing
        return [target.encode(piece, packing) for piece in target.split(batch, packing)]

    async def commit(self, packs: list[EncodedPack], position: int, note: str) -> int:
        """Store the packs and the position as one unit; returns the number of outputs."""
        count = len(self.waiting)
        await self.fenced.store(packs, position, note)
        self.waiting.clear()
        return count


class Process:
    """Applies a function to every event of a topic and stores the results in another: exactly once.

    A crash at any point loses no output, and stores none twice or partially. The function may be
    called again for an event whose outputs were not committed, so it should depend only on the
    event. Order: outputs keep the order of their input partition.
    """

    def __init__(
        self,
        inputs: Sequence[Partition],
        output: PackTarget,
        function: Transform,
        settings: ProcessSettings,
    ) -> None:
        chosen = settings.partitions
        self.settings = settings
        self.output = output
        check_handler(function)
        self.function = function
        self.stopping = asyncio.Event()
        self.handled = 0  # events the function was called for
        self.produced = 0  # outputs stored
        self._inputs = [
            partition for partition in inputs if chosen is None or partition.number in chosen
        ]

    def stop(self) -> None:
        """Commit what is done and return from `run`."""
        self.stopping.set()

    async def run(self, once: bool = False) -> None:
        """Process until `stop`; with `once`, until everything stored now is done.

        When one input partition fails the others commit what they have; then its error is raised.
        """
        workers = [_PartitionWorker(self, partition) for partition in self._inputs]
        results = await asyncio.gather(*(w.run(once) for w in workers), return_exceptions=True)
        for error in results:
            if isinstance(error, BaseException):
                raise error


class _PartitionWorker:
    """Follows one input partition."""

    def __init__(self, process: Process, partition: Partition) -> None:
        self._process = process
        self._settings = process.settings
        self._target = process.output
        self._stream = partition.stream
        self._partition = partition
        self._fences: list[_Fence] = []
        self._failures = FailureLog(_log)
        self._hold: InterestHold | None = None  # keeps the events of an interest topic
        self._position = 0  # offset of the last input message whose outputs are collected
        self._committed = 0
        self._note = ""
        self._waiting = 0
        self._bytes = 0

    async def run(self, once: bool) -> None:
        try:
            await self._check_retention()
            await self._claim()
            self._hold = await hold_on(
                *(self._target.jetstream, self._stream, "process", self._settings.name),
                known=self._position > 0,
            )
            await self._let_go()
            await self._check_input()
            await self._follow(once)
        except Exception:
            self._process.stop()
            raise

    # -- starting -------------------------------------------------------------------------

    async def _check_retention(self) -> None:
        """Refuse an input without positions before anything is claimed."""
        config = (await self._target.jetstream.stream_info(self._stream)).config
        needs_hold(config, f"process '{self._settings.name}'")

    async def _claim(self) -> None:
        target, settings = self._target, self._settings
        name = f"{settings.name}-{self._partition.number}"
        for output, prefix in zip(target.partitions, target.shape.prefixes, strict=True):
            subject = fence_subject(prefix, name)
            fenced = FencedLane(
                target.jetstream, target.publisher, output.stream, subject, name, target.acks
            )
            self._fences.append(_Fence(fenced, target, settings.packing))
        await asyncio.gather(*(fence.fenced.claim(self._stream) for fence in self._fences))
        for fence in self._fences:
            fence.done = fence.fenced.state.position
        self._position = self._committed = min(fence.done for fence in self._fences)

    async def _check_input(self) -> None:
        """The input must still be the topic that was read before."""
        furthest = max((fence.fenced.state for fence in self._fences), key=lambda s: s.position)
        if not furthest.position:
            return
        jetstream = self._target.jetstream
        state = (await jetstream.stream_info(self._stream)).state
        found = await jetstream.get_message(self._stream, {"seq": furthest.position})
        same = found is None or furthest.note in ("", str(stored_ns_of(found.time)))
        if state.last_seq < furthest.position or not same:
            raise DataLoss(
                f"process '{self._settings.name}' has handled '{self._stream}' up to offset "
                f"{furthest.position}, but what is stored there is not what it read (last offset "
                f"{state.last_seq}): it was damaged, recreated or restored. Use another name to "
                f"process it from the beginning"
            )
        if state.first_seq > self._position + 1:
            _log.warning(
                "process %s: offsets %d to %d of %s were removed before they were handled",
                *(self._settings.name, self._position + 1, state.first_seq - 1, self._stream),
            )

    # -- reading --------------------------------------------------------------------------

    async def _follow(self, once: bool) -> None:
        due = Deadline(self._settings.commit_every)
        messages = self._messages(once)
        try:
            async for group in messages:
                for raw in group:
                    await self._handle(raw)
                    if self._full:
                        await self._commit()
                        due = Deadline(self._settings.commit_every)
                if due.passed or not group:
                    await self._commit()
                    due = Deadline(self._settings.commit_every)
                if self._process.stopping.is_set():
                    break
        finally:
            await messages.aclose()
        await self._commit(all_of_them=True)

    async def _messages(self, once: bool) -> AsyncGenerator[list[RawMessage], None]:
        """Input messages from the position on; an empty list when it is time to commit."""
        plan = ReadPlan(
            start=Start.at_offset(self._position + 1),
            follow=not once,
            fail_on_data_loss=self._settings.fail_on_data_loss,
        )
        stream = read_messages(self._target.jetstream, [self._partition], plan)
        pending: asyncio.Task[Any] | None = None
        stopping = asyncio.create_task(self._process.stopping.wait())
        try:
            while True:
                pending = pending or asyncio.ensure_future(anext(stream, None))
                await asyncio.wait(
                    {pending, stopping},
                    timeout=self._settings.commit_every,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not pending.done():
                    yield []
                    continue
                found, pending = pending.result(), None
                if found is None:
                    return
                yield found[1]
        finally:
            stopping.cancel()
            if pending is not None:
                pending.cancel()
                await asyncio.gather(pending, return_exceptions=True)
            await stream.aclose()

    @property
    def _full(self) -> bool:
        return self._waiting >= self._settings.commit_events or self._bytes >= UNIT_BYTES_MAX

    async def _handle(self, raw: RawMessage) -> None:
        address = parse_ack_address(raw.reply)
        for event in await self._events(raw):
            for fence, new in await self._outputs(event):
                if address.sequence > fence.done:
                    fence.waiting.append(_Output(new, event))
                    self._waiting += 1
                    if type(new.value) is bytes:
                        self._bytes += len(new.value)
        self._position = address.sequence
        self._note = str(address.timestamp_ns)

    async def _events(self, raw: RawMessage) -> list[Event]:
        if is_for_another(raw.headers, self._settings.name):
            return []
        try:
            return events_in(self._partition, raw)
        except DECODE_FAILURES as error:
            await self._failed(PlainEvent(self._partition, raw), error)
            return []

    async def _outputs(self, event: Event) -> list[tuple[_Fence, NewEvent]]:
        """The outputs of an event, each with the fence of its partition."""
        self._process.handled += 1
        try:
            result = self._process.function(event)
            if hasattr(result, "__await__"):
                result = await result
            return [
                (self._fences[self._partition_of(new, event, number)], new)
                for number, new in enumerate(_outputs_of(result))
            ]
        except Exception as error:
            await self._failed(event, error)
            return []

    def _partition_of(self, new: NewEvent, event: Event, number: int) -> int:
        """The output's partition; without a key by its input, so the same after a restart."""
        if len(self._fences) == 1:
            return 0
        if new.key is None:
            return (event.offset + event.index + number) % len(self._fences)
        return self._target.shape.route(new.key)[0]

    async def _failed(self, event: Event, error: Exception) -> None:
        """Stop at an event, or dead-letter it and continue."""
        name = self._settings.name
        if self._settings.on_error == "stop":
            raise ProcessFailed(name, place_of(event), error) from error
        topic = default_dead_letter_topic(event.topic, name)
        self._failures.warn(
            error,
            "process '%s': the function failed on %s, attempt 1; it becomes a dead letter in '%s'",
            *(name, place_of(event), topic),
        )
        store = DeadLetterStore(self._target.jetstream, self._target.publisher, topic, name)
        await store.store(event, f"{type(error).__name__}: {error}", 1)

    # -- committing -----------------------------------------------------------------------

    async def _commit(self, all_of_them: bool = False) -> None:
        """Store outputs and position; partitions without outputs may keep an older position."""
        if self._position == self._committed and not all_of_them:
            return
        packs = await self._packs()
        chosen = [
            fence
            for fence in self._fences
            if fence.waiting
            or self._position - fence.fenced.state.position > (0 if all_of_them else BEHIND_MAX)
        ]
        if not chosen and self._position > self._committed:
            # No outputs: the fence with the oldest position stores that of the input.
            chosen = [min(self._fences, key=lambda fence: fence.fenced.state.position)]
        counts = await asyncio.gather(
            *(fence.commit(packs[id(fence)], self._position, self._note) for fence in chosen)
        )
        self._process.produced += sum(counts)
        self._committed = self._position
        self._waiting = self._bytes = 0
        await self._let_go()

    async def _let_go(self) -> None:
        """Let an interest topic drop what a restart would not read again."""
        if self._hold is not None:
            done = min(fence.fenced.state.position for fence in self._fences)
            await self._hold.move(done + 1)

    async def _packs(self) -> dict[int, list[EncodedPack]]:
        """The packs of each fence, built before anything is stored."""
        while True:
            try:
                return {id(fence): fence.packs() for fence in self._fences}
            except _UnfitOutput as unfit:
                # Ends: each round takes the outputs of one event away.
                await self._failed(unfit.event, unfit.error)
                where = unfit.event.position
                for fence in self._fences:
                    fence.waiting = [o for o in fence.waiting if o.event.position != where]


def _outputs_of(result: Any) -> list[NewEvent]:
    if result is None:
        return []
    if isinstance(result, NewEvent):
        return [result]
    # Cheap checks, because they are made for every event.
    if isinstance(result, list) or hasattr(result, "__next__"):
        return [item if isinstance(item, NewEvent) else NewEvent(item) for item in result]
    return [NewEvent(result)]
