"""The partitions that the options name: their state now, offsets in them, and lost data."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import replace

from millstream.errors import ConfigError, DataLoss
from millstream.messaging.topics.stream_config import (
    check_stream_name,
    identity_of,
    wire_format_of,
)
from millstream.spark.broker_access import PATIENCE_SECONDS, find_topics, missing_topic
from millstream.spark.options import SourceOptions
from millstream.spark.source.offsets import (
    FIRST,
    OffsetLimit,
    PartitionOffset,
    PartitionState,
    SourceOffset,
    TopicPartition,
    rfc3339,
)
from millstream.wire.api import StreamInfo
from millstream.wire.lost import loss_text, lost_ranges
from millstream.wire.sync.connection import BlockingJetStream
from millstream.wire.sync.streams import find_stream, get_message, list_streams, sequence_at

__all__ = [
    "PartitionStates",
    "check_fingerprint",
    "check_partition",
    "find_partitions",
    "offsets_at",
    "report_loss",
]

_log = logging.getLogger("millstream.spark")

PartitionStates = dict[TopicPartition, PartitionState]


def find_partitions(jetstream: BlockingJetStream, options: SourceOptions) -> PartitionStates:
    """The partitions that are read, with their state now."""
    if options.stream is not None:
        check_stream_name(options.stream)
        info = find_stream(jetstream, options.stream, PATIENCE_SECONDS)
        if info is None:
            raise missing_topic(jetstream, options.stream)
        return _sorted([_state(info, options.stream, alone=True)])
    if options.pattern is not None:
        return _matching(jetstream, options.pattern)
    if options.assigned:
        return _assigned(jetstream, options)
    found: list[PartitionState] = []
    for topic, infos in find_topics(jetstream, options.topics).items():
        if options.is_table and not (infos[0].config.get("max_msgs_per_subject") or 0) > 0:
            raise ConfigError(
                f"'{topic}' keeps every event, so it is not a table: read it with 'subscribe'"
            )
        found += [_state(info, topic) for info in infos]
    if options.store is not None:  # the events of a deleted aggregate are removed
        found = [replace(state, gaps=True) for state in found]
    return _sorted(found)


def _matching(jetstream: BlockingJetStream, pattern: str) -> PartitionStates:
    wanted = re.compile(pattern)
    found = []
    for info in list_streams(jetstream, PATIENCE_SECONDS):
        topic = identity_of(info.config).topic
        if wanted.fullmatch(topic):
            found.append(_state(info, topic))
    return _sorted(found)


def _assigned(jetstream: BlockingJetStream, options: SourceOptions) -> PartitionStates:
    streams = find_topics(jetstream, [topic for topic, _ in options.assigned])
    found: list[PartitionState] = []
    for topic, numbers in options.assigned:
        states = {state.partition: state for state in (_state(i, topic) for i in streams[topic])}
        for number in numbers:
            if number not in states:
                raise ConfigError(
                    f"option 'assign': topic '{topic}' has partitions 0 to {len(states) - 1}, "
                    f"there is no {number}"
                )
            found.append(states[number])
    return _sorted(found)


def _sorted(states: Iterable[PartitionState]) -> PartitionStates:
    in_order = sorted(states, key=lambda state: state.topic_partition)
    return {state.topic_partition: state for state in in_order}


def _state(info: StreamInfo, topic: str, alone: bool = False) -> PartitionState:
    state, config = info.state, info.config
    identity = identity_of(config)
    per_key = (config.get("max_msgs_per_subject") or 0) > 0
    retention = config.get("retention", "limits")
    return PartitionState(
        topic=topic,
        partition=0 if alone or identity.topic != topic else identity.partition,
        stream=config["name"],
        prefix=identity.prefix,
        created=info.created,
        first=max(state.first_seq, FIRST) if state.messages else state.last_seq + 1,
        next=state.last_seq + 1,
        last_time=state.last_ts if state.messages else "",
        message_bytes=state.bytes // state.messages if state.messages else 0,
        typed=wire_format_of(config) is not None,
        retention=retention,
        # Work queues and interest topics remove what was handled.
        gaps=per_key or retention != "limits",
        lost=lost_ranges(config),
    )


# -- offsets --------------------------------------------------------------------------------


def offsets_at(
    jetstream: BlockingJetStream, states: PartitionStates, limit: OffsetLimit, option: str
) -> SourceOffset:
    """The offset that an option's limit means now; `option` is its name, for errors."""
    _check_names(states, {**limit.offsets, **limit.times}, option)
    result: SourceOffset = {}
    for partition, state in states.items():
        chosen = limit.offsets.get(partition, limit.edge)
        time = limit.times.get(partition, limit.time)
        if time is not None:
            following = _at_time(jetstream, state, time, limit, option)
        elif isinstance(chosen, int):
            following = chosen
            if following > state.next:
                raise ConfigError(
                    f"option '{option}': offset {following} of {state.topic}/{state.partition} is "
                    f"beyond its end; the next message gets {state.next}"
                )
        else:
            following = state.first if chosen == "earliest" else state.next
        result[partition] = PartitionOffset(following, state.created)
    return result


