"""A projection: a function over events that keeps tables up to date, exactly once.

Each version of it has tables and a position of its own. A new version is built from the first event
beside the one that is running, compared with it, and then made the active one by one write:

1. `rebuild`: run the new version until it has caught up.
2. `diff`: the rows that are different now.
3. `swap`: readers of the projection find the new tables; a process that still runs the old version
   notices and ends.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, Protocol

from millstream.errors import (
    ConfigError,
    ConnectError,
    NoResponders,
    NotCaughtUp,
    RequestTimeout,
    TopicNotFound,
)
from millstream.event_store.events import StoredEvent
from millstream.event_store.store import EventStore
from millstream.event_store.usual import AT_ONCE, usual_events
from millstream.events.event import Event, Partition, PlainEvent
from millstream.events.subject import check_name
from millstream.messaging import Topic
from millstream.messaging.process import Process
from millstream.messaging.process_list import ProcessInfo
from millstream.messaging.processing.runs import GroupTransform, RawMessages
from millstream.projections.diff import RowDiff, diff_tables, same_tables
from millstream.projections.records import (
    ProjectionRecord,
    ProjectionRecords,
    declared,
    table_name,
)
from millstream.tables import Table

__all__ = [
    "Projection",
    "ProjectionView",
    "Projector",
    "diff_versions",
    "open_projection",
    "open_view",
]

# How often a running version looks whether another one was made the active one.
LOOK_SECONDS: Final = 1.0
# Messages that a version may lack and still be swapped in: the log does not stop for it.
SWAP_LAG: Final = 1000
VERSIONS_MAX: Final = 9999

# Called with an event and the table, or the tables by name.
Projector = Callable[..., Any | Awaitable[Any]]


class ProjectionHome(Protocol):
    """What a projection needs of the connection that opens it."""

    async def table(self, name: str, type: type | None = None) -> Table: ...

    async def create_table(
        self, name: str, settings: Any = None, *, schema: object = None
    ) -> Table: ...

    async def delete_topic(self, name: str) -> None: ...

    async def processes(self) -> list[ProcessInfo]: ...

    def process(
        self,
        source: Topic,
        target: Any,
        function: Projector,
        settings: Any = None,
        *,
        tables: Any = None,
        **values: Any,
    ) -> Process: ...


class Projection:
    """One version of a projection. Opened by `mill.projection(...)`.

    Rows and the position in the log are one commit: a crash at any point loses no event and counts
    none twice. A process ends when a newer version becomes the active one; if an older one does, it
    goes on, ready to be swapped in again. Order: events are handled in the order of the log, of
    each partition if it has several.
    """

    def __init__(
        self,
        home: ProjectionHome,
        records: ProjectionRecords,
        record: ProjectionRecord,
        version: int,
        process: Process,
    ) -> None:
        self.name = record.name
        self.version = version
        self._home = home
        self._records = records
        self._record = record
        self._process = process
        self.process_name = process.settings.name

    def __repr__(self) -> str:
        return f"<Projection {self.name}, version {self.version}>"

    async def run(self, once: bool = False) -> bool:
        """Keep the tables up to date until `stop`; with `once`, until all that is stored is in.

        Returns False if it ended because a newer version was made the active one.
        """
        watch = asyncio.create_task(self._replaced())
        work = asyncio.create_task(self._process.run(once))
        try:
            await asyncio.wait({watch, work}, return_when=asyncio.FIRST_COMPLETED)
            replaced = watch.done()
            if replaced:
                watch.result()  # its error, if it has failed
                self._process.stop()
            await work
            return not replaced
        finally:
            for task in (watch, work):
                task.cancel()
            await asyncio.gather(watch, work, return_exceptions=True)

    def stop(self) -> None:
        """Commit what is done and return from `run`."""
        self._process.stop()

    async def _replaced(self) -> None:
        """Returns when a newer version is active."""
        while True:
            with suppress(ConnectError, NoResponders, RequestTimeout):  # the process waits as well
                if (await self._records.get(self.name)).active > self.version:
                    return
            await asyncio.sleep(LOOK_SECONDS)

    async def rebuild(self) -> int:
        """Build this version up to the end of the log, beside the active one; returns its lag.

        What it has built before is kept: a call that was interrupted goes on.
        """
        await self._process.run(once=True)
        return await self.lag()

    async def lag(self) -> int:
        """Messages of the log that are not in the tables of this version yet."""
        for info in await self._home.processes():
            if info.name == self.process_name and info.lag is not None:
                return info.lag
        raise NotCaughtUp(self.name, self.version, None)

    async def is_active(self) -> bool:
        """Whether readers of the projection find this version."""
        return (await self._records.get(self.name)).active == self.version

    async def diff(self, against: int | None = None) -> AsyncIterator[RowDiff]:
        """The rows that differ between the active version, or another one, and this one."""
        async for row in diff_versions(self._home, self._records, self.name, self.version, against):
            yield row

    async def swap(self, max_lag: int = SWAP_LAG) -> int:
        """Make this version the active one; returns the version that was active before.

        NotCaughtUp when it lacks more than `max_lag` messages of the log.
        """
        lag = await self.lag()
        if lag > max_lag:
            raise NotCaughtUp(self.name, self.version, lag)
        before = 0

        def activate(record: ProjectionRecord | None) -> ProjectionRecord:
            nonlocal before
            if record is None or self.version not in record.versions:
                raise ConfigError(
                    f"projection '{self.name}' has no version {self.version} any more"
                )
            before = record.active
            return replace(record, active=self.version)

        self._record = await self._records.change(self.name, activate)
        return before

    async def drop(self, version: int) -> None:
        """Delete the tables of a version that is not active."""

        def forget(record: ProjectionRecord | None) -> ProjectionRecord:
            if record is None or version not in record.versions:
                raise ConfigError(f"projection '{self.name}' has no version {version}")
            if record.active == version:
                raise ConfigError(
                    f"version {version} of projection '{self.name}' is the active one: make "
                    f"another one active first"
                )
            names[:] = record.versions[version]
            rest = {v: tables for v, tables in record.versions.items() if v != version}
            return replace(record, versions=rest)

        names: list[str] = []
        await self._records.change(self.name, forget)
        for name in names:
            try:
                await self._home.delete_topic(table_name(name, version))
            except TopicNotFound:
                continue  # of a call that was interrupted

    async def table(self, name: str | None = None) -> Table:
        """A table of this version, active or not; the name may be left out if it has one."""
        tables = self._record.tables(self.version)
        return await self._home.table(tables[_chosen(self.name, name, tables)])


class ProjectionView:
    """The tables of a projection's active version, for readers; a swap takes effect at once."""

    def __init__(
        self, home: ProjectionHome, records: ProjectionRecords, name: str, cls: type | None = None
    ) -> None:
        self.name = name
        self._cls = cls  # of the rows; None: they are dicts, or bytes without a schema
        self._home = home
        self._records = records
        self._open: dict[str, Table] = {}

    async def table(self, name: str | None = None) -> Table:
        """A table of the active version; the name may be left out if it has one."""
        tables = (await self._records.get(self.name)).tables()
        topic = tables[_chosen(self.name, name, tables)]
        found = self._open.get(topic)
        if found is None:
            # Without those of the version before.
            self._open = {
                name: known for name, known in self._open.items() if name in tables.values()
            }
            found = self._open[topic] = await self._home.table(topic, self._cls)
        return found

    async def get(self, key: str, table: str | None = None) -> Any:
        """The value of a row; None when there is none."""
        entry = await (await self.table(table)).get(key)
        return None if entry is None else entry.value

    async def as_dict(self, table: str | None = None) -> dict[str, Any]:
        """All rows by key."""
        return await (await self.table(table)).as_dict()


