"""The classes of a store's events, for tools and Spark, which know the class of its states."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace

from millstream.errors import ConfigError
from millstream.event_store.event_types import schema_of
from millstream.schemas.compatibility import Mode
from millstream.schemas.registry.records import TopicSchemas, Version, event_name, matching
from millstream.schemas.registry.stores import RegisteredEvent

__all__ = ["classes_beside", "version_of"]


def classes_beside(
    store: str, state: type, names: Iterable[str], given: Mapping[str, type] | None = None
) -> dict[str, type]:
    """The classes of events by name: those given, else from the module of the states' class."""
    module, given = sys.modules[state.__module__], given or {}
    found: dict[str, type] = {}
    for name in names:
        cls = given.get(name) or getattr(module, name, None)
        if not isinstance(cls, type):
            raise ConfigError(
                f"'{state.__module__}' has no class '{name}', which is an event of store "
                f"'{store}': define it beside {state.__name__}, or in Spark name the classes of "
                f"events with the option 'events', such as accounts:Opened,accounts:Deposited"
            )
        found[name] = cls
    return found


def version_of(store: str, event: RegisteredEvent, cls: type | None) -> RegisteredEvent:
    """A registered event with the version that a class has the fields of."""
    if cls is None:
        return event
    versions = tuple(Version(n, 0, one.fingerprint) for n, one in enumerate(event.schemas, 1))
    record = TopicSchemas(event_name(store, event.name), "json", Mode.NONE, versions)
    same = matching(record, event.schemas, schema_of(event.name, cls))
    if same is None:
        raise ConfigError(
            f"{cls.__module__}.{cls.__name__} has other fields than every version of event "
            f"'{event.name}' in store '{store}'. Open the store with it first, which registers it"
        )
    return replace(event, current=same[0])
