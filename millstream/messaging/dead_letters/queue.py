"""The dead letters of a subscription: list, show, edit, delete, redrive."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Final

from millstream.errors import (
    ApiError,
    ConfigError,
    DeadLetterNotFound,
    TopicNotFound,
    WrongSequence,
)
from millstream.events.classify import is_own_subject
from millstream.events.event import Partition
from millstream.events.fence import EXPECTED_HEADER
from millstream.events.unpack import raw_of
from millstream.events.value_type import ValueType
from millstream.messaging.dead_letters.letter import (
    ORDER_HEADER,
    DeadLetter,
    DeadLetterFilter,
    edited_message,
    read_letter,
)
from millstream.messaging.dead_letters.redrive import Redrive, was_redriven
from millstream.messaging.dead_letters.store import dead_letter_prefix
from millstream.messaging.reading.replay import ReadPlan, read_messages
from millstream.messaging.topics.lookup import open_topic
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.aio.ordered_consumer import OrderedConsumer
from millstream.wire.aio.publisher import StreamPublisher
from millstream.wire.api import ErrorCode, parse_ack_address
from millstream.wire.message import OutgoingMessage, RawMessage
from millstream.wire.range_cursor import Range

__all__ = ["DeadLetterQueue", "RedriveReport"]

STORE_SECONDS: Final = 10.0
TAKE_MESSAGES: Final = 1000
# Letters that are read before any of them is redriven: each window costs one synced write.
WINDOW_LETTERS: Final = 500
WINDOW_BYTES: Final = 16 * 1024 * 1024
_KEEP: Final = object()
_ORDER_LINE: Final = f"\r\n{ORDER_HEADER}: ".encode()
_ORDER: Final = re.compile(rb"[0-9]{1,19}")
_EVERYTHING: Final = DeadLetterFilter()


@dataclass(frozen=True, slots=True)
class RedriveReport:
    """What a redrive did."""

    redriven: int  # events that were stored in their topics again
    recovered: int  # letters that an earlier, interrupted redrive had stored but not removed


class DeadLetterQueue:
    """The dead letters in one dead-letter topic, in the order in which they were stored.

    Reading changes nothing. A redriven event is stored in its topic exactly once, even if the
    redrive is killed and run again; see `redriving` for what that needs.
    """

    def __init__(
        self,
        jetstream: JetStream,
        publisher: StreamPublisher,
        dead_topic: str,
        value_type: ValueType | None = None,
    ) -> None:
        self.name = dead_topic
        self._jetstream = jetstream
        self._publisher = publisher
        self._value_type = value_type

    def __repr__(self) -> str:
        return f"<DeadLetterQueue {self.name}>"

    # -- reading --------------------------------------------------------------------------

    async def letters(
        self, which: DeadLetterFilter = _EVERYTHING
    ) -> AsyncGenerator[DeadLetter, None]:
        """The dead letters in order, the oldest first; none when the topic does not exist."""
        partition = await self._partition()
        if partition is None:
            return
        edited = await self._edited(partition.stream)
        given = 0
        async for raw in self._in_order(partition, edited):
            letter = read_letter(raw, self._value_type)
            if which.takes(letter):
                yield letter
                given += 1
                if which.limit is not None and given >= which.limit:
                    return

    async def list(self, which: DeadLetterFilter = _EVERYTHING) -> list[DeadLetter]:
        """The dead letters as a list; set a limit when there may be very many."""
        return [letter async for letter in self.letters(which)]

    async def show(self, offset: int) -> DeadLetter:
        """The dead letter at an offset; DeadLetterNotFound when there is none."""
        partition = await self._partition()
        if offset < 1 or partition is None:
            raise DeadLetterNotFound(self.name, offset)
        raw = await self._version(partition, offset)
        if raw is None:
            raise DeadLetterNotFound(self.name, offset)
        return read_letter(raw, self._value_type)

    # -- changing -------------------------------------------------------------------------

    async def edit(self, offset: int, *, value: Any = _KEEP, headers: Any = _KEEP) -> DeadLetter:
        """Replace the value or the producer's headers; returns the letter as it is now stored.

        Key, cause, origin and order are kept; the offset is new. If the letter was changed, removed
        or redriven in the meantime, nothing is changed and DeadLetterNotFound is raised.
        """
        given = {"value": value, "headers": headers}
        changes = {name: what for name, what in given.items() if what is not _KEEP}
        if not changes:
            raise ConfigError("edit needs a new value or new headers")
        letter = await self.show(offset)
        stream = await self._stream()
        if await was_redriven(self._jetstream, self.name, letter):
            raise DeadLetterNotFound(self.name, offset, ": it was redriven")
        subject, block, payload = edited_message(letter, changes, self._value_type)
        expected = f"NATS/1.0\r\n{EXPECTED_HEADER}: {offset}\r\n".encode()
        message = OutgoingMessage(subject, expected + block.partition(b"\r\n")[2], payload)
        try:
            ack = await self._publisher.publish(message, STORE_SECONDS, lambda ack: ack)
        except WrongSequence as error:
            raise DeadLetterNotFound(self.name, offset, ": it was changed meanwhile") from error
        await self._remove(stream, offset)
        return await self.show(ack.seq)

    async def delete(self, offset: int) -> None:
        """Remove one dead letter permanently; DeadLetterNotFound when there is none."""
        await self.show(offset)
        await self._remove(await self._stream(), offset)

    async def purge(self, which: DeadLetterFilter = _EVERYTHING) -> int:
        """Remove the selected letters permanently; returns the number removed."""
        removed = 0
        stream = await self._stream()
        for letter in await self.list(which):
            await self._remove(stream, letter.offset)
            removed += 1
        return removed

    # -- redriving ------------------------------------------------------------------------

    async def redrive(
        self,
        which: DeadLetterFilter = _EVERYTHING,
        *,
        to_all: bool = False,
        dry_run: bool = False,
    ) -> RedriveReport:
        """Store the events of dead letters in their topics again, in order, and remove the letters.

        Only the subscription that dead-lettered an event receives it again; with `to_all`, every
        reader of the topic does. A dry run only counts. See `redriving` for the guarantees.
        """
        if dry_run:
            return RedriveReport(len([letter async for letter in self.letters(which)]), 0)
        run = self._run(to_all)
        redriven = 0
        async for _ in self._redrive(run, which):
            redriven += 1
        return RedriveReport(redriven, run.recovered)

    async def redriving(
        self, which: DeadLetterFilter = _EVERYTHING, *, to_all: bool = False
    ) -> AsyncGenerator[DeadLetter, None]:
        """Like `redrive`, but yields each letter once its event is stored and the letter removed.

        Exactly once, even if it is killed: the events of a partition and a record that lists them
        are stored in one atomic step; the next redrive finds the record and only removes those
        letters. Where the record can be removed meanwhile (by retention or a purge, or in a work
        queue with running members), where there are no atomic batches, and on a foreign stream, an
        interrupted redrive is at least once, and exactly once within the duplicate window. Of two
        redrives at the same time the older one ends with RedriveTaken.
        """
        async for letter in self._redrive(self._run(to_all), which):
            yield letter

    def _run(self, to_all: bool) -> Redrive:
        return Redrive(self._jetstream, self._publisher, self.name, to_all)

    async def _redrive(
        self, run: Redrive, which: DeadLetterFilter
    ) -> AsyncGenerator[DeadLetter, None]:
        partition = await self._partition()
        if partition is None:
            return
        await run.open(partition.stream)
        async for letter in self.letters(which):
            await run.prepare(letter)
        try:
            # Letters that were read before the claims may have been redriven by another run.
            await run.claim()
            window: list[DeadLetter] = []
            size = 0
            async for letter in self.letters(which):
                window.append(letter)
                size += letter.size
                if len(window) >= WINDOW_LETTERS or size >= WINDOW_BYTES:
                    async for done in run.redrive(window):
                        yield done
                    window, size = [], 0
            async for done in run.redrive(window):
                yield done
        finally:
            await run.close()

    # -- inside ---------------------------------------------------------------------------

    async def _partition(self) -> Partition | None:
        """The queue's only partition; None until something is dead-lettered."""
        try:
            info = await open_topic(self._jetstream, self.name)
        except TopicNotFound:
            return None
        prefix = dead_letter_prefix(info)
        stream = info.partitions[0].stream
        return Partition(stream, self.name, 0, prefix, self._value_type)

    async def _stream(self) -> str:
        partition = await self._partition()
        if partition is None:
            raise ConfigError(
                f"there is no dead-letter topic '{self.name}' yet: it has no dead letters"
            )
        return partition.stream

    async def _remove(self, stream: str, offset: int) -> None:
        try:
            await self._jetstream.delete_message(stream, offset)
        except ApiError as error:
            if error.err_code not in (ErrorCode.MESSAGE_NOT_FOUND, ErrorCode.DELETE_FAILED):
                raise

    async def _edited(self, stream: str) -> dict[int, int]:
        """Order to offset of the edited letters, which are stored after the others."""
        last = (await self._jetstream.stream_info(stream)).state.last_seq
        reader = OrderedConsumer(self._jetstream, stream, Range(1, last + 1, headers_only=True))
        await reader.open()
        found: dict[int, int] = {}
        try:
            while not reader.done:
                for raw in reader.take_now(TAKE_MESSAGES):
                    if _ORDER_LINE in raw.headers:
                        order = raw.headers.partition(_ORDER_LINE)[2].partition(b"\r\n")[0]
                        if _ORDER.fullmatch(order):  # if not, reading the letter reports it
                            found[int(order)] = parse_ack_address(raw.reply).sequence
                if not reader.done:
                    await reader.signal.wait()
        finally:
            reader.close()
        return dict(sorted(found.items()))

    async def _in_order(
        self, partition: Partition, edited: dict[int, int]
    ) -> AsyncGenerator[RawMessage, None]:
        """The letters' messages: of each the newest version, in the order of the first."""
        waiting = iter(edited.items())
        ahead = next(waiting, None)
        async for _, messages in read_messages(self._jetstream, [partition], ReadPlan()):
            for raw in messages:
                offset = parse_ack_address(raw.reply).sequence
                while ahead is not None and ahead[0] <= offset:
                    version = await self._version(partition, ahead[1])
                    ahead = next(waiting, None)
                    if version is not None:
                        yield version
                older = offset in edited or _ORDER_LINE in raw.headers
                if not older and not is_own_subject(raw.subject, partition.prefix_size):
                    yield raw

    async def _version(self, partition: Partition, offset: int) -> RawMessage | None:
        """The message at an offset, ready to be decoded; None when it was removed."""
        stored = await self._jetstream.get_message(partition.stream, {"seq": offset})
        if stored is None or is_own_subject(stored.subject.encode(), partition.prefix_size):
            return None
        raw = raw_of(partition.stream, stored)
        if partition.learn is not None:
            await partition.learn([raw])
        return raw
