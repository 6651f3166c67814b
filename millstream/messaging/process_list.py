"""The processes that have stored a position: found by the fences of their outputs.

A process commits to a fence on every partition of its output, which holds its name, the input
partition and how far it is in it. So nothing else has to be recorded, and what is listed is what
a restart would continue from.
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
from millstream.messaging.topics.lookup import side_by_side, stream_subjects
from millstream.messaging.topics.stream_config import from_stream_config, identity_of
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.api import StreamInfo

__all__ = ["ProcessInfo", "ProcessPartition", "list_processes"]

# A process's fence for an input partition is NAME-NUMBER.
_FENCE_NAME: Final = re.compile(r"(.+)-(\d+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class ProcessPartition:
    """How far a process is in one partition of its input."""

    partition: int
    position: int  # offset of the last message whose outputs are stored
    lag: int | None  # messages after it; None: the input does not exist any more


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """A process that has stored a position, running or not."""

    name: str
    source: str  # topic that it reads
    target: str  # topic that it writes
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
    found = await side_by_side(lambda stream: _fences(jetstream, stream), streams)
    by_process: dict[tuple[str, str], list[_Found]] = {}
    for fence in (fence for part in found for fence in part):
        by_process.setdefault((fence.target, fence.name), []).append(fence)
    known = {stream.config["name"]: stream for stream in streams}
    return [_info(fences, known) for _, fences in sorted(by_process.items())]


async def _fences(jetstream: JetStream, stream: StreamInfo) -> list[_Found]:
    """The fences of processes in one partition of a topic."""
    config = stream.config
    prefix = identity_of(config).prefix
    if prefix is None or from_stream_config(config).is_copy:
        return []
    found = []
    name = config["name"]
    async for subject, _ in stream_subjects(jetstream, name, f"{prefix}.{PACK_TOKEN}.*"):
        matched = _FENCE_NAME.fullmatch(subject.rpartition(".")[2])
        if matched is None:
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


def _info(fences: Sequence[_Found], streams: dict[str, StreamInfo]) -> ProcessInfo:
    first = fences[0]
    furthest: dict[int, FenceState] = {}
    for fence in fences:  # output partitions without outputs may keep an older position
        other = furthest.get(fence.partition, fence.state)
        furthest[fence.partition] = max(other, fence.state, key=lambda state: state.position)
    stream = streams.get(first.state.input_stream)
    return ProcessInfo(
        first.name,
        first.state.input_stream if stream is None else identity_of(stream.config).topic,
        first.target,
        tuple(
            ProcessPartition(
                number, state.position, _lag(state.position, streams.get(state.input_stream))
            )
            for number, state in sorted(furthest.items())
        ),
        max(fence.stored for fence in fences),
    )


def _lag(position: int, stream: StreamInfo | None) -> int | None:
    if stream is None:
        return None
    return min(max(0, stream.state.last_seq - position), stream.state.messages)
