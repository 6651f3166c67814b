"""The classes that past states are made with: of the states, and of the events that change them."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from millstream.errors import ConfigError
from millstream.event_store.event_types import EventTypes, Upcasters, classes_by_name
from millstream.event_store.folding import Folding, make_folding
from millstream.event_store.messages import AppendMessage, stored_events
from millstream.event_store.state_classes import classes_beside, version_of
from millstream.schemas import Schema, declare
from millstream.schemas import types as t
from millstream.schemas.formats.python import is_schema_class
from millstream.schemas.registry.records import Version
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
            self._types.learn(_registered(name, map(Schema.from_json, texts)))


def _registered(name: str, schemas: Iterable[Schema]) -> RegisteredEvent:
    """An event in its newest version."""
    versions = tuple(schemas)
    newest = Version(len(versions), 0, versions[-1].fingerprint)
    return RegisteredEvent(name, versions, newest)


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
        named = classes_by_name([_imported(path, "events") for path in how.events])
        classes = classes_beside(store.store, state, store.events, named)
    if not isinstance(state, type) or not is_schema_class(state):
        raise ConfigError(
            f"the states' class {state!r:.80} has no schema, so there is no column for it: make it "
            f"a dataclass, a msgspec Struct or a Pydantic model"
        )
    folding = make_folding(state, fold)
    if folding is None:
        raise ConfigError(f"{state.__name__} has no method apply(event)")
    registered = [
        version_of(store.store, _registered(name, store.schemas(name)), classes.get(name))
        for name in store.events
    ]
    upcasters: Upcasters = read_upcasters(how.upcasters)
    types = EventTypes(store.store, registered, classes, upcasters)
    types.check()
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


def pickled_classes(state: type, fold: Fold | None, events: Any) -> str:
    """The text of classes and a function for the option `state`."""
    return pickled((state, fold, classes_by_name(events)))