async def open_projection(
    home: ProjectionHome,
    records: ProjectionRecords,
    name: str,
    source: EventStore | Topic,
    function: Projector,
    values: Mapping[str, Any],
) -> Projection:
    """A version of a projection, its tables created if they are missing; see `Mill.projection`."""
    settings = dict(values)
    version = _version(settings.pop("version", 1))
    schema, several = settings.pop("schema", None), settings.pop("tables", None)
    if schema is not None and several is not None:
        raise ConfigError("give a schema for the one table, or tables={name: schema}, not both")
    schemas: Mapping[str, object] = several or {name: schema}
    check_name("projection", name)
    if inspect.iscoroutinefunction(function):
        raise _asynchronous()
    about = (name, source.name, version, tuple(schemas))
    declared(await records.find(name), *about)  # refused before anything is created
    tables = {
        table: await home.create_table(table_name(table, version), schema=schema)
        for table, schema in schemas.items()
    }
    record = await records.change(name, lambda found: declared(found, *about))
    topic = source.topic if isinstance(source, EventStore) else source
    alone = name if list(tables) == [name] else None
    process = home.process(
        *(topic, [], _adapted(source, function, alone)),
        tables=tables,
        name=f"{name}-v{version}",
        **settings,
    )
    return Projection(home, records, record, version, process)


