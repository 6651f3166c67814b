"""Replay: reading any range of a topic, independent of subscriptions."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from millstream.errors import ConfigError, DataLoss, Undecodable
from millstream.events.event import Partition
from millstream.events.start import Start
from millstream.events.subject import PACK_TOKEN, key_token, text_keys
from millstream.events.undecodable import OnUndecodable, Report, check_policy
from millstream.messaging.reading.by_key import KEYS_MAX, Source, open_sources, take_merged
from millstream.messaging.topics.lookup import stream_subjects
from millstream.messaging.topics.setting_forms import several
from millstream.messaging.topics.stream_config import may_hold_packs
from millstream.nearest import settings_from
from millstream.wire.aio.direct_reader import DirectReader, open_range
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.aio.pull_consumer import Signal
from millstream.wire.direct import matches
from millstream.wire.message import RawMessage
from millstream.wire.range_cursor import Range

__all__ = [
    "ReadPlan",
    "end_of",
    "holds_packs",
    "plan_of",
    "read_messages",
    "subjects_of",
]

_log = logging.getLogger("millstream.messaging")

TAKE_MESSAGES: Final = 1000
# After this long without a message, a reader checks whether the rest of its range is readable.
QUIET_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Which events to read, from where to where."""

    start: Start = Start.ALL
    end: int | datetime | None = None  # offset or time, exclusive; None: what is stored now
    follow: bool = False  # continue with events stored later, forever
    partitions: Sequence[int] | None = None  # None: all
    keys: Sequence[str] = ()  # only events of these keys; none given: all
    subjects: Sequence[str] = ()  # only messages on these subjects; instead of keys
    # An event that cannot be decoded: "fail" raises Undecodable after the events before it, "drop"
    # leaves it out with a warning in the log; a function is called with the Undecodable instead.
    undecodable: OnUndecodable = "fail"
    # Whether to stop at events that the broker has lost and no operator has accepted; False: go on.
    fail_on_data_loss: bool = True

    def __post_init__(self) -> None:
        Start.checked(self.start)
        object.__setattr__(self, "keys", text_keys(self.keys))
        object.__setattr__(self, "subjects", several(self.subjects))
        check_policy(self.undecodable)
        if self.follow and self.end is not None:
            raise ConfigError("follow=True reads forever; it cannot have an end")
        if self.keys and self.subjects:
            raise ConfigError("choose by keys or by subjects, not by both")
        if isinstance(self.end, datetime) and self.end.tzinfo is None:
            raise ConfigError(f"end {self.end!r} has no time zone")

    def chosen(self, partitions: Sequence[Partition]) -> list[Partition]:
        """Those of the topic's partitions that are read."""
        return [p for p in partitions if self.partitions is None or p.number in self.partitions]

    def report(self) -> Report | None:
        """What is called with each event that is left out; None: it is raised."""
        if callable(self.undecodable):
            return self.undecodable
        return None if self.undecodable == "fail" else _LogDropped()


class _LogDropped:
    """Warns of dropped events: of the first, the tenth, the hundredth and so on."""

    def __init__(self) -> None:
        self._count = 0
        self._next = 1

    def __call__(self, error: Undecodable) -> None:
        self._count += 1
        if self._count == self._next:
            self._next *= 10
            _log.warning(
                "%d undecodable event(s) dropped, the last one at %s/%d, offset %d, index %d: %s",
                *(self._count, error.topic, error.partition, error.offset, error.index),
                error.reason,
            )


def plan_of(plan: ReadPlan | None, choices: dict[str, Any]) -> ReadPlan:
    """The given plan, or one of single values."""
    return settings_from(ReadPlan, plan, choices) or ReadPlan()


async def read_messages(
    jetstream: JetStream,
    partitions: Sequence[Partition],
    plan: ReadPlan,
    *,
    over_damage: bool = False,
    headers_only: bool = False,
    starts: Mapping[str, int] | None = None,
) -> AsyncGenerator[tuple[Partition, list[RawMessage]], None]:
    """The messages of a plan in groups, each group of one partition and in its order.

    `starts` are offsets by stream instead of the plan's start; partitions may be of several topics.

    DataLoss when the broker has noted that events of the range are lost, or counts messages at its
    end that it cannot read; with `over_damage` it is read as far as that is possible. With
    `headers_only` the broker leaves out payloads where it can.
    """
    signal = Signal()
    readers: list[_PartitionReader] = []
    try:
        for partition in plan.chosen(partitions):
            own = plan
            if starts is not None:
                own = replace(plan, start=Start.at_offset(starts[partition.stream]))
            over_loss = over_damage or not plan.fail_on_data_loss
            bounds = Range(over_loss=over_loss, headers_only=headers_only)
            readers.append(await _open(jetstream, partition, own, bounds, signal))
        while readers:
            idle = True
            for reader in readers:
                messages = await reader.take()
                if messages:
                    idle = False
                    yield reader.partition, messages
            for reader in [reader for reader in readers if reader.done]:
                readers.remove(reader)
                reader.close()
            if idle and readers and not await signal.wait(QUIET_SECONDS):
                for reader in readers:
                    await reader.check_damage(over_damage)
    finally:
        for reader in readers:
            reader.close()


