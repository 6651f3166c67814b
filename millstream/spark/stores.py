"""What Spark knows of an event store: its types of events with all versions, from the registry."""

from __future__ import annotations

import base64
import dataclasses
import io
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final

from millstream.errors import ConfigError, TopicNotFound
from millstream.spark.broker_access import PATIENCE_SECONDS
from millstream.wire.sync.connection import BlockingJetStream
from millstream.wire.sync.streams import get_message, get_messages

if TYPE_CHECKING:
    from millstream.event_store.event_types import Upcasters
    from millstream.schemas import Schema

__all__ = [
    "PICKLED",
    "StoreSnapshot",
    "event_upcasters",
    "find_store",
    "load_event",
    "pickled",
    "read_upcasters",
    "unpickled",
]

PICKLED: Final = "pickled:"  # before the text of what cannot be imported elsewhere
_FieldKind: Final = type(dataclasses._FIELD)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class StoreSnapshot:
    """An event store as it was when a query was built; travels to the workers."""

    store: str
    # The schemas of each type of event, oldest version first, as the registry stores them.
    events: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    state: str | None = None  # "module:Class"

    def schemas(self, event: str) -> list[Schema]:
        """The versions of a type of event, oldest first."""
        from millstream.schemas import Schema

        return [Schema.from_json(text) for text in self.events[event]]


def find_store(jetstream: BlockingJetStream, store: str) -> StoreSnapshot:
    """An event store's types of events; a ConfigError when there is no such store."""
    # Loaded only for event stores: every Python process that Spark starts pays for it.
    from millstream.events.classify import is_deletion
    from millstream.schemas.registry.records import TABLE, read_store, record_query, store_key

    try:
        found = get_message(jetstream, TABLE, record_query(store_key(store)), PATIENCE_SECONDS)
    except TopicNotFound:
        found = None
    if found is None or is_deletion(found.headers):
        raise ConfigError(
            f"option 'eventStore': '{store}' is a topic and not an event store; read it with "
            f"'subscribe'"
        )
    record = read_store(found.payload)
    events = {name: load_event(jetstream, store, name) for name in record.events}
    known = {name: texts for name, texts in events.items() if texts is not None}
    return StoreSnapshot(store, known, record.state)


def load_event(jetstream: BlockingJetStream, store: str, name: str) -> tuple[str, ...] | None:
    """The versions of a type of event, oldest first; None when the store has no such type."""
    from millstream.schemas.registry.records import (
        TABLE,
        event_key,
        record_of,
        record_query,
        schema_of,
    )

    query = record_query(event_key(store, name))
    record = record_of(get_message(jetstream, TABLE, query, PATIENCE_SECONDS))
    if record is None or not record.versions:
        return None
    queries = [{"seq": version.id} for version in record.versions]
    messages = get_messages(jetstream, TABLE, queries, PATIENCE_SECONDS)
    return tuple(
        schema_of(version.id, message, version.fingerprint).to_json()
        for version, message in zip(record.versions, messages, strict=True)
    )


# -- functions and classes in options -----------------------------------------------------------


def pickled(content: object) -> str:
    """Functions and classes as the text of an option, also those of a notebook."""
    from pyspark import cloudpickle

    class Pickler(cloudpickle.CloudPickler):
        """Keeps what marks a field of a dataclass, which is compared by identity."""

        dispatch_table: ClassVar = ChainMap(  # type: ignore[misc]
            {type(dataclasses.MISSING): lambda _: "MISSING", _FieldKind: lambda kind: kind.name},
            cloudpickle.CloudPickler.dispatch_table,
        )

    file = io.BytesIO()
    Pickler(file).dump(content)  # type: ignore[no-untyped-call]
    return PICKLED + base64.b64encode(file.getvalue()).decode()


def unpickled(text: str, option: str, function: str) -> Any:
    """What `pickled` wrote; `function` is the one that makes the text of this option."""
    from pyspark import cloudpickle

    if not text.startswith(PICKLED):
        raise ConfigError(f"option '{option}': make its text with millstream.spark.{function}(...)")
    return cloudpickle.loads(base64.b64decode(text.removeprefix(PICKLED)))


def event_upcasters(upcasters: Upcasters) -> str:
    """The text of functions for the option `upcasters`: `{("Deposited", 1): function}`.

    Each takes an event of that version as a dict and returns a dict of the next version.
    """
    return pickled(dict(upcasters))


def read_upcasters(text: str | None) -> Upcasters:
    """The functions in the option's text."""
    if text is None:
        return {}
    found: Upcasters = unpickled(text, "upcasters", "event_upcasters")
    return found
