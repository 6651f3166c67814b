"""Opening a store: its topic, its types of events in the registry, its snapshots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Final, Protocol

from millstream.errors import ConfigError, TopicNotFound
from millstream.event_store.ending import ARCHIVE_SUFFIX
from millstream.event_store.event_types import EventTypes, classes_by_name, new_types
from millstream.event_store.folding import Folding, class_path, make_folding
from millstream.event_store.info import StoreInfo
from millstream.event_store.keys import KEYS_SUFFIX
from millstream.event_store.personal import PersonalData
from millstream.event_store.settings import StoreSettings, split_settings, topic_settings
from millstream.event_store.snapshots import SNAPSHOTS_SUFFIX, Snapshots
from millstream.event_store.state_classes import classes_beside, version_of
from millstream.event_store.store import EventStore, StoreParts
from millstream.events.value_type import ValueType
from millstream.messaging import Topic, TopicInfo, TopicSettings
from millstream.messaging.topics.lookup import open_topic
from millstream.schemas.compatibility import parse_mode
from millstream.schemas.formats.python import is_schema_class
from millstream.schemas.registry.registry import Registry
from millstream.schemas.registry.stores import StoreSchemas
from millstream.tables import Table
from millstream.wire.aio.jetstream import JetStream

__all__ = ["COMPANIONS", "list_stores", "open_for_states", "open_store"]

# What the names of the topics that belong to a store end with.
COMPANIONS: Final = (SNAPSHOTS_SUFFIX, ARCHIVE_SUFFIX, KEYS_SUFFIX)


class StoreHome(Protocol):
    """What a store needs of the connection that opens it."""

    @property
    def jetstream(self) -> JetStream: ...

    @property
    def schemas(self) -> Registry: ...

    async def topics(self) -> list[TopicInfo]: ...

    async def create_topic(self, name: str, settings: TopicSettings | None = None) -> Topic: ...

    async def open_as(self, info: TopicInfo, value_type: ValueType | None = None) -> Topic: ...

    async def table(self, name: str, type: type | None = None) -> Table: ...

    async def create_table(self, name: str, settings: TopicSettings | None = None) -> Table: ...


async def open_store(
    mill: StoreHome,
    name: str,
    state: type | None,
    events: Iterable[type] | Mapping[str, type],
    values: Mapping[str, Any],
    *,
    register: bool = True,
) -> EventStore:
    """Open a store; see `Mill.event_store`. Without `register` it is left as it is."""
    settings, about_topic = split_settings(values)
    classes = classes_by_name(events)
    folding = make_folding(state, settings.fold, settings.initial)
    new = new_types(classes, settings.upcasters)  # every class is checked before anything is made
    mode = None if settings.compatibility is None else parse_mode(settings.compatibility)
    schemas = StoreSchemas(mill.schemas, name)
    topic = await _topic(mill, name, bool(classes) and register, about_topic, schemas)
    if classes and register:
        # Before anything is registered: a version that cannot read older ones would stay.
        expected = [await schemas.prospect(event, new[event]) for event in new]
        EventTypes(name, expected, classes, settings.upcasters).check()
        registered = await schemas.register(new, mode, class_path(state))
        known = {event.name for event in registered}
        registered += [event for event in await schemas.events() if event.name not in known]
    else:
        found = await schemas.events()
        registered = [version_of(name, event, classes.get(event.name)) for event in found]
    personal = PersonalData(name, partial(_table, mill, topic, KEYS_SUFFIX, "Keys of persons"))
    types = EventTypes(name, registered, classes, settings.upcasters, personal)
    return EventStore(
        StoreParts(
            topic,
            schemas,
            types,
            folding,
            snapshots=_snapshots(mill, topic, folding, settings, personal),
            snapshot_every=settings.snapshot_every,
            open_archive=partial(_archive_topic, mill, topic),
            personal=personal,
        )
    )


async def open_for_states(
    mill: StoreHome, name: str, state: type, snapshot_version: int = 1
) -> EventStore:
    """Open a store that exists, to make states of its events; nothing is registered.

    The classes of the events are those beside the class of the states.
    """
    record = await StoreSchemas(mill.schemas, name).record()
    classes = {} if record is None else classes_beside(name, state, record.events)
    values = {"snapshot_version": snapshot_version}
    store = await open_store(mill, name, state, classes, values, register=False)
    store.types.check()
    return store


async def list_stores(mill: StoreHome) -> list[StoreInfo]:
    """The event stores of a broker, sorted by name."""
    records = {record.store: record for record in await mill.schemas.stores()}
    infos = await mill.topics() if records else []
    return [
        StoreInfo(info, records[info.name].events, records[info.name].state)
        for info in infos
        if info.name in records
    ]


async def _topic(
    mill: StoreHome, name: str, may_create: bool, values: Mapping[str, Any], schemas: StoreSchemas
) -> Topic:
    """The topic of a store, created if there is none; refused when it is something else."""
    try:
        info = await open_topic(mill.jetstream, name)
    except TopicNotFound as missing:
        if not may_create:
            if await schemas.record() is None:
                raise
            raise ConfigError(
                f"the topic of store '{name}' is gone, but its events are still registered: it was "
                f"deleted by another tool. Create it again: event_store({name!r}, events=[...])"
            ) from missing
        return await mill.create_topic(name, topic_settings(values))
    same = info.settings
    forgets = same.history or same.max_age or same.max_messages
    if await schemas.record() is None and (same.takes_packs or info.messages or forgets):
        raise ConfigError(
            f"'{name}' is a topic and not an event store. Use another name for the store"
        )
    if values:  # says which of them differ
        wanted = {"partitions": len(info.partitions), **values}
        return await mill.create_topic(name, topic_settings(wanted))
    return await mill.open_as(info)


def _snapshots(
    mill: StoreHome,
    topic: Topic,
    folding: Folding | None,
    settings: StoreSettings,
    personal: PersonalData,
) -> Snapshots | None:
    """The snapshots of a store whose states can be stored; None: it has none."""
    storable = folding is not None and folding.cls is not None and is_schema_class(folding.cls)
    if folding is None or not (storable or settings.snapshot_every):
        return None
    codec = folding.state_codec(settings.snapshot_version)  # says why, if it cannot be
    open_table = partial(_table, mill, topic, SNAPSHOTS_SUFFIX, "Snapshots")
    return Snapshots(open_table, codec, personal)


async def _table(mill: StoreHome, topic: Topic, suffix: str, what: str, create: bool) -> Table:
    """A table that belongs to a store, as durable as the store; created if that is asked for."""
    name = topic.name + suffix
    try:
        return await mill.table(name)
    except TopicNotFound:
        if not create:
            raise
        settings = _like(topic, f"{what} of event store {topic.name}", history=1)
        return await mill.create_table(name, settings)


async def _archive_topic(mill: StoreHome, topic: Topic, create: bool) -> Topic:
    """The topic of a store's archived aggregates."""
    name = topic.name + ARCHIVE_SUFFIX
    try:
        return await mill.open_as(await open_topic(mill.jetstream, name))
    except TopicNotFound:
        if not create:
            raise
        about = f"Archived aggregates of event store {topic.name}"
        settings = _like(topic, about, packs=False, partitions=topic.partitions)
        return await mill.create_topic(name, settings)


def _like(topic: Topic, description: str, **values: Any) -> TopicSettings:
    """Settings of a topic that belongs to a store, as durable as the store itself."""
    same = topic.settings
    return TopicSettings(
        description=description, replicas=same.replicas, storage=same.storage, **values
    )
