"""The messages of some keys in a range, through the broker's index of subjects.

The broker finds the messages of one subject by its index. With several filters in one consumer it
walks through everything instead, which takes a hundred times as long in a topic of a million keys.
So each key is read by a filter of its own, packs by another, and the parts are merged by offset.

A short range of a key is one direct request; where that leaves anything open (more messages than
one answer has, a copy that lags, a message that cannot be read) a reader reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from millstream.errors import ApiError, ConnectError, PermissionDenied, RequestTimeout
from millstream.messaging.topics.lookup import side_by_side, stream_subjects
from millstream.wire.aio.direct_reader import DirectReader, direct_batch, open_range
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.aio.ordered_consumer import OrderedConsumer
from millstream.wire.aio.pull_consumer import Signal
from millstream.wire.api import parse_ack_address
from millstream.wire.message import RawMessage
from millstream.wire.range_cursor import Range, check_loss

__all__ = ["KEYS_MAX", "Reader", "Source", "open_sources", "take_merged"]

Reader = OrderedConsumer | DirectReader

# Keys that are read by a filter each; with more, the broker walks through the range once instead.
KEYS_MAX: Final = 32
# What one direct request may answer, for each key: enough for most keys.
SHORT_MESSAGES: Final = 500
SHORT_BYTES: Final = 1024 * 1024


class Source:
    """The messages of one filter, in order: those found at once, then those of a reader."""

    def __init__(self, found: Sequence[RawMessage], reader: Reader | None) -> None:
        self.waiting = list(found)
        self.reader = reader

    @property
    def done(self) -> bool:
        return not self.waiting and self.read_out

    @property
    def read_out(self) -> bool:
        """Whether nothing comes after what is waiting."""
        return self.reader is None or self.reader.done

    def fill(self, at_most: int) -> None:
        if self.reader is not None and not self.waiting:
            self.waiting = self.reader.take_now(at_most)

    def close(self) -> None:
        if self.reader is not None:
            self.reader.close()


async def open_sources(
    jetstream: JetStream, stream: str, what: Range, config: Mapping[str, Any], signal: Signal
) -> list[Source]:
    """Start reading a range that ends, each of its subjects by a filter of its own."""
    check_loss(what, config, what.start)

    async def short(subject: str) -> list[RawMessage] | None:
        return await _short(jetstream, stream, replace(what, subjects=(subject,)), config)

    opened: list[Source] = []
    try:
        found = await side_by_side(short, what.subjects)
        for subject, messages in zip(what.subjects, found, strict=True):
            reader = None
            if messages is None:
                one = replace(what, subjects=(subject,))
                reader = await open_range(jetstream, stream, one, signal)
            opened.append(Source(messages or (), reader))
    except BaseException:
        for source in opened:
            source.close()
        raise
    return opened


async def _short(
    jetstream: JetStream, stream: str, what: Range, config: Mapping[str, Any]
) -> list[RawMessage] | None:
    """The messages of a range by one direct request; None: a reader has to find out.

    The answer counts the messages that come after each: when the last one says that there are none,
    all of them were readable. Otherwise the range is read from its start, by a reader that notices
    what the broker counts and cannot read.
    """
    end, subject = what.end or 0, what.subjects[0]
    if not config.get("allow_direct") or what.start_time or what.start >= end:
        return None
    if ">" in subject:
        return None  # packs: a reader has them sooner
    limits = {"batch": SHORT_MESSAGES, "max_bytes": SHORT_BYTES}
    ask = {"seq": what.start, "next_by_subj": subject, **limits}
    try:
        found, status = await direct_batch(jetstream, stream, ask)
        if not found:
            # Nothing says whose answer it is: that of a copy that lags, or of a mirror.
            return None if await _is_known(jetstream, stream, subject) else []
        last = found[-1].sequence
        if any(message.stream != stream for message in found):
            return None  # a mirror answered in its origin's name
        if last < end - 1:
            if status.get("Nats-Num-Pending") != "0":
                return None
            if int(config.get("num_replicas", 1)) > 1:  # a copy that lags may have answered
                later = {"seq": last + 1, "next_by_subj": subject}
                more = await jetstream.get_message(stream, later)
                if more is not None and more.sequence < end:
                    return None
    except (ApiError, ConnectError, PermissionDenied, RequestTimeout):
        return None  # a reader waits out what passes, and may be allowed more
    return [one.as_delivered(number) for number, one in enumerate(found, 1) if one.sequence < end]


async def _is_known(jetstream: JetStream, stream: str, subject: str) -> bool:
    """Whether the leader counts messages on a subject."""
    async for _ in stream_subjects(jetstream, stream, subject):
        return True
    return False


def take_merged(sources: Sequence[Source], at_most: int) -> list[RawMessage]:
    """The messages that are next in order and have arrived; empty: one is missing, or done."""
    for source in sources:
        source.fill(at_most)
    if len(sources) == 1:
        taken, sources[0].waiting = sources[0].waiting, []
        return taken
    if not all(source.waiting or source.read_out for source in sources):
        return []
    # After the last one of a source that goes on, messages of its own may be next.
    going_on = [_sequence(source.waiting[-1]) for source in sources if not source.read_out]
    limit = min(going_on, default=None)
    merged: list[tuple[int, RawMessage]] = []
    for source in sources:
        placed = [(_sequence(message), message) for message in source.waiting]
        chosen = [pair for pair in placed if limit is None or pair[0] <= limit]
        source.waiting = source.waiting[len(chosen) :]
        merged.extend(chosen)
    return [message for _, message in sorted(merged)]


def _sequence(message: RawMessage) -> int:
    return parse_ack_address(message.reply).sequence
