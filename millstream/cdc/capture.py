"""A capture: rows and changes of a database to topics, exactly once.

1. Check the source, and create what a capture needs there (its position in the log first).
2. Open the topic of each table and claim its writer: a capture of the same name that still runs is
   fenced out.
3. Snapshot tables that have none yet, or an unfinished one.
4. Write changes; after they are stored, and only then, confirm them to the source.

Every event has the position that the source gives it, so what is sent again after a crash, of
whichever process, is skipped by the writer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from millstream.cdc.masks import masked_errors
from millstream.cdc.model import CaptureLag, Finding, Received, RowChanges, TableShape
from millstream.cdc.outbox import Outbox
from millstream.cdc.settings import CaptureSettings
from millstream.cdc.settings_file import check_capture
from millstream.cdc.source import CaptureSource
from millstream.cdc.state import CaptureRecord, States
from millstream.cdc.status import CaptureState, CaptureStatus, TableStatus
from millstream.cdc.table_topic import TableTopic
from millstream.cdc.topic_names import topic_findings
from millstream.deadline import now_ns
from millstream.errors import (
    CaptureError,
    ConfigError,
    ConnectError,
    MillstreamError,
    RequestTimeout,
    SourceLost,
    SourceUnreachable,
    TopicNotFound,
    Unconfirmed,
)
from millstream.mill import Mill
from millstream.settings import hide_password

__all__ = ["Capture"]

log = logging.getLogger(__name__)
T = TypeVar("T")

FLUSH_SECONDS: Final = 0.2  # between two stores while changes keep coming
FLUSH_ROWS: Final = 100_000  # that are written and not known to be stored
FIRST_PAUSE: Final = 0.5  # seconds before another attempt; doubles each time
LONGEST_PAUSE: Final = 15.0
GIVE_UP_SECONDS: Final = 900.0  # of attempts in a row that all failed
LAG_SECONDS: Final = 5.0  # between two looks at the lag
ALARM_SHARE: Final = 0.8  # of the log budget
# What another attempt may get past. The broker connection has tried for long enough by itself.
_PASSING: Final = (SourceUnreachable, RequestTimeout, Unconfirmed, ConnectError)


class _Stopped(Exception):
    """The capture was asked to stop while it waited."""


@asynccontextmanager
async def _closing(items: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """End a generator when the block is left: it holds connections, and what it reads from."""
    try:
        yield items
    finally:
        if isinstance(items, AsyncGenerator):
            await items.aclose()


class Capture:
    """Captures the changes of one source, until it is stopped."""

    def __init__(self, mill: Mill, source: CaptureSource, settings: CaptureSettings) -> None:
        check_capture(settings)
        self.settings = settings
        self._mill, self._source = mill, source
        self._state: CaptureState = "checking"
        self._since = datetime.fromtimestamp(now_ns() // 10**9, UTC).isoformat()
        self._error: str | None = None
        self._tables: dict[str, TableTopic] = {}
        self._outboxes: dict[str, Outbox] = {}
        self._statuses: dict[str, TableStatus] = {}
        self._identities: dict[str, int] = {}  # of the tables that are open
        self._lag = CaptureLag()
        self._alarms: list[str] = []
        self._left_out = ""  # why new tables are not captured
        self._stop = asyncio.Event()
        self._once = False  # end when it has caught up
        self._goal: int | None = None  # with what

    # -- running --------------------------------------------------------------------------

    async def run(self, until: asyncio.Event | None = None, *, once: bool = False) -> None:
        """Snapshot what is new, then capture changes, until the event is set.

        With `once` it also ends as soon as it has caught up with the source.

        A source or broker that cannot be reached is tried again for a quarter of an hour. What no
        attempt can repair (a breaking change, a lost position in the log, another capture of this
        name) is raised.
        """
        self._stop, self._once, self._goal = until or self._stop, once, None
        clock = asyncio.get_running_loop().time
        pause, failing_since = FIRST_PAUSE, None
        while True:
            began = clock()
            try:
                while await self._attempt():
                    pass
                self._state = "stopped"
                return
            except _Stopped:
                self._state = "stopped"
                return
            except _PASSING as error:
                self._error = str(error)
                worked = self._state != "checking" and clock() - began > 2 * LONGEST_PAUSE
                if worked or failing_since is None:
                    pause, failing_since = FIRST_PAUSE, clock()
                if clock() - failing_since > GIVE_UP_SECONDS or self._mill.connection.closed:
                    self._state = "failed"
                    raise
                log.warning("capture '%s': %s; trying again", self.settings.name, error)
            except BaseException as error:
                self._state, self._error = "failed", str(error)
                raise
            if await self._stopped_within(pause):
                self._state = "stopped"
                return
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._stop.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def _attempt(self) -> bool:
        """Open everything and run; true: again, because there are new tables."""
        try:
            await self._unless_stopped(self._open())
            await self._snapshot()
            return await self._stream()
        finally:
            for topic in self._tables.values():
                await topic.close()
            for outbox in self._outboxes.values():
                await outbox.close()
            self._tables, self._outboxes = {}, {}
            await self._source.close()

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """Do what may take long: a slot waits for the transactions that are open at its source."""
        task, stop = asyncio.create_task(work), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise _Stopped
        finally:
            for one in (task, stop):
                one.cancel()
            await asyncio.wait([task, stop])

    # -- opening --------------------------------------------------------------------------

    async def _open(self) -> None:
        self._state = "checking"
        source, name = self._source, self.settings.name
        await source.open()
        self._refuse(await source.check())
        shapes = await source.tables()
        self._refuse(topic_findings(self.settings, shapes))
        states = await States.opened(self._mill, name)
        known, identity = await states.capture(), await source.identity()
        if known is not None and known.identity != identity:
            raise SourceLost(
                name, f"its source is another database now ({identity}, it was {known.identity})"
            )
        if known is not None and known.format != self.settings.format:
            raise ConfigError(
                f"capture '{name}' has topics of {known.format}, and the settings say "
                f"{self.settings.format}: change that back, or 'millstream cdc reset --yes'"
            )
        created = await source.prepare(shapes)
        if created and known is not None:
            await source.reset()  # else the next attempt would find it and go on after a gap
            raise SourceLost(name, "its position in the log of the source is gone")
        await states.put_capture(CaptureRecord(identity, self.settings.format))
        await self._open_tables(states, shapes)

    def _refuse(self, findings: Sequence[Finding]) -> None:
        """Do not start with something fatal missing."""
        listed = "; ".join(
            f"{one.subject}: {one.text}" + (f" ({one.fix})" if one.fix else "")
            for one in findings
            if not one.ok and one.fatal
        )
        if listed:
            raise ConfigError(f"capture '{self.settings.name}' cannot start: {listed}")

    async def _open_tables(self, states: States, shapes: Sequence[TableShape]) -> None:
        outboxes = {one.table: one for one in self.settings.outbox}
        self._identities = {shape.full_name: shape.identity for shape in shapes}
        for shape in shapes:
            outbox = outboxes.get(shape.full_name)
            if outbox is not None:
                self._outboxes[shape.full_name] = Outbox(self._mill, self.settings, outbox, shape)
                continue
            topic = await TableTopic.opened(self._mill, states, self.settings, shape)
            self._tables[topic.table] = topic
            status = TableStatus(topic.table, topic.name, snapshot_estimate=shape.estimate)
            self._statuses.setdefault(topic.table, status)
        # A table without a position gets one by its snapshot, which is newer than all others.
        positions = [topic.position[0] for topic in self._tables.values()]
        self._source.start_at(min(filter(None, positions), default=0))

    # -- the snapshot ---------------------------------------------------------------------

    async def _snapshot(self) -> None:
        tables = [topic for topic in self._tables.values() if not topic.snapshot_done]
        if not tables or not self.settings.snapshot or self._stop.is_set():
            return
        self._state = "snapshot"
        shapes = {shape.full_name: shape for shape in await self._source.tables()}
        async with AsyncExitStack() as stack:
            view = await self._unless_stopped(stack.enter_async_context(self._source.snapshot()))
            for topic in tables:
                if self._stop.is_set():
                    return
                status = self._statuses[topic.table]
                status.state = "snapshot"
                after = await topic.begin_snapshot(shapes[topic.table], view.point)
                log.info("capture '%s': snapshot of %s", self.settings.name, topic.table)
                with masked_errors(self.settings.settings_of(topic.table)):
                    async with _closing(view.rows(shapes[topic.table], after)) as batches:
                        async for rows, last in batches:
                            await topic.write_rows(rows, last)
                            status.snapshot_rows = topic.rows
                            if self._stop.is_set():
                                await topic.writer.flush()
                                return
                await topic.finish_snapshot()
                log.info(
                    "capture '%s': snapshot of %s has %s rows",
                    *(self.settings.name, topic.table, f"{topic.rows:,}"),
                )

    # -- changes --------------------------------------------------------------------------

    async def _stream(self) -> bool:
        """Write changes until the capture ends; true: until there are new tables to open."""
        if self._stop.is_set():
            return False
        self._state, self._error = "streaming", None
        for status in self._statuses.values():
            status.state = "streaming"
        async with _closing(self._source.changes()) as received:
            return await self._write_all(received)

    async def _write_all(self, changes: AsyncIterator[Received]) -> bool:
        clock = asyncio.get_running_loop().time
        stored = looked = beaten = clock()
        waiting, confirmed = 0, -1
        async for received in changes:
            waiting += await self._write_before_error(received)
            now = clock()
            due = received.idle or now - stored > FLUSH_SECONDS or waiting > FLUSH_ROWS
            if due and (waiting or received.upto > confirmed):
                if waiting:
                    await self._flush()
                if received.upto > confirmed:
                    await self._source.confirm(received.upto)
                waiting, confirmed, stored = 0, received.upto, clock()
            if now - looked > LAG_SECONDS:
                looked = now
                await self._look()
            more = False
            if now - beaten > self.settings.heartbeat and not waiting:
                beaten = now
                await self._beat(received.upto)
                more = await self._has_new_tables()
            done = self._once and received.idle and await self._caught_up(received.upto)
            if self._stop.is_set() or done or more:
                await self._flush()
                await self._source.confirm(received.upto)
                return more
        return False

    async def _has_new_tables(self) -> bool:
        """Whether there are tables that the settings mean, made since this began."""
        try:
            shapes = await self._source.tables()
        except ConfigError as error:  # one of them has a column that no topic can have
            self._left_out = f"new tables are not captured: {error}"
            return False
        known = self._identities
        found = {one.full_name for one in shapes if known.get(one.full_name) != one.identity}
        if not found:
            self._left_out = ""
            return False
        names = ", ".join(sorted(found))
        findings = [*await self._source.check(), *topic_findings(self.settings, shapes)]
        problems = [one for one in findings if not one.ok and one.fatal]
        if not problems:
            log.info("capture '%s': new tables: %s", self.settings.name, names)
            return True
        # What runs is not stopped by a table that it could not be started with.
        self._left_out = f"new tables are not captured ({names}): {problems[0].text}"
        return False

    async def _caught_up(self, upto: int) -> bool:
        """Whether it has all that the source had when it was first asked."""
        lag = self._lag = await self._source.lag()
        if self._goal is None:
            # Others may write without end; positions that count bytes pass this all the same.
            self._goal = upto + (lag.bytes or 0)
        return not lag.bytes or upto >= self._goal

    async def _write_before_error(self, received: Received) -> int:
        rows = 0
        try:
            for changes in received.changes:
                await self._write_table(changes)
                rows += len(changes)
        except CaptureError:
            with suppress(MillstreamError):  # the first error says more
                await self._flush()  # what came before it is right
            raise
        return rows

    async def _write_table(self, changes: RowChanges) -> None:
        name = changes.table.full_name
        target = self._tables.get(name) or self._outboxes.get(name)
        if target is None:
            return  # left out of the settings since it was sent
        await target.write(changes, self._source.is_after)
        status = self._statuses.get(name)
        if status is not None:
            status.events = target.events

    async def _flush(self) -> None:
        outboxes = [w for outbox in self._outboxes.values() for w in outbox.writers]
        writers = [*(topic.writer for topic in self._tables.values()), *outboxes]
        await asyncio.gather(*(writer.flush() for writer in writers))
        self._note_positions()

    def _note_positions(self) -> None:
        for topic in self._tables.values():
            commit, place = topic.position
            self._statuses[topic.table].position = f"{commit}:{place}"

    async def _beat(self, upto: int) -> None:
        """Store for idle tables that nothing has changed up to here."""
        for topic in self._tables.values():
            if topic.position < (upto, 0):
                await topic.writer.advance((upto, 0))
        self._note_positions()

    async def _look(self) -> None:
        """How far behind; and whether the source will soon run out of room for what waits."""
        lag = self._lag = await self._source.lag()
        alarms = [self._left_out] if self._left_out else []
        budget = lag.budget_bytes or self.settings.log_budget
        if lag.kept_bytes is not None and lag.kept_bytes > ALARM_SHARE * budget:
            alarms.append(
                f"the source keeps {lag.kept_bytes:,} bytes of log for this capture, of "
                f"{budget:,} that it may: it must catch up, or the source drops what it needs"
            )
        for alarm in alarms:
            if alarm not in self._alarms:
                log.warning("capture '%s': %s", self.settings.name, alarm)
        self._alarms = alarms

    # -- about it -------------------------------------------------------------------------

    def status(self) -> CaptureStatus:
        """How it is at this moment."""
        return CaptureStatus(
            name=self.settings.name,
            state=self._state,
            source=hide_password(self.settings.source),
            since=self._since,
            tables=list(self._statuses.values()),
            lag=self._lag,
            error=self._error,
            alarms=list(self._alarms),
        )

    async def reset(self, table: str | None = None, keep_topics: bool = False) -> list[str]:
        """Forget the capture, or one table of it: the next run begins with a new snapshot.

        Removes what it created at the source (not for a single table), its records, and unless
        they are kept the topics, whose names are returned. It must not be running.
        """
        if keep_topics and self.settings.format == "rows":
            raise ConfigError(
                "topics of rows cannot be kept: they cannot say that rows of an earlier snapshot "
                "are gone"
            )
        states = await States.opened(self._mill, self.settings.name)
        known = await states.tables()
        if table is not None and table not in known:
            names = ", ".join(sorted(known)) or "none"
            raise CaptureError(
                f"capture '{self.settings.name}' has no table {table}; it has {names}"
            )
        chosen = known if table is None else {table: known[table]}
        if table is None:
            await self._source.open()
            try:
                await self._source.reset()
            finally:
                await self._source.close()
        await states.forget(list(chosen), capture=table is None)
        topics = [] if keep_topics else sorted({record.topic for record in chosen.values()})
        for topic in topics:
            try:
                await self._mill.delete_topic(topic)
            except TopicNotFound:
                continue
        return topics
