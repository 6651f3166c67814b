"""Appends: events under an expected version, each append stored once.

An aggregate's last message says its version. A message is published with the sequence of that last
message as expectation, so the broker stores it only if no other append came first:

1. Find the head of the aggregate: version and sequence of its last message, remembered if this
   store has just loaded or appended to it.
2. Publish with the head's sequence as expectation, again and again until it is answered.
3. A refusal is either a conflict or the answer to a copy of a message that was stored: the messages
   after the head decide, because each has the id of its append.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from millstream.errors import (
    AggregateDeleted,
    ApiError,
    ConfigError,
    Unconfirmed,
    VersionConflict,
    WrongSequence,
)
from millstream.event_store.event_types import EventTypes
from millstream.event_store.events import (
    ANY,
    NEW,
    Append,
    AppendReceipt,
    Unchanged,
)
from millstream.event_store.format import (
    CAUSATION_HEADER,
    CORRELATION_HEADER,
    EVENTS_MAX,
    PREVIOUS_HEADER,
    VERSIONS_HEADER,
    join_lines,
    next_previous,
    versions_text,
)
from millstream.event_store.ids import pattern_of, subject_of
from millstream.event_store.reading import AggregateReader
from millstream.events.encoding import check_headers
from millstream.events.event import ID_HEADER, TIME_HEADER, nanoseconds_of
from millstream.events.fence import EXPECTED_HEADER
from millstream.events.subject import partition_of
from millstream.messaging.publishing.acks import Acks
from millstream.messaging.publishing.event_publisher import PUBLISH_SECONDS
from millstream.messaging.topics.handle import TopicHandle
from millstream.wire.aio.atomic import publish_batch
from millstream.wire.api import ErrorCode, PubAck
from millstream.wire.message import OutgoingMessage
from millstream.wire.protocol import encode_headers

__all__ = ["AggregateHead", "Appender"]

# Heads that are remembered: some megabytes, and more aggregates than one process works on.
HEADS_MAX: Final = 20_000
# Refusals in a row of an append that takes any version: each means that another one was stored.
TRIES_MAX: Final = 100
_PATTERN_HEADER: Final = b"Nats-Expected-Last-Subject-Sequence-Subject"
_STATUS_LINE: Final = b"NATS/1.0\r\n"
# The headers of every append: its id, its versions, where those before it are, and the sequence
# that it expects.
_HEADERS: Final = (
    f"NATS/1.0\r\n{ID_HEADER}: %b\r\n{VERSIONS_HEADER}: %b\r\n%b{EXPECTED_HEADER}: %d\r\n".encode()
)


class AggregateHead(NamedTuple):
    """The end of an aggregate: its version, and the sequence of its last message."""

    version: int = 0
    sequence: int = 0
    deleted: bool = False
    previous: str = ""  # what the next append says of those before it
    boundary: int = 0  # the last message of a pattern that it is checked against


class _Prepared(msgspec.Struct, frozen=True):
    """An append with everything that does not depend on the head of its aggregate."""

    append: Append
    append_id: str
    partition: int
    subject: str
    count: int
    details: bytes  # the rest of its headers
    payload: bytes

    def message(self, head: AggregateHead) -> OutgoingMessage:
        """The message that follows a head."""
        versions = versions_text(head.version + 1, head.version + self.count)
        expected, details = self.append.expected, self.details
        sequence = head.sequence
        if isinstance(expected, Unchanged):
            prefix = self.subject[: -len(subject_of("", self.append.id))]
            pattern = f"{prefix}.{pattern_of(expected.pattern)}"
            sequence = head.boundary
            details = b"%b: %b\r\n%b" % (_PATTERN_HEADER, pattern.encode(), details)
        previous = f"{PREVIOUS_HEADER}: {head.previous}\r\n" if head.previous else ""
        known = (self.append_id.encode(), versions.encode(), previous.encode())
        block = _HEADERS % (*known, sequence)
        return OutgoingMessage(self.subject.encode(), block + details, self.payload)


class Appender:
    """Appends to the aggregates of one store; each append is stored once, or refused."""

    def __init__(
        self, store: str, topic: TopicHandle, acks: Acks, types: EventTypes, reader: AggregateReader
    ) -> None:
        self._store = store
        self._topic = topic
        self._acks = acks
        self._reader = reader
        self._heads: dict[str, AggregateHead] = {}
        self.types = types

    # -- heads ----------------------------------------------------------------------------

    def remember(self, id: str, head: AggregateHead) -> None:
        """Keep the head of an aggregate that was just read or written."""
        heads = self._heads
        heads.pop(id, None)
        if len(heads) >= HEADS_MAX:
            del heads[next(iter(heads))]
        heads[id] = head

    def forget(self, id: str) -> None:
        """The head of an aggregate is no longer known."""
        self._heads.pop(id, None)

    async def head(self, id: str) -> AggregateHead:
        """The head of an aggregate, as the broker has it now."""
        found, sequence = await self._reader.head(id)
        head = AggregateHead(0, sequence)
        if found is not None:
            head = AggregateHead(found.last, sequence, found.ends, found.next_previous)
        self.remember(id, head)
        return head

    # -- one append -----------------------------------------------------------------------

    async def append(self, append: Append) -> AppendReceipt:
        """Store one append; VersionConflict when the aggregate has another version."""
        if self._acks.demanded:
            await self._acks.check()
        prepared = await self._prepare(append)
        unsure = append.append_id is not None and append.expected is not NEW
        for _ in range(TRIES_MAX):
            head = await self._expected_head(prepared)
            if isinstance(head, AppendReceipt):
                return head
            if unsure:
                # After the head: a copy that is stored later makes the broker refuse this one.
                stored = await self._repeated(prepared, AggregateHead())
                if stored is not None:
                    return stored
                unsure = False
            try:
                return await self._publish(prepared, head)
            except WrongSequence as refused:
                self.forget(append.id)
                stored = await self._stored_after(prepared, head, refused)
                if stored is not None:
                    return stored
        raise VersionConflict(
            *(self._store, append.id, append.expected, (await self.head(append.id)).version),
            f": others were faster {TRIES_MAX} times in a row",
        )

    async def _prepare(self, append: Append) -> _Prepared:
        events = append.events
        is_list = type(events) is list  # nearly always, and the other question takes long
        if not is_list and (
            isinstance(events, str | bytes | dict) or not isinstance(events, Sequence)
        ):
            raise ConfigError(
                f"events: give a list of events, found {type(events).__name__}: [{events!r:.60}]"
            )
        if not 1 <= len(events) <= EVENTS_MAX:
            raise ConfigError(
                f"an append has 1 to {EVENTS_MAX:,} events, found {len(events):,}. Append more in "
                f"several calls"
            )
        if isinstance(append.expected, Unchanged) and len(self._topic.partitions) > 1:
            raise ConfigError(
                f"expected: store '{self._store}' has {len(self._topic.partitions)} partitions, "
                f"and the broker checks Unchanged(...) in one. Create the store with one partition"
            )
        payload = join_lines(await self.types.encode_all(events, append.id))
        pairs: list[tuple[str, str]] = []
        if append.timestamp is not None:
            pairs.append((TIME_HEADER, str(nanoseconds_of(append.timestamp))))
        if append.correlation_id is not None:
            pairs.append((CORRELATION_HEADER, append.correlation_id))
        if append.causation_id is not None:
            pairs.append((CAUSATION_HEADER, append.causation_id))
        if append.headers:
            check_headers(append.headers)
            pairs.extend(append.headers.items())
        number = partition_of(append.id, len(self._topic.partitions))
        prefix = self._topic.partitions[number].prefix or self._store
        append_id, details = append.append_id, b"\r\n"
        if not append_id:
            append_id = self._topic.publisher.new_id()
        else:
            encode_headers([(ID_HEADER, append_id)], foreign=True)  # refuses what is not text
        if pairs:
            details = encode_headers(pairs, foreign=True).removeprefix(_STATUS_LINE)
        known = (number, subject_of(prefix, append.id), len(events), details, payload)
        return _Prepared(append, append_id, *known)

    async def _expected_head(self, prepared: _Prepared) -> AggregateHead | AppendReceipt:
        """The head that an append follows, or its receipt if it was stored before."""
        append = prepared.append
        expected = append.expected
        known = self._heads.get(append.id)
        if expected is NEW:  # remembered with a sequence: another program has published there
            return known if known is not None and not known.version else AggregateHead()
        if isinstance(expected, Unchanged):
            # The pattern first: what is appended after this question makes the broker refuse.
            last = await self._reader.last_offset(expected.pattern)
            head = await self.head(append.id)
            if max(last, head.sequence) > min(last, expected.offset):
                raise VersionConflict(self._store, append.id, expected, head.version)
            head = head._replace(boundary=last)
        elif known is not None and not known.deleted and expected in (ANY, known.version):
            head = known
        else:
            head = await self.head(append.id)
        if head.deleted:
            raise AggregateDeleted(self._store, append.id)
        if not isinstance(expected, int) or head.version == expected:
            return head
        if append.append_id is not None and head.version > expected:
            stored = await self._repeated(prepared, AggregateHead(expected))
            if stored is not None:
                return stored
        raise VersionConflict(self._store, append.id, expected, head.version)

    async def _publish(self, prepared: _Prepared, head: AggregateHead) -> AppendReceipt:
        publisher = self._topic.publisher
        if publisher.full:
            await publisher.wait_for_space()
        message = prepared.message(head)
        ack: PubAck = await publisher.publish(message, PUBLISH_SECONDS, lambda ack: ack)
        if ack.duplicate:
            # The broker knows the id: an earlier try was stored, perhaps under another version.
            found = await self._reader.at(prepared.partition, ack.seq)
            if found is None or found.id != prepared.append.id:
                raise ConfigError(
                    f"append_id {prepared.append_id!r:.60} was used for another aggregate; give "
                    f"every append an id of its own"
                )
            return await self._receipt(prepared, found.first, found.last, ack.seq, True)
        last = head.version + prepared.count
        previous = next_previous(head.previous, ack.seq, len(prepared.payload))
        self.remember(prepared.append.id, AggregateHead(last, ack.seq, previous=previous))
        return await self._receipt(prepared, head.version + 1, last, ack.seq, False)

    async def _receipt(
        self, prepared: _Prepared, first: int, last: int, sequence: int, duplicate: bool
    ) -> AppendReceipt:
        acks, number = self._acks, prepared.partition
        if acks.demanded:
            await acks.check()
        known = (number, sequence, duplicate, acks.durabilities[number])
        return AppendReceipt(prepared.append.id, first, last, *known)

    # -- refusals ---------------------------------------------------------------------------

    async def _stored_after(
        self, prepared: _Prepared, head: AggregateHead, refused: WrongSequence
    ) -> AppendReceipt | None:
        """The receipt of an append that was refused and is stored; None: try again."""
        append = prepared.append
        if refused.sent_again or append.append_id is not None:
            stored = await self._repeated(prepared, head)
            if stored is not None:
                return stored
        now = await self.head(append.id)
        if refused.sent_again and now.version < head.version:
            raise Unconfirmed(
                f"an append to '{append.id}' of store '{self._store}' was sent again after its "
                f"answer was lost, and the aggregate was deleted since: it may have been stored"
            ) from refused
        if now.deleted:
            raise AggregateDeleted(self._store, append.id) from refused
        if append.expected is ANY:
            return None
        if now.version == (0 if append.expected is NEW else append.expected):
            return None  # the head that was remembered was out of date
        raise VersionConflict(self._store, append.id, append.expected, now.version) from refused

    async def _repeated(self, prepared: _Prepared, head: AggregateHead) -> AppendReceipt | None:
        """The receipt of an append that is stored after a head already; None: it is not."""
        async for found in self._reader.appends(prepared.append.id, head.sequence + 1):
            if found.append_id == prepared.append_id:
                known = (found.first, found.last, found.offset)
                return await self._receipt(prepared, *known, True)
        return None

    # -- several ----------------------------------------------------------------------------

    async def append_all(self, appends: Sequence[Append]) -> list[AppendReceipt]:
        """Store appends to several aggregates of one partition: all of them or none."""
        await self._acks.check()
        prepared = [await self._prepare(append) for append in appends]
        self._check_together(prepared)
        for _ in range(TRIES_MAX):
            heads = [await self._head_for_batch(one) for one in prepared]
            # After the heads: a copy that is stored later than this makes the broker refuse them.
            stored = await self._all_repeated(prepared)
            if stored is not None:
                return stored
            for one, head in zip(prepared, heads, strict=True):
                self._check_head(one.append, head, None)
            messages = [one.message(head) for one, head in zip(prepared, heads, strict=True)]
            stream = self._topic.partitions[prepared[0].partition].stream
            try:
                ack = await publish_batch(self._topic.jetstream, stream, messages, PUBLISH_SECONDS)
            except ApiError as refused:
                stored = await self._all_stored_after(prepared, heads, refused)
                if stored is not None:
                    return stored
                continue
            return await self._receipts(prepared, heads, ack.seq)
        first = appends[0]
        raise VersionConflict(
            *(self._store, first.id, first.expected, (await self.head(first.id)).version),
            f": others were faster {TRIES_MAX} times in a row",
        )

    async def _all_repeated(
        self, prepared: Sequence[_Prepared], heads: Sequence[AggregateHead] | None = None
    ) -> list[AppendReceipt] | None:
        """The receipts of appends that were stored together before; None: they were not.

        With `heads` also those whose ids were made here: they can only be stored after them.
        """
        if heads is None:
            if any(one.append.append_id is None for one in prepared):
                return None
            heads = [AggregateHead()] * len(prepared)
        found = []
        for one, head in zip(prepared, heads, strict=True):
            stored = await self._repeated(one, head)
            if stored is None:
                return None
            found.append(stored)
        return found

    async def _all_stored_after(
        self, prepared: Sequence[_Prepared], heads: Sequence[AggregateHead], refused: ApiError
    ) -> list[AppendReceipt] | None:
        """The receipts of appends that were refused and are stored; None: try again."""
        is_wrong = isinstance(refused, WrongSequence)
        if not is_wrong and refused.err_code != ErrorCode.BATCH_DUPLICATE:
            raise refused
        stored = await self._all_repeated(prepared)
        if stored is None and isinstance(refused, WrongSequence) and refused.sent_again:
            stored = await self._all_repeated(prepared, heads)
        if stored is None and not is_wrong:
            raise ConfigError(
                "append_all: an append_id was used before, for another append; give every append "
                "an id of its own"
            ) from refused
        if stored is None:
            for one in prepared:
                self._check_head(one.append, await self.head(one.append.id), refused)
        return stored

    async def _head_for_batch(self, prepared: _Prepared) -> AggregateHead:
        append = prepared.append
        known = self._heads.get(append.id)
        if append.expected is NEW:
            return known if known is not None and not known.version else AggregateHead()
        if known is None or known.deleted or append.expected not in (ANY, known.version):
            known = await self.head(append.id)
        return known

    def _check_head(self, append: Append, head: AggregateHead, cause: ApiError | None) -> None:
        """Raise the error of an append that cannot follow a head."""
        if head.deleted:
            raise AggregateDeleted(self._store, append.id) from cause
        wanted = 0 if append.expected is NEW else append.expected
        if isinstance(wanted, int) and head.version != wanted:
            found = (self._store, append.id, append.expected, head.version)
            raise VersionConflict(*found) from cause

    def _check_together(self, prepared: Sequence[_Prepared]) -> None:
        if not prepared:
            raise ConfigError("append_all: give at least one Append")
        ids = [one.append.id for one in prepared]
        if len(set(ids)) < len(ids):
            raise ConfigError("append_all: an aggregate is named twice; join its events in one")
        given = [one.append.append_id is not None for one in prepared]
        if any(given) and not all(given):
            raise ConfigError("append_all: give all appends an append_id, or none")
        if any(isinstance(one.append.expected, Unchanged) for one in prepared):
            raise ConfigError("append_all: Unchanged(...) is for a single append")
        if len({one.partition for one in prepared}) > 1:
            raise ConfigError(
                f"append_all: these aggregates are in different partitions of store "
                f"'{self._store}', and only one partition is stored at once. Create the store with "
                f"one partition"
            )

    async def _receipts(
        self, prepared: Sequence[_Prepared], heads: Sequence[AggregateHead], last: int
    ) -> list[AppendReceipt]:
        found = []
        first = last - len(prepared) + 1
        for sequence, (one, head) in enumerate(zip(prepared, heads, strict=True), first):
            version = head.version + one.count
            previous = next_previous(head.previous, sequence, len(one.payload))
            self.remember(one.append.id, AggregateHead(version, sequence, previous=previous))
            found.append(await self._receipt(one, head.version + 1, version, sequence, False))
        return found
