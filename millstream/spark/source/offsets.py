"""Offsets of a query: what one means, its JSON, where options start and end reading, tasks. Pure.

The offset of a query has one entry for each partition. `next` is the stream sequence of the next
message to read: a batch from `start` to `end` reads the sequences start.next <= s < end.next,
whatever happens in the meantime. Each entry also says which stream it belongs to (by the time the
stream was created), when the message before `next` was stored, and into how many tasks the range
that ends here is split: a batch that runs again has the same rows in the same tasks.

Spark compares offsets as JSON text, so the order of keys is fixed here: topics by name, partitions
by number.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal

from millstream.errors import ConfigError
from millstream.wire.lost import LostRange

__all__ = [
    "Edge",
    "OffsetLimit",
    "OffsetRange",
    "PartitionOffset",
    "PartitionState",
    "SourceOffset",
    "TaskSplit",
    "TopicPartition",
    "WhenNone",
    "from_json",
    "lag",
    "limited_ends",
    "message_counts",
    "offset_ranges",
    "parse_moment",
    "parse_offsets",
    "parse_timestamp",
    "parse_timestamps",
    "rfc3339",
    "task_counts",
    "to_json",
]

TopicPartition = tuple[str, int]  # topic, number of the partition
SourceOffset = dict[TopicPartition, "PartitionOffset"]  # the offset of a query

FIRST: Final = 1  # the first sequence of every stream


@dataclass(frozen=True, slots=True)
class PartitionOffset:
    """How far one partition is read."""

    next: int  # sequence of the next message to read
    created: str  # when the stream was created: a different time is a different stream
    last_time: str = ""  # when the message before `next` was stored; empty: unknown
    tasks: int = 1  # into how many tasks the range that ends here is split


@dataclass(frozen=True, slots=True)
class PartitionState:
    """The stream of one partition as it is now."""

    topic: str
    partition: int
    stream: str
    prefix: str | None  # of its subjects; None: a stream that Millstream did not create
    created: str
    first: int  # sequence of the oldest message that still exists, or `next`
    next: int  # sequence that the next message will get
    last_time: str = ""  # when the last message was stored
    message_bytes: int = 0  # of an average message
    typed: bool = False  # whether its values have a schema
    retention: str = "limits"
    gaps: bool = False  # whether sequences vanish by design: a table keeps the last of each key
    lost: tuple[LostRange, ...] = ()  # what the broker found to be lost

    @property
    def topic_partition(self) -> TopicPartition:
        return self.topic, self.partition

    def known_lost(self, start: int, end: int) -> int:
        """How many of the sequences [start, end) are known to be lost."""
        edges = [(max(start, lost.first), min(end, lost.last + 1)) for lost in self.lost]
        return sum(max(0, high - low) for low, high in edges)


# -- JSON -----------------------------------------------------------------------------------


def to_json(offset: Mapping[TopicPartition, PartitionOffset]) -> dict[str, Any]:
    """The offset as Spark keeps it; equal offsets give equal text.

    >>> to_json({("b", 10): PartitionOffset(3, "x"), ("b", 9): PartitionOffset(2, "y", "z", 4)})
    {'b': {'9': {'next': 2, 'log': 'y', 'last': 'z', 'tasks': 4}, '10': {'next': 3, 'log': 'x'}}}
    """
    result: dict[str, Any] = {}
    for (topic, number), reached in sorted(offset.items()):
        entry: dict[str, Any] = {"next": reached.next, "log": reached.created}
        if reached.last_time:
            entry["last"] = reached.last_time
        if reached.tasks != 1:
            entry["tasks"] = reached.tasks
        result.setdefault(topic, {})[str(number)] = entry
    return result


def from_json(kept: Mapping[str, Any]) -> SourceOffset:
    """The offset that Spark kept."""
    try:
        return {
            (topic, int(number)): PartitionOffset(
                int(entry["next"]), entry["log"], entry.get("last", ""), entry.get("tasks", 1)
            )
            for topic, numbers in kept.items()
            for number, entry in numbers.items()
        }
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"the checkpoint's offset is not one of this source ({error!r}): {kept!r}. Was it "
            f"written by another source? Use a new checkpoint location"
        ) from error


def lag(done: Mapping[str, Any] | str, latest: Mapping[str, Any] | str) -> int:
    """Messages between two offsets of a query's progress: `endOffset` and `latestOffset`.

    >>> lag('{"a": {"0": {"next": 5, "log": "x"}}}', {"a": {"0": {"next": 9, "log": "x"}}})
    4
    """
    start = from_json(json.loads(done) if isinstance(done, str) else done)
    end = from_json(json.loads(latest) if isinstance(latest, str) else latest)
    return sum(message_counts(start, end).values())


# -- where reading starts and ends, by option -----------------------------------------------

Edge = Literal["earliest", "latest"]
WhenNone = Literal["error", "latest"]
_EDGES: Final[Mapping[int, Edge]] = {-2: "earliest", -1: "latest"}  # Kafka's numbers for them
TIME_MAX: Final = 2**63 // 1_000_000  # the server counts nanoseconds in 64 bits
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class OffsetLimit:
    """Where reading starts or ends. Offsets are those of the next message: an end is exclusive."""

    edge: Edge = "earliest"  # for every partition that has none of the others
    offsets: Mapping[TopicPartition, int | Edge] = field(default_factory=dict)
    time: int | None = None  # milliseconds since 1970, for every partition
    times: Mapping[TopicPartition, int] = field(default_factory=dict)
    when_none: WhenNone = "error"  # if nothing was stored at or after a time


def parse_offsets(text: str, default: Edge) -> OffsetLimit:
    """`earliest`, `latest`, or JSON: {"orders": {"0": 17, "1": -2}} (-2 earliest, -1 latest)."""
    name = text.strip().lower()
    if name == "earliest":
        return OffsetLimit("earliest")
    if name == "latest":
        return OffsetLimit("latest")
    if not name.startswith("{"):
        raise ConfigError(
            'choose earliest, latest, or offsets by partition: {"orders": {"0": 17}} '
            f"(default: {default})"
        )
    offsets: dict[TopicPartition, int | Edge] = {}
    for partition, given in _by_partition(text).items():
        if given == "earliest" or given == "latest":
            offsets[partition] = "earliest" if given == "earliest" else "latest"
        elif isinstance(given, int) and given in _EDGES:
            offsets[partition] = _EDGES[given]
        elif isinstance(given, int) and given >= FIRST:
            offsets[partition] = given
        else:
            raise ConfigError(
                f"offset {given!r} of {partition[0]}/{partition[1]}: offsets start at 1; "
                f"-2 is earliest, -1 is latest"
            )
    return OffsetLimit("latest", offsets=offsets)


def parse_timestamp(text: str, when_none: WhenNone) -> OffsetLimit:
    """Milliseconds since 1970 for every partition."""
    if not re.fullmatch(r"\d{1,14}", text.strip()) or int(text) > TIME_MAX:
        raise ConfigError("give milliseconds since 1970, a whole number, up to the year 2262")
    return OffsetLimit(time=int(text), when_none=when_none)


def parse_moment(text: str) -> datetime:
    """A time: ISO 8601 with its zone, or milliseconds since 1970.

    >>> parse_moment("2023-11-14T22:13:20Z") == parse_moment("1700000000000")
    True
    """
    if re.fullmatch(r"\d{1,14}", text.strip()):
        return _EPOCH + timedelta(milliseconds=parse_timestamp(text, "latest").time or 0)
    try:
        time = datetime.fromisoformat(text.strip())
    except ValueError as error:
        raise ConfigError(
            "write it like 2026-01-31T12:00:00Z, or as milliseconds since 1970"
        ) from error
    if time.tzinfo is None:
        raise ConfigError("it has no time zone. Add Z for UTC, or +01:00")
    return time


def parse_timestamps(text: str, when_none: WhenNone) -> OffsetLimit:
    """Milliseconds since 1970 by partition: {"orders": {"0": 1700000000000}}."""
    times: dict[TopicPartition, int] = {}
    for partition, given in _by_partition(text).items():
        if not isinstance(given, int) or not 0 <= given <= TIME_MAX:
            raise ConfigError(f"time {given!r} of {partition[0]}/{partition[1]}: give milliseconds")
        times[partition] = given
    return OffsetLimit(times=times, when_none=when_none)


def _by_partition(text: str) -> dict[TopicPartition, object]:
    try:
        found = json.loads(text)
        return {
            (str(topic), int(number)): value
            for topic, numbers in found.items()
            for number, value in numbers.items()
        }
    except (ValueError, AttributeError) as error:
        raise ConfigError('not JSON of the form {"orders": {"0": 17, "1": -2}}') from error


def rfc3339(milliseconds: int) -> str:
    """The moment in the form that the server reads.

    >>> rfc3339(1_700_000_000_123)
    '2023-11-14T22:13:20.123000Z'
    """
    moment = _EPOCH + timedelta(milliseconds=milliseconds)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%f") + "Z"


# -- from offsets to tasks ------------------------------------------------------------------

# Batch reads, without an option: one task for this much, so that large ranges use every core and
# small ones cost one task. Reading 8 MiB takes about as long as starting the task that does it.
TASK_BYTES: Final = 8 * 1024 * 1024
TASK_MESSAGES: Final = 50_000
AUTOMATIC_TASKS_MAX: Final = 32  # of one partition; with more, the driver is the bottleneck


@dataclass(frozen=True, slots=True)
class TaskSplit:
    """How ranges are split into tasks. One task for each partition keeps the order of every key."""

    min_tasks: int | None = None  # of all partitions together
    messages_per_task: int | None = None
    by_size: bool = False  # if neither is given: large ranges are split, and order is lost


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """What one task reads: the sequences start <= s < end of one partition."""

    topic: str
    partition: int
    start: int
    end: int


def _range_start(start: PartitionOffset | None, end: PartitionOffset) -> int:
    """Where the range of a partition starts; a new partition or stream is read from 1."""
    if start is None or start.created != end.created:
        return FIRST
    return start.next


def message_counts(
    start: Mapping[TopicPartition, PartitionOffset], end: Mapping[TopicPartition, PartitionOffset]
) -> dict[TopicPartition, int]:
    """Messages between two offsets, by partition."""
    return {
        partition: max(0, reached.next - _range_start(start.get(partition), reached))
        for partition, reached in end.items()
    }


def limited_ends(
    start: SourceOffset, states: Mapping[TopicPartition, PartitionState], most: int | None
) -> dict[TopicPartition, int]:
    """The next sequence of each partition after at most `most` messages, shared by backlog."""
    full = {
        partition: PartitionOffset(state.next, state.created) for partition, state in states.items()
    }
    backlog = message_counts(start, full)
    waiting = sum(backlog.values())
    if most is None or waiting <= most:
        return {partition: reached.next for partition, reached in full.items()}
    left = most
    result = {}
    # The smallest first, so that the large ones get what these leave of their share.
    for partition, count in sorted(backlog.items(), key=lambda item: item[1]):
        share = min(count, math.ceil(left * count / waiting)) if waiting else 0
        left -= share
        waiting -= count
        reached = full[partition]
        first = _range_start(start.get(partition), reached)
        result[partition] = first + share if count else reached.next
    return result


def task_counts(
    backlog: Mapping[TopicPartition, int],
    states: Mapping[TopicPartition, PartitionState],
    split: TaskSplit,
) -> dict[TopicPartition, int]:
    """Into how many tasks the range of each partition is split; 1 for an empty one."""
    total = sum(backlog.values())
    result = {}
    for partition, count in backlog.items():
        tasks = 1
        if split.messages_per_task is not None:
            tasks = math.ceil(count / split.messages_per_task)
        if split.min_tasks is not None and total:
            tasks = max(tasks, math.ceil(split.min_tasks * count / total))
        if split.by_size and split.messages_per_task is None and split.min_tasks is None:
            weight = count * states[partition].message_bytes / TASK_BYTES
            tasks = min(AUTOMATIC_TASKS_MAX, math.ceil(max(weight, count / TASK_MESSAGES)))
        result[partition] = max(1, min(tasks, count))
    return result


def offset_ranges(
    start: Mapping[TopicPartition, PartitionOffset], end: Mapping[TopicPartition, PartitionOffset]
) -> list[OffsetRange]:
    """The tasks of a batch: a function of its two offsets and nothing else."""
    result = []
    for (topic, partition), reached in sorted(end.items()):
        first = _range_start(start.get((topic, partition)), reached)
        count = reached.next - first
        if count <= 0:
            continue
        tasks = min(reached.tasks, count)
        edges = [first + count * n // tasks for n in range(tasks + 1)]
        for low, high in itertools.pairwise(edges):
            result.append(OffsetRange(topic, partition, low, high))
    return result
