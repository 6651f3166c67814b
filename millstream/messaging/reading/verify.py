"""Checking a topic: checksums, writer chains, sequences; every gap is reported."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Final

from millstream.errors import PackError
from millstream.events.classify import Kind, check_whole, kind_of
from millstream.events.event import Partition
from millstream.events.fence import (
    EPOCH_HEADER,
    NUMBER_HEADER,
    PART_HEADER,
    PARTS_HEADER,
    PREVIOUS_HEADER,
    WRITER_HEADER,
)
from millstream.events.packs.pack import decode
from millstream.messaging.reading.replay import ReadPlan, read_messages
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.api import parse_ack_address
from millstream.wire.message import RawMessage
from millstream.wire.protocol import parse_headers

__all__ = ["Flaw", "Verification", "verify_log"]

# Flaws that are kept; beyond this they are only counted.
FLAWS_KEPT: Final = 10_000
# Set by the server where a message was copied from another topic: its chain is the origin's.
SOURCE_HEADER: Final = "Nats-Stream-Source"


@dataclass(frozen=True, slots=True)
class Flaw:
    """One fault: where it is, its kind, and a description."""

    partition: int
    offset: int
    kind: str  # "checksum", "chain", "damaged", "hole" or "parts"; the command line adds "end"
    text: str


@dataclass(slots=True)
class Verification:
    """What checking a topic found."""

    topic: str
    messages: int = 0
    events: int = 0  # that a reader of the complete topic gets
    packs: int = 0
    writers: int = 0
    deleted: int = 0  # sequences between messages that hold nothing
    flaw_count: int = 0
    flaws: list[Flaw] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        return self.flaw_count == 0

    def add(self, flaw: Flaw) -> None:
        self.flaw_count += 1
        if len(self.flaws) < FLAWS_KEPT:
            self.flaws.append(flaw)


@dataclass(slots=True)
class _Chain:
    """The last unit of one writer's lane that was seen."""

    offset: int
    epoch: int
    number: int


class _Walk:
    """The state of walking one partition."""

    def __init__(self, report: Verification, partition: int, first: int, chained: bool) -> None:
        self._report = report
        self._partition = partition
        self._chained = chained  # packs are removed only from the start, so a gap is a loss
        self._first = first  # chains may start before it: their first units have expired
        self._next = first
        self._chains: dict[bytes, _Chain] = {}
        self._parts: dict[bytes, tuple[str, int]] = {}  # writer subject: number, parts seen

    @property
    def writers(self) -> int:
        return len(self._chains)

    def message(self, partition: Partition, raw: RawMessage) -> None:
        report = self._report
        offset = parse_ack_address(raw.reply).sequence
        report.messages += 1
        report.deleted += offset - self._next
        self._next = offset + 1
        kind = kind_of(raw.subject, raw.headers, partition.prefix_size)
        # A copy redriven for one subscription is not another event: readers leave it out.
        counts = not kind.redriven
        if kind is Kind.DAMAGED:
            try:
                check_whole(raw.subject, raw.headers, partition.prefix_size)
            except ValueError as error:
                self._flaw(offset, "damaged", f"the message is {error}")
            return
        if not kind.is_pack:
            report.events += kind.is_plain and counts
            return
        report.packs += 1
        headers = parse_headers(raw.headers)
        try:
            count = decode(headers, raw.payload).count
            report.events += count if counts else 0
        except PackError as error:
            self._flaw(offset, "checksum", f"the pack cannot be read: {error}")
        if WRITER_HEADER in headers and SOURCE_HEADER not in headers:
            self._unit(offset, raw.subject, headers)

    def _unit(self, offset: int, subject: bytes, headers: dict[str, str]) -> None:
        writer = headers[WRITER_HEADER]
        try:
            epoch, number = int(headers[EPOCH_HEADER]), int(headers[NUMBER_HEADER])
            if PART_HEADER in headers:
                self._part(subject, headers[NUMBER_HEADER])
                return
            previous = int(headers[PREVIOUS_HEADER])
        except (KeyError, ValueError) as error:
            self._flaw(offset, "chain", f"writer '{writer}': its headers are not valid ({error})")
            return
        chain = self._chains.get(subject)
        self._chains[subject] = _Chain(offset, epoch, number)
        if not self._chained:
            return
        self._check_parts(offset, subject, headers)
        if chain is None:
            if previous >= self._first:
                self._missing(offset, writer, previous)
        elif previous != chain.offset:
            self._missing(offset, writer, previous)
        elif number != chain.number + 1 or epoch < chain.epoch:
            self._flaw(
                offset,
                "chain",
                f"writer '{writer}': unit {number} (epoch {epoch}) follows unit {chain.number} "
                f"(epoch {chain.epoch})",
            )

    def _part(self, subject: bytes, number: str) -> None:
        fence = subject.removesuffix(b".part")
        before, count = self._parts.get(fence, ("", 0))
        self._parts[fence] = (number, count + 1 if before == number else 1)

    def _check_parts(self, offset: int, subject: bytes, headers: dict[str, str]) -> None:
        wanted = int(headers.get(PARTS_HEADER, "1")) - 1
        number, seen = self._parts.pop(subject, ("", 0))
        found = seen if number == headers[NUMBER_HEADER] else 0
        if found != wanted and offset - wanted >= self._first:
            self._flaw(offset, "parts", f"a unit of {wanted + 1} packs, of which {found + 1} exist")

    def _missing(self, offset: int, writer: str, previous: int) -> None:
        self._flaw(
            offset,
            "chain",
            f"writer '{writer}' stored its unit before this one at offset {previous}; it is "
            f"missing: it was deleted or lost",
        )

    def _flaw(self, offset: int, kind: str, text: str) -> None:
        self._report.add(Flaw(self._partition, offset, kind, text))


def _hole(partition: int, offset: int, counted: int, walked: int) -> Flaw:
    text = (
        f"the broker counts {counted:,} messages but only {walked:,} can be read: a block of its "
        f"file is damaged"
    )
    return Flaw(partition, offset, "hole", text)


async def verify_log(
    jetstream: JetStream, topic: str, partitions: Sequence[Partition]
) -> AsyncGenerator[Verification, None]:
    """Walk every partition; the report so far after each group of messages, at last all of it."""
    report = Verification(topic)
    plan = ReadPlan()
    for partition in partitions:
        info = await jetstream.stream_info(partition.stream)
        state = info.state
        # Work queues and interest topics remove what was handled, in any order; tables, what was
        # replaced.
        chained = (
            info.config.get("retention", "limits") == "limits"
            and info.config.get("max_msgs_per_subject", -1) <= 0
        )
        walk = _Walk(report, partition.number, max(1, state.first_seq), chained)
        held = report.messages
        groups = read_messages(jetstream, [partition], plan, over_damage=True)
        async for _, messages in groups:
            for raw in messages:
                walk.message(partition, raw)
            yield report
        report.writers += walk.writers
        walked = report.messages - held
        if walked < state.messages:
            # Some may have expired or been handled in the meantime: only those that are left count.
            now = (await jetstream.stream_info(partition.stream)).state
            left = min(state.messages, now.messages - (now.last_seq - state.last_seq))
            if walked < left:
                report.add(_hole(partition.number, state.last_seq, left, walked))
    yield report
