"""The classes that past states are made with: of the states, and of the events that change them."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from millstream.errors import ConfigError
from millstream.event_store.event_types import (
    EventTypes,
    Upcasters,
    classes_by_name,
    new_types,
)
from millstream.event_store.folding import Folding, make_folding
from millstream.event_store.messages import AppendMessage, stored_events
from millstream.schemas import Schema, declare
from millstream.schemas import types as t
from millstream.schemas.compatibility import Mode
from millstream.schemas.formats.python import is_schema_class
from millstream.schemas.registry.records import TopicSchemas, Version, matching
from millstream.schemas.registry.stores import RegisteredEvent
from millstream.settings import ConnectionSettings
from millstream.spark.broker_access import jetstream_to
from millstream.spark.options import StoreOptions
from millstream.spark.stores import (
    PICKLED,
    StoreSnapshot,
    load_event,
    pickled,
    read_upcasters,
    unpickled,
)

if TYPE_CHECKING:
    from millstream.event_store.folding import Fold

__all__ = ["StateClasses", "find_classes", "pickled_classes"]


class StateClasses:
    """How states are folded, and what events are made of."""

    def __init__(self, state: type, folding: Folding, types: EventTypes, store: str) -> None:
        self.folding = folding
        self.record: t.Record = declare(state).record
        self._types = types
        self._store = store

    def decoded(self, append: AppendMessage, settings: ConnectionSettings) -> Iterator[Any]:
        """The events of an append, as objects of their classes."""
        for tag, _ in append.lines:
            if not self._types.knows(tag):
                self._learn(self._types.name_of(tag)[0], settings)
        return (event.data for event in stored_events(append, self._types))

    def _learn(self, name: str, settings: ConnectionSettings) -> None:
        """Versions of an event that were registered after the query was built."""
        texts = load_event(jetstream_to(settings), self._store, name)
        if texts is not None:
            schemas = tuple(map(Schema.from_json, texts))
            latest = Version(len(schemas), 0, schemas[-1].fingerprint)
            self._types.learn(RegisteredEvent(name, schemas, latest))


def find_classes(store: StoreSnapshot, how: StoreOptions) -> StateClasses:
    """The classes that the options name; refused if they do not fit the store."""
    path = how.state or store.state
    if path is None:
        raise ConfigError(
            f"the record of store '{store.store}' names no class of states: give the option "
            f"'state', such as accounts:Account"
        )
    fold: Fold | None = None
    if path.startswith(PICKLED):
        state, fold, classes = unpickled(path, "state", "states_as_of")
    else:
        state = _imported(path, "state")
        classes = _classes_of_events(store, state, how.events)
    if not isinstance(state, type) or not is_schema_class(state):
        raise ConfigError(
            f"the states' class {state!r:.80} has no schema, so there is no column for it: make it "
            f"a dataclass, a msgspec Struct or a Pydantic model"
        )
    folding = make_folding(state, fold)
    if folding is None:
        raise ConfigError(f"{state.__name__} has no method apply(event)")
    registered = [_registered(store, name, classes.get(name)) for name in store.events]
    upcasters: Upcasters = read_upcasters(how.upcasters)
    types = EventTypes(store.store, registered, classes, upcasters)
    return StateClasses(state, folding, types, store.store)


def _imported(path: str, option: str) -> Any:
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"option '{option}': '{path}' cannot be imported where Spark runs Python ({error}). "
            f"Install its module there or send it with spark.addArtifacts(..., pyfile=True); for "
            f"classes of a notebook use millstream.spark.states_as_of"
        ) from error
    return found


def _classes_of_events(
    store: StoreSnapshot, state: type, paths: Iterable[str]
) -> Mapping[str, type]:
    """The classes of events: those that are named, else those beside the class of the states."""
    named = classes_by_name([_imported(path, "events") for path in paths])
    beside = importlib.import_module(state.__module__)
    found: dict[str, type] = {}
    for name in store.events:
        cls = named.get(name) or getattr(beside, name, None)
        if not isinstance(cls, type):
            raise ConfigError(
                f"'{state.__module__}' has no class '{name}', which the events of store "
                f"'{store.store}' are made of: name their classes with the option 'events', such "
                f"as accounts:Opened,accounts:Deposited"
            )
        found[name] = cls
    return found


def _registered(store: StoreSnapshot, name: str, cls: type | None) -> RegisteredEvent:
    """An event's versions, and the one that its class has the fields of."""
    schemas = store.schemas(name)
    versions = tuple(Version(n, 0, one.fingerprint) for n, one in enumerate(schemas, 1))
    if cls is None:
        return RegisteredEvent(name, tuple(schemas), versions[-1])
    record = TopicSchemas(f"{store.store}/{name}", "json", Mode.NONE, versions)
    same = matching(record, schemas, new_types({name: cls}, {})[name].schema)
    if same is None:
        raise ConfigError(
            f"{cls.__module__}.{cls.__name__} has other fields than every version of event "
            f"'{name}' in store '{store.store}': open the store with it first, which registers "
            f"them"
        )
    return RegisteredEvent(name, tuple(schemas), same[0])


def pickled_classes(state: type, fold: Fold | None, events: Any) -> str:
    """The text of classes and a function for the option `state`."""
    return pickled((state, fold, classes_by_name(events)))
