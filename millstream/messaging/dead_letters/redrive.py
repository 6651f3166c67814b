"""Redriving dead letters to their topics, each exactly once.

1. Claim: store an empty record on `<prefix>._redrive.<dead topic>` of every partition involved,
   expecting the last one there. An older run is fenced out from now on.
2. The record found there lists letters that were redriven but perhaps not removed: remove them.
3. Read the letters. Store the events of a partition and a record that lists their letters in one
   atomic batch; the record must follow ours, or nothing is stored.
4. Remove these letters; continue with 3.
5. At the end remove the records. Events are never stored without a record before them, so a batch
   of an older run that arrives late finds none and is refused.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from millstream.errors import (
    ApiError,
    ConfigError,
    MillstreamError,
    RedriveTaken,
    SubscriptionNotFound,
    TopicNotFound,
    Unconfirmed,
    WrongSequence,
)
from millstream.events.fence import EXPECTED_HEADER
from millstream.events.subject import copies_prefix, key_token, partition_of
from millstream.messaging.dead_letters.letter import (
    REDRIVE_TOKEN,
    DeadLetter,
    redriven_message,
    redriven_subject,
)
from millstream.messaging.topics.info import PartitionInfo, TopicInfo
from millstream.messaging.topics.lookup import open_topic, side_by_side
from millstream.messaging.topics.settings import Retention
from millstream.wire.aio.atomic import publish_batch
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.aio.publisher import StreamPublisher
from millstream.wire.api import ErrorCode
from millstream.wire.direct import matches
from millstream.wire.message import OutgoingMessage, stored_ns_of
from millstream.wire.protocol import encode_headers, unique_token

__all__ = ["Redrive", "was_redriven"]

_log = logging.getLogger("millstream.messaging")

STORE_SECONDS: Final = 30.0
# Claims that may be lost to other redrives before this one gives up.
CLAIMS_MAX: Final = 5


class _RunRecord(msgspec.Struct):
    """What a redrive of a queue stores in a partition."""

    run: str = ""
    step: int = 0
    letters: list[tuple[int, int]] = []  # offset and time of the letters that were redriven


@dataclass(slots=True)
class _Target:
    """A partition to which events are redriven."""

    topic: str
    stream: str
    prefix: str | None  # None: a foreign stream
    fenced: bool  # records are kept there: atomic batches, and nothing removes them soon
    sequence: int = 0  # of our record
    step: int = 0
    in_doubt: bool = False  # the record lists letters that are not removed yet

    def subject(self, queue: str) -> str:
        return f"{self.prefix}.{REDRIVE_TOKEN}.{queue}"


class Redrive:
    """One run: `prepare` every letter, then `claim`, then `redrive`, then `close`."""

    def __init__(
        self, jetstream: JetStream, publisher: StreamPublisher, queue: str, to_all: bool
    ) -> None:
        self._jetstream = jetstream
        self._publisher = publisher
        self._queue = queue
        self._to_all = to_all
        self._run = unique_token()
        self._stream = ""
        self._topics: dict[str, TopicInfo] = {}
        self._targets: dict[tuple[str, int], _Target] = {}
        self._filters: dict[tuple[str, str], list[str]] = {}  # by stream and subscription
        self.recovered = 0

    async def open(self, stream: str) -> None:
        """Check the queue's stream and use it."""
        info = await self._jetstream.stream_info(stream)
        if info.config.get("deny_delete"):
            raise ConfigError(
                f"'{self._queue}' denies deletes (deny_delete): a letter that was redriven could "
                f"not be removed and would be redriven again"
            )
        self._stream = stream

    async def prepare(self, letter: DeadLetter) -> None:
        """Look up the partition that the letter's event goes to."""
        info = self._topics.get(letter.topic)
        if info is None:
            info = self._topics[letter.topic] = await open_topic(self._jetstream, letter.topic)
            if info.settings.is_copy:
                raise ConfigError(
                    f"'{letter.topic}' is a copy of another topic and takes no events. "
                    f"Publish the events you need to the original topic"
                )
        number, part = _partition_for(info, letter)
        if (letter.topic, number) not in self._targets:
            target = _Target(letter.topic, part.stream, part.prefix, _keeps_records(info))
            self._targets[letter.topic, number] = target
        if not self._to_all and part.prefix is not None:
            await self._check_delivered(letter, part.stream, part.prefix)

    async def _check_delivered(self, letter: DeadLetter, stream: str, prefix: str) -> None:
        """Refuse what the subscription's filters, set by another tool, would not let through."""
        name = letter.subscription
        filters = self._filters.get((stream, name))
        if filters is None and key_token(name) != name:
            return  # not the name of a subscription
        if filters is None:
            try:
                config = (await self._jetstream.consumer_info(stream, name)).config
                filters = config.filter_subjects or [config.filter_subject or ">"]
            except SubscriptionNotFound:
                filters = [">"]  # a group, a process, or one that will be created again
            self._filters[stream, name] = filters
        subject = redriven_subject(letter, prefix, self._to_all)
        if not any(matches(pattern, subject) for pattern in filters):
            raise ConfigError(
                f"subscription '{name}' of '{letter.topic}' has filters that exclude redriven "
                f"events: add '{copies_prefix(prefix, name)}.>' to them, which "
                f"topic.subscriptions.edit('{name}') does, or redrive for all"
            )

    async def claim(self) -> None:
        """Fence out older runs, and finish what they left (steps 1 and 2)."""
        for target in self._targets.values():
            if target.fenced:
                await self._claim(target)

    async def _claim(self, target: _Target) -> None:
        for _ in range(CLAIMS_MAX):
            found, sequence = await read_record(
                self._jetstream, target.stream, self._subject(target)
            )
            if found.run == self._run:  # the ack of our claim was lost
                target.sequence = sequence
                return
            # What an older run left is finished first: our record replaces its record.
            self.recovered += await self._finish(found)
            record = self._record_message(target, sequence, [])
            try:
                ack = await self._publisher.publish(record, STORE_SECONDS, lambda ack: ack)
            except WrongSequence:
                continue  # another run was faster, or this is our own copy sent again
            target.sequence = ack.seq
            return
        raise RedriveTaken(self._queue, target.topic)

    async def _finish(self, record: _RunRecord) -> int:
        """Remove letters that were redriven; the number that still existed."""
        left = 0
        for offset, stored_ns in record.letters:
            # Checked by time: a queue that was created again uses the same offsets.
            stored = await self._jetstream.get_message(self._stream, {"seq": offset})
            if stored is not None and stored_ns_of(stored.time) == stored_ns:
                await self._remove(offset)
                left += 1
        return left

    # -- redriving ------------------------------------------------------------------------

    async def redrive(self, letters: Sequence[DeadLetter]) -> AsyncGenerator[DeadLetter, None]:
        """Store the events and remove the letters; yields each letter when that is done."""
        groups: dict[tuple[str, int], list[DeadLetter]] = {}
        for letter in letters:
            info = self._topics.get(letter.topic)
            if info is None:
                continue  # dead-lettered after the claims: for the next run
            where = letter.topic, _partition_for(info, letter)[0]
            if where in self._targets:
                groups.setdefault(where, []).append(letter)
        for where, group in groups.items():
            target = self._targets[where]
            for done in await self._redrive(target, _by_key(group)):
                yield done

    async def _redrive(self, target: _Target, group: list[DeadLetter]) -> list[DeadLetter]:
        if not target.fenced:
            for letter in group:
                message = self._message(target, letter)
                await self._publisher.publish(message, STORE_SECONDS, lambda ack: ack)
                await self._remove(letter.offset)
            return group
        try:
            await self._store(target, group)
        except ApiError as error:
            # Ids outlive a record that was purged: some events of the group are stored already.
            if error.err_code != ErrorCode.BATCH_DUPLICATE:
                raise
            if len(group) > 1:
                for letter in group:
                    await self._redrive(target, [letter])
                return group
        await side_by_side(self._remove, [letter.offset for letter in group])
        target.in_doubt = False
        return group

    async def _store(self, target: _Target, group: list[DeadLetter]) -> None:
        """Step 3: the events and the record, or nothing."""
        messages = [self._message(target, letter) for letter in group]
        before, old_step = target.sequence, target.step
        target.step += 1
        record = self._record_message(target, before, group)
        target.in_doubt = True
        try:
            ack = await publish_batch(
                self._jetstream, target.stream, [*messages, record], STORE_SECONDS
            )
            target.sequence = ack.seq
        except (WrongSequence, Unconfirmed) as refused:
            subject = self._subject(target)
            found, sequence = await read_record(self._jetstream, target.stream, subject)
            if (found.run, found.step) == (self._run, target.step):
                target.sequence = sequence  # it was stored, only the reply was lost
            elif isinstance(refused, Unconfirmed):
                raise
            else:
                target.in_doubt = False
                raise RedriveTaken(self._queue, target.topic) from refused
        except ApiError:
            target.step, target.in_doubt = old_step, False
            raise
        await self._remove_record(target.stream, before)

    def _message(self, target: _Target, letter: DeadLetter) -> OutgoingMessage:
        event_id = f"redrive-{self._queue}-{letter.offset}-{letter.stored_ns}"
        return redriven_message(letter, target.prefix, event_id, self._to_all)

    def _record_message(
        self, target: _Target, follows: int, group: Sequence[DeadLetter]
    ) -> OutgoingMessage:
        letters = [(letter.offset, letter.stored_ns) for letter in group]
        body = msgspec.json.encode(_RunRecord(self._run, target.step, letters))
        block = encode_headers([(EXPECTED_HEADER, str(follows))])
        return OutgoingMessage(self._subject(target).encode(), block, body)

    def _subject(self, target: _Target) -> str:
        return target.subject(self._queue)

    async def _remove(self, offset: int) -> None:
        try:
            await self._jetstream.delete_message(self._stream, offset)
        except ApiError as error:
            if error.err_code not in (ErrorCode.MESSAGE_NOT_FOUND, ErrorCode.DELETE_FAILED):
                raise

    async def _remove_record(self, stream: str, sequence: int) -> None:
        """Remove a record that is not needed any more; leaving it does no harm."""
        try:
            await self._jetstream.delete_message(stream, sequence)
        except MillstreamError as error:
            _log.info("a redrive's record is left in %s at %d: %s", stream, sequence, error)

    async def close(self) -> None:
        """Step 5; records of letters that could not be removed stay."""
        for target in self._targets.values():
            if target.sequence and not target.in_doubt:
                await self._remove_record(target.stream, target.sequence)
                target.sequence = 0


