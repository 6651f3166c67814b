"""Tables and their entries, for people and programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from millstream.cli.options.times import time_text
from millstream.cli.output import print_table, say, size
from millstream.cli.views.event_text import (
    json_line,
    shown,
    text_field,
    value_bytes,
    value_field,
)
from millstream.cli.views.topic import age
from millstream.events.event import nanoseconds_of

if TYPE_CHECKING:
    from millstream.messaging import TopicInfo
    from millstream.tables import Change, Entry

__all__ = ["LineOf", "entry_record", "line_writer", "show_list", "table_record"]

LineOf = Callable[["Entry | Change"], bytes]


def table_record(info: TopicInfo) -> dict[str, Any]:
    """A table as an object."""
    return {
        "name": info.name,
        "partitions": len(info.partitions),
        "history": info.settings.history,
        "keys": _keys(info),
        "bytes": info.bytes,
    }


def _keys(info: TopicInfo) -> int:
    return sum(part.keys for part in info.partitions)


def show_list(infos: Sequence[TopicInfo]) -> None:
    """The tables of a broker."""
    if not infos:
        say("There is no table yet. Create one with 'millstream topic create NAME --history 1'")
        return
    print_table(
        "Tables",
        ["table", "#partitions", "#keys and deletions", "#size", "last change"],
        [
            (
                info.name,
                len(info.partitions),
                f"{_keys(info):,}",
                size(info.bytes),
                age(max((p.last_time for p in info.partitions if p.last_time), default=None)),
            )
            for info in infos
        ],
    )


def entry_record(entry: Entry | Change) -> dict[str, Any]:
    """A key with its value as an object; a deletion has the value null."""
    return {
        **text_field("key", entry.key),
        **value_field(entry.value, "auto"),
        "revision": entry.revision,
        "timestamp": time_text(nanoseconds_of(entry.timestamp)),
    }


def line_writer(as_json: bool) -> LineOf:
    """How a key with its value is written: as an object, or as a line for people."""
    if as_json:
        return lambda entry: json_line(entry_record(entry))
    return _line


def _line(entry: Entry | Change) -> bytes:
    time = time_text(nanoseconds_of(entry.timestamp) // 1_000_000 * 1_000_000)
    value = b"(deleted)" if entry.value is None else shown(value_bytes(entry.value))
    key = shown(entry.key.encode("utf-8", "surrogateescape"))
    return f"{entry.revision}  {time}  ".encode() + key + b"  " + value + b"\n"
