"""From all input partitions to tables and topics: state, outputs and positions in one commit.

One worker handles the events of all input partitions in turn, so a row is never written by two.
`commits.py` stores what it collects, and says why nothing is lost, doubled or half done.

1. Open the commits: claim the fences, complete the last commit, learn how far the input is.
2. Read the tables that the function changes into memory.
3. Call the function for each event. Its changes and outputs are collected; if it raises, those of
   this event are undone.
4. Commit when enough is collected or some time has passed, in the middle of a pack too. While it
   is stored, go on with 3; the next commit waits for it.
5. An output that turns out not to fit its topic when packs are made: undo everything since the
   last commit and read it again, without the event that it came from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final, cast

from millstream.deadline import Deadline
from millstream.errors import ConfigError, ProcessFailed
from millstream.events.classify import is_for_another
from millstream.events.event import Event, NewEvent, Partition, PlainEvent
from millstream.events.pack_event import PackEvent
from millstream.events.undecodable import DECODE_FAILURES
from millstream.events.unpack import events_in
from millstream.messaging.processing.commits import Commits, Part, StreamKey
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
from millstream.messaging.processing.record import InputPosition
from millstream.messaging.processing.redo import REDO_BYTES_MAX
from millstream.messaging.processing.rows import NewRows
from millstream.messaging.processing.runs import Run, runs_of
from millstream.messaging.processing.state_table import Meter, StateTable, too_many_rows
from millstream.messaging.processing.work import Work
from millstream.messaging.reading.replay import ReadPlan, read_messages
from millstream.wire.aio.interest_hold import InterestHold, hold_on
from millstream.wire.api import AckAddress, parse_ack_address
from millstream.wire.message import OutgoingMessage, RawMessage

__all__ = ["TableWorker"]

# A commit is made when it has about this much. A row that changes often is stored once in it, so a
# process that has a lot to read makes large commits.
COMMIT_ROWS: Final = 20_000
COMMIT_BYTES: Final = 8 * 1024 * 1024
# While the commit before is being stored more is collected, up to this much; then it is waited for.
LATE_ROWS: Final = 200_000
LATE_BYTES: Final = 3 * COMMIT_BYTES
# What one event may change: with all that was collected before, it fits a redo.
EVENT_BYTES_MAX: Final = REDO_BYTES_MAX - LATE_BYTES
# With this many events before it a process is far behind, and commits this much less often.
FAR_EVENTS: Final = 20_000
FAR_FACTOR: Final = 20
# Events after which others on the event loop have their turn, commits under way for example.
TURN_EVENTS: Final = 2000


def _all_of(address: AckAddress) -> InputPosition:
    """The position after a message."""
    return InputPosition(address.sequence, str(address.timestamp_ns))


def _up_to(event: Event) -> InputPosition:
    """The position after an event."""
    if isinstance(event, PlainEvent):
        return _all_of(event.address)
    address = cast(PackEvent, event).message.address
    return InputPosition(address.sequence, str(address.timestamp_ns), event.index + 1)


class _Rewind(Exception):
    """Everything since the last commit has to be read again."""


class TableWorker:
    """Follows all input partitions."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._settings = work.settings
        self._inputs = list(work.parts.inputs)
        self._router = Router(work.parts.outputs)
        self._outputs = {output.name: output for output in work.parts.outputs}
        first = next(iter([*work.parts.tables.values(), *work.parts.outputs])).target
        self._jetstream = first.jetstream
        self._failures = Failures(first.jetstream, first.publisher, work.settings)
        self._commits = Commits(work.settings.name, work.parts)
        self._holds: dict[str, InterestHold] = {}
        self._meter = Meter()
        self._tables = {
            name: StateTable(output, self._meter) for name, output in work.parts.tables.items()
        }
        self._arguments: tuple[Any, ...] = (self._tables,) if self._tables else ()
        self._rows = {o.name: NewRows(o) for o in work.parts.outputs if o.is_table}
        self._waiting: dict[StreamKey, list[Made]] = {}
        self._made = 0  # outputs since the last commit
        self._made_bytes = 0
        self._positions: dict[str, InputPosition] = {}
        self._committed: dict[str, InputPosition] = {}
        self._storing: asyncio.Task[None] | None = None
        self._skipped: set[tuple[str, int, int]] = set()  # events that are dead letters already
        self._behind = 0  # events that are waiting to be read, roughly

    async def run(self, once: bool) -> None:
        """Process until the work is stopped; with `once`, until everything stored now is done."""
        try:
            await self._start()
            while not await self._follow(once):
                pass  # ends: each round takes one event away
        except Exception:
            self._work.stopping.set()
            raise
        finally:
            if self._storing is not None:
                self._storing.cancel()
                await asyncio.gather(self._storing, return_exceptions=True)

    # -- starting -------------------------------------------------------------------------

    async def _start(self) -> None:
        name, jetstream = self._settings.name, self._jetstream
        for partition in self._inputs:
            await check_retention(jetstream, partition.stream, name)
        found = await self._commits.open(self._inputs[0].stream if self._inputs else "")
        left = self._settings.rows_max
        for table in self._tables.values():
            await table.load(left, self._settings.rows_max)
            left -= len(table)
        # Positions of inputs that are not read this time are kept.
        self._positions = {part.stream: InputPosition() for part in self._inputs} | found
        self._committed = dict(self._positions)
        for partition in self._inputs:
            stream, position = partition.stream, self._positions[partition.stream]
            known = position.offset > 0
            hold = await hold_on(jetstream, stream, "process", name, known=known)
            if hold is not None:
                self._holds[stream] = hold
            await check_input(
                jetstream, stream, name, (position.offset, position.stored), position.next
            )
        await self._let_go()

    # -- reading --------------------------------------------------------------------------

    async def _follow(self, once: bool) -> bool:
        """Read until the end or until stopped; False when it has to be read again."""
        every = self._settings.commit_every
        due, far = Deadline(every), Deadline(every * FAR_FACTOR)
        plan = ReadPlan(follow=not once, fail_on_data_loss=self._settings.fail_on_data_loss)
        starts = {part.stream: self._positions[part.stream].next for part in self._inputs}
        messages = read_messages(self._jetstream, self._inputs, plan, starts=starts)
        found = groups(messages, self._work.stopping, every)
        try:
            async for group in found:
                if group is not None:
                    await self._handle(*group)
                late = far.passed and not self._busy
                if group is None or late or (due.passed and self._behind < FAR_EVENTS):
                    await self._commit()
                    due, far = Deadline(every), Deadline(every * FAR_FACTOR)
                if self._work.stopping.is_set():
                    break
            await self._commit()
            await self._stored()
        except _Rewind:
            return False
        except ProcessFailed:
            # Everything before the event that failed is done.
            await self._commit()
            await self._stored()
            raise
        finally:
            await found.aclose()
        return True

    async def _handle(self, partition: Partition, messages: list[RawMessage]) -> None:
        """Handle a group of messages: runs of plain ones together, any other one by one."""
        stream, stopping = partition.stream, self._work.stopping
        if self._positions[stream].events is not None:
            await self._handle_one(partition, messages[0])  # it may be handled in part
            messages = messages[1:]
        for part in runs_of(self._work.function, partition, messages):
            if stopping.is_set():
                return
            if isinstance(part, Run):
                await self._apply(stream, part)
                self._behind = parse_ack_address(messages[-1].reply).pending
            else:
                await self._handle_one(partition, part)

    async def _handle_one(self, partition: Partition, raw: RawMessage) -> None:
        """Handle one message, from its first event that is not handled."""
        address, before = parse_ack_address(raw.reply), self._positions[partition.stream]
        first = before.events or 0 if before.offset == address.sequence else 0
        events = await self._events(partition, raw)
        run = Run(self._work.function, events, events.__getitem__, packed=True)
        await self._apply(partition.stream, run, first)
        self._positions[partition.stream] = _all_of(address)
        self._behind = address.pending * max(1, len(events))

    async def _events(self, partition: Partition, raw: RawMessage) -> list[Event]:
        if is_for_another(raw.headers, self._settings.name):
            return []
        try:
            return events_in(partition, raw)
        except DECODE_FAILURES as error:
            await self._failures.failed(PlainEvent(partition, raw), error)
            return []

    async def _apply(self, stream: str, run: Run, first: int = 0) -> None:
        """Call the function for the events of a run, from the first that is not handled."""
        work, arguments, most = self._work, self._arguments, self._settings.commit_events
        meter, journal = self._meter, self._meter.journal
        function, items, event_of, packed = run
        done = first
        for item in items[first:] if first else items:
            if self._skipped and self._is_skipped(stream, event_of(done)):
                done += 1
                continue
            work.handled += 1
            try:
                result = function(item, *arguments)
                if result is not None:
                    if hasattr(result, "__await__"):
                        result = await result
                    self._collect(event_of(done), outputs_of(result))
                if len(journal) > 1:
                    self._check_journal()
            except Exception as error:
                self._undo()
                if done:
                    self._positions[stream] = _up_to(event_of(done - 1))
                await self._failures.failed(event_of(done), error)
            journal.clear()
            done += 1
            if not work.handled % TURN_EVENTS:
                await asyncio.sleep(0)
            if (
                self._made >= most or meter.rows >= COMMIT_ROWS or meter.bytes >= COMMIT_BYTES
            ) and self._full():
                self._positions[stream] = _up_to(event_of(done - 1))
                await self._commit()
            if work.stopping.is_set() and not packed:
                break
        if done > first:
            self._positions[stream] = _up_to(event_of(done - 1))

    def _is_skipped(self, stream: str, event: Event) -> bool:
        return (stream, event.offset, event.index) in self._skipped

    def _undo(self) -> None:
        """Take back what the present event has changed."""
        for table, key, old, first in reversed(self._meter.journal):
            table.put_back(key, old, first)

    def _check_journal(self) -> None:
        """Refuse an event that changes more than a commit can hold."""
        if self._meter.bytes <= EVENT_BYTES_MAX:
            return
        changed = {(id(table), key): table for table, key, *_ in self._meter.journal}
        size = sum(table.size_of(key) for (_, key), table in changed.items())
        if size > EVENT_BYTES_MAX:
            raise ConfigError(
                f"one event changed {len(changed):,} rows of {size:,} bytes: at most "
                f"{EVENT_BYTES_MAX:,} fit a commit. Change fewer rows for one event"
            )

    # -- collecting -----------------------------------------------------------------------

    def _collect(self, event: Event, made: Iterable[NewEvent]) -> None:
        """Note the outputs of an event: all of them, or none when one is wrong."""
        placed: list[tuple[str, int, Made | OutgoingMessage]] = []
        size = 0
        for number, new in enumerate(made):
            output = self._router.of(new)
            if new.options is not None:
                raise ConfigError("an output of a process takes no options")
            if output.is_table:
                number, row = self._rows[output.name].encode(new)
                placed.append((output.name, number, row))
                size += len(row.payload)
            else:
                number = self._router.partition(output, new, event, number)
                placed.append((output.name, number, Made(new, event)))
                if type(new.value) is bytes:
                    size += len(new.value)
        for name, number, item in placed:
            if isinstance(item, Made):
                self._waiting.setdefault((name, number), []).append(item)
            else:
                self._rows[name].put(number, item)
        self._made += len(placed)
        self._made_bytes += size
        self._meter.bytes += size

    def _full(self) -> bool:
        """Whether there is enough for a commit; a row that changed often counts once."""
        meter = self._meter
        if self._made >= self._settings.commit_events:
            return True
        if self._busy:
            return meter.rows >= LATE_ROWS or meter.bytes >= LATE_BYTES
        if meter.rows >= COMMIT_ROWS:
            return True
        meter.bytes = self._made_bytes + sum(t.changed_bytes() for t in self._tables.values())
        return meter.bytes >= COMMIT_BYTES // 2

    @property
    def _busy(self) -> bool:
        """Whether a commit is being stored."""
        return self._storing is not None and not self._storing.done()

    # -- committing -----------------------------------------------------------------------

    async def _commit(self) -> None:
        """Begin to store everything that is collected, when the commit before is stored."""
        await self._stored()
        if self._positions == self._committed:
            return
        rows = sum(len(table) for table in self._tables.values())
        if rows > self._settings.rows_max:
            raise too_many_rows(self._settings.rows_max)
        parts, count = await self._take()
        positions = dict(self._positions)
        self._storing = asyncio.create_task(self._store(parts, positions, count))
        await asyncio.sleep(0)  # so that it is under way

    async def _take(self) -> tuple[dict[StreamKey, Part], int]:
        """What a commit has for each stream, and how many outputs and rows that is."""
        parts: dict[StreamKey, Part] = {}
        count = 0
        try:
            for key, waiting in self._waiting.items():
                part = parts.setdefault(key, Part())
                target = self._outputs[key[0]].target
                part.packs = packs_of(waiting, target, self._settings.packing)
                count += len(waiting)
        except UnfitOutput as unfit:
            await self._rewind(unfit)
        tables = self._work.parts.tables
        taken = [(name, rows.take()) for name, rows in self._rows.items()]
        taken += [(tables[name].name, table.take()) for name, table in self._tables.items()]
        for name, rows in taken:
            for number, row in rows:
                parts.setdefault((name, number), Part()).rows.append(row)
                count += 1
        self._forget()
        return parts, count

    def _forget(self) -> None:
        """What was collected is on its way, or undone."""
        self._waiting = {}
        self._made = self._made_bytes = 0
        self._meter.clear()

    async def _rewind(self, unfit: UnfitOutput) -> None:
        """Go back to the last commit, and leave the event out that has an unfit output."""
        event = unfit.event
        for table in self._tables.values():
            table.roll_back()
        for rows in self._rows.values():
            rows.clear()
        self._forget()
        self._positions = dict(self._committed)
        await self._failures.failed(event, unfit.error)
        self._skipped.add((self._stream_of(event), event.offset, event.index))
        raise _Rewind

    def _stream_of(self, event: Event) -> str:
        return next(
            part.stream
            for part in self._inputs
            if (part.topic, part.number) == (event.topic, event.partition)
        )

    async def _store(
        self, parts: dict[StreamKey, Part], positions: dict[str, InputPosition], count: int
    ) -> None:
        await self._commits.store(parts, positions)
        self._committed = positions
        self._work.produced += count
        await self._let_go()

    async def _stored(self) -> None:
        """Wait for the commit that is under way."""
        if self._storing is not None:
            await self._storing
            self._storing = None
            done = self._committed
            self._skipped = {s for s in self._skipped if s[1] >= done[s[0]].offset}

    async def _let_go(self) -> None:
        """Let an interest topic drop what a restart would not read again."""
        for stream, hold in self._holds.items():
            await hold.move(self._committed[stream].next)
