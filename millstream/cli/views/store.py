"""Event stores, aggregates and events, for people and programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from millstream.cli.options.times import time_text
from millstream.cli.output import print_json, print_table, say, size
from millstream.cli.views.event_text import (
    header_fields,
    json_line,
    shown,
    text_field,
    value_bytes,
)
from millstream.cli.views.topic import age, settings_record, topic_record
from millstream.schemas.types import MISSING, kind

if TYPE_CHECKING:
    from millstream.event_store.events import AppendReceipt, Loaded, StoredEvent
    from millstream.event_store.info import StoreInfo
    from millstream.schemas.registry.stores import RegisteredEvent
    from millstream.schemas.types import Field

__all__ = [
    "event_writer",
    "list_record",
    "print_change",
    "receipt_record",
    "show_list",
    "show_state",
    "show_store",
    "show_summary",
    "store_record",
]


# -- stores -------------------------------------------------------------------------------


def list_record(info: StoreInfo) -> dict[str, Any]:
    """A store as an object."""
    return {
        "store": info.name,
        "aggregates": info.aggregates,
        "appends": info.appends,
        "bytes": info.topic.bytes,
        "partitions": len(info.topic.partitions),
        "events": list(info.events),
        "state": info.state,
    }


def show_list(infos: Sequence[StoreInfo]) -> None:
    """The stores of a broker."""
    if not infos:
        say("There is no event store yet. A program creates one: mill.event_store(NAME, ...)")
        return
    print_table(
        "Event stores",
        ["store", "#partitions", "#aggregates", "#appends", "#size", "last append", "events"],
        [
            (
                info.name,
                len(info.topic.partitions),
                f"{info.aggregates:,}",
                f"{info.appends:,}",
                size(info.topic.bytes),
                age(max((p.last_time for p in info.topic.partitions if p.last_time), default=None)),
                ", ".join(info.events),
            )
            for info in infos
        ],
    )


def store_record(info: StoreInfo, events: Iterable[RegisteredEvent]) -> dict[str, Any]:
    """A store with the fields of its events, and its settings."""
    types = [
        {
            "name": event.name,
            "versions": len(event.schemas),
            "fields": [_field_record(field) for field in event.schemas[-1].record.fields],
        }
        for event in events
    ]
    return {**list_record(info), "events": types, "settings": topic_record(info.topic)["settings"]}


def _field_record(field: Field) -> dict[str, Any]:
    return {"name": field.name, "type": kind(field.type), "required": field.default is MISSING}


def show_store(info: StoreInfo, events: Iterable[RegisteredEvent]) -> None:
    """One store: settings, then the types of its events."""
    say(f"Event store {info.name}")
    say(f"  aggregates: {info.aggregates:,}, appends: {info.appends:,}")
    say(f"  states: {info.state or 'class not known'}")
    for name, value in settings_record(info.topic.settings).items():
        say(f"  {name.replace('_', ' ')}: {value}")
    rows = [
        (event.name, len(event.schemas), ", ".join(map(_field, event.schemas[-1].record.fields)))
        for event in events
    ]
    print_table("", ["event", "#versions", "fields of the latest"], rows)


def _field(field: Field) -> str:
    return f"{field.name}: {kind(field.type)}" + ("" if field.default is MISSING else "?")


# -- one aggregate ------------------------------------------------------------------------


def show_state(store: str, loaded: Loaded[Any], state: bytes, as_json: bool) -> None:
    """An aggregate with its state, given as JSON."""
    times = {
        name: None if time is None else time_text(time)
        for name, time in (("timestamp", loaded.timestamp_ns), ("stored", loaded.stored_ns))
    }
    if as_json:
        where = {"store": store, **text_field("id", loaded.id), "version": loaded.version}
        value = msgspec.json.decode(state)
        print_json({**where, "offset": loaded.offset, **times, "state": value})
        return
    say(f"{_shown(loaded.id)}, version {loaded.version}, stored {times['stored']}")
    say(_shown(msgspec.json.format(state, indent=0)))


def show_summary(store: str, id: str, events: Sequence[StoredEvent], as_json: bool) -> None:
    """An aggregate whose class of states is not here: the last event of each type."""
    counts: dict[str, int] = {}
    last: dict[str, StoredEvent] = {}
    for event in events:
        counts[event.name] = counts.get(event.name, 0) + 1
        last[event.name] = event
    newest = events[-1]
    if as_json:
        types = [{"count": counts[name], **event_record(event)} for name, event in last.items()]
        where = {"store": store, **text_field("id", id), "version": newest.version}
        times = {"timestamp": time_text(newest.timestamp_ns), "stored": time_text(newest.stored_ns)}
        print_json({**where, "offset": newest.offset, **times, "last_events": types})
        return
    say(f"{_shown(id)}, version {newest.version}, stored {time_text(newest.stored_ns)}")
    rows = [
        (name, counts[name], event.version, time_text(event.stored_ns), _data(event))
        for name, event in last.items()
    ]
    print_table("", ["event", "#count", "#last version", "stored", "last one"], rows)


def receipt_record(store: str, receipt: AppendReceipt) -> dict[str, Any]:
    """A receipt as an object."""
    return {
        "store": store,
        **text_field("id", receipt.id),
        "first_version": receipt.first_version,
        "version": receipt.version,
        "partition": receipt.partition,
        "offset": receipt.offset,
        "duplicate": receipt.duplicate,
        "durability": str(receipt.durability),
    }


def print_change(store: str, id: str, verb: str, as_json: bool, **facts: Any) -> None:
    """What was done to an aggregate."""
    if as_json:
        print_json({"store": store, **text_field("id", id), **facts})
        return
    more = "".join(f", {name} {value}" for name, value in facts.items())
    say(f"{verb}: {_shown(id)} of store '{store}'{more}")


# -- events -------------------------------------------------------------------------------


def event_record(event: StoredEvent) -> dict[str, Any]:
    """An event as an object; the end of an aggregate has the data null."""
    record: dict[str, Any] = {
        **text_field("id", event.id),
        "version": event.version,
        "event": event.name,
        "schema_version": event.schema_version,
        "timestamp": time_text(event.timestamp_ns),
        "stored": time_text(event.stored_ns),
        "partition": event.partition,
        "offset": event.offset,
        "index": event.index,
        **text_field("append_id", event.append_id),
        **text_field("correlation_id", event.correlation_id),
        **text_field("causation_id", event.causation_id),
        **header_fields(event.headers),
    }
    # Through JSON, because fields may be dates, decimals or bytes.
    data = None if event.deleted else msgspec.json.decode(msgspec.json.encode(event.data))
    return {**record, "data": data}


def event_writer(as_json: bool) -> Callable[[StoredEvent], bytes]:
    """How an event is written: as an object, or as a line for people."""
    if as_json:
        return lambda event: json_line(event_record(event))
    return _line


def _line(event: StoredEvent) -> bytes:
    where = f"{event.partition}@{event.offset}" + (f".{event.index}" if event.index else "")
    time = time_text(event.timestamp_ns // 1_000_000 * 1_000_000)
    head = f"{where}  {time}  {_shown(event.id)}  {event.version}  {event.name}  {_data(event)}"
    about = {
        "correlation": event.correlation_id,
        "causation": event.causation_id,
        **event.headers,
    }
    tail = "".join(f"  {name}: {text}" for name, text in about.items() if text is not None)
    return (head + _shown(tail)).encode() + b"\n"


def _data(event: StoredEvent) -> str:
    if event.deleted:
        archive = event.data.archived_to
        return "(deleted)" if archive is None else f"(archived to {archive})"
    return _shown(value_bytes(event.data))


def _shown(text: str | bytes) -> str:
    data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    return shown(data).decode()
