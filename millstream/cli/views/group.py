"""Ordered groups as tables for people and objects for programs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from millstream.cli.output import plain, print_table, say
from millstream.cli.views.event_text import shown, text_field
from millstream.cli.views.topic import age, simple, span

if TYPE_CHECKING:
    from millstream.messaging import GroupInfo
    from millstream.messaging.groups.admin import ParkedKey

__all__ = ["group_record", "show", "show_list"]


def group_record(info: GroupInfo) -> dict[str, Any]:
    """A group as an object."""
    return {
        "topic": info.topic,
        "name": info.name,
        "lag": plain(info.lag),
        "members": [
            {
                "id": member.id,
                "name": member.name,
                "since": simple(member.since),
                "leaving": member.leaving,
                "partitions": list(member.partitions),
            }
            for member in info.members
        ],
        "partitions": [
            {
                "partition": part.partition,
                "owner": part.owner,
                "epoch": part.epoch,
                "offset": part.position[0],
                "index": part.position[1],
                "lag": plain(part.lag),
                "parked": [_parked_record(key) for key in part.parked],
            }
            for part in info.partitions
        ],
    }


def _parked_record(key: ParkedKey) -> dict[str, Any]:
    return {
        **text_field("key", key.key),
        "offset": key.offset,
        "index": key.index,
        "since": simple(key.since),
    }


def show_list(infos: Sequence[GroupInfo]) -> None:
    """Groups as a table."""
    if not infos:
        say("There is no group. One is created when its first member opens it: topic.group(NAME)")
        return
    print_table(
        "Groups",
        ["topic", "group", "#members", "#partitions", "#lag", "#behind", "#parked keys"],
        [
            (
                info.topic,
                info.name,
                len(info.members),
                len(info.partitions),
                f"{info.lag.messages:,}",
                span(timedelta(seconds=info.lag.seconds)),
                len(info.parked),
            )
            for info in infos
        ],
    )


def show(info: GroupInfo) -> None:
    """One group: members, partitions, parked keys."""
    behind = span(timedelta(seconds=info.lag.seconds))
    say(f"Group {info.name} of topic {info.topic}, {len(info.members)} members")
    say(f"  lag: {info.lag.messages:,} messages, {behind}")
    names = {member.id: member.name for member in info.members}
    for member in info.members:
        state = "leaving" if member.leaving else "running"
        say(f"  member {member.name} ({member.id}): {state}, joined {age(member.since)}")
    print_table(
        "",
        ["#partition", "owner", "#next offset", "#index", "#lag", "#behind", "#parked keys"],
        [
            (
                part.partition,
                names.get(part.owner or "", part.owner) or "-",
                *part.position,
                f"{part.lag.messages:,}",
                span(timedelta(seconds=part.lag.seconds)),
                len(part.parked),
            )
            for part in info.partitions
        ],
    )
    for key in info.parked:
        name = shown(key.key.encode("utf-8", "surrogateescape")).decode()
        where = f"partition {key.partition}, offset {key.offset}, index {key.index}"
        say(f"  parked: {name}, at {where}, {age(key.since)}")
