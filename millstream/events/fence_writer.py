"""Every decision of writing under a fence; no I/O. Shared by asynchronous and Spark writers.

Its methods are generators. They yield what to ask the broker (`ReadLast`, `Publish`) and go on when
they are sent the answer, or thrown the error that came instead:

    steps = fence.store(packs, position)
    request = next(steps)               # Publish(messages)
    steps.send(ack)                     # or steps.throw(WrongSequence(...))

So the order of questions, what a refusal means and how often a race is tried again are written
once; `fence.py` has the format and explains why nothing can be stored twice.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, TypeVar

from millstream.errors import ConfigError, FencedOut, Unconfirmed, WrongSequence
from millstream.events.fence import (
    FenceState,
    data_subject,
    judge_refusal,
    part_headers,
    read_state,
    state_headers,
)
from millstream.events.packs.pack import EncodedPack, empty
from millstream.events.positions import Position
from millstream.wire.api import PubAck
from millstream.wire.batch import BATCH_BYTES_MAX, BATCH_MESSAGES_MAX
from millstream.wire.message import OutgoingMessage, StoredMessage

__all__ = [
    "RACES_MAX",
    "Answer",
    "FenceWriter",
    "Offer",
    "Outcome",
    "Publish",
    "ReadLast",
    "Request",
    "Steps",
    "unit_messages",
]

# Claims that may be lost before the name counts as taken: a writer that stores without a pause
# often stores between a claim's read of the fence and the claim.
CLAIMS_MAX: Final = 200
# Refusals in a row before a fence that nobody claims counts as taken by something else.
RACES_MAX: Final = 20

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReadLast:
    """Asks for the last message on a subject, as the partition's leader has it; None: none."""

    subject: str


@dataclass(frozen=True, slots=True)
class Publish:
    """Asks for messages to be stored, all or none; answered by the ack of the last one."""

    messages: list[OutgoingMessage]


Request = ReadLast | Publish
Answer = StoredMessage | PubAck | None
Steps = Generator[Request, Answer, T]


class Outcome(Enum):
    """What became of a unit."""

    STORED = auto()  # the broker confirmed it
    FOUND = (
        auto()
    )  # it was stored before: only its ack was lost, or another attempt stored the same
    REFUSED = auto()  # something else is stored instead


@dataclass(frozen=True, slots=True)
class Offer:
    """What became of a unit, and the state of the fence now."""

    outcome: Outcome
    state: FenceState

    @property
    def is_stored(self) -> bool:
        return self.outcome is not Outcome.REFUSED


def unit_messages(
    subject: str,
    writer: str,
    state: FenceState,
    packs: Sequence[EncodedPack],
    beside: Sequence[OutgoingMessage] = (),
    expects: Sequence[tuple[str, str]] = (),
) -> list[OutgoingMessage]:
    """The messages of one unit: plain messages, earlier packs, the last pack on the fence."""
    count = len(beside) + len(packs)
    size = sum(pack.size for pack in packs) + sum(len(m.headers) + len(m.payload) for m in beside)
    if count > BATCH_MESSAGES_MAX or size > BATCH_BYTES_MAX:
        raise ConfigError(
            f"one unit of {count:,} messages and {size:,} bytes: the server stores at most "
            f"{BATCH_MESSAGES_MAX:,} messages and {BATCH_BYTES_MAX:,} bytes together. "
            f"Write it as several units"
        )
    parts = [
        pack.message(data_subject(subject), part_headers(writer, state, number))
        for number, pack in enumerate(packs[:-1], 1)
    ]
    last = packs[-1].message(subject, state_headers(writer, state, count, expects))
    return [*beside, *parts, last]


class FenceWriter:
    """Stores units under one fence. A unit that is stored is never stored again, by anybody."""

    def __init__(self, subject: str, writer: str) -> None:
        self.subject = subject
        self.writer = writer
        self.state = FenceState()  # after what this writer stored, or found when it started

    def look(self) -> Steps[FenceState]:
        """The state in the last pack on the fence; its sequence is 0 when there is none."""
        found = yield ReadLast(self.subject)
        if not isinstance(found, StoredMessage):
            return FenceState()
        return read_state(found.sequence, found.headers)

    def claim(self, owner: str, input_stream: str = "") -> Steps[FenceState]:
        """Take the writer's name over; every older writer of it is fenced out from now on.

        `owner` is a random token that nobody else uses.
        """
        for _ in range(CLAIMS_MAX):
            last = yield from self.look()
            offer = yield from self.offer(last.claimed(owner, input_stream), [empty()])
            if offer.is_stored:
                return offer.state
            # The old writer, or another claimant, was faster: follow what it stored.
        raise FencedOut(self.writer)

    def begin(self) -> Steps[FenceState]:
        """The state to continue from, without a claim; a new fence gets its first, empty pack.

        No data is ever sent with expectation 0: when the fence is gone (purged, expired), the
        server would store it a second time.
        """
        for _ in range(RACES_MAX):
            last = yield from self.look()
            if last.sequence:
                self.state = last
                return last
            offer = yield from self.offer(last.next(0), [empty()])
            if offer.is_stored:
                return offer.state
        raise FencedOut(self.writer)

    def store(
        self,
        packs: Sequence[EncodedPack],
        position: Position,
        note: str | None = None,
        noted: Position | None = None,
        beside: Sequence[OutgoingMessage] = (),
    ) -> Steps[FenceState]:
        """Store the next unit of the writer that claimed the fence, and its position.

        Without a note the one before it stays. FencedOut when another writer claimed the fence
        since, DataLoss when the log lost what was stored.
        """
        wanted = self.state.next(position, note, noted)
        offer = yield from self.offer(wanted, packs, beside)
        if not offer.is_stored:
            self.state = judge_refusal(self.writer, wanted, offer.state)
        return self.state

    def offer(
        self,
        wanted: FenceState,
        packs: Sequence[EncodedPack],
        beside: Sequence[OutgoingMessage] = (),
        expects: Sequence[tuple[str, str]] = (),
    ) -> Steps[Offer]:
        """Store packs, all or none, as the unit that follows `wanted.sequence`.

        `beside` are plain messages that are stored together with them, before them; `expects` is
        as for `state_headers`. Unconfirmed when it is unknown whether they are stored.
        """
        packs = packs or [empty()]
        messages = unit_messages(self.subject, self.writer, wanted, packs, beside, expects)
        unsure: Unconfirmed | None = None
        try:
            ack = yield Publish(messages)
        except WrongSequence:
            pass
        except Unconfirmed as error:
            unsure = error
        else:
            # A unit with this id was stored before: look whether it is this one.
            if not (isinstance(ack, PubAck) and ack.duplicate):
                self.state = wanted.stored_at(ack.seq if isinstance(ack, PubAck) else 0)
                return Offer(Outcome.STORED, self.state)
        found = yield from self.look()
        if found == wanted.stored_at(found.sequence):
            self.state = found
            return Offer(Outcome.FOUND, found)
        if unsure is not None and found.number < wanted.number:
            raise unsure  # it may be on its way
        return Offer(Outcome.REFUSED, found)