async def was_redriven(jetstream: JetStream, queue: str, letter: DeadLetter) -> bool:
    """Whether an interrupted redrive stored the letter's event and did not remove the letter."""
    try:
        info = await open_topic(jetstream, letter.topic)
    except TopicNotFound:
        return False
    if not _keeps_records(info):
        return False
    _, part = _partition_for(info, letter)
    record, _ = await read_record(jetstream, part.stream, f"{part.prefix}.{REDRIVE_TOKEN}.{queue}")
    return (letter.offset, letter.stored_ns) in record.letters


async def read_record(jetstream: JetStream, stream: str, subject: str) -> tuple[_RunRecord, int]:
    """The last record on a subject and its sequence; an empty one and 0 when there is none."""
    found = await jetstream.get_message(stream, {"last_by_subj": subject})
    if found is None:
        return _RunRecord(), 0
    try:
        return msgspec.json.decode(found.payload, type=_RunRecord), found.sequence
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"the message at offset {found.sequence} of '{stream}' is on '{subject}' but is not "
            f"a redrive's record ({error}): another client published there; delete it"
        ) from error


def _keeps_records(info: TopicInfo) -> bool:
    settings = info.settings
    limits = settings.retention is Retention.LIMITS
    return info.managed and limits and settings.allows("atomic")


def _partition_for(info: TopicInfo, letter: DeadLetter) -> tuple[int, PartitionInfo]:
    """The partition of an event: that of its key; without a key, the original one."""
    number = letter.partition
    if letter.key is not None and info.managed:
        number = partition_of(letter.key, len(info.partitions))
    number = min(number, len(info.partitions) - 1)
    return number, info.partitions[number]


def _by_key(group: list[DeadLetter]) -> list[DeadLetter]:
    """The letters in their order, but those of one key in the order of their topic.

    They may have been dead-lettered in another order, by several members or after retries.
    """
    of_key: dict[str, list[DeadLetter]] = {}
    for letter in group:
        if letter.key is not None:
            of_key.setdefault(letter.key, []).append(letter)
    for letters in of_key.values():
        letters.sort(key=lambda letter: (letter.origin_offset, letter.origin_index), reverse=True)
    return [letter if letter.key is None else of_key[letter.key].pop() for letter in group]
