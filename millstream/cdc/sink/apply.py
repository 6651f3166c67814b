"""A topic into a table of PostgreSQL or SQLite, exactly once: `await apply(mill, "orders", url)`.

Rows and the position are stored in one transaction, so that a killed process goes on exactly where
the table is. The position is in the table `millstream_positions` of the target.
"""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from millstream.cdc.sink.engine import ApplyCounters, Engine, GroupLimits
from millstream.cdc.sink.target import DatabaseLost, RefusedRow, Session, SinkPlan
from millstream.cdc.sink.topic_positions import TopicPosition
from millstream.cdc.state import STATE_TABLE
from millstream.cdc.topic_log import TopicLog
from millstream.deadline import Deadline
from millstream.errors import ConfigError, SinkError, TopicNotFound
from millstream.events.undecodable import OnUndecodable, check_policy
from millstream.nearest import settings_from
from millstream.settings import hide_password

if TYPE_CHECKING:
    from millstream.mill import Mill

__all__ = ["Applied", "Apply", "ApplySettings", "apply"]

_log = logging.getLogger("millstream.cdc")

WORKERS_MAX: Final = 64
PAUSE_SECONDS: Final = 0.2  # before the first retry; doubled up to
PAUSE_SECONDS_MAX: Final = 5.0


@dataclass(frozen=True, slots=True)
class ApplySettings:
    """How a topic is applied to a table."""

    table: str | None = None  # "orders" or "public.orders"; None: the name of the topic
    key: Sequence[str] = ()  # columns; none: those of the capture, or the table's primary key
    name: str = ""  # of the stored position; "": the table's. One name is one position
    workers: int = 1  # connections that share the keys; PostgreSQL only
    follow: bool = True  # go on with events that are stored later; False: end with the last one
    create: bool = True  # the table, and columns of later versions of the schema
    group_rows: int = 20_000  # events of one transaction, at most
    group_bytes: int = 16 * 1024 * 1024  # as Arrow data; memory is a few times as much
    retry_seconds: float = 60.0  # how long a lost database is waited for
    fail_on_data_loss: bool = True  # False: go on with what is left of the topic
    undecodable: OnUndecodable = "fail"  # as in ReadPlan

    def __post_init__(self) -> None:
        key = [self.key] if isinstance(self.key, str) else self.key
        object.__setattr__(self, "key", tuple(key))
        if not 1 <= self.workers <= WORKERS_MAX:
            raise ConfigError(f"workers {self.workers!r}: choose 1 to {WORKERS_MAX}")
        if self.group_rows < 1 or self.group_bytes < 1 or self.retry_seconds < 0:
            raise ConfigError("group_rows and group_bytes are at least 1, retry_seconds at least 0")
        check_policy(self.undecodable)


@dataclass(frozen=True, slots=True)
class Applied:
    """What was applied so far."""

    events: int  # of the topic
    rows: int  # upserted or deleted; less than events where a group had several for a key
    transactions: int
    truncations: int  # events that emptied the table
    retries: int  # after the database was lost
    positions: dict[int, TopicPosition]  # of each partition: the next event to apply