def _asynchronous() -> ConfigError:
    return ConfigError(
        "the function of a projection is asynchronous: write a plain function, and use "
        "mill.process for work that waits"
    )


def _version(found: object) -> int:
    if isinstance(found, bool) or not isinstance(found, int) or not 1 <= found <= VERSIONS_MAX:
        raise ConfigError(f"version {found!r:.40}: give a number from 1 to {VERSIONS_MAX:,}")
    return found


async def open_view(
    home: ProjectionHome, records: ProjectionRecords, name: str, cls: type | None = None
) -> ProjectionView:
    """The active version of a projection, for readers; ProjectionNotFound when there is none."""
    await records.get(name)
    return ProjectionView(home, records, name, cls)


async def diff_versions(
    home: ProjectionHome,
    records: ProjectionRecords,
    name: str,
    version: int,
    against: int | None = None,
) -> AsyncIterator[RowDiff]:
    """The rows that differ between two versions of a projection; `against` None: the active one."""
    record = await records.get(name)
    first = record.active if against is None else against
    for wanted in (first, version):
        if wanted not in record.versions:
            known = ", ".join(map(str, sorted(record.versions)))
            raise ConfigError(f"projection '{name}' has no version {wanted}; it has {known}")
    old, new = record.tables(first), record.tables(version)
    for table in same_tables(old, new):
        pair = [await home.table(topics[table]) for topics in (old, new)]
        async for row in diff_tables(table, *pair):
            yield row


def _chosen(projection: str, name: str | None, tables: Mapping[str, str]) -> str:
    if name is None and len(tables) == 1:
        return next(iter(tables))
    if name is None or name not in tables:
        raise ConfigError(
            f"projection '{projection}' has the tables {', '.join(tables)}; {name!r} was asked for"
        )
    return name


def _adapted(source: EventStore | Topic, function: Projector, alone: str | None) -> Projector:
    """The function as a process calls it: with one table alone, that table instead of a dict."""
    if not isinstance(source, EventStore):
        return lambda event, tables: _check_result(
            function(event, tables if alone is None else tables[alone])
        )
    return _StoreProjector(source, function, alone)


class _StoreProjector(GroupTransform):
    """A function of the events of a store: the events of one append are one step."""

    at_once = AT_ONCE

    def __init__(self, store: EventStore, function: Projector, alone: str | None) -> None:
        self._store = store
        self._function = function
        self._alone = alone  # the only table, which is handed over instead of a dict

    def read(self, partition: Partition, messages: RawMessages) -> list[list[StoredEvent] | None]:
        """The events of appends; None: it may be of a new type, or need the keys of persons."""
        return usual_events(partition, messages, self._store.types)

    def apply(self, read: list[StoredEvent], tables: Mapping[str, Any]) -> None:
        """Call the function for the events of one append."""
        function = self._function
        target = tables if self._alone is None else tables[self._alone]
        for stored in read:
            result = function(stored, target)
            if result is not None:
                _check_result(result)

    async def __call__(self, event: Event, tables: Mapping[str, Any]) -> None:
        """Look up what is not known yet, then the same."""
        if not isinstance(event, PlainEvent):
            raise ConfigError(f"{event!r} is not an append of store '{self._store.name}'")
        self.apply(await self._store.events_in(event), tables)


def _check_result(result: object) -> None:
    """A projection changes its tables; what its function returns would be lost."""
    if result is None:
        return
    if inspect.iscoroutine(result):
        result.close()
        raise _asynchronous()
    raise ConfigError(
        f"the function of a projection returned {result!r:.60}: it changes its tables and returns "
        f"nothing. Use mill.process for outputs"
    )
