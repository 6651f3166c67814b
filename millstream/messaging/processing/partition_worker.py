"""From one input partition to topics: outputs and input position in one atomic commit.

Each partition of the input is followed by position and has a fence on every partition of every
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
from typing import Final

from millstream.deadline import Deadline
from millstream.events.classify import is_for_another
from millstream.events.event import Event, NewEvent, Partition, PlainEvent
from millstream.events.fence import fence_subject
from millstream.events.packs.pack import EncodedPack
from millstream.events.start import Start
from millstream.events.undecodable import DECODE_FAILURES
from millstream.events.unpack import events_in
from millstream.messaging.processing.inputs import (
    Failures,
    check_input,
    check_retention,
    groups,
)
from millstream.messaging.processing.outputs import (
    Made,
    Router,
    UnfitOutput,
    outputs_of,
    packs_of,
)
from millstream.messaging.processing.record import other_kind, state_subject
from millstream.messaging.processing.settings import ProcessTarget
from millstream.messaging.processing.work import Work
from millstream.messaging.publishing.fenced_lane import FencedLane
from millstream.messaging.reading.replay import ReadPlan, read_messages
from millstream.wire.aio.interest_hold import InterestHold, hold_on
from millstream.wire.api import parse_ack_address
from millstream.wire.batch import BATCH_BYTES_MAX
from millstream.wire.message import RawMessage

__all__ = ["PartitionWorker"]

# A unit must stay below what the server stores together; half leaves room for headers.
UNIT_BYTES_MAX: Final = BATCH_BYTES_MAX // 2

# An output partition without outputs stores the position of the input after this many messages:
# that is how much is read again, at most, after a crash.
BEHIND_MAX: Final = 10_000


class _Fence:
    """The fence of one input partition on one output partition, and what waits for it."""

    def __init__(self, fenced: FencedLane, output: ProcessTarget) -> None:
        self.fenced = fenced
        self.output = output
        self.waiting: list[Made] = []
        self.done = 0  # input offset up to which the outputs were stored before this start

    async def commit(self, packs: list[EncodedPack], position: int, note: str) -> int:
        """Store the packs and the position as one unit; returns the number of outputs."""
        count = len(self.waiting)
        await self.fenced.store(packs, position, note)
        self.waiting.clear()
        return count


class PartitionWorker:
    """Follows one input partition."""

    def __init__(self, work: Work, partition: Partition) -> None:
        self._work = work
        self._settings = work.settings
        target = work.parts.outputs[0].target
        self._jetstream, self._publisher = target.jetstream, target.publisher
        self._stream = partition.stream
        self._partition = partition
        self._router = Router(work.parts.outputs)
        self._fences: list[_Fence] = []
        self._of: dict[str, list[_Fence]] = {}  # by output and its partition
        self._failures = Failures(self._jetstream, self._publisher, work.settings)
        self._hold: InterestHold | None = None  # keeps the events of an interest topic
        self._position = 0  # offset of the last input message whose outputs are collected
        self._committed = 0
        self._note = ""
        self._waiting = 0
        self._bytes = 0

    async def run(self, once: bool) -> None:
        """Process until the work is stopped; with `once`, until everything stored now is done."""
        try:
            await check_retention(self._jetstream, self._stream, self._settings.name)
            await self._claim()
            self._hold = await hold_on(
                *(self._jetstream, self._stream, "process", self._settings.name),
                known=self._position > 0,
            )
            await self._let_go()
            furthest = max((fence.fenced.state for fence in self._fences), key=lambda s: s.position)
            seen = furthest.position, furthest.note
            name, start = self._settings.name, self._position + 1
            await check_input(self._jetstream, self._stream, name, seen, start)
            await self._follow(once)
        except Exception:
            self._work.stopping.set()
            raise

    # -- starting -------------------------------------------------------------------------

    async def _claim(self) -> None:
        for output in self._work.parts.outputs:
            places = zip(output.target.partitions, output.target.shape.prefixes, strict=True)
            found = await asyncio.gather(*(self._fence(output, *place) for place in places))
            self._of[output.name] = found
            self._fences += found
        await asyncio.gather(*(fence.fenced.claim(self._stream) for fence in self._fences))
        for fence in self._fences:
            fence.done = fence.fenced.state.position
        self._position = self._committed = min(fence.done for fence in self._fences)

    async def _fence(self, output: ProcessTarget, partition: Partition, prefix: str) -> _Fence:
        """The fence of this input on an output partition.

        With one input topic it is known by the partition's number; with several, by the topic too.
        One that exists is used, so that a topic can be added to the input, and taken away again.
        """
        target = output.target
        name = f"{self._settings.name}-{self._partition.number}"
        alone, among = (
            FencedLane(target.jetstream, target.publisher, partition.stream, subject, name, acks)
            for acks in (target.acks,)
            for subject in (
                fence_subject(prefix, name),
                f"{fence_subject(prefix, name)}.from-{self._partition.topic}",
            )
        )
        first, second = await alone.look(), await among.look()
        if not first.sequence and not second.sequence:
            ask = {"last_by_subj": state_subject(prefix, self._settings.name)}
            if await self._jetstream.get_message(partition.stream, ask) is not None:
                raise other_kind(self._settings.name, output.name)
        if self._work.several_inputs:
            chosen = alone if first.sequence and first.input_stream == self._stream else among
        else:
            chosen = among if second.sequence else alone
        return _Fence(chosen, output)

    # -- reading --------------------------------------------------------------------------

    async def _follow(self, once: bool) -> None:
        due = Deadline(self._settings.commit_every)
        plan = ReadPlan(
            start=Start.at_offset(self._position + 1),
            follow=not once,
            fail_on_data_loss=self._settings.fail_on_data_loss,
        )
        messages = read_messages(self._jetstream, [self._partition], plan)
        found = groups(messages, self._work.stopping, self._settings.commit_every)
        try:
            async for group in found:
                for raw in group[1] if group else ():
                    await self._handle(raw)
                    if self._full:
                        await self._commit()
                        due = Deadline(self._settings.commit_every)
                if due.passed or not group:
                    await self._commit()
                    due = Deadline(self._settings.commit_every)
                if self._work.stopping.is_set():
                    break
        finally:
            await found.aclose()
        await self._commit(all_of_them=True)

    @property
    def _full(self) -> bool:
        return self._waiting >= self._settings.commit_events or self._bytes >= UNIT_BYTES_MAX

    async def _handle(self, raw: RawMessage) -> None:
        address = parse_ack_address(raw.reply)
        for event in await self._events(raw):
            for fence, new in await self._outputs(event):
                if address.sequence > fence.done:
                    fence.waiting.append(Made(new, event))
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
            await self._failures.failed(PlainEvent(self._partition, raw), error)
            return []

    async def _outputs(self, event: Event) -> list[tuple[_Fence, NewEvent]]:
        """The outputs of an event, each with the fence of its partition."""
        self._work.handled += 1
        try:
            result = self._work.function(event)
            if hasattr(result, "__await__"):
                result = await result
            return [
                (self._fence_of(new, event, number), new)
                for number, new in enumerate(outputs_of(result))
            ]
        except Exception as error:
            await self._failures.failed(event, error)
            return []

    def _fence_of(self, new: NewEvent, event: Event, number: int) -> _Fence:
        output = self._router.of(new)
        return self._of[output.name][self._router.partition(output, new, event, number)]

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
        self._work.produced += sum(counts)
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
        packing = self._settings.packing
        while True:
            try:
                return {
                    id(fence): packs_of(fence.waiting, fence.output.target, packing)
                    for fence in self._fences
                }
            except UnfitOutput as unfit:
                # Ends: each round takes the outputs of one event away.
                await self._failures.failed(unfit.event, unfit.error)
                where = unfit.event.position
                for fence in self._fences:
                    fence.waiting = [o for o in fence.waiting if o.event.position != where]
