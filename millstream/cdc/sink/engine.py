"""One run of `apply`: reads ahead, shares events out to workers, stores what they have done.

    topic -> reader -> chunks (a few) -> group -> one part for each worker -> transaction

While the workers commit, the next group grows; it is handed out when it is full or they are idle.
So few events are applied at once, and many in large transactions. Truncations, new columns and
another number of workers wait until every worker has nothing to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from millstream.cdc.sink.fold import truncates
from millstream.cdc.sink.groups import EventGroup, WorkerPart, part_of, shared_out
from millstream.cdc.sink.target import Begun, RefusedRow, Session
from millstream.cdc.sink.topic_positions import (
    LogState,
    TopicPosition,
    TopicPositions,
    covers,
    first_of,
    is_even,
    last_of,
)
from millstream.deadline import Deadline
from millstream.errors import DataLoss, SinkError

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from millstream.cdc.topic_log import Chunk, TopicLog

__all__ = ["ApplyCounters", "Engine", "GroupLimits"]

CHUNKS: Final = 2  # that are read ahead of the group, of a few MB each
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """Of one group."""

    rows: int
    bytes: int
    idle_seconds: float = 5.0  # after which positions without events are stored


@dataclass(slots=True)
class ApplyCounters:
    """What was done since the start; numbers only grow."""

    events: int = 0  # read and applied, those that a later event of their key replaced included
    rows: int = 0  # upserted or deleted
    transactions: int = 0
    truncations: int = 0
    retries: int = 0
    positions: dict[int, TopicPosition] = field(default_factory=dict)  # up to where all is stored
    begun: bool = False  # the positions are ours


class Engine:
    """Applies a log until it ends or is stopped; an error ends it, and nothing is half done."""

    def __init__(
        self,
        log: TopicLog,
        make_session: Callable[[], Session],
        executor: ThreadPoolExecutor,
        limits: GroupLimits,
        counters: ApplyCounters,
    ) -> None:
        self._log, self._make, self._executor = log, make_session, executor
        self._limits, self._counters = limits, counters
        self._sessions: list[Session] = []
        self._queues: list[asyncio.Queue[WorkerPart]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._applied: list[dict[int, TopicPosition]] = []  # by worker, before this run
        self._chunks: asyncio.Queue[Chunk | None] = asyncio.Queue(CHUNKS)
        self._changed = asyncio.Event()
        self._busy = 0  # parts that are not applied yet
        self._group = EventGroup()
        self._key: tuple[str, ...] = ()
        self._version = 0
        self._states: dict[int, LogState] = {}
        self._reached: dict[int, TopicPosition] = {}
        self._before: dict[int, TopicPosition] = {}  # what some worker had applied at the start
        self._done: list[dict[int, TopicPosition]] = []  # by worker, in this run
        self._workers = 1
        self._rebase = False

    async def call(self, function: Callable[..., T], *given: Any) -> T:
        """Call a blocking function in a thread; it is never left alone with its connection."""
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._executor, partial(function, *given))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            future.exception()  # it was seen; the call is over for another reason
            raise

    # -- beginning and end ----------------------------------------------------------------

    async def run(self, workers: int, follow: bool, stop: asyncio.Event) -> None:
        """Apply everything, for ever with `follow`, until `stop` is set."""
        try:
            await self._begin(workers)
            await self._until_done(follow, stop)
        finally:
            await self._end_tasks(self._tasks)
            for session in self._sessions:
                await self.call(session.close)

    async def _begin(self, workers: int) -> None:
        log = self._log
        await log.open()
        self._states = await log.states()
        first = await self._open_session()
        begun: Begun = await self.call(first.begin, log.row, self._states, workers)
        self._key, self._version = begun.key, log.version
        self._counters.begun = True
        stored = begun.stored
        for one in stored:
            state = self._states.get(one.partition)
            if state is None:
                raise DataLoss(
                    f"'{log.name}' has no partition {one.partition} any more, which was applied "
                    f"before. Begin again under another name with an empty table"
                )
            position = await log.check(one.partition, one.position, one.log, state)
            if position != one.position:
                stored = await self.call(first.restart, one.partition, state.created, position)
        self._reached, self._before = first_of(stored), last_of(stored)
        self._workers, self._rebase = workers, stored[0].workers != workers
        if self._rebase and is_even(stored):
            stored = await self._rebased()
        self._counters.positions = dict(self._reached)
        await self._start_workers(stored[0].workers)
        for one in stored:
            self._applied[one.worker][one.partition] = one.position

    async def _open_session(self) -> Session:
        session = self._make()
        self._sessions.append(session)
        await self.call(session.open)
        return session

    async def _start_workers(self, count: int) -> None:
        for number in range(count):
            session = self._sessions[number] if number < len(self._sessions) else None
            if session is None:
                session = await self._open_session()
                session.join(self._sessions[0])
            queue: asyncio.Queue[WorkerPart] = asyncio.Queue(1)
            self._queues.append(queue)
            self._applied.append({})
            self._done.append(dict(self._reached))
            self._tasks.append(asyncio.create_task(self._work(number, session, queue)))

    async def _until_done(self, follow: bool, stop: asyncio.Event) -> None:
        reader = asyncio.create_task(self._read(follow))
        waiting = asyncio.create_task(self._stopped(stop, reader))
        main = asyncio.create_task(self._main())
        own = [reader, waiting, main]
        try:
            while not main.done():
                # Workers may be others by now.
                await asyncio.wait([main, *self._watched(reader)], return_when="FIRST_COMPLETED")
                for task in self._watched(reader):
                    if task.done():
                        task.result()
            main.result()
        finally:
            await self._end_tasks(own)

    def _watched(self, reader: asyncio.Task[None]) -> list[asyncio.Task[None]]:
        return [task for task in (reader, *self._tasks) if not self._is_over(task)]

    @staticmethod
    def _is_over(task: asyncio.Task[None]) -> bool:
        """Whether a task has ended without an error."""
        return task.done() and (task.cancelled() or task.exception() is None)

    @staticmethod
    async def _end_tasks(tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- reading --------------------------------------------------------------------------

    async def _read(self, follow: bool) -> None:
        async with aclosing(self._log.chunks(self._reached, follow)) as chunks:
            async for chunk in chunks:
                await self._chunks.put(chunk)
                self._changed.set()
        await self._chunks.put(None)
        self._changed.set()

    async def _stopped(self, stop: asyncio.Event, reader: asyncio.Task[None]) -> None:
        await stop.wait()
        reader.cancel()
        await asyncio.wait([reader])
        while not self._chunks.empty():
            self._chunks.get_nowait()
        self._chunks.put_nowait(None)
        self._changed.set()

    async def _main(self) -> None:
        quiet = Deadline(self._limits.idle_seconds)
        while True:
            if not self._chunks.empty():
                chunk = self._chunks.get_nowait()
                if chunk is None:
                    break
                await self._take(chunk)
            elif self._group.rows and not self._busy:
                await self._hand_out()
            elif quiet.passed:
                await self._store_quietly()
                quiet = Deadline(self._limits.idle_seconds)
            else:
                self._changed.clear()
                try:
                    async with asyncio.timeout(quiet.left()):
                        await self._changed.wait()
                except TimeoutError:
                    continue
        await self._hand_out(now=True)
        await self._all_done()

    async def _store_quietly(self) -> None:
        """Store positions that no event brought along, and see that the log is still the same."""
        if not self._busy:
            await self._hand_out(now=True)
        for number, state in (await self._log.states()).items():
            known = self._states.get(number)
            if known is not None and known.created != state.created:
                raise DataLoss(
                    f"'{self._log.name}/{number}' was deleted and created again while it was "
                    f"applied. Begin again under another name with an empty table"
                )

    # -- from chunks to parts -------------------------------------------------------------

    async def _take(self, chunk: Chunk) -> None:
        if chunk.version != self._version:
            await self._follow(chunk.version)
        for batch in chunk.events:
            start = 0
            for row in truncates(batch, self._log.format):
                here = TopicPosition(
                    *(batch.column(name)[row].as_py() for name in ("offset", "index"))
                )
                self._group.add([batch.slice(start, row - start)])
                await self._truncate(chunk.partition, here)
                start = row + 1
            self._group.add([batch.slice(start)] if start else [batch])
        self._group.positions[chunk.partition] = chunk.reached
        group, limits = self._group, self._limits
        if group.rows >= limits.rows or group.bytes >= limits.bytes:
            await self._hand_out()

    async def _hand_out(self, now: bool = False) -> None:
        """Give the group to the workers; waits while they have enough."""
        group, self._group = self._group, EventGroup()
        if not group.positions and not now:
            return
        count = len(self._queues)
        parts = await self.call(shared_out, group, self._log.format, self._key, count, now)
        self._reached.update(group.positions)
        self._counters.events += group.rows
        for queue, part in zip(self._queues, parts, strict=True):
            self._busy += 1
            await queue.put(part)
        if self._rebase and covers(self._reached, self._before):
            await self._all_done()
            await self._with_new_workers()

    async def _all_done(self) -> None:
        """Wait until the workers have applied everything."""
        for queue in self._queues:
            await queue.join()

    @asynccontextmanager
    async def _alone(self, positions: dict[int, TopicPosition]) -> AsyncIterator[Session]:
        """The first session, while everything up to such positions is applied."""
        self._group.positions.update(positions)
        await self._hand_out(now=True)
        await self._all_done()
        yield self._sessions[0]

    async def _truncate(self, partition: int, before: TopicPosition) -> None:
        after = TopicPosition(before.offset, before.index + 1)
        if len(self._states) > 1:
            raise SinkError(
                f"topic '{self._log.name}' has several partitions, and an event that empties the "
                f"table (partition {partition}, offset {before.offset}): which rows of the other "
                f"partitions were before it is not known. Use a topic with one partition"
            )
        if after.key <= self._before[partition].key:
            return  # before a restart
        async with self._alone({partition: before}) as session:
            await self.call(session.empty, {partition: after})
        self._reached[partition] = after
        for worker in range(len(self._done)):
            self._note_done(worker, {partition: after})
        self._counters.truncations += 1
        self._counters.transactions += 1

    async def _follow(self, version: int) -> None:
        """Let the table follow a newer version of the schema."""
        async with self._alone({}) as session:
            await self.call(session.follow, self._log.row)
        for other in self._sessions[1:]:
            other.join(self._sessions[0])
        self._version = version

    # -- another number of workers --------------------------------------------------------

    async def _rebased(self) -> list[Any]:
        """Store that another number of workers goes on from here."""
        logs = {number: state.created for number, state in self._states.items()}
        session, self._rebase = self._sessions[0], False
        return await self.call(session.rebase, self._workers, self._reached, logs)

    async def _with_new_workers(self) -> None:
        tasks, self._tasks, self._queues = self._tasks, [], []
        self._applied, self._done = [], []
        await self._end_tasks(tasks)
        await self._rebased()
        await self._start_workers(self._workers)

    # -- workers --------------------------------------------------------------------------

    async def _work(self, number: int, session: Session, queue: asyncio.Queue[WorkerPart]) -> None:
        waiting: dict[int, TopicPosition] = {}  # positions that are not stored yet
        while True:
            part = await queue.get()
            waiting.update(part.positions)
            if part.events is not None or (part.now and waiting):
                events = await self.call(part_of, part, self._applied[number])
                await self._commit(number, session, waiting, events)
                waiting.clear()
            self._note_done(number, part.positions)
            for partition in [p for p in self._applied[number] if p in part.positions]:
                if part.positions[partition].key >= self._applied[number][partition].key:
                    del self._applied[number][partition]
            self._busy -= 1
            queue.task_done()
            self._changed.set()

    def _note_done(self, worker: int, positions: TopicPositions) -> None:
        """A worker is done up to here; all together are up to the first of them."""
        self._done[worker].update(positions)
        for partition in positions:
            self._counters.positions[partition] = min(
                (done.get(partition, TopicPosition()) for done in self._done),
                key=lambda position: position.key,
            )

    async def _commit(
        self, number: int, session: Session, positions: dict[int, TopicPosition], events: Any
    ) -> None:
        known = self._applied[number]
        # Never back: this worker may have been ahead of the others at a restart.
        ahead = {
            partition: position
            for partition, position in positions.items()
            if partition not in known or position.key > known[partition].key
        }
        if not ahead:
            return
        try:
            rows = await self.call(session.apply, number, ahead, events)
        except RefusedRow as refusal:
            raise SinkError(f"table {session.plan.table}: {refusal}") from refusal
        self._counters.transactions += 1
        self._counters.rows += rows
