"""From offsets to tasks: limits, cuts, and what lost data means. Pure."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from millstream.errors import DataLoss
from millstream.spark.source.offsets import FIRST, Offsets, Position, Where

__all__ = [
    "Cut",
    "Log",
    "Piece",
    "check_log",
    "limited",
    "pieces",
    "report_loss",
    "sizes",
    "tasks_for",
]

_log = logging.getLogger("millstream.spark")

# Batch reads, without an option: one task for this much, so that large ranges use every core and
# small ones cost one task. Reading 8 MiB takes about as long as starting the task that does it.
TASK_BYTES: Final = 8 * 1024 * 1024
TASK_MESSAGES: Final = 50_000
AUTOMATIC_TASKS_MAX: Final = 32  # of one partition; beyond that the driver is the limit


@dataclass(frozen=True, slots=True)
class Log:
    """The state of one partition's stream right now."""

    topic: str
    partition: int
    stream: str
    prefix: str | None  # of its subjects; None: a stream that Millstream did not lay out
    created: str
    first: int  # sequence of the first message that is still there, or the next one
    next: int  # sequence that the next message will get
    last_time: str = ""  # when the last message was stored
    message_bytes: int = 0  # of an average message
    typed: bool = False  # whether its values have a schema
    gaps: bool = False  # whether sequences vanish by design: a table keeps the last of each key

    @property
    def where(self) -> Where:
        return self.topic, self.partition


@dataclass(frozen=True, slots=True)
class Cut:
    """How a range is cut into tasks. One task for each partition keeps the order of every key."""

    min_tasks: int | None = None  # of all partitions together
    messages_per_task: int | None = None
    by_size: bool = False  # when neither is given: large ranges are cut, and order is lost


@dataclass(frozen=True, slots=True)
class Piece:
    """One task's part of a range: sequences start <= s < end of one partition."""

    topic: str
    partition: int
    start: int
    end: int


def report_loss(what: str, fail: bool) -> None:
    """Everything that was promised and is gone comes through here: it stops the query, or warns."""
    if fail:
        raise DataLoss(
            f"{what}. To go on with what is there set the option failOnDataLoss to false; to "
            f"begin anew use a new checkpoint location"
        )
    _log.warning("%s; reading goes on with what is there (failOnDataLoss=false)", what)


def check_log(start: Position, log: Log, fail: bool) -> None:
    """Report when the log is no longer the one that a position belongs to, or lost its start."""
    name = f"{log.topic}/{log.partition}"
    if start.log != log.created:
        report_loss(
            f"'{name}' was made anew at {log.created} (the position is of the log made at "
            f"{start.log}): what was not read of the old one is gone",
            fail,
        )
    elif log.next < start.next:
        report_loss(
            f"'{name}' ends at offset {log.next - 1}, but {start.next - 1} was read before: the "
            f"log lost messages at its end",
            fail,
        )
    elif log.first > start.next and not log.gaps:
        report_loss(
            f"'{name}': offsets {start.next} to {log.first - 1} expired or were deleted before "
            f"they were read",
            fail,
        )


def begin_of(start: Position | None, end: Position) -> int:
    """Where the range of a partition begins; one that is new, or made anew, is read from 1."""
    if start is None or start.log != end.log:
        return FIRST
    return start.next


def sizes(start: Mapping[Where, Position], end: Mapping[Where, Position]) -> dict[Where, int]:
    """Messages between two offsets, by partition."""
    return {
        where: max(0, position.next - begin_of(start.get(where), position))
        for where, position in end.items()
    }


def limited(start: Offsets, logs: Mapping[Where, Log], most: int | None) -> dict[Where, int]:
    """The next sequence of each partition after at most `most` messages, shared by backlog."""
    full = {where: Position(log.next, log.created) for where, log in logs.items()}
    backlog = sizes(start, full)
    total = sum(backlog.values())
    if most is None or total <= most:
        return {where: position.next for where, position in full.items()}
    left = most
    result = {}
    # The smallest first, so that what they leave of their share goes to the large ones.
    for place, (where, size) in enumerate(sorted(backlog.items(), key=lambda item: item[1])):
        waiting = sum(sorted(backlog.values())[place:])
        share = 0 if not waiting else min(size, math.ceil(left * size / waiting))
        left -= share
        begin = begin_of(start.get(where), full[where])
        result[where] = begin + share if size else full[where].next
    return result


def tasks_for(
    backlog: Mapping[Where, int], logs: Mapping[Where, Log], cut: Cut
) -> dict[Where, int]:
    """Into how many tasks the range of each partition is cut; 1 for an empty one."""
    total = sum(backlog.values())
    result = {}
    for where, size in backlog.items():
        tasks = 1
        if cut.messages_per_task is not None:
            tasks = math.ceil(size / cut.messages_per_task)
        if cut.min_tasks is not None and total:
            tasks = max(tasks, math.ceil(cut.min_tasks * size / total))
        if cut.by_size and cut.messages_per_task is None and cut.min_tasks is None:
            weight = size * logs[where].message_bytes / TASK_BYTES
            tasks = min(AUTOMATIC_TASKS_MAX, math.ceil(max(weight, size / TASK_MESSAGES)))
        result[where] = max(1, min(tasks, size))
    return result


def pieces(start: Mapping[Where, Position], end: Mapping[Where, Position]) -> list[Piece]:
    """The tasks of a batch: a function of its two offsets and nothing else."""
    result = []
    for (topic, partition), position in sorted(end.items()):
        first = begin_of(start.get((topic, partition)), position)
        size = position.next - first
        if size <= 0:
            continue
        tasks = min(position.tasks, size)
        edges = [first + size * n // tasks for n in range(tasks + 1)]
        for low, high in itertools.pairwise(edges):
            result.append(Piece(topic, partition, low, high))
    return result
