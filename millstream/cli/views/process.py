"""Processes as a table for people and objects for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from millstream.cli.output import plain, print_table, say
from millstream.cli.views.topic import age, simple

if TYPE_CHECKING:
    from millstream.messaging import ProcessInfo

__all__ = ["process_record", "show_list"]


def process_record(info: ProcessInfo) -> dict[str, Any]:
    """A process as an object."""
    return {
        "name": info.name,
        "source": info.source,
        "target": info.target,
        "lag": info.lag,
        "last_commit": simple(info.last_commit),
        "partitions": plain(info.partitions),
    }


def _positions(info: ProcessInfo) -> str:
    """Each partition and its position, with the topic where there are several."""
    several = len({part.topic for part in info.partitions}) > 1
    return ", ".join(
        f"{part.topic}/{part.partition}@{part.position}"
        if several
        else f"{part.partition}@{part.position}"
        for part in info.partitions
    )


def show_list(infos: Sequence[ProcessInfo]) -> None:
    """Processes as a table."""
    if not infos:
        say("There is no process. One is listed when it has started: mill.process(...).run()")
        return
    print_table(
        "Processes",
        ["process", "reads", "writes", "position", "#lag", "last commit"],
        [
            (
                info.name,
                info.source,
                info.target,
                _positions(info),
                "input is gone" if info.lag is None else f"{info.lag:,}",
                age(info.last_commit),
            )
            for info in infos
        ],
    )
