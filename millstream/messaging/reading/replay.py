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
from millstream.messaging.topics.setting_forms import several
from millstream.nearest import settings_from
from millstream.wire.aio.direct_reader import DirectReader, open_range
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.aio.ordered_consumer import OrderedConsumer
from millstream.wire.aio.pull_consumer import Signal
from millstream.wire.direct import matches
from millstream.wire.message import RawMessage
from millstream.wire.range_cursor import Range

__all__ = ["ReadPlan", "end_of", "plan_of", "read_messages", "subjects_of"]

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
            what = replace(
                await _range(jetstream, partition, own),
                over_loss=over_damage or not plan.fail_on_data_loss,
                headers_only=headers_only,
            )
            opened = await open_range(jetstream, partition.stream, what, signal)
            readers.append(_PartitionReader(partition, opened))
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

    def __init__(self, partition: Partition, reader: OrderedConsumer | DirectReader) -> None:
        self.partition = partition
        self._reader = reader
        subjects = reader.what.subjects
        # The server gives a direct reader the messages of one subject, or all.
        self._filters = subjects if isinstance(reader, DirectReader) and len(subjects) > 1 else ()

    @property
    def done(self) -> bool:
        return self._reader.done

    def close(self) -> None:
        self._reader.close()

    async def take(self) -> list[RawMessage]:
        """The messages that have arrived, ready to be decoded; empty: none are waiting."""
        while messages := self._reader.take_now(TAKE_MESSAGES):
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
        reader, partition = self._reader, self.partition
        if isinstance(reader, DirectReader) or not await reader.ends_unreadable():
            return
        if not over_damage:
            raise DataLoss(
                f"'{partition.topic}', partition {partition.number}: the broker counts messages "
                f"from offset {reader.next_sequence} up to {(reader.what.end or 0) - 1} and cannot "
                f"read one of them: its file is damaged. 'millstream verify {partition.topic}' "
                f"reports what is missing"
            )
        reader.end()


async def _range(jetstream: JetStream, partition: Partition, plan: ReadPlan) -> Range:
    stream = partition.stream
    subjects = subjects_of(partition, plan)
    end = await end_of(jetstream, partition, plan.end)
    start = plan.start
    if not plan.follow or start == Start.NEW:
        last = (await jetstream.stream_info(stream)).state.last_seq + 1
        if not plan.follow:
            end = last if end is None else min(end, last)
        if start == Start.NEW:
            # A position, so that nothing is missed when the connection is lost before the first.
            start = Start.at_offset(last)
    if start.policy == "by_start_sequence":
        return Range(start.offset, end, subjects=subjects)
    if start.policy == "by_start_time":
        return Range(1, end, start_time=start.rfc3339, subjects=subjects)
    if start.policy == "all":
        return Range(1, end, subjects=subjects)
    return Range(1, end, deliver=start.policy, subjects=subjects)


async def end_of(
    jetstream: JetStream, partition: Partition, end: int | datetime | None
) -> int | None:
    """The offset that an offset or a time means in a partition."""
    if isinstance(end, datetime):
        return await jetstream.sequence_at(partition.stream, Start.at_time(end).rfc3339 or "")
    return end


def subjects_of(partition: Partition, plan: ReadPlan) -> tuple[str, ...]:
    """What the server has to deliver; empty: everything. For keys: their subjects, and packs."""
    keys = plan.keys
    if not keys:
        return tuple(plan.subjects)
    if partition.prefix is None:
        raise ConfigError("a foreign stream has no keys; choose by subjects instead")
    tokens = sorted({key_token(key) for key in keys})
    return (*(f"{partition.prefix}.{t}" for t in tokens), f"{partition.prefix}.{PACK_TOKEN}.>")
