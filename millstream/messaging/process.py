"""Consume, transform, produce: outputs and input position in one atomic commit.

Each partition of the input is followed by position and has a fence on every partition of the
output. A commit stores the outputs of some input messages together with the offset of the last of
them. After a crash the input is read again from the lowest position; what a fence has stored is
recognised by its position and left out.

1. Claim the fences; the lowest stored position is where reading begins.
2. Check that the input still holds the message seen last: a log that lost it is an error.
3. Call the function for each event and collect its outputs by output partition.
4. Store each partition's outputs and the input offset as one unit; repeat from 3.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal

from millstream.deadline import Deadline
from millstream.errors import ConfigError, DataLoss, MillstreamError, ProcessFailed
from millstream.messaging.dead_letters import DeadLetterStore, default_dead_letter_topic
from millstream.messaging.event import Event, NewEvent, Source, nanoseconds_of
from millstream.messaging.fence import fence_subject
from millstream.messaging.fenced_lane import FencedLane
from millstream.messaging.pack import EncodedPack, split
from millstream.messaging.packing import Packing
from millstream.messaging.reading import ReadPlan, read_messages
from millstream.messaging.row_buffer import RowBuffer
from millstream.messaging.start import Start
from millstream.messaging.subject import check_name
from millstream.messaging.unpack import events_of
from millstream.messaging.writer import WriterTarget
from millstream.wire.api import parse_ack_address
from millstream.wire.atomic import BATCH_BYTES_MAX

__all__ = ["Process", "ProcessSettings", "Transform"]

# A unit must stay below what the server stores together; half leaves room for headers.
UNIT_BYTES_MAX: Final = BATCH_BYTES_MAX // 2

Transform = Callable[[Event], Any | Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """How often a process commits and what it does with an event that fails."""

    name: str  # two processes of one name: the younger fences the older out
    commit_every: float = 0.1  # seconds between commits at most
    commit_events: int = 10_000  # outputs between commits at most
    on_error: Literal["stop", "dead_letter"] = "stop"
    partitions: tuple[int, ...] | None = None  # of the input; None: all, in parallel
    packing: Packing = field(default_factory=Packing)

    def __post_init__(self) -> None:
        check_name("process", self.name)
        if self.on_error not in ("stop", "dead_letter"):
            raise ConfigError(f"on_error {self.on_error!r}: choose stop or dead_letter")
        if self.commit_every <= 0 or self.commit_events < 1:
            raise ConfigError("commit_every and commit_events must be greater than zero")


class _Outputs:
    """The fence of one input partition on one output partition, and what waits for it."""

    def __init__(self, fence: FencedLane, target: WriterTarget, packing: Packing) -> None:
        self.fence = fence
        self._buffer = RowBuffer(target.value_type)
        self._packing = packing
        self._limits = packing.limits(target.jetstream.connection.info.max_payload)
        self._schema_id = target.value_type.schema_id if target.value_type else None
        self.done = 0  # input offset up to which earlier lives stored the outputs

    def add(self, event: NewEvent) -> None:
        self._buffer.add_event(event.value, event.key, event.headers, event.timestamp, event.id)

    @property
    def waiting(self) -> int:
        return len(self._buffer)

    @property
    def bytes(self) -> int:
        return self._buffer.bytes

    async def commit(self, position: int, note: str) -> None:
        """Store what waits and the position as one unit."""
        packs: list[EncodedPack] = []
        if len(self._buffer):
            batch = self._buffer.build(self._buffer.drain())
            packs = [self._packing.pack(p, self._schema_id) for p in split(batch, self._limits)]
        await self.fence.store(packs, position, note)


class Process:
    """Applies a function to every event of a topic and stores the results in another: exactly once.

    Crash anywhere: no output is missing, none is doubled, none is partial. The function may be
    called again for an event whose outputs were not committed, so it should depend on nothing but
    the event. Order: outputs keep the order of their input partition.
    """

    def __init__(
        self,
        inputs: Sequence[tuple[str, Source]],
        output: WriterTarget,
        function: Transform,
        settings: ProcessSettings,
    ) -> None:
        self._inputs = inputs
        self._output = output
        self._function = function
        self._settings = settings
        self._stop = asyncio.Event()
        self.handled = 0  # events the function was called for
        self.produced = 0  # outputs stored

    def stop(self) -> None:
        """Commit what is done and return from `run`."""
        self._stop.set()

    async def run(self, once: bool = False) -> None:
        """Process until `stop`; with `once`, until everything stored now is done."""
        chosen = self._settings.partitions
        async with asyncio.TaskGroup() as tasks:
            for stream, source in self._inputs:
                if chosen is None or source.partition in chosen:
                    worker = _PartitionWorker(self, stream, source)
                    tasks.create_task(worker.run(once))


class _PartitionWorker:
    """Follows one input partition."""

    def __init__(self, process: Process, stream: str, source: Source) -> None:
        self._process = process
        self._settings = process._settings
        self._target = process._output
        self._stream = stream
        self._source = source
        self._outputs: list[_Outputs] = []
        self._position = 0  # offset of the last input message whose outputs are collected
        self._note = ""
        self._since_commit = 0

    async def run(self, once: bool) -> None:
        try:
            await self._claim()
            await self._check_input()
            await self._follow(once)
        except MillstreamError:
            self._process.stop()  # the others commit what they have; the error ends the group
            raise

    async def _claim(self) -> None:
        target, settings = self._target, self._settings
        name = f"{settings.name}-{self._source.partition}"
        for (stream, _), prefix in zip(target.sources, target.shape.prefixes, strict=True):
            subject = fence_subject(prefix, name)
            fence = FencedLane(target.jetstream, target.lane, stream, subject, name)
            self._outputs.append(_Outputs(fence, target, settings.packing))
        await asyncio.gather(*(out.fence.claim() for out in self._outputs))
        for out in self._outputs:
            out.done = out.fence.state.position
        self._position = min(out.done for out in self._outputs)

    async def _check_input(self) -> None:
        """The input must still be the log that was read before."""
        furthest = max((out.fence.state for out in self._outputs), key=lambda s: s.position)
        if not furthest.position:
            return
        jetstream = self._target.jetstream
        state = (await jetstream.stream_info(self._stream)).state
        found = await jetstream.get_message(self._stream, {"seq": furthest.position})
        same = found is None or furthest.note in ("", _fingerprint(found.time))
        if state.last_seq < furthest.position or not same:
            raise DataLoss(
                f"process '{self._settings.name}' has handled '{self._stream}' up to offset "
                f"{furthest.position}, but the log there is not the one it read (last offset "
                f"{state.last_seq}): it was damaged, recreated or restored. Use another name to "
                f"process it from the beginning"
            )

    async def _follow(self, once: bool) -> None:
        last_commit = Deadline(self._settings.commit_every)
        async for messages in self._messages(once):
            for raw in messages:
                await self._handle(raw)
                if self._full:
                    await self._commit()
                    last_commit = Deadline(self._settings.commit_every)
            if last_commit.passed or not messages:
                await self._commit()
                last_commit = Deadline(self._settings.commit_every)
            if self._process._stop.is_set():
                break
        await self._commit()
        if once:
            await self._commit_idle()

    async def _messages(self, once: bool) -> AsyncIterator[list[Any]]:
        """Input messages from the position on; an empty list when it is time to commit."""
        plan = ReadPlan(start=Start.at_offset(self._position + 1), follow=not once)
        stream = read_messages(self._target.jetstream, [(self._stream, self._source)], plan)
        pending: asyncio.Task[Any] | None = None
        stopping = asyncio.create_task(self._process._stop.wait())
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
        waiting = sum(out.waiting for out in self._outputs)
        size = max(out.bytes for out in self._outputs)
        return waiting >= self._settings.commit_events or size >= UNIT_BYTES_MAX

    async def _handle(self, raw: Any) -> None:
        address = parse_ack_address(raw.reply)
        offset = address.sequence
        for event in events_of(self._source, [raw]):
            for output in await self._call(event):
                partition, _ = self._target.shape.place(output.key)
                out = self._outputs[partition]
                if offset > out.done:
                    out.add(output)
        self._position = offset
        self._note = str(address.timestamp_ns)
        self._since_commit += 1

    async def _call(self, event: Event) -> list[NewEvent]:
        process = self._process
        process.handled += 1
        try:
            result = process._function(event)
            if inspect.isawaitable(result):
                result = await result
            return _outputs_of(result)
        except Exception as error:
            if self._settings.on_error == "stop":
                raise ProcessFailed(self._settings.name, repr(event), error) from error
            await self._bury(event, error)
            return []

    async def _bury(self, event: Event, error: Exception) -> None:
        name = self._settings.name
        topic = default_dead_letter_topic(event.topic, name)
        store = DeadLetterStore(self._target.jetstream, self._target.lane, topic, name)
        await store.store_event(event, f"{type(error).__name__}: {error}", 1)

    async def _commit(self) -> None:
        """Store outputs and position; partitions without outputs keep their older position."""
        if not self._since_commit:
            return
        waiting = [out for out in self._outputs if out.waiting]
        behind = [out for out in self._outputs if not out.waiting]
        self._since_commit = 0
        if not waiting:
            # Nothing to say: one fence remembers how far the input is, the cheapest one.
            waiting = [min(behind, key=lambda out: out.fence.state.position)]
        count = sum(out.waiting for out in waiting)
        await asyncio.gather(*(out.commit(self._position, self._note) for out in waiting))
        self._process.produced += count

    async def _commit_idle(self) -> None:
        """At the end every fence knows how far the input is."""
        behind = [out for out in self._outputs if out.fence.state.position < self._position]
        await asyncio.gather(*(out.commit(self._position, self._note) for out in behind))


def _fingerprint(time: str) -> str:
    return str(nanoseconds_of(datetime.fromisoformat(time)))


def _outputs_of(result: Any) -> list[NewEvent]:
    if result is None:
        return []
    if isinstance(result, NewEvent):
        return [result]
    if isinstance(result, str | bytes | dict) or not isinstance(result, Iterable):
        return [NewEvent(result)]
    return [item if isinstance(item, NewEvent) else NewEvent(item) for item in result]
