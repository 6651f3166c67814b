"""The schema registry: versions of every topic's schema, stored in the broker itself."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Mapping
from typing import Any, Final

from millstream.errors import (
    ApiError,
    ConfigError,
    MillstreamError,
    SchemaError,
    SchemaNotFound,
    TopicNotFound,
    WrongSequence,
)
from millstream.messaging import Client, Topic, TopicSettings
from millstream.messaging.topics.admin import edit
from millstream.messaging.topics.lookup import open_topic
from millstream.messaging.topics.missing import NAMES_SECONDS
from millstream.nearest import check_known, propose
from millstream.schemas.compatibility import Mode, Problem, parse_mode
from millstream.schemas.declaration import declare
from millstream.schemas.registry.records import (
    TABLE,
    StoreRecord,
    TopicSchemas,
    Version,
    new_record,
    next_version,
    problems_of,
    read_record,
    read_store,
    record_key,
    record_of,
    record_query,
    schema_key,
    schema_of,
    store_key,
)
from millstream.schemas.schema import Schema
from millstream.tables import Table
from millstream.wire.api import ErrorCode
from millstream.wire.message import StoredMessage

__all__ = ["Added", "Registry", "pause", "too_busy"]

# Decoded schemas in memory. They never change; a process uses a few dozen.
SCHEMAS_KEPT: Final = 1000
# Each lost race means that another process registered something; this many mean a bug.
TRIES_MAX: Final = 50
PAUSE_SECONDS: Final = 0.02

_SETTINGS: Final = TopicSettings(
    history=1, description="Schemas and their versions", deny_delete=True, max_message_size="2MiB"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Added:
    """A record as it is now, and the version in it that was asked for."""

    record: TopicSchemas
    current: Version


class Registry:
    """Versions of topics' schemas. Ids are stable; a breaking change is refused.

    Several processes may register at the same time: every version gets one number, and the same
    schema is the same version for all of them.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._table: Table | None = None
        self._schemas: dict[int, Schema] = {}

    # -- reading --------------------------------------------------------------------------

    async def topic(self, name: str) -> TopicSchemas:
        """The versions of a topic's schema; SchemaNotFound when it has none."""
        record, _ = await self._record(name)
        if record is None:
            missing = SchemaNotFound(
                f"topic '{name}' has no schema. Declare it with create_topic(..., schema=...), or "
                f"'millstream schema register {name} FILE'"
            )
            propose(missing, name, await self._names())
            raise missing
        return record

    async def _names(self) -> list[str]:
        """The topics with a schema, to propose one; none if they cannot be read now."""
        try:
            async with asyncio.timeout(NAMES_SECONDS):
                return [record.topic for record in await self.topics()]
        except (MillstreamError, TimeoutError):
            return []

    async def find(self, name: str) -> TopicSchemas | None:
        """Like `topic`, but None when it has no schema."""
        return (await self._record(name))[0]

    async def topics(self) -> list[TopicSchemas]:
        """The records of all topics that have a schema, sorted by name."""
        found = map(read_record, await self._stored(record_key("")))
        return sorted(found, key=lambda record: record.topic)

    async def stores(self) -> list[StoreRecord]:
        """The records of all event stores, sorted by name."""
        found = map(read_store, await self._stored(store_key("")))
        return sorted(found, key=lambda record: record.store)

    async def _stored(self, prefix: str) -> list[bytes]:
        """The texts of all records whose keys start with this."""
        try:
            table = Table(await self._client.topic(TABLE))
        except TopicNotFound:
            return []
        return [entry.value async for entry in table.entries() if entry.key.startswith(prefix)]

    async def schema(self, id_: int) -> Schema:
        """The schema with that id; SchemaNotFound when there is none."""
        return await self._load(id_, None)

    async def version(self, topic: str, number: int | None = None) -> tuple[Version, Schema]:
        """One version of a topic's schema; None: the latest."""
        version = (await self.topic(topic)).version(number)
        return version, await self._load(version.id, version.fingerprint)

    async def schemas_of(self, record: TopicSchemas) -> list[Schema]:
        """Every version's schema, oldest first."""
        return [await self._load(v.id, v.fingerprint) for v in record.versions]

    async def check(
        self, topic: str, source: object, mode: Mode | str | None = None, **how: Any
    ) -> list[Problem]:
        """Why a schema may not become the topic's next version; nothing is written.

        `mode` checks under another compatibility mode. `how` is passed to `declare`.
        """
        schema = _declared(source, how)
        record = await self.find(topic)
        if record is None:
            problems_of(new_record(topic, None, mode), (), schema)
            return []
        return problems_of(record, await self.schemas_of(record), schema, mode)

    async def check_first(
        self, topic: str, source: object, wire_format: str | None, mode: Mode | str | None = None
    ) -> None:
        """Raise an error if this cannot be a topic's first schema, before anything is created."""
        if await self.find(topic) is None:
            next_version(new_record(topic, wire_format, mode), (), declare(source))

    # -- changing -------------------------------------------------------------------------

    async def register(
        self,
        topic: str,
        source: object,
        mode: Mode | str | None = None,
        wire_format: str | None = None,
        **how: Any,
    ) -> Version:
        """Give an existing topic a schema or its next version; return the current version.

        A schema that is registered already is left as it is. Incompatible names the field and the
        rule that a new one breaks. `how` is passed to `declare`.

        1. Mark the topic as one with a schema, so that from now on nothing untyped is written.
        2. Store the schema under its fingerprint; its offset is its id.
        3. Add the version to the topic's record if that has not changed meanwhile; else repeat.
        """
        schema = _declared(source, how)
        await self.check_first(topic, schema, wire_format, mode)
        await self._mark(topic, wire_format)
        first = new_record(topic, await self._format(topic), mode)
        wanted = None if mode is None else parse_mode(mode)
        return (await self.add_version(record_key(topic), first, schema, wanted)).current

    async def add_version(
        self,
        key: str,
        first: TopicSchemas,
        schema: Schema,
        mode: Mode | None,
        *,
        free: bool = False,
    ) -> Added:
        """Internal: the version of a schema in the record with that key, added if it is new.

        `first` is the record if there is none yet. With `free` a new version may break every rule,
        because a function converts what was written before it.
        """
        for _ in range(TRIES_MAX):
            record, revision = await self._record_at(key)
            if record is None:
                record = first
            elif mode is not None and mode is not record.mode:
                raise SchemaError(
                    f"'{first.topic}' has the mode {record.mode}, not {mode}: "
                    f"change the mode first (set_mode, or 'millstream schema evolve --mode')"
                )
            rules = dataclasses.replace(record, mode=Mode.NONE) if free else record
            following = next_version(rules, await self.schemas_of(record), schema)
            known = record.of(following.fingerprint)
            if known is not None:
                return Added(record, known)
            try:
                id_ = await self._store(following)
                changed = record.followed_by(id_, following.fingerprint)
                await self.put(key, changed.to_json(), revision)
            except WrongSequence:
                await pause()
                continue
            return Added(changed, changed.latest)
        raise too_busy(first.topic)

    async def evolve(
        self, topic: str, source: object, mode: Mode | str | None = None, **how: Any
    ) -> Version:
        """Register the next version of a topic that has a schema.

        With `mode` the compatibility mode is changed first; the new version is checked under it.
        """
        await self.topic(topic)
        if mode is not None:
            await self.set_mode(topic, mode)
        return await self.register(topic, source, **how)

    async def set_mode(self, topic: str, mode: Mode | str) -> TopicSchemas:
        """Change the compatibility mode for a topic's next versions."""
        wanted = parse_mode(mode)
        for _ in range(TRIES_MAX):
            record, revision = await self._record(topic)
            if record is None:
                return await self.topic(topic)  # raises if there is none
            if record.mode is wanted:
                return record
            changed = dataclasses.replace(record, mode=wanted)
            try:
                await self.put(record_key(topic), changed.to_json(), revision)
            except WrongSequence:
                await pause()
                continue
            return changed
        raise too_busy(topic)

    async def adopt(self, topic: str, record: TopicSchemas) -> TopicSchemas:
        """Give a topic that has no schema all versions of another one, under the same ids."""
        await self._mark(topic, record.format)
        found, revision = await self._record(topic)
        if found is not None:
            return found
        adopted = dataclasses.replace(record, topic=topic)
        await self.put(record_key(topic), adopted.to_json(), revision)
        return adopted

    async def forget(self, topic: str) -> None:
        """Remove the record of a deleted topic; its schemas keep their ids."""
        record, _ = await self._record(topic)
        if record is not None:
            await self.delete(record_key(topic))

    async def delete(self, key: str) -> None:
        """Internal: remove a record of the table."""
        await (await self._writable()).delete(key)

    # -- the table ------------------------------------------------------------------------

    async def _record(self, topic: str) -> tuple[TopicSchemas | None, int]:
        """A topic's record and its revision, which also counts if the record was deleted."""
        return await self._record_at(record_key(topic))

    async def _record_at(self, key: str) -> tuple[TopicSchemas | None, int]:
        found = await self.message_at(key)
        return record_of(found), 0 if found is None else found.sequence

    async def message_at(self, key: str) -> StoredMessage | None:
        """Internal: the last message of a key of the table."""
        try:
            return await self._client.jetstream.get_message(TABLE, record_query(key))
        except TopicNotFound:
            return None

    async def _load(self, id_: int, fingerprint: str | None) -> Schema:
        known = self._schemas.get(id_)
        if known is not None:
            return known
        try:
            found = await self._client.jetstream.get_message(TABLE, {"seq": id_})
        except TopicNotFound:
            found = None
        schema = schema_of(id_, found, fingerprint)
        if len(self._schemas) >= SCHEMAS_KEPT:
            self._schemas.pop(next(iter(self._schemas)))
        self._schemas[id_] = schema
        return schema

    async def _store(self, schema: Schema) -> int:
        key = schema_key(schema.fingerprint)
        try:
            return await self.put(key, schema.to_json(), 0)
        except WrongSequence:  # another process stored it first
            return await (await self._writable()).revision(key)

    async def put(self, key: str, text: str, revision: int) -> int:
        """Internal: set a key of the table if that is still its revision; else WrongSequence."""
        return await (await self._writable()).put(key, text, revision=revision)

    async def _writable(self) -> Table:
        if self._table is None:
            try:
                self._table = Table(await self._client.topic(TABLE))
            except TopicNotFound:
                self._table = Table(await self._create())
        return self._table

    async def _create(self) -> Topic:
        """On three nodes if there are three: without the ids, every typed topic is lost."""
        if self._client.connection.info.cluster:
            try:
                return await self._client.create_topic(TABLE, _SETTINGS.changed({"replicas": 3}))
            except ApiError as error:
                if error.err_code not in (
                    ErrorCode.NO_SUITABLE_PEERS,
                    ErrorCode.REPLICAS_NOT_CLUSTERED,
                ):
                    raise
        return await self._client.create_topic(TABLE, _SETTINGS)

    # -- the topic ------------------------------------------------------------------------

    async def _format(self, topic: str) -> str | None:
        return (await open_topic(self._client.jetstream, topic)).settings.wire_format

    async def _mark(self, topic: str, wire_format: str | None) -> None:
        info = await open_topic(self._client.jetstream, topic)
        found = info.settings.wire_format
        if not info.managed or info.settings.is_copy:
            raise ConfigError(
                f"'{topic}' takes no events of its own here (a copy, or a stream that Millstream "
                f"did not create), so it cannot have a schema of its own"
            )
        if found is None:
            changes = {"wire_format": wire_format or "json"}
            await edit(self._client.jetstream, topic, changes)
        elif wire_format not in (None, found):
            raise SchemaError(
                f"the events of '{topic}' are encoded as {found}, not as {wire_format}; this "
                f"cannot be changed. Declare a topic of another name"
            )


async def pause() -> None:
    """A random pause, so that two competing processes do not retry in step."""
    await asyncio.sleep(PAUSE_SECONDS * random.random())


def _declared(source: object, how: Mapping[str, Any]) -> Schema:
    check_known(how, ("format", "name", "message", "drop_constraints"))
    return declare(source, **how)


def too_busy(topic: str) -> SchemaError:
    """The error of a record that others never stop changing."""
    return SchemaError(
        f"the record of '{topic}' in the schema registry was changed by others {TRIES_MAX} times "
        f"in a row; something registers in a loop"
    )
