"""Topics and subscriptions as tables for people and objects for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from millstream.cli.options.times import time_text
from millstream.cli.output import print_table, say, size
from millstream.deadline import now_ns
from millstream.errors import MillstreamError
from millstream.events.event import nanoseconds_of
from millstream.messaging.topics.lookup import side_by_side
from millstream.messaging.topics.setting_forms import duration_text

if TYPE_CHECKING:
    from millstream.messaging import EventCount, TopicInfo, TopicSettings
    from millstream.mill import Mill
    from millstream.wire.lost import LostRange

# Packs of a topic whose headers are read to count events: a fraction of a second.
PACKS_MAX: Final = 20_000

Counts = Mapping[str, "EventCount | None"]  # by topic

__all__ = [
    "age",
    "counted",
    "lost_text",
    "settings_record",
    "show",
    "show_list",
    "simple",
    "span",
    "topic_record",
]


def simple(value: Any) -> Any:
    """A setting as JSON: durations and times as text, the rest as it is."""
    if isinstance(value, timedelta):
        return duration_text(value)
    if isinstance(value, datetime):
        return time_text(nanoseconds_of(value))
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, tuple | list):
        return [simple(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return settings_record(value)
    return dict(value) if hasattr(value, "items") else value


def settings_record(settings: Any) -> dict[str, Any]:
    """The settings that differ from the defaults."""
    return {
        field.name: simple(getattr(settings, field.name))
        for field in fields(settings)
        if getattr(settings, field.name) != field.default
    }


async def counted(mill: Mill, infos: Sequence[TopicInfo], *, exact: bool) -> Counts:
    """The events of each topic; None where they are not known: foreign streams, missing parts."""

    async def count(info: TopicInfo) -> EventCount | None:
        if info.missing or not info.managed:
            return None
        try:
            return await mill.count_events(info.name, None if exact else PACKS_MAX)
        except MillstreamError:
            return None  # removed meanwhile, or not readable by this user

    found = await side_by_side(count, infos)
    return {info.name: one for info, one in zip(infos, found, strict=True)}


def topic_record(info: TopicInfo, count: EventCount | None = None) -> dict[str, Any]:
    """A topic as an object."""
    return {
        "name": info.name,
        "managed": info.managed,
        "created": simple(info.created),
        "settings": _settings(info.settings),
        "messages": info.messages,
        **({} if count is None else {"events": count.events, "events_exact": count.exact}),
        "bytes": info.bytes,
        "subscriptions": info.subscriptions,
        "lag": info.lag,
        "missing": list(info.missing),
        "uneven": info.uneven,
        "partitions": [
            {
                field.name: simple(getattr(part, field.name))
                for field in fields(part)
                if field.name != "config"
            }
            for part in info.partitions
        ],
    }


def _settings(settings: TopicSettings) -> dict[str, Any]:
    return {field.name: simple(getattr(settings, field.name)) for field in fields(settings)}


def events_text(count: EventCount | None) -> str:
    """A number of events; `~` marks an estimate, `-` one that is not known.

    >>> events_text(None)
    '-'
    """
    return "-" if count is None else f"{'' if count.exact else '~'}{count.events:,}"


def show_list(infos: Sequence[TopicInfo], counts: Counts) -> None:
    """The topics as a table."""
    if not infos:
        say("There is no topic yet. Create one with 'millstream topic create NAME'")
        return
    print_table(
        "Topics",
        [
            "topic",
            "#partitions",
            "#events",
            "#messages",
            "#size",
            "#subscriptions",
            "last event",
            "state",
        ],
        [
            (
                info.name,
                len(info.partitions),
                events_text(counts.get(info.name)),
                f"{info.messages:,}",
                size(info.bytes),
                info.subscriptions,
                age(max((p.last_time for p in info.partitions if p.last_time), default=None)),
                _state(info),
            )
            for info in infos
        ],
    )


def _state(info: TopicInfo) -> str:
    if info.missing:
        return f"partitions {', '.join(map(str, info.missing))} are missing"
    if any(lost.accepted is None for part in info.partitions for lost in part.lost):
        return "events are lost"
    if info.uneven:
        return "partitions differ"
    if not info.managed:
        return "foreign stream"
    return "ok" if info.lag is None else f"copy, {info.lag:,} behind"


def show(info: TopicInfo, count: EventCount | None = None) -> None:
    """One topic: settings, then partitions."""
    say(f"Topic {info.name}, created {simple(info.created)}, {_state(info)}")
    say(f"  events: {events_text(count)}, in {info.messages:,} messages")
    for name, value in settings_record(info.settings).items():
        say(f"  {name.replace('_', ' ')}: {value}")
    print_table(
        "",
        ["#partition", "stream", "#first", "#last", "#messages", "#size", "#keys", "last event",
         "#subscriptions", "leader"],
        [
            (
                part.number,
                part.stream,
                part.first_offset,
                part.last_offset,
                f"{part.messages:,}",
                size(part.bytes),
                f"{part.keys:,}",
                age(part.last_time),
                part.subscriptions,
                part.leader or "-",
            )
            for part in info.partitions
        ],
    )  # fmt: skip
    for part in info.partitions:
        for copy in part.copies:
            problem = f": {copy.problem}" if copy.problem else ""
            heard = "never heard of" if copy.heard is None else f"heard {span(copy.heard)} ago"
            say(f"  copies {copy.stream}: {copy.lag:,} behind, {heard}{problem}")
        for lost in part.lost:
            say(f"  partition {part.number} {lost_text(lost)}")
        for replica in part.replicas:
            state = "offline" if replica.offline else "current" if replica.current else "behind"
            say(f"  partition {part.number} on {replica.node}: {state}, lag {replica.lag}")


def lost_text(lost: LostRange) -> str:
    """A loss in words, and whether it is accepted."""
    taken = "not accepted: readers stop there (millstream topic accept-loss)"
    if lost.accepted is not None:
        taken = f"accepted at {lost.accepted} by {lost.accepted_by or 'unknown'}"
    return f"lost the offsets {lost.first} to {lost.last}, found at {lost.found}; {taken}"


def age(moment: datetime | None) -> str:
    """How long ago it was, in a suitable unit."""
    if moment is None:
        return "-"
    past = max(0, now_ns() - nanoseconds_of(moment))
    return f"{span(timedelta(microseconds=past // 1000))} ago"


def span(time: timedelta) -> str:
    """A duration in its largest unit.

    >>> span(timedelta(seconds=90)), span(timedelta(milliseconds=250)), span(timedelta(days=3))
    ('1m', '0.2s', '3d')
    """
    seconds = time.total_seconds()
    if seconds < 10:
        return f"{seconds:.1f}s"
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f}{unit}"
    return f"{seconds:.0f}s"
