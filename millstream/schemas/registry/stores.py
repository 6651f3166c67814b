"""Event stores in the registry: a record for each type of event, and one for the store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from millstream.errors import WrongSequence
from millstream.events.classify import is_deletion
from millstream.schemas.compatibility import Mode
from millstream.schemas.registry.records import (
    Marks,
    StoreRecord,
    TopicSchemas,
    Version,
    event_key,
    event_name,
    new_record,
    read_store,
    record_of,
    store_key,
)
from millstream.schemas.registry.registry import TRIES_MAX, Registry, pause, too_busy
from millstream.schemas.schema import Schema

__all__ = ["NewEventType", "RegisteredEvent", "StoreSchemas"]


@dataclass(frozen=True, slots=True)
class NewEventType:
    """A type of event to be registered."""

    schema: Schema
    # Versions from which a function leads to the next one: that step may break every rule.
    upcast_from: frozenset[int] = frozenset()
    personal: Marks = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RegisteredEvent:
    """A type of event: its versions, oldest first, and the one that is written here."""

    name: str
    schemas: tuple[Schema, ...]
    current: Version
    personal: Marks = field(default_factory=dict)  # its personal fields


class StoreSchemas:
    """The types of events of one store."""

    def __init__(self, registry: Registry, store: str) -> None:
        self._registry = registry
        self._store = store

    async def record(self) -> StoreRecord | None:
        """The store's record; None when there is no store of that name."""
        return (await self._record())[0]

    async def event(self, name: str) -> RegisteredEvent | None:
        """A type of event with its latest version; None when the store has none of that name."""
        return await self._event(name, await self.record())

    async def _event(self, name: str, store: StoreRecord | None) -> RegisteredEvent | None:
        record = record_of(await self._registry.message_at(event_key(self._store, name)))
        if record is None:
            return None
        found = await self._registered(name, record, record.latest)
        return found if store is None else replace(found, personal=store.personal.get(name, {}))

    async def events(self) -> list[RegisteredEvent]:
        """All types of events of the store, as they are now."""
        record = await self.record()
        names = () if record is None else record.events
        found = [await self._event(name, record) for name in names]
        return [event for event in found if event is not None]

    async def prospect(self, name: str, event: NewEventType) -> RegisteredEvent:
        """A type of event as `register` would leave it; nothing is written."""
        before = await self._event(name, None)
        known = () if before is None else before.schemas
        prints = [schema.fingerprint for schema in known]
        fingerprint = event.schema.fingerprint
        if fingerprint in prints:
            return RegisteredEvent(
                name, known, Version(prints.index(fingerprint) + 1, 0, fingerprint)
            )
        return RegisteredEvent(
            name, (*known, event.schema), Version(len(known) + 1, 0, fingerprint)
        )

    async def register(
        self, events: Mapping[str, NewEventType], mode: Mode | None, state: str | None
    ) -> list[RegisteredEvent]:
        """Register types of events and the store; what is known already stays as it is.

        `mode` is the compatibility of their versions from now on; None: as it is, BACKWARD at
        first. The types first: who finds the store's record also finds all that it names.
        """
        found = [await self._add(name, event, mode) for name, event in events.items()]
        await self._put(events, state)
        return found

    async def forget(self) -> None:
        """Remove the records of a deleted store; the schemas keep their ids."""
        record = await self.record()
        if record is None:
            return
        await self._registry.delete(store_key(self._store))
        for name in record.events:
            await self._registry.delete(event_key(self._store, name))

    async def _set_mode(self, key: str, mode: Mode) -> None:
        for _ in range(TRIES_MAX):
            found = await self._registry.message_at(key)
            record = record_of(found)
            if found is None or record is None or record.mode is mode:
                return
            try:
                changed = replace(record, mode=mode)
                await self._registry.put(key, changed.to_json(), found.sequence)
                return
            except WrongSequence:
                await pause()
        raise too_busy(self._store)

    async def _add(self, name: str, event: NewEventType, mode: Mode | None) -> RegisteredEvent:
        key = event_key(self._store, name)
        if mode is not None:
            await self._set_mode(key, mode)
        before = await self._event(name, None)
        free = before is not None and len(before.schemas) in event.upcast_from
        first = new_record(event_name(self._store, name), "json", mode)
        added = await self._registry.add_version(key, first, event.schema, None, free=free)
        return await self._registered(name, added.record, added.current)

    async def _registered(
        self, name: str, record: TopicSchemas, current: Version
    ) -> RegisteredEvent:
        schemas = await self._registry.schemas_of(record)
        return RegisteredEvent(name, tuple(schemas), current)

    async def _put(self, events: Mapping[str, NewEventType], state: str | None) -> None:
        for _ in range(TRIES_MAX):
            found, revision = await self._record()
            record = found or StoreRecord(self._store)
            names = dict.fromkeys((*record.events, *events))
            marks = {n: {**record.personal.get(n, {}), **e.personal} for n, e in events.items()}
            personal = {n: one for n, one in {**record.personal, **marks}.items() if one}
            wanted = replace(
                record, events=tuple(names), state=state or record.state, personal=personal
            )
            if wanted == found:
                return
            try:
                await self._registry.put(store_key(self._store), wanted.to_json(), revision)
                return
            except WrongSequence:
                await pause()
        raise too_busy(self._store)

    async def _record(self) -> tuple[StoreRecord | None, int]:
        found = await self._registry.message_at(store_key(self._store))
        if found is None or is_deletion(found.headers):
            return None, 0 if found is None else found.sequence
        return read_store(found.payload), found.sequence
