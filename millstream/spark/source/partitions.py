"""Finding the partitions that the options mean, and their state: the driver's side of a source."""

from __future__ import annotations

import re
from collections.abc import Iterable

from millstream.errors import ConfigError, TopicNotFound
from millstream.events.subject import stream_name
from millstream.messaging.topics.stream_config import from_stream_config, identity_of
from millstream.spark.broker_access import PATIENCE_SECONDS
from millstream.spark.options import SourceOptions
from millstream.spark.source.offsets import FIRST, Offsets, Position, Where
from millstream.spark.source.planning import Log, report_loss
from millstream.spark.source.starting import Bound, rfc3339
from millstream.wire.api import ErrorCode, StreamInfo
from millstream.wire.sync.connection import BlockingJetStream
from millstream.wire.sync.streams import find_stream, get_message, list_streams, sequence_at

__all__ = ["check_fingerprint", "find_logs", "positions_at", "topic_streams"]

Logs = dict[Where, Log]


def find_logs(jetstream: BlockingJetStream, options: SourceOptions) -> Logs:
    """The partitions that are read, with their state right now."""
    if options.stream is not None:
        info = find_stream(jetstream, options.stream, PATIENCE_SECONDS)
        if info is None:
            raise _missing(options.stream)
        return _by_place([_log(info, options.stream, alone=True)])
    if options.pattern is not None:
        return _matching(jetstream, options.pattern)
    if options.assigned:
        return _assigned(jetstream, options)
    found: list[Log] = []
    for topic in options.topics:
        infos = topic_streams(jetstream, topic)
        if options.is_table and not (infos[0].config.get("max_msgs_per_subject") or 0) > 0:
            raise ConfigError(
                f"'{topic}' keeps every event, so it is not a table: read it with 'subscribe'"
            )
        found += [_log(info, topic) for info in infos]
    return _by_place(found)


def topic_streams(jetstream: BlockingJetStream, topic: str) -> list[StreamInfo]:
    """The streams of a topic that must be there, in the order of partitions."""
    alone = find_stream(jetstream, topic, PATIENCE_SECONDS)
    if alone is not None:
        return [alone]
    first = find_stream(jetstream, stream_name(topic, 0, 2), PATIENCE_SECONDS)
    identity = None if first is None else identity_of(first.config)
    if first is None or identity is None or identity.topic != topic:
        raise _missing(topic)
    found = [first]
    for number in range(1, identity.partitions):
        name = stream_name(topic, number, identity.partitions)
        info = find_stream(jetstream, name, PATIENCE_SECONDS)
        if info is None:
            raise TopicNotFound(
                0,
                ErrorCode.STREAM_NOT_FOUND,
                f"topic '{topic}' is there only in part: partition {number} is missing",
                "Declare it again to complete it",
            )
        found.append(info)
    return found


def _missing(name: str) -> TopicNotFound:
    text = f"there is no topic or stream '{name}'"
    return TopicNotFound(0, ErrorCode.STREAM_NOT_FOUND, text, "Create it, or check the name")


def _matching(jetstream: BlockingJetStream, pattern: str) -> Logs:
    wanted = re.compile(pattern)
    found = []
    for info in list_streams(jetstream, PATIENCE_SECONDS):
        topic = identity_of(info.config).topic
        if wanted.fullmatch(topic):
            found.append(_log(info, topic))
    return _by_place(found)


def _assigned(jetstream: BlockingJetStream, options: SourceOptions) -> Logs:
    found: list[Log] = []
    for topic, numbers in options.assigned:
        logs = {
            log.partition: log for log in (_log(i, topic) for i in topic_streams(jetstream, topic))
        }
        for number in numbers:
            if number not in logs:
                raise ConfigError(
                    f"option 'assign': topic '{topic}' has partitions 0 to {len(logs) - 1}, "
                    f"there is no {number}"
                )
            found.append(logs[number])
    return _by_place(found)


def _by_place(logs: Iterable[Log]) -> Logs:
    return {log.where: log for log in sorted(logs, key=lambda log: log.where)}


def _log(info: StreamInfo, topic: str, alone: bool = False) -> Log:
    state, config = info.state, info.config
    identity = identity_of(config)
    per_key = (config.get("max_msgs_per_subject") or 0) > 0
    return Log(
        topic=topic,
        partition=0 if alone or identity.topic != topic else identity.partition,
        stream=config["name"],
        prefix=identity.prefix,
        created=info.created,
        first=max(state.first_seq, FIRST) if state.messages else state.last_seq + 1,
        next=state.last_seq + 1,
        last_time=state.last_ts if state.messages else "",
        message_bytes=state.bytes // state.messages if state.messages else 0,
        typed=from_stream_config(config).wire_format is not None,
        # Work queues and interest topics remove what was handled.
        gaps=per_key or config.get("retention", "limits") != "limits",
    )


# -- positions ------------------------------------------------------------------------------


def positions_at(jetstream: BlockingJetStream, logs: Logs, bound: Bound, name: str) -> Offsets:
    """The position of each partition that an option means; `name` is the option's."""
    _check_places(logs, {**bound.places, **bound.times}, name)
    result: Offsets = {}
    for where, log in logs.items():
        place = bound.places.get(where, bound.word)
        time = bound.times.get(where, bound.time)
        if time is not None:
            following = _at_time(jetstream, log, time, bound, name)
        elif isinstance(place, int):
            following = place
            if following > log.next:
                raise ConfigError(
                    f"option '{name}': offset {following} of {log.topic}/{log.partition} is "
                    f"beyond its end; the next message gets {log.next}"
                )
        else:
            following = log.first if place == "earliest" else log.next
        result[where] = Position(following, log.created)
    return result


def _check_places(logs: Logs, given: Iterable[Where], name: str) -> None:
    wanted = set(given)
    if not wanted:
        return
    if wanted != logs.keys():
        missing = sorted(f"{topic}/{number}" for topic, number in logs.keys() - wanted)
        unknown = sorted(f"{topic}/{number}" for topic, number in wanted - logs.keys())
        text = f"option '{name}' must name every partition that is read"
        if missing:
            text += f"; it lacks {', '.join(missing)}"
        if unknown:
            text += f"; nobody reads {', '.join(unknown)}"
        raise ConfigError(text)


def _at_time(jetstream: BlockingJetStream, log: Log, time: int, bound: Bound, name: str) -> int:
    found = sequence_at(jetstream, log.stream, rfc3339(time), PATIENCE_SECONDS)
    if found is not None:
        return found
    if bound.strategy == "error":
        raise ConfigError(
            f"option '{name}': nothing is stored in {log.topic}/{log.partition} at or after "
            f"{rfc3339(time)}. To begin at the end then, set the option "
            f"startingOffsetsByTimestampStrategy to latest"
        )
    return log.next


def check_fingerprint(jetstream: BlockingJetStream, start: Position, log: Log, fail: bool) -> None:
    """Report when the last message that was read is another one now: the log was damaged."""
    if not start.last or start.log != log.created or not log.first < start.next <= log.next:
        return
    found = get_message(jetstream, log.stream, {"seq": start.next - 1}, PATIENCE_SECONDS)
    if found is not None and found.time != start.last:
        report_loss(
            f"'{log.topic}/{log.partition}' has another message at offset {start.next - 1} than "
            f"was read before (stored at {found.time}, not {start.last}): the log lost messages "
            f"and used their offsets again",
            fail,
        )