class _PartitionReader:
    """Reads one partition's part of a plan."""

    def __init__(self, partition: Partition, sources: Sequence[Source]) -> None:
        self.partition = partition
        self._sources = sources
        # The server gives a direct reader the messages of one subject, or all.
        one = sources[0].reader if len(sources) == 1 else None
        several = isinstance(one, DirectReader) and len(one.what.subjects) > 1
        self._filters = one.what.subjects if several and one is not None else ()

    @property
    def done(self) -> bool:
        return all(source.done for source in self._sources)

    def close(self) -> None:
        for source in self._sources:
            source.close()

    async def take(self) -> list[RawMessage]:
        """The messages that have arrived, ready to be decoded; empty: none are waiting."""
        while messages := take_merged(self._sources, TAKE_MESSAGES):
            if self._filters:
                messages = [message for message in messages if self._is_chosen(message)]
            if messages:
                if self.partition.learn is not None:
                    await self.partition.learn(messages)
                break
        return messages

    def _is_chosen(self, message: RawMessage) -> bool:
        subject = message.subject.decode("utf-8", "surrogateescape")
        return any(matches(pattern, subject) for pattern in self._filters)

    async def check_damage(self, over_damage: bool) -> None:
        """End the range if the broker cannot read the rest of it."""
        partition = self.partition
        for reader in [source.reader for source in self._sources]:
            if reader is None or isinstance(reader, DirectReader):
                continue
            if not await reader.ends_unreadable():
                continue
            if not over_damage:
                raise DataLoss(
                    f"'{partition.topic}', partition {partition.number}: the broker counts "
                    f"messages from offset {reader.next_sequence} up to "
                    f"{(reader.what.end or 0) - 1} and cannot read one of them: its file is "
                    f"damaged. 'millstream verify {partition.topic}' reports what is missing"
                )
            reader.end()


async def _open(
    jetstream: JetStream, partition: Partition, plan: ReadPlan, bounds: Range, signal: Signal
) -> _PartitionReader:
    """Start reading a partition's part of a plan."""
    stream = partition.stream
    what, config = await _range(jetstream, partition, plan, bounds)
    if plan.keys:
        # Packs hold events of any key. The end of the range is fixed before this question: a pack
        # that is stored after it is outside of the range, and one before it is in the index. A
        # reader that follows has no end, so there it counts whether packs can come.
        packs = may_hold_packs(config)
        if packs and not plan.follow:
            packs = await holds_packs(jetstream, partition)
        if packs:
            what = replace(what, subjects=(*what.subjects, _packs(partition)))
        each = what.end is not None and what.deliver is None
        if each and len(what.subjects) <= KEYS_MAX:
            sources = await open_sources(jetstream, stream, what, config, signal)
            return _PartitionReader(partition, sources)
    return _PartitionReader(
        partition, [Source((), await open_range(jetstream, stream, what, signal))]
    )


async def _range(
    jetstream: JetStream, partition: Partition, plan: ReadPlan, bounds: Range
) -> tuple[Range, Mapping[str, Any]]:
    """What a plan means in a partition, and the stream's configuration where it matters."""
    stream = partition.stream
    end = await end_of(jetstream, partition, plan.end)
    start = plan.start
    config: Mapping[str, Any] = {}
    if not plan.follow or start == Start.NEW or plan.keys:
        info = await jetstream.stream_info(stream)
        config, last = info.config, info.state.last_seq + 1
        if not plan.follow:
            end = last if end is None else min(end, last)
        if start == Start.NEW:
            # A position, so that nothing is missed when the connection is lost before the first.
            start = Start.at_offset(last)
    what = replace(bounds, end=end, subjects=subjects_of(partition, plan))
    if start.policy == "by_start_sequence":
        return replace(what, start=start.offset), config
    if start.policy == "by_start_time":
        return replace(what, start_time=start.rfc3339), config
    if start.policy != "all":
        return replace(what, deliver=start.policy), config
    return what, config


async def end_of(
    jetstream: JetStream, partition: Partition, end: int | datetime | None
) -> int | None:
    """The offset that an offset or a time means in a partition."""
    if isinstance(end, datetime):
        return await jetstream.sequence_at(partition.stream, Start.at_time(end).rfc3339 or "")
    return end


def subjects_of(partition: Partition, plan: ReadPlan) -> tuple[str, ...]:
    """The subjects that a plan chooses; empty: all. Packs may hold events of its keys too."""
    keys = plan.keys
    if not keys:
        return tuple(plan.subjects)
    if partition.prefix is None:
        raise ConfigError("a foreign stream has no keys; choose by subjects instead")
    return tuple(f"{partition.prefix}.{token}" for token in sorted({key_token(k) for k in keys}))


def _packs(partition: Partition) -> str:
    return f"{partition.prefix}.{PACK_TOKEN}.>"


async def holds_packs(jetstream: JetStream, partition: Partition) -> bool:
    """Whether there are packs in a partition now, by the broker's index of subjects.

    A table takes none: what it has on those subjects are the fences of those who write to it.
    """
    if partition.prefix is None:
        return False
    if not may_hold_packs((await jetstream.stream_info(partition.stream)).config):
        return False
    async for _ in stream_subjects(jetstream, partition.stream, _packs(partition)):
        return True
    return False
