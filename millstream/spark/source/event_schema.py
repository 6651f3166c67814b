"""The columns of an event store, as Spark DDL and as Arrow types. Pure, without pyspark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pyarrow as pa

from millstream.errors import ConfigError
from millstream.nearest import one_of
from millstream.schemas import spark_arrow_type, spark_type
from millstream.schemas import types as t
from millstream.spark.options import SourceOptions
from millstream.spark.source.row_schema import check_types
from millstream.spark.stores import StoreSnapshot

__all__ = [
    "EVENT_COLUMNS",
    "asked_fields",
    "check_event_schema",
    "chosen_columns",
    "event_columns",
    "events_ddl",
    "states_ddl",
]

_TIME: Final = pa.timestamp("us", "UTC")
_HEADERS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
# Name, DDL and Arrow type of the columns of every store; `headers` and `reason` only on request.
EVENT_COLUMNS: Final[Mapping[str, tuple[str, pa.DataType]]] = {
    "aggregate": ("STRING", pa.string()),
    "version": ("BIGINT", pa.int64()),
    "event": ("STRING", pa.string()),
    "timestamp": ("TIMESTAMP", _TIME),
    "stored": ("TIMESTAMP", _TIME),
    "partition": ("INT", pa.int32()),
    "offset": ("BIGINT", pa.int64()),
    "index": ("INT", pa.int32()),
    "correlation_id": ("STRING", pa.string()),
    "causation_id": ("STRING", pa.string()),
    "headers": ("ARRAY<STRUCT<key: STRING, value: BINARY>>", _HEADERS),
    "reason": ("STRING", pa.string()),
}
_ON_REQUEST: Final = ("headers", "reason")


def event_columns(store: StoreSnapshot) -> dict[str, str]:
    """The columns of the types of events: the name of each, and of its event.

    Spark ignores case: an event named like another column has the column `<event>_event`.

    >>> event_columns(StoreSnapshot("s", {"Opened": ("",), "Version": ("",)}))
    {'Opened': 'Opened', 'Version_event': 'Version'}
    """
    taken = {name.casefold() for name in EVENT_COLUMNS}
    found: dict[str, str] = {}
    for event in store.events:
        name = event
        while name.casefold() in taken:
            name += "_event"
        taken.add(name.casefold())
        found[name] = event
    return found


def asked_fields(schema: pa.Schema, store: StoreSnapshot) -> dict[str, list[str]]:
    """The fields of each type of event that a query's columns have."""
    return {
        event: [field.name for field in schema.field(name).type]
        for name, event in event_columns(store).items()
        if name in schema.names
    }


def chosen_columns(options: SourceOptions, store: StoreSnapshot) -> dict[str, list[str]]:
    """The columns that the options choose, in order, each with its chosen fields (none: all)."""
    known = [*EVENT_COLUMNS, *event_columns(store)]
    chosen: dict[str, list[str]] = {}
    for given in options.columns:
        name, _, inner = given.partition(".")
        if name not in known:
            raise ConfigError(f"option 'columns': {one_of(name, known, 'column')}")
        if (inner and name in EVENT_COLUMNS) or (name in chosen and not (inner and chosen[name])):
            raise ConfigError(
                f"option 'columns': '{given}'; choose an event's column or some of its fields"
            )
        chosen.setdefault(name, []).extend([inner] if inner else [])
    if not options.columns:
        chosen = {name: [] for name in known if name not in _ON_REQUEST}
    if options.headers:
        chosen["headers"] = []
    if options.undecodable == "null":
        chosen["reason"] = []
    return {name: chosen[name] for name in known if name in chosen}


def events_ddl(options: SourceOptions, store: StoreSnapshot) -> str:
    """The source's schema as DDL text."""
    events = event_columns(store)
    parts = []
    for name, inner in chosen_columns(options, store).items():
        if name in EVENT_COLUMNS:
            parts.append(f"`{name}` {EVENT_COLUMNS[name][0]}")
        else:
            record = _some(store.schemas(events[name])[-1].record, inner, name)
            parts.append(f"`{name}` {spark_type(record, nullability=False)}")
    return ", ".join(parts)


def _some(record: t.Record, names: list[str], event: str) -> t.Record:
    """The record with some of its fields only; none chosen: all."""
    fields = [field.name for field in record.fields]
    for name in names:
        if name not in fields:
            raise ConfigError(
                f"option 'columns': event '{event}' has no field '{name}'; it has "
                f"{', '.join(fields)}"
            )
    chosen = tuple(field for field in record.fields if not names or field.name in names)
    return t.Record(record.name, chosen)


def states_ddl(options: SourceOptions, store: StoreSnapshot) -> str:
    """The schema of past states as DDL text."""
    from millstream.spark.state_classes import find_classes

    if options.store is None:
        raise ConfigError("past states need the option 'eventStore'")
    state = spark_type(find_classes(store, options.store).record, nullability=False)
    parts = [f"`{name}` {EVENT_COLUMNS[name][0]}" for name in ("aggregate", "version", "timestamp")]
    return ", ".join([*parts, f"`state` {state}"])


def check_event_schema(schema: pa.Schema, store: StoreSnapshot, options: SourceOptions) -> None:
    """Reject a user's schema that asks for something the store does not have."""
    types = {name: (type_,) for name, (_, type_) in EVENT_COLUMNS.items()}
    for name, event in event_columns(store).items():
        types[name] = (spark_arrow_type(store.schemas(event)[-1].record),)
    check_types(schema, types, options)
