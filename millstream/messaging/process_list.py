"""The processes that have stored a position: found by what they store beside their outputs.

A process from topics to topics has a fence on every partition of its outputs, which holds its name,
the input partition and how far it is in it. One with tables has one record, with all of that. So
nothing else has to be stored, and what is listed is what a restart would continue from.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from millstream.errors import DataLoss
from millstream.events.fence import FenceState, read_state
from millstream.events.subject import PACK_TOKEN
from millstream.messaging.processing.record import CommitRecord, read_record, record_subject
from millstream.messaging.topics.lookup import side_by_side, stream_subjects
from millstream.messaging.topics.stream_config import from_stream_config, identity_of
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.api import StreamInfo

__all__ = ["ProcessInfo", "ProcessPartition", "list_processes"]

# A process's fence for an input partition is NAME-NUMBER; with several inputs the topic follows.
_FENCE_NAME: Final = re.compile(r"(.+)-(\d+)(\.from-.+)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class ProcessPartition:
    """How far a process is in one partition of its input."""

    partition: int
    position: int  # offset of the last message whose outputs are stored
    lag: int | None  # messages after it; None: the input does not exist any more
    topic: str = ""  # that the partition is of


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """A process that has stored a position, running or not."""

    name: str
    source: str  # topic that it reads; several are separated by commas
    target: str  # topic or table that it writes; several tables and topics, by commas
    partitions: tuple[ProcessPartition, ...]
    last_commit: datetime  # when it last stored outputs or a position, or was started

    @property
    def lag(self) -> int | None:
        """Messages of all partitions that are not handled; None: the input is gone."""
        lags = [part.lag for part in self.partitions]
        return None if None in lags else sum(lag for lag in lags if lag is not None)


@dataclass(frozen=True, slots=True)
class _Found:
    """One fence of a process."""

    name: str
    target: str
    partition: int  # of the input
    state: FenceState
    stored: datetime


async def list_processes(jetstream: JetStream) -> list[ProcessInfo]:
    """The processes of all topics, by output and name.

    A process whose fences were last stored by an older version is listed when it has run again.
    """
    streams = await jetstream.streams()
    known = {stream.config["name"]: stream for stream in streams}
    found = await side_by_side(lambda stream: _fences(jetstream, stream), streams)
    by_process: dict[tuple[str, str], list[_Found]] = {}
    for fence in (fence for part in found for fence in part):
        by_process.setdefault((fence.target, fence.name), []).append(fence)
    listed = [_of_fences(fences, known) for fences in by_process.values()]
    records = await side_by_side(lambda stream: _records(jetstream, stream), streams)
    listed += [_of_record(*record, known) for part in records for record in part]
    return sorted(listed, key=lambda info: (info.target, info.name))


def _prefix_of(stream: StreamInfo) -> str | None:
    """The prefix of a topic's partition; None: processes do not write there."""
    prefix = identity_of(stream.config).prefix
    return None if prefix is None or from_stream_config(stream.config).is_copy else prefix


async def _fences(jetstream: JetStream, stream: StreamInfo) -> list[_Found]:
    """The fences of processes in one partition of a topic."""
    config = stream.config
    prefix = _prefix_of(stream)
    if prefix is None:
        return []
    found = []
    name = config["name"]
    start = f"{prefix}.{PACK_TOKEN}."
    async for subject, _ in stream_subjects(jetstream, name, f"{start}>"):
        matched = _FENCE_NAME.fullmatch(subject.removeprefix(start))
        if matched is None or "." in matched[1]:
            continue
        message = await jetstream.get_message(name, {"last_by_subj": subject})
        if message is None:
            continue
        try:
            state = read_state(message.sequence, message.headers)
        except DataLoss:  # a producer's: it has no fence
            continue
        if state.input_stream:
            stored = datetime.fromisoformat(message.time).astimezone(UTC)
            topic = identity_of(config).topic
            found.append(_Found(matched[1], topic, int(matched[2]), state, stored))
    return found


async def _records(jetstream: JetStream, stream: StreamInfo) -> list[tuple[CommitRecord, datetime]]:
    """The records of processes in one partition of a table, and when they were stored."""
    prefix = _prefix_of(stream)
    if prefix is None or from_stream_config(stream.config).history is None:
        return []
    found = []
    name = stream.config["name"]
    async for subject, _ in stream_subjects(jetstream, name, record_subject(prefix, "*")):
        message = await jetstream.get_message(name, {"last_by_subj": subject})
        if message is not None:
            stored = datetime.fromisoformat(message.time).astimezone(UTC)
            found.append((read_record(message, name), stored))
    return found


def _of_fences(fences: Sequence[_Found], streams: dict[str, StreamInfo]) -> ProcessInfo:
    furthest: dict[tuple[str, int], FenceState] = {}
    for fence in fences:  # output partitions without outputs may keep an older position
        key = _topic_of(fence.state.input_stream, streams), fence.partition
        other = furthest.get(key, fence.state)
        furthest[key] = max(other, fence.state, key=lambda state: state.position)
    partitions = [
        _partition(state.input_stream, number, state.position, streams)
        for (_, number), state in sorted(furthest.items())
    ]
    last = max(fence.stored for fence in fences)
    return ProcessInfo(
        fences[0].name, _sources(partitions), fences[0].target, tuple(partitions), last
    )


def _of_record(
    record: CommitRecord, stored: datetime, streams: dict[str, StreamInfo]
) -> ProcessInfo:
    partitions = []
    for name, position in sorted(record.positions.items()):
        known = streams.get(name)
        number = 0 if known is None else identity_of(known.config).partition
        partitions.append(_partition(name, number, position.next - 1, streams))
    writes = ", ".join(record.writes)
    return ProcessInfo(record.process, _sources(partitions), writes, tuple(partitions), stored)


def _sources(partitions: Sequence[ProcessPartition]) -> str:
    return ", ".join(sorted({part.topic for part in partitions}))


def _topic_of(stream: str, streams: dict[str, StreamInfo]) -> str:
    """The topic of a stream; its own name if it is gone."""
    found = streams.get(stream)
    return stream if found is None else identity_of(found.config).topic


def _partition(
    stream: str, number: int, position: int, streams: dict[str, StreamInfo]
) -> ProcessPartition:
    found = streams.get(stream)
    lag = None
    if found is not None:
        lag = min(max(0, found.state.last_seq - position), found.state.messages)
    return ProcessPartition(number, position, lag, _topic_of(stream, streams))
