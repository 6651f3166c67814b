"""A table as it was at an earlier time, or the certainty that this is not known any more.

A time is an offset of each partition: the first message that was stored after it. The value of a
key is its last one before that offset, found by the broker's index of subjects. If there is none,
either the key had no value, or its value was removed since; forgotten.py decides which.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from datetime import datetime

from millstream.errors import HistoryGone
from millstream.events.classify import is_own_subject
from millstream.events.event import Event, Partition, datetime_of
from millstream.events.start import Start
from millstream.events.subject import key_of_token, partition_of, text_keys
from millstream.events.undecodable import OnUndecodable
from millstream.events.unpack import events_of
from millstream.messaging.reading.last_per_key import last_messages, last_messages_before
from millstream.messaging.reading.latest import LastStored, newest, subject_of_key
from millstream.messaging.reading.replay import ReadPlan
from millstream.messaging.topics.forgotten import (
    LOOKED_AT,
    check_created,
    doubt,
    first_after,
    history_of,
    nothing_removed,
    overwritten,
    past_time,
    was_first,
)
from millstream.messaging.topics.lookup import side_by_side, stream_subjects
from millstream.messaging.topics.stream_config import from_stream_config
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.api import StreamInfo
from millstream.wire.lost import check
from millstream.wire.message import RawMessage, StoredMessage, stored_ns_of

__all__ = ["Past", "past_of"]


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
    table = partitions[0].topic
    infos = await side_by_side(lambda part: jetstream.stream_info(part.stream), partitions)
    time = past_time(table, time, infos)
    after = first_after(time)
    ends = await side_by_side(lambda part: jetstream.sequence_at(part.stream, after), partitions)
    check_created(table, time, infos, ends)
    at_home = from_stream_config(infos[0].config).keys_at_home
    return Past(jetstream, list(map(_Cut, partitions, ends, infos)), time, at_home)


class Past:
    """The last event of each key at a time."""

    def __init__(
        self, jetstream: JetStream, cuts: Sequence[_Cut], time: datetime, at_home: bool
    ) -> None:
        self._jetstream = jetstream
        self._cuts = cuts
        self._at_home = at_home  # each key is in the partition that `partition_of` gives
        self._table = cuts[0].partition.topic
        self.time = time  # never later than the broker's clock was

    async def last(self, key: str) -> Event | None:
        """The last event of a key; None: it had none. HistoryGone if that is not known."""
        [key] = text_keys([key])
        if self._at_home:
            return await self._last_in(self._cuts[partition_of(key, len(self._cuts))], key)
        found = [await self._last_in(cut, key) for cut in self._cuts]
        return newest(event for event in found if event is not None)

    async def _last_in(self, cut: _Cut, key: str) -> Event | None:
        """The last event of a key in one partition."""
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

        HistoryGone after them if others are not known, or before all if no key is certain; also
        before all if keys may be in any partition.
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
        last = LastStored()
        for cut in self._cuts:
            partition, seen = cut.partition, set[bytes]()
            size = partition.prefix_size
            async for messages in last_messages(self._jetstream, partition, plan, cut.end):
                own = [raw for raw in messages if not is_own_subject(raw.subject, size)]
                seen.update(raw.subject for raw in own)
                if not self._at_home:
                    last.add(partition, own)
                    continue
                for event in events_of(partition, own, report=report):
                    yield event
            unknown += [(cut, subject) for subject in await self._overwritten(cut, seen)]
        if unknown and not self._at_home:  # they may hide a later value of a key that is known
            await self._raise_first(unknown)
        for partition, raw in last.messages():
            for event in events_of(partition, [raw], report=report):
                yield event
        if unknown and self._at_home:
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
        if (why := doubt(info, self.time)) is not None:
            stored = None if oldest is None else datetime_of(stored_ns_of(oldest.time))
            raise HistoryGone(self._table, key, self.time, why, oldest=stored)
        history = history_of(info)
        if nothing_removed(info) or history is None or count < history or was_first(oldest):
            return
        raise overwritten(self._table, key, self.time, history, oldest)

    # -- all keys -------------------------------------------------------------------------

    def _check_certain(self, info: StreamInfo) -> None:
        """HistoryGone if any key may have had a value that is removed."""
        if (why := doubt(info, self.time)) is not None:
            raise HistoryGone(self._table, None, self.time, why)

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

        for start in range(0, len(unknown), LOOKED_AT):
            looked_at = unknown[start : start + LOOKED_AT]
            oldest = await side_by_side(oldest_of, looked_at)
            gone = [
                (cut, subject, first)
                for (cut, subject), first in zip(looked_at, oldest, strict=True)
                if not was_first(first)
            ]
            if gone:
                cut, subject, first = gone[0]
                key = key_of_token(subject.encode()[cut.partition.prefix_size :]) or ""
                others = len(gone) - 1 + len(unknown) - start - len(looked_at)
                history = history_of(cut.info) or 0
                raise overwritten(self._table, key, self.time, history, first, others)
