"""The fence: why a writer cannot write twice. Pure; shared by asynchronous and Spark writers.

A writer owns one subject. Each pack on it names the one it follows (`Mill-Previous`), and the
server stores it only if that is still the last one. So of two copies of a pack, however far apart,
the second is refused; and the last pack holds the position of a writer that restarts.

1. Read the last pack on the subject.
2. Claim it: store an empty pack that follows it, with the next epoch. Older writers now fail.
3. Store each pack as the one that follows the last; its headers hold the position in the input.
4. Refused? Read the last pack again: if it is ours, it was stored before and only its ack was
   lost; if another owner stored it with our epoch or a higher one, we were taken over; if it is
   older than ours, the log lost data.

Every claim has an owner, a random token that all its packs carry: two claims made at the same
moment ask for the same epoch and number, and only the token shows whose was stored.

A pack may be sent before the ack of the one it follows (`chain_headers`). It then names a sequence
that is only expected, which alone would not do: if that pack is refused, the claim of another
writer, or an earlier pack that was stored later than expected, may have the very sequence. So it
also names the id of the pack it follows, and the server stores it only directly after that one, as
the last message of the stream. If one is refused, all that were sent after it are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from millstream.errors import ConfigError, DataLoss, FencedOut, PublishError
from millstream.events.event import ID_HEADER
from millstream.events.subject import PACK_TOKEN, check_name
from millstream.wire.protocol import HEADERS_END, parse_headers

if TYPE_CHECKING:  # it loads pyarrow, which reading a fence does not need
    from millstream.events.positions import Position

__all__ = [
    "EPOCH_HEADER",
    "EXPECTED_HEADER",
    "NOTE_BYTES_MAX",
    "NUMBER_HEADER",
    "PARTS_HEADER",
    "PART_HEADER",
    "POSITION_HEADER",
    "PREVIOUS_HEADER",
    "WRITER_HEADER",
    "FenceState",
    "chain_headers",
    "check_fence_kept",
    "check_not_cut",
    "check_note",
    "data_subject",
    "fence_subject",
    "judge_refusal",
    "part_headers",
    "read_state",
    "state_headers",
]

EXPECTED_HEADER: Final = "Nats-Expected-Last-Subject-Sequence"
EXPECTED_IN_STREAM_HEADER: Final = "Nats-Expected-Last-Sequence"
EXPECTED_ID_HEADER: Final = "Nats-Expected-Last-Msg-Id"
WRITER_HEADER: Final = "Mill-Writer"
EPOCH_HEADER: Final = "Mill-Epoch"
OWNER_HEADER: Final = "Mill-Owner"
NUMBER_HEADER: Final = "Mill-Number"
PREVIOUS_HEADER: Final = "Mill-Previous"
POSITION_HEADER: Final = "Mill-Position"
NOTE_HEADER: Final = "Mill-Note"
NOTED_HEADER: Final = "Mill-Noted"
INPUT_HEADER: Final = "Mill-Input"
PART_HEADER: Final = "Mill-Part"
PARTS_HEADER: Final = "Mill-Parts"
NOTE_BYTES_MAX: Final = 1024


@dataclass(frozen=True, slots=True)
class FenceState:
    """What the last pack of a writer holds."""

    sequence: int = 0  # of that pack in the stream; 0: there is none
    epoch: int = 0  # grows with each claim
    number: int = 0  # grows with each stored unit, over all epochs
    position: int = 0  # in the writer's input, up to which everything is stored
    note: str = ""  # the writer's own text about it
    owner: str = ""  # who claimed the epoch
    input_stream: str = ""  # what a process reads, and `position` counts in; "": another writer
    minor: int | None = None  # the second part of a position that is a pair
    noted: Position | None = None  # the position that the note belongs to; None: not known

    @property
    def place(self) -> Position:
        """The position as the writer gave it: a number or a pair."""
        return self.position if self.minor is None else (self.position, self.minor)

    def next(
        self,
        position: Position | None = None,
        note: str | None = None,
        noted: Position | None = None,
    ) -> FenceState:
        """The state after one more unit; its sequence is known when it is stored."""
        place = self.place if position is None else position
        major, minor = place if isinstance(place, tuple) else (place, None)
        return FenceState(
            self.sequence,
            self.epoch,
            self.number + 1,
            major,
            self.note if note is None else note,
            self.owner,
            self.input_stream,
            minor,
            self.noted if note is None else noted,
        )

    def claimed(self, owner: str, input_stream: str = "") -> FenceState:
        """The state after `owner`, a unique token, has taken the writer's name over."""
        return replace(
            self,
            epoch=self.epoch + 1,
            number=self.number + 1,
            owner=owner,
            input_stream=input_stream,
        )

    def stored_at(self, sequence: int) -> FenceState:
        """The same at this sequence; by hand, `replace` takes several times as long."""
        return FenceState(
            sequence,
            self.epoch,
            self.number,
            self.position,
            self.note,
            self.owner,
            self.input_stream,
            self.minor,
            self.noted,
        )


def fence_subject(prefix: str, writer: str, lane: int = 0) -> str:
    """The subject that a writer's lane owns in a partition."""
    check_name("writer", writer)
    base = f"{prefix}.{PACK_TOKEN}.{writer}"
    return base if lane == 0 else f"{base}.lane{lane}"


def data_subject(fence: str) -> str:
    """The subject of the packs of an atomic unit before its last one."""
    return f"{fence}.part"


def check_note(note: str) -> str:
    """The note if a header can hold it; else a ConfigError."""
    if len(note.encode()) > NOTE_BYTES_MAX or "\r" in note or "\n" in note:
        raise ConfigError(
            f"a writer's note has at most {NOTE_BYTES_MAX:,} bytes and one line, "
            f"found {len(note.encode()):,} bytes"
        )
    return note