class Apply:
    """Applies one topic to one table; `await Apply(...).run()`. Not for several runs at once."""

    def __init__(
        self,
        mill: Mill,
        topic: str,
        url: str,
        settings: ApplySettings | None = None,
        **values: Any,
    ) -> None:
        chosen = settings_from(ApplySettings, settings, values) or ApplySettings()
        self._mill, self.topic, self._url = mill, topic, url
        self.settings = chosen
        self.table = chosen.table or topic
        self.name = chosen.name or self.table
        self._counters = ApplyCounters()
        self._make = _sessions_of(url, chosen.workers)
        self._plan = SinkPlan(
            self.name, topic, self.table, tuple(chosen.key), uuid.uuid4().hex, chosen.create
        )

    def __repr__(self) -> str:
        """Without passwords."""
        return f"<Apply {self.name}: {self.topic} to {self.table}, {hide_password(self._url)}>"

    @property
    def applied(self) -> Applied:
        """What was applied so far, by this object."""
        found = self._counters
        return Applied(
            *(found.events, found.rows, found.transactions, found.truncations, found.retries),
            dict(found.positions),
        )

    async def lag(self) -> int:
        """Messages of the topic that are not applied yet, as far as this object knows."""
        log = TopicLog(self._mill, self.topic)
        await log.open()
        positions = self._counters.positions
        return sum(
            max(0, state.next - (positions[number].offset if number in positions else state.first))
            for number, state in (await log.states()).items()
        )

    async def run(self, until: asyncio.Event | None = None) -> Applied:
        """Apply events until `until` is set, or without `follow` up to the topic's end.

        A lost database is connected again, with growing pauses, for up to `retry_seconds`.
        """
        stop = until or asyncio.Event()
        if not self._plan.key:
            self._plan = replace(self._plan, key=await _captured_key(self._mill, self.topic))
        pause, patience, done = PAUSE_SECONDS, Deadline(self.settings.retry_seconds), -1
        while True:
            try:
                await self._attempt(stop)
                return self.applied
            except RefusedRow as refusal:
                raise SinkError(f"table {self.table}: the database says: {refusal}") from refusal
            except DatabaseLost as lost:
                if self._counters.transactions > done:
                    done = self._counters.transactions
                    pause, patience = PAUSE_SECONDS, Deadline(self.settings.retry_seconds)
                if patience.passed:
                    raise SinkError(
                        f"table {self.table}: the database {hide_password(self._url)} could not be "
                        f"used for {patience.seconds:g} seconds: {lost}. What is stored is right; "
                        f"start again when it is back"
                    ) from lost
                self._counters.retries += 1
                _log.warning("apply '%s': %s; trying again", self.name, lost)
                with suppress(TimeoutError):
                    async with asyncio.timeout(patience.left(pause * random.uniform(0.5, 1))):
                        await stop.wait()
                if stop.is_set():
                    return self.applied
                pause = min(2 * pause, PAUSE_SECONDS_MAX)

    async def _attempt(self, stop: asyncio.Event) -> None:
        settings = self.settings
        executor = ThreadPoolExecutor(2 * WORKERS_MAX, "millstream-apply")
        log = TopicLog(self._mill, self.topic, settings.fail_on_data_loss, settings.undecodable)
        limits = GroupLimits(settings.group_rows, settings.group_bytes)
        engine = Engine(log, self._session, executor, limits, self._counters)
        try:
            await engine.run(settings.workers, settings.follow, stop)
        finally:
            executor.shutdown(wait=False)
            if self._counters.begun:  # from now on another owner is one who took over
                self._plan = replace(self._plan, take=False)

    def _session(self) -> Session:
        return self._make(self._url, self._plan)


async def apply(
    mill: Mill,
    topic: str,
    url: str,
    settings: ApplySettings | None = None,
    *,
    until: asyncio.Event | None = None,
    **values: Any,
) -> Applied:
    """Apply a topic of changes or rows, or a table, to a table of a database: exactly once.

    `await apply(mill, "orders", "postgresql://app@host/shop", table="orders", key=["id"])`: see
    ApplySettings. Returns when `until` is set, or with `follow=False` at the topic's end. A second
    one of the same name takes over, and the first ends with SinkTakenOver.
    """
    return await Apply(mill, topic, url, settings, **values).run(until)


def _sessions_of(url: str, workers: int) -> Callable[[str, SinkPlan], Session]:
    """What makes sessions of the database that an address means."""
    scheme = url.partition("://")[0]
    if scheme in ("postgresql", "postgres"):
        from millstream.cdc.sink.postgres import PostgresSession

        return PostgresSession
    if scheme == "sqlite":
        from millstream.cdc.sink.sqlite import SqliteSession, sqlite_path

        sqlite_path(url)
        if workers > 1:
            raise ConfigError("SQLite writes one transaction at a time: set workers to 1")
        return SqliteSession
    raise ConfigError(
        f"{hide_password(url)!r}: rows are applied to postgresql://user@host/database or "
        f"sqlite:///file"
    )


async def _captured_key(mill: Mill, topic: str) -> tuple[str, ...]:
    """The key columns of the table that a capture writes to this topic; empty: none is known."""
    try:
        table = await mill.table(STATE_TABLE)
    except TopicNotFound:
        return ()
    async for entry in table.entries():
        record = entry.json()
        if isinstance(record, dict) and record.get("topic") == topic:
            return tuple(record.get("key", ()))
    return ()