def _check_names(states: PartitionStates, given: Iterable[TopicPartition], option: str) -> None:
    named = set(given)
    if not named or named == states.keys():
        return
    missing = sorted(f"{topic}/{number}" for topic, number in states.keys() - named)
    unknown = sorted(f"{topic}/{number}" for topic, number in named - states.keys())
    text = f"option '{option}' must name exactly the partitions that are read"
    if missing:
        text += f"; missing: {', '.join(missing)}"
    if unknown:
        text += f"; not read: {', '.join(unknown)}"
    raise ConfigError(text)


def _at_time(
    jetstream: BlockingJetStream, state: PartitionState, time: int, limit: OffsetLimit, option: str
) -> int:
    found = sequence_at(jetstream, state.stream, rfc3339(time), PATIENCE_SECONDS)
    if found is not None:
        return found
    if limit.when_none == "error":
        raise ConfigError(
            f"option '{option}': nothing is stored in {state.topic}/{state.partition} at or after "
            f"{rfc3339(time)}. To start at the end in this case, set the option "
            f"startingOffsetsByTimestampStrategy to latest"
        )
    return state.next


# -- lost data ------------------------------------------------------------------------------


def report_loss(what: str, fail: bool) -> None:
    """Every loss of promised messages is reported here: it stops the query, or warns."""
    if fail:
        raise DataLoss(
            f"{what}. To continue with what is left, set the option failOnDataLoss to false; to "
            f"start from scratch, use a new checkpoint location"
        )
    _log.warning("%s; reading continues with what is left (failOnDataLoss=false)", what)


def check_partition(
    start: PartitionOffset, state: PartitionState, fail: bool, end: int | None = None
) -> None:
    """Report if the stream is no longer the one an offset belongs to, or lost what comes after it.

    `end`: where reading ends, if that is known.
    """
    name = f"{state.topic}/{state.partition}"
    for lost in state.lost if start.created == state.created else ():
        if lost.accepted is None and lost.concerns(start.next, end):
            report_loss(loss_text(state.topic, state.partition, lost), fail)
    if start.created != state.created:
        report_loss(
            f"'{name}' was created again at {state.created} (the offset belongs to the stream "
            f"created at {start.created}): what was not read of the old one is gone",
            fail,
        )
    elif state.next < start.next:
        report_loss(
            f"'{name}' ends at offset {state.next - 1}, but {start.next - 1} was read before: the "
            f"stream lost messages at its end",
            fail,
        )
    elif state.first > start.next and not state.gaps:
        report_loss(
            f"'{name}': offsets {start.next} to {state.first - 1} expired or were deleted before "
            f"they were read",
            fail,
        )


def check_fingerprint(
    jetstream: BlockingJetStream, start: PartitionOffset, state: PartitionState, fail: bool
) -> None:
    """Report if the last message that was read is a different one now: the stream was damaged."""
    known = start.last_time and start.created == state.created
    if not known or not state.first < start.next <= state.next:
        return
    found = get_message(jetstream, state.stream, {"seq": start.next - 1}, PATIENCE_SECONDS)
    if found is not None and found.time != start.last_time:
        report_loss(
            f"'{state.topic}/{state.partition}' has a different message at offset {start.next - 1} "
            f"than the one read before (stored at {found.time}, not {start.last_time}): the "
            f"stream lost messages and used their offsets again",
            fail,
        )
