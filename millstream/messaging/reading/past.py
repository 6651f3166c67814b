"""A table as it was at an earlier time, or the certainty that this is not known any more.

A time is an offset of each partition: the first message that was stored after it. The value of a
key is its last one before that offset, found by the broker's index of subjects. If there is none,
either the key had no value, or its value was removed since; forgotten.py decides which.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from millstream.errors import ConfigError, HistoryGone
from millstream.events.classify import is_own_subject
from millstream.events.event import Event, Partition, datetime_of, nanoseconds_of
from millstream.events.fence import EXPECTED_HEADER
from millstream.events.start import Start
from millstream.events.subject import key_of_token, partition_of, text_keys
from millstream.events.undecodable import OnUndecodable
from millstream.events.unpack import events_of
from millstream.messaging.reading.last_per_key import last_messages, last_messages_before
from millstream.messaging.reading.latest import subject_of_key
from millstream.messaging.reading.replay import ReadPlan
from millstream.messaging.topics.forgotten import doubt, history_of, nothing_removed
from millstream.messaging.topics.lookup import side_by_side, stream_subjects
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.api import StreamInfo
from millstream.wire.lost import check
from millstream.wire.message import RawMessage, StoredMessage, stored_ns_of
from millstream.wire.protocol import parse_headers

__all__ = ["Past", "past_of"]

# A time that is later than the broker's clock by no more than this means now: clocks differ.
CLOCKS_DIFFER: Final = timedelta(seconds=10)
# Of so many keys the oldest value is looked at to find one whose past is really unknown.
LOOKED_AT: Final = 1000
_MICROSECOND: Final = timedelta(microseconds=1)
_EXPECTED_OF: Final = f"{EXPECTED_HEADER}-Subject"


@dataclass(frozen=True, slots=True)
class _Cut:
    """What one partition held at the time: the messages before `end`."""

    partition: Partition
    end: int
    info: StreamInfo  # when the time was looked up


async def past_of(jetstream: JetStream, partitions: Sequence[Partition], time: datetime) -> Past:
    """A table at a time of storing; the time counts to the microsecond, and is included.

    HistoryGone if the table was created later; ConfigError for a time in the future.
    """
    nanoseconds_of(time)  # refuses one without a zone
    infos = await side_by_side(
        lambda partition: jetstream.stream_info(partition.stream), partitions
    )
    now = min(datetime_of(stored_ns_of(info.ts)) for info in infos)
    if time > now + CLOCKS_DIFFER:
        raise ConfigError(
            f"table '{partitions[0].topic}': {time.isoformat()} is in the future: the broker's "
            f"clock is at {now.isoformat()}. Give an earlier time"
        )
    time = min(time.astimezone(UTC), now)
    after = Start.at_time(time + _MICROSECOND).rfc3339 or ""

    async def cut(number: int) -> _Cut:
        partition, info = partitions[number], infos[number]
        return _Cut(partition, await jetstream.sequence_at(partition.stream, after), info)

    cuts = await side_by_side(cut, range(len(partitions)))
    past = Past(jetstream, cuts, time)
    created = min(datetime_of(stored_ns_of(info.created)) for info in infos)
    if time < created and all(cut.end <= max(1, cut.info.state.first_seq) for cut in cuts):
        raise past.gone(
            None,
            f"it was created at {created.isoformat()}",
            advice="Give a later time; a table of this name that was deleted before is not known",
        )
    return past


class Past:
    """The last event of each key at a time."""

    def __init__(self, jetstream: JetStream, cuts: Sequence[_Cut], time: datetime) -> None:
        self._jetstream = jetstream
        self._cuts = cuts
        self.time = time  # never later than the broker's clock was

    async def last(self, key: str) -> Event | None:
        """The last event of a key; None: it had none. HistoryGone if that is not known."""
        [key] = text_keys([key])
        cut = self._cuts[partition_of(key, len(self._cuts))]
        found = await self._found(cut, key)
        if found is None:
            await self._check_had_none(cut, key)
            check(cut.info.config, 1, cut.end)
            return None
        check(cut.info.config, found.offset, cut.end)
        return found

    async def events(
        self, keys: Sequence[str] = (), undecodable: OnUndecodable = "fail"
    ) -> AsyncGenerator[Event, None]:
        """The last event of each key, or of these keys; those that are known come first.

        HistoryGone after them if others are not known, or before all if no key is certain.
        """
        if keys:
            for key in dict.fromkeys(text_keys(keys)):
                if (event := await self.last(key)) is not None:
                    yield event
            return
        plan = ReadPlan(start=Start.LAST_PER_KEY, undecodable=undecodable)
        report = plan.report()
        for cut in self._cuts:
            self._check_certain(cut.info)
        unknown: list[tuple[_Cut, str]] = []
        for cut in self._cuts:
            partition, seen = cut.partition, set[bytes]()
            size = partition.prefix_size
            async for messages in last_messages(self._jetstream, partition, plan, cut.end):
                own = [raw for raw in messages if not is_own_subject(raw.subject, size)]
                seen.update(raw.subject for raw in own)
                for event in events_of(partition, own, report=report):
                    yield event
            unknown += [(cut, subject) for subject in await self._overwritten(cut, seen)]
        if unknown:
            await self._raise_first(unknown)

    # -- one key --------------------------------------------------------------------------

    async def _found(self, cut: _Cut, key: str) -> Event | None:
        """The last event of a key before the end."""
        subject = subject_of_key(cut.partition, key)
        if cut.end <= 1:
            return None
        messages: list[RawMessage] = []
        async for found in last_messages_before(
            self._jetstream, cut.partition, [subject], cut.end, cut.info.config
        ):
            messages += found
        return next(iter(events_of(cut.partition, messages[-1:])), None)

    async def _check_had_none(self, cut: _Cut, key: str) -> None:
        """HistoryGone if a key that has no value before the end may have had one."""
        jetstream, stream = self._jetstream, cut.partition.stream
        subject = subject_of_key(cut.partition, key)
        oldest = await jetstream.get_message(stream, {"seq": 1, "next_by_subj": subject})
        stored_values = dict([one async for one in stream_subjects(jetstream, stream, subject)])
        count = stored_values.get(subject, 0)
        info = await jetstream.stream_info(stream)
        stored = None if oldest is None else datetime_of(stored_ns_of(oldest.time))
        if (why := doubt(info, self.time)) is not None:
            raise self.gone(key, why, oldest=stored)
        history = history_of(info)
        if nothing_removed(info) or history is None or count < history or _was_first(oldest):
            return
        raise self._overwritten_error(key, history, stored)

    # -- all keys -------------------------------------------------------------------------

    def _check_certain(self, info: StreamInfo) -> None:
        """HistoryGone if any key may have had a value that is removed."""
        if (why := doubt(info, self.time)) is not None:
            raise self.gone(None, why)

    async def _overwritten(self, cut: _Cut, seen: set[bytes]) -> list[str]:
        """Subjects that were not seen before the end and may have been overwritten since."""
        jetstream, partition = self._jetstream, cut.partition
        found = [
            (subject, count)
            async for subject, count in stream_subjects(jetstream, partition.stream, ">")
            if subject.encode() not in seen
            and not is_own_subject(subject.encode(), partition.prefix_size)
        ]
        info = await jetstream.stream_info(partition.stream)
        self._check_certain(info)
        history = history_of(info)
        if nothing_removed(info) or history is None:
            return []
        return [subject for subject, count in found if count >= history]

    async def _raise_first(self, unknown: Sequence[tuple[_Cut, str]]) -> None:
        """HistoryGone for the first of these subjects, unless each had no value before."""

        async def oldest_of(one: tuple[_Cut, str]) -> StoredMessage | None:
            ask = {"seq": 1, "next_by_subj": one[1]}
            return await self._jetstream.get_message(one[0].partition.stream, ask)

        looked_at = unknown[:LOOKED_AT]
        oldest = await side_by_side(oldest_of, looked_at)
        gone = [
            (cut, subject, first)
            for (cut, subject), first in zip(looked_at, oldest, strict=True)
            if not _was_first(first)
        ]
        rest = len(unknown) - len(looked_at)
        if not gone and not rest:
            return
        cut, subject, first = gone[0] if gone else (*unknown[-1], None)
        key = key_of_token(subject.encode()[cut.partition.prefix_size :]) or ""
        stored = None if first is None else datetime_of(stored_ns_of(first.time))
        others = max(len(gone) - 1, 0) + rest
        raise self._overwritten_error(key, history_of(cut.info) or 0, stored, others)

    # -- errors ---------------------------------------------------------------------------

    def gone(
        self,
        key: str | None,
        reason: str,
        *,
        oldest: datetime | None = None,
        others: int = 0,
        advice: str = "",
    ) -> HistoryGone:
        """The error for a key, or for the whole table."""
        return HistoryGone(
            self._cuts[0].partition.topic,
            key,
            self.time,
            reason,
            oldest=oldest,
            others=others,
            advice=advice,
        )

    def _overwritten_error(
        self, key: str, history: int, oldest: datetime | None, others: int = 0
    ) -> HistoryGone:
        since = "" if oldest is None else f", the oldest stored at {oldest.isoformat()}"
        reason = f"the table keeps {history} value(s) of a key (setting history){since}"
        advice = "To look back further, create the table with a larger history"
        return self.gone(key, reason, oldest=oldest, others=others, advice=advice)


def _was_first(oldest: StoredMessage | None) -> bool:
    """Whether a value was stored under the condition that its key had none."""
    if oldest is None:
        return False
    headers = parse_headers(oldest.headers)
    return headers.get(EXPECTED_HEADER) == "0" and _EXPECTED_OF not in headers
