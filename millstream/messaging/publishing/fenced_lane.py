"""One fence of a writer, on one partition: claimed, then one unit after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from uuid import uuid4

from millstream.errors import ConfigError, DataLoss, FencedOut, Unconfirmed, WrongSequence
from millstream.events.fence import (
    FenceState,
    data_subject,
    judge_refusal,
    part_headers,
    read_state,
    state_headers,
)
from millstream.events.packs.pack import EncodedPack, empty
from millstream.wire.aio.atomic import publish_batch
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.aio.publisher import StreamPublisher
from millstream.wire.api import PubAck
from millstream.wire.batch import BATCH_BYTES_MAX, BATCH_MESSAGES_MAX
from millstream.wire.message import OutgoingMessage
from millstream.wire.protocol import encode_headers, parse_headers

__all__ = ["FencedLane", "as_message", "unit_messages"]

# Claims that may be lost before we say that somebody keeps the name: a writer that stores without a
# pause often comes between a claim's look at the fence and the claim.
CLAIMS_MAX: Final = 200
STORE_SECONDS: Final = 30.0


def as_message(subject: str, pairs: list[tuple[str, str]], pack: EncodedPack) -> OutgoingMessage:
    """A pack on a subject, with headers besides its own."""
    block = encode_headers([*pairs, *pack.headers.items()])
    return OutgoingMessage(subject.encode(), block, memoryview(pack.payload))


def unit_messages(
    subject: str, writer: str, state: FenceState, packs: Sequence[EncodedPack]
) -> list[OutgoingMessage]:
    """The messages of one unit: earlier packs beside the fence, the last one on it."""
    size = sum(pack.size for pack in packs)
    if len(packs) > BATCH_MESSAGES_MAX or size > BATCH_BYTES_MAX:
        raise ConfigError(
            f"one unit of {len(packs):,} packs and {size:,} bytes: the server stores at most "
            f"{BATCH_MESSAGES_MAX:,} packs and {BATCH_BYTES_MAX:,} bytes together. "
            f"Write it as several units"
        )
    beside = data_subject(subject)
    parts = [
        as_message(beside, part_headers(writer, state, number), pack)
        for number, pack in enumerate(packs[:-1], 1)
    ]
    last = as_message(subject, state_headers(writer, state, len(packs)), packs[-1])
    return [*parts, last]


class FencedLane:
    """Stores units under one fence. A unit that is stored is never stored again, by anybody."""

    def __init__(
        self, jetstream: JetStream, lane: StreamPublisher, stream: str, subject: str, writer: str
    ) -> None:
        self._jetstream = jetstream
        self._lane = lane
        self._stream = stream
        self._subject = subject
        self._writer = writer
        self.state = FenceState()

    async def claim(self) -> FenceState:
        """Take the writer's name over; every older writer of it is fenced out from now on."""
        owner = uuid4().hex
        for _ in range(CLAIMS_MAX):
            last = await self._last()
            try:
                return await self._store_one(last.claimed(owner), [empty()])
            except (FencedOut, DataLoss):
                continue  # the old writer, or another claimant, was faster: follow what it stored
        raise FencedOut(self._writer)

    async def store(
        self, packs: Sequence[EncodedPack], position: int, note: str | None = None
    ) -> FenceState:
        """Store packs, all or none, and with them how far the input is done."""
        return await self._store_one(self.state.next(position, note), packs or [empty()])

    async def _store_one(self, wanted: FenceState, packs: Sequence[EncodedPack]) -> FenceState:
        messages = unit_messages(self._subject, self._writer, wanted, packs)
        try:
            ack = await self._publish(messages)
        except (WrongSequence, Unconfirmed) as refused:
            found = await self._last()
            if isinstance(refused, Unconfirmed) and found.number < wanted.number:
                raise
            self.state = judge_refusal(self._writer, wanted, found)
        else:
            self.state = wanted.stored_at(ack.seq)
        return self.state

    async def _publish(self, messages: list[OutgoingMessage]) -> PubAck:
        if len(messages) == 1:
            return await self._lane.publish(messages[0], STORE_SECONDS, lambda ack: ack)
        return await publish_batch(self._jetstream, self._stream, messages, STORE_SECONDS)

    async def _last(self) -> FenceState:
        found = await self._jetstream.get_message(self._stream, {"last_by_subj": self._subject})
        if found is None:
            return FenceState()
        return read_state(found.sequence, parse_headers(found.headers))