def state_headers(
    writer: str, state: FenceState, parts: int = 1, expects: Sequence[tuple[str, str]] = ()
) -> list[tuple[str, str]]:
    """The headers of the pack that brings a writer to `state`; it follows `state.sequence`.

    `expects`: how the server checks that, if not by the last message of the fence.
    """
    pairs = [
        *(expects or [(EXPECTED_HEADER, str(state.sequence))]),
        (WRITER_HEADER, writer),
        (EPOCH_HEADER, str(state.epoch)),
        (NUMBER_HEADER, str(state.number)),
        (PREVIOUS_HEADER, str(state.sequence)),
        (POSITION_HEADER, _position_text(state.place)),
    ]
    if state.owner:
        pairs.append((OWNER_HEADER, state.owner))
    if state.note:
        pairs.append((NOTE_HEADER, check_note(state.note)))
    if state.noted is not None:
        pairs.append((NOTED_HEADER, _position_text(state.noted)))
    if state.input_stream:
        pairs.append((INPUT_HEADER, state.input_stream))
    if parts > 1:
        pairs.append((PARTS_HEADER, str(parts)))
    return pairs


def chain_headers(state: FenceState, follows: FenceState | None) -> list[tuple[str, str]]:
    """What lets units be sent ahead: the id of this one, and what it expects.

    That is the unit before it as the last message of the stream if it follows one that is under
    way; else the last message of the fence. An id is never used for two units: a writer that has
    claimed its fence has a random owner and counts its units.
    """
    own = (ID_HEADER, f"{state.owner}-{state.number}")
    if follows is None:
        return [(EXPECTED_HEADER, str(state.sequence)), own]
    return [
        (EXPECTED_IN_STREAM_HEADER, str(state.sequence)),
        (EXPECTED_ID_HEADER, f"{follows.owner}-{follows.number}"),
        own,
    ]


def _position_text(position: Position) -> str:
    """A position in a header: `7`, or `7/3` for a pair, which a reader of numbers alone refuses."""
    return f"{position[0]}/{position[1]}" if isinstance(position, tuple) else str(position)


def _position(text: str) -> Position:
    major, pair, minor = text.partition("/")
    return (int(major), int(minor)) if pair else int(major)


def part_headers(writer: str, state: FenceState, part: int) -> list[tuple[str, str]]:
    """The headers of an earlier pack of an atomic unit; `part` counts from 1."""
    return [
        (WRITER_HEADER, writer),
        (EPOCH_HEADER, str(state.epoch)),
        (NUMBER_HEADER, str(state.number)),
        (PART_HEADER, str(part)),
    ]


def read_state(sequence: int, block: bytes) -> FenceState:
    """The state in a stored pack's headers; DataLoss when they are damaged or not a writer's."""
    headers = parse_headers(block)
    try:
        if not block.endswith(HEADERS_END):
            raise ValueError("its headers have no end")
        place, noted = _position(headers[POSITION_HEADER]), headers.get(NOTED_HEADER)
        major, minor = place if isinstance(place, tuple) else (place, None)
        return FenceState(
            sequence,
            int(headers[EPOCH_HEADER]),
            int(headers[NUMBER_HEADER]),
            major,
            headers.get(NOTE_HEADER, ""),
            headers.get(OWNER_HEADER, ""),
            headers.get(INPUT_HEADER, ""),
            minor,
            None if noted is None else _position(noted),
        )
    except (KeyError, ValueError) as error:
        raise DataLoss(
            f"the message at offset {sequence} is on a writer's subject without a valid fence "
            f"({error}): it was damaged, or something else published there"
        ) from error


def judge_refusal(writer: str, wanted: FenceState, found: FenceState) -> FenceState:
    """What a refused pack means: the state if it was stored before; else raises the error."""
    if found == wanted.stored_at(found.sequence):
        return found
    ours = (found.epoch, found.owner) == (wanted.epoch, wanted.owner)
    if ours and found.number >= wanted.number:
        raise PublishError(
            f"writer '{writer}' stored another unit {wanted.number} in a call that was "
            f"interrupted; this one is not stored. Open the writer again to continue from position "
            f"{found.place}"
        )
    if found.epoch >= wanted.epoch and not ours:
        raise FencedOut(writer, wanted.epoch, found.epoch)
    raise _lost(writer, wanted, found)


def check_fence_kept(topic: str, retention: str) -> None:
    """Refuse a topic that removes what was handled: the last pack of a writer is its fence."""
    if retention != "limits":
        raise ConfigError(
            f"'{topic}' has retention {retention}: it removes events when they are handled, the "
            f"last pack of a writer included, which shows what is stored. Exactly once cannot hold "
            f"there: write to a topic with retention limits, or use publish or topic.producer"
        )


def check_not_cut(writer: str, wanted: FenceState, found: FenceState) -> None:
    """DataLoss when the last unit on a fence is older than the one that `wanted` follows.

    A fence without any unit was purged or has expired: that is no loss.
    """
    if 0 < found.sequence < wanted.sequence:
        raise _lost(writer, wanted, found)


def _lost(writer: str, wanted: FenceState, found: FenceState) -> DataLoss:
    return DataLoss(
        f"writer '{writer}' had stored unit {wanted.number - 1} (epoch {wanted.epoch}, offset "
        f"{wanted.sequence}), but the topic's last is unit {found.number} (epoch {found.epoch}, "
        f"offset {found.sequence}): the log lost what was acknowledged. Check the disk, then open "
        f"the writer again to continue from position {found.place}"
    )
