"""The connection that application code holds: `mill = await millstream.connect()`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from millstream.errors import ConfigError, SchemaError, SchemaNotFound, TopicNotFound
from millstream.events.value_type import ValueType
from millstream.messaging import Client, Connecting, Topic, TopicInfo, TopicSettings
from millstream.messaging.topics.admin import declare
from millstream.messaging.topics.lookup import open_topic
from millstream.messaging.topics.stream_config import from_stream_config
from millstream.nearest import check_known, settings_from
from millstream.settings import ConnectionSettings

if TYPE_CHECKING:
    from millstream.event_store.info import StoreInfo
    from millstream.event_store.store import EventStore
    from millstream.messaging.process import (
        Process,
        ProcessSettings,
        Sources,
        StateTables,
        Targets,
        Transform,
    )
    from millstream.projections.diff import RowDiff
    from millstream.projections.projection import Projection, ProjectionView, Projector
    from millstream.projections.records import ProjectionRecord, ProjectionRecords
    from millstream.schemas.registry.guard import Guard, GuardSettings
    from millstream.schemas.registry.records import TopicSchemas
    from millstream.schemas.registry.registry import Registry
    from millstream.tables import Table

__all__ = ["Mill", "connect"]


def connect(
    url: str | None = None,
    *,
    client_id: str | None = None,
    settings: ConnectionSettings | None = None,
    **changes: Any,
) -> Connecting[Mill]:
    """Connect to a broker: `mill = await connect()`, or `async with connect() as mill`.

    The address is `url`, else that of the context of the `nats` tool that `context` names, else
    `NATS_URL`, else that of the context `NATS_CONTEXT`, else `url` in millstream.toml, else the
    broker that `millstream up` started on the data folder (NotRunning if that folder is named or
    exists but has no broker), else nats://127.0.0.1:4222. Other settings are those of
    ConnectionSettings, as keywords. A `client_id` is claimed for this connection only.
    """
    known = [*ConnectionSettings.__dataclass_fields__, "url", "context", "client_id"]
    check_known(changes, known)
    if settings is not None and (url is not None or changes):
        raise ConfigError("give ConnectionSettings, or an address and keywords, not both")
    return Connecting(Mill, settings or ConnectionSettings.load(url, **changes), client_id)


class Mill(Client):
    """A connection to a broker, for one event loop: subjects, topics, schemas and tables.

    Reconnects automatically; close it when done.
    """

    @cached_property
    def schemas(self) -> Registry:
        """The schema registry of this broker."""
        from millstream.schemas.registry.registry import Registry

        return Registry(self)

    # -- topics ---------------------------------------------------------------------------

    async def create_topic(
        self,
        name: str,
        settings: TopicSettings | None = None,
        *,
        schema: object = None,
        compatibility: str | None = None,
        **values: Any,
    ) -> Topic:
        """Create a topic; no-op if it already exists with the same settings and schema.

        `create_topic("orders", schema=Order, partitions=4, max_age="7d")`: see TopicSettings.
        The schema is anything that `schemas.declare` accepts; single events are written as JSON
        unless `wire_format` is "avro" or "protobuf". If the topic has a schema, another one
        becomes its next version if `compatibility` (default BACKWARD) allows it, else
        Incompatible names the field. TopicConflict says which setting differs from an existing
        topic's.
        """
        if schema is not None and settings is None:
            values.setdefault("wire_format", "json")
        also = ("schema", "compatibility")
        wanted = settings_from(TopicSettings, settings, values, also) or TopicSettings()
        if schema is None:
            if compatibility is not None:
                raise ConfigError("compatibility needs a schema")
            return await self._open(await declare(self.jetstream, name, wanted), None)
        if wanted.wire_format is None:
            wanted = wanted.changed({"wire_format": "json"})
        await self.schemas.check_first(name, schema, wanted.wire_format, compatibility)
        info = await declare(self.jetstream, name, wanted)
        await self.schemas.register(name, schema, compatibility)
        return await self._open(info, schema if isinstance(schema, type) else None)

    async def topic(self, name: str, type: type | None = None) -> Topic:
        """An existing topic, or any JetStream stream as it is.

        With `type` values are objects of that class, whichever version they were written with;
        without it they are dicts (bytes when the topic has no schema). `type=bytes` reads the
        stored bytes, for tools: the schema is not used, and nothing can be published.
        """
        return await self._open(await open_topic(self.jetstream, name), type)

    async def delete_topic(self, name: str) -> None:
        """Delete a topic, all its events and the versions of its schema.

        The versions stay while a mirror of the topic exists, because it is read with them. With an
        event store its snapshots, its archive and its keys are deleted as well.
        """
        from millstream.schemas.registry.stores import StoreSchemas

        store = StoreSchemas(self.schemas, name)
        is_store = await store.record() is not None
        unused = await self.schemas.find(name) is not None and not await self._has_mirror(name)
        # The topic first: a user without permission must not delete its schema either.
        missing: TopicNotFound | None = None
        try:
            await super().delete_topic(name)
        except TopicNotFound as error:
            missing = error  # the rest may be there, of a deletion that was interrupted
        if unused:
            await self.schemas.forget(name)
        if is_store:
            from millstream.event_store.opening import COMPANIONS

            for suffix in COMPANIONS:
                with suppress(TopicNotFound):
                    await super().delete_topic(name + suffix)
            await store.forget()
        if missing is not None:
            raise missing

    async def _has_mirror(self, name: str) -> bool:
        """Whether some topic mirrors this one; IncompleteList when that cannot be known now."""
        configs = await self.jetstream.stream_configs()
        mirrors = [from_stream_config(config).mirror for config in configs]
        return any(mirror is not None and mirror.topic == name for mirror in mirrors)

    async def _open(self, info: TopicInfo, cls: type | None) -> Topic:
        return await self.open_as(info, await self._values(info, cls))

    async def promote_topic(self, name: str, *, allow_lag: bool = False) -> TopicInfo:
        """Turn a mirror into a topic of its own, which continues after the last mirrored event.

        It keeps the schema of its origin, with all its versions.
        """
        settings = (await open_topic(self.jetstream, name)).settings
        record = await self._record_of_origins(settings, None)
        info = await super().promote_topic(name, allow_lag=allow_lag)
        if record is None:
            return info
        await self.schemas.adopt(name, record)
        return await open_topic(self.jetstream, name)

    async def _values(self, info: TopicInfo, cls: type | None) -> ValueType | None:
        """The value type of a topic by its schema; None: bytes."""
        settings = info.settings
        if cls is bytes:
            return await self._raw(info)
        if settings.wire_format is None:
            record = await self._record_of_origins(settings, cls)
        else:
            record = await self.schemas.find(info.name)
            if record is None:
                raise SchemaNotFound(
                    f"topic '{info.name}' was created with a schema, but the registry has none. "
                    f"Register it: 'millstream schema register {info.name} FILE', or "
                    f"create_topic(...)"
                )
        if record is not None:
            from millstream.schemas.registry.binding import TypedValues

            schemas = await self.schemas.schemas_of(record)
            return TypedValues(record, schemas, self.schemas.schema, cls)
        if cls is not None:
            raise SchemaError(
                f"topic '{info.name}' has no schema, so its values are bytes and cannot be read "
                f"as {cls.__name__}. Create it with create_topic(..., schema=...)"
            )
        return None

    async def _raw(self, info: TopicInfo) -> ValueType | None:
        if info.settings.wire_format is None:
            return None
        from millstream.schemas.registry.binding import RawValues

        return RawValues(info.name)

    async def _record_of_origins(
        self, settings: TopicSettings, cls: type | None
    ) -> TopicSchemas | None:
        """The schema of a copy: that of its origins, if they agree or a class is given."""
        origins = settings.sources if settings.mirror is None else (settings.mirror,)
        if not origins or any(o.domain is not None or o.foreign for o in origins):
            return None
        found = [await self.schemas.find(origin.topic) for origin in origins]
        first = found[0]
        for record in found:
            if first is None or record is None or record.format != first.format:
                return None
            if cls is None and record.latest != first.latest:
                return None
        return first

    # -- tables ---------------------------------------------------------------------------

    async def create_table(
        self,
        name: str,
        settings: TopicSettings | None = None,
        *,
        schema: object = None,
        compatibility: str | None = None,
        **values: Any,
    ) -> Table:
        """Create a table: a topic that keeps the latest value of each key."""
        from millstream.tables import Table

        if settings is None:
            values.setdefault("history", 1)
        elif isinstance(settings, TopicSettings) and settings.history is None:
            raise ConfigError(f"table '{name}': set a history, normally 1")
        topic = await self.create_topic(
            name, settings, schema=schema, compatibility=compatibility, **values
        )
        return Table(topic)

    async def table(self, name: str, type: type | None = None) -> Table:
        """An existing table; see `topic` for `type`."""
        from millstream.tables import Table

        return Table(await self.topic(name, type))

    async def tables(self) -> list[TopicInfo]:
        """All tables: the topics that keep the latest values of each key."""
        infos = await self.topics()
        return [info for info in infos if info.managed and info.settings.history is not None]

    # -- event stores ---------------------------------------------------------------------

    async def event_store(
        self,
        name: str,
        state: type | None = None,
        *,
        events: Iterable[type] | Mapping[str, type] = (),
        **values: Any,
    ) -> EventStore:
        """An event store, created if `events` are given and there is none of that name.

        `event_store("accounts", Account, events=[Opened, Deposited])`: the classes of the events
        (dataclasses, msgspec Structs or Pydantic models), and the class of the states, which has a
        method `apply(event)`. A changed class becomes the next version of its event if that can
        read what is stored, or with a function in `upcasters`. Other keywords are those of
        StoreSettings, and of TopicSettings for a new store. Without `events` an existing one is
        opened for reading: events are dicts.
        """
        from millstream.event_store.opening import open_store

        return await open_store(self, name, state, events, values)

    async def event_stores(self) -> list[StoreInfo]:
        """All event stores: their types of events, aggregates and appends."""
        from millstream.event_store.opening import list_stores

        return await list_stores(self)

    # -- projections ----------------------------------------------------------------------

    async def projection(
        self, name: str, source: EventStore | Topic, function: Projector, **values: Any
    ) -> Projection:
        """A view of a log in a table, kept up to date by a function, exactly once.

        `projection("balances", store, function, schema=Balance)`: the function is called with each
        event of the store (StoredEvent) or topic (Event) and the table, whose rows it reads and
        changes like those of a dict. With `tables={"a": A, "b": B}` it gets a dict of tables, with
        their schemas. `version=2` is another build, with tables of its own: see Projection for how
        it is compared and swapped in. Other keywords are those of ProcessSettings.
        `await projection.run()`.
        """
        from millstream.projections.projection import open_projection

        return await open_projection(self, self._projections, name, source, function, values)

    async def view(self, name: str, type: type | None = None) -> ProjectionView:
        """The tables of a projection's active version, for readers; see `topic` for `type`."""
        from millstream.projections.projection import open_view

        return await open_view(self, self._projections, name, type)

    async def projections(self) -> list[ProjectionRecord]:
        """All projections: what they read, their versions, and which one is active."""
        return await self._projections.all()

    async def diff_projection(
        self, name: str, version: int, against: int | None = None
    ) -> AsyncIterator[RowDiff]:
        """The rows that differ between two versions of a projection; None: the active one."""
        from millstream.projections.projection import diff_versions

        async for row in diff_versions(self, self._projections, name, version, against):
            yield row

    @cached_property
    def _projections(self) -> ProjectionRecords:
        from millstream.projections.records import ProjectionRecords

        return ProjectionRecords(self.table, self.create_table)

    # -- processing -----------------------------------------------------------------------

    def process(
        self,
        source: Sources,
        target: Targets,
        function: Transform,
        settings: ProcessSettings | None = None,
        *,
        tables: StateTables | None = None,
        **values: Any,
    ) -> Process:
        """Apply a function to every event of a topic and store the results in another.

        Exactly once: results and the position in the input are one commit. The function gets an
        event and returns None, a value, a NewEvent, or several of them. `await process.run()`.
        `process(source, target, function, on_error="dead_letter")`: see ProcessSettings.

        `source` may be several topics, and `target` several topics and tables: then each output
        says with `NewEvent(..., topic=NAME)` which one it is for. A row of a table needs a key;
        without a value it deletes it. With `tables={"totals": table}` the function is called as
        `function(event, tables)`, and reads and changes their rows like those of a dict: they are
        its state, held in memory, which nobody else may change. `target=[]` if they are all that
        it writes.
        """
        from millstream.messaging.process import make_process

        return make_process(source, target, function, settings, tables, values)

    def guard(self, topic: str, settings: GuardSettings | None = None, **values: Any) -> Guard:
        """A guard of a guarded topic, which checks what is published: `async with mill.guard(...)`.

        A broker of `millstream up` runs its guards itself; this is for other servers. What fits the
        schema is stored and acked, the rest is refused with the reason. Clients of other libraries
        publish to `ingress.orders.KEY`. The keywords are those of GuardSettings.
        """
        from millstream.schemas.registry.guard import Guard, GuardSettings

        return Guard(self, topic, settings_from(GuardSettings, settings, values))
