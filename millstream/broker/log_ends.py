"""Checkpoints of where the logs of a single server end, stored outside of the logs.

A server that was killed reads its files again when it starts. It takes a damaged record for a torn
last write: it truncates the file there, and the log silently ends earlier. Two checks detect this,
and neither needs the log itself:

- at every start, compare the block files before and after: was one truncated in place, or did a
  stream lose its last one? This needs no checkpoint, but cannot tell damage from a write that a
  crash tore.
- while the server runs and before it is stopped, save the last sequence of each stream: a
  checkpoint. A log that ends before its checkpoint has lost the events in between.

A replicated stream recovers from its replicas, and its files may lag behind its Raft log: this is
for single servers only. Standard library only: the keeper loads this file on its own.
"""

# Importing pathlib would take longer than everything else at start-up.
# ruff: noqa: PTH110, PTH116, PTH118, PTH123, PTH208
from __future__ import annotations

import contextlib
import json
import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Any, Final

__all__ = [
    "ENDS_FILE",
    "Block",
    "Cut",
    "LogEnds",
    "block_files",
    "cut_logs",
    "last_of",
    "loss_text",
    "records_of",
]

ENDS_FILE: Final = "log-ends.json"  # in the folder of a node
# Of the start and the end of a file: a record starts with its length, sequence and time and ends
# with its checksum, so no two are alike.
SAMPLE_BYTES: Final = 20
LOSSES_KEPT: Final = 100  # the newest ones

# A record of a block file: length, sequence, time and length of its subject, then subject, headers,
# payload and an 8-byte checksum.
HEADER: Final = struct.Struct("<IQQH")
RECORD_BYTES_MIN: Final = HEADER.size + 8
RECORD_BYTES_MAX: Final = 32 * 1024 * 1024  # the server takes a longer one for damaged
LENGTH_BITS: Final = 0x7FFFFFFF  # the highest one says that it has headers
SEQUENCE_BITS: Final = (1 << 62) - 1  # the highest two mark removed messages
REMOVAL: Final = 1 << 62  # such a record says that another one, with this sequence, was removed
STEP_MAX: Final = 1_000_000  # between the sequences of two records; more is damage
SEARCH_BYTES: Final = 64 * 1024  # for the last record, or the first one after a damaged one
ENDING_BYTES: Final = 1024 * 1024  # of a file, read for its last record; some 30,000 removals
SEQUENCE_MAX: Final = 1 << 48  # more is damage


class Block:
    """One block file as it was before the server started; `last`: the last one of its stream.

    With `walk`, the records of the last one are looked at: a killed server may cut them.
    """

    def __init__(self, path: str, last: bool, walk: bool = False) -> None:
        self.path, self.last = path, last
        facts = os.stat(path)
        self.inode, self.size = facts.st_ino, facts.st_size
        self.head, self.tail = self.samples()
        self.readable = not os.path.exists(path.removesuffix("blk") + "key")  # not encrypted
        self.end, self.whole = 0, 0  # the last sequence in it; where its last whole record ends
        self.walked = walk and last and self.readable
        if self.walked:
            self.end, self.whole = self.last_record()

    def last_record(self) -> tuple[int, int]:
        """The last sequence in it, and where its last whole record ends."""
        with open(self.path, "rb") as file:
            start = max(0, self.size - ENDING_BYTES)
            ending = os.pread(file.fileno(), self.size - start, start)
            # From the end, because a block has many small records or a few large ones.
            last = last_of(ending)
            if last and (abs(last - self.first) <= STEP_MAX if self.first else last < SEQUENCE_MAX):
                return last, self.size
            return records_of(file.read())  # it is far, or one of them is damaged

    def samples(self) -> tuple[bytes, bytes]:
        """The first bytes, and those where the file used to end; fewer if it is shorter now."""
        start = max(0, self.size - SAMPLE_BYTES)
        with open(self.path, "rb") as file:
            head = os.pread(file.fileno(), SAMPLE_BYTES, 0)
            # Only the last one grows: for the others the size is enough.
            return head, os.pread(file.fileno(), self.size - start, start) if self.last else b""

    @property
    def first(self) -> int:
        """The sequence of its first record; 0 if that cannot be read or is about another one."""
        plain = self.readable and len(self.head) == SAMPLE_BYTES and _length(self.head, 0)
        sequence = int.from_bytes(self.head[4:12], "little") if plain else REMOVAL
        return 0 if sequence & REMOVAL else sequence & SEQUENCE_BITS

    def was_cut(self) -> bool:
        """Whether the file has lost its end since.

        A file that was rewritten, by compaction for example, is a different one: it has another
        inode, or, if the old one was removed first, another start.
        """
        facts = os.stat(self.path)
        if facts.st_ino != self.inode or (facts.st_size >= self.size and not self.last):
            return False
        head, tail = self.samples()
        # Clients may have appended to the log since, but its old end is still gone.
        same = head == self.head[: facts.st_size]
        return same and (facts.st_size < self.size or tail != self.tail)

    def is_gone(self) -> bool:
        return self.size > 0 and not os.path.exists(self.path)


class Cut:
    """What a start has cut off the files of a stream.

    `left`: some of its files are left. `torn`: nothing but the beginning of a record is gone,
    which is a write that a crash interrupted. `end`: the last sequence that is gone; 0: unknown.
    `readable`: it is not encrypted.
    `inside`: the sequences that are gone from the middle of the log; (0, 0): unknown which.
    """

    def __init__(self, left: bool, size: int = 0, end: int = 0, torn: bool = False) -> None:
        self.left, self.size, self.end, self.torn = left, size, end, torn
        self.inside: list[tuple[int, int]] = []
        self.readable = True

    @property
    def at_end(self) -> bool:
        """Whether the end of the log is gone."""
        return not self.left or self.size > 0


def last_of(ending: bytes) -> int:
    """The last sequence in a block file that ends like this, with a whole record; 0: not found."""
    end, removed = len(ending), 0
    # A queue removes what was handled: it has many records at its end that say so.
    while end > RECORD_BYTES_MIN and _length(ending, end - RECORD_BYTES_MIN) == RECORD_BYTES_MIN:
        end -= RECORD_BYTES_MIN
        removed = max(removed, _sequence(ending, end))
    for shift in range(RECORD_BYTES_MIN + 1, RECORD_BYTES_MIN + 5):  # four bytes are a length
        many = max(0, min(end - shift, SEARCH_BYTES) // 4 + 1)
        lengths = memoryview(ending)[end - shift + 4 - 4 * many : end - shift + 4].cast("I")
        for back in range(many):
            rest = shift + 4 * back
            if lengths[many - 1 - back] & LENGTH_BITS == rest:
                at = end - rest
                if HEADER.unpack_from(ending, at)[3] <= rest:
                    return max(removed, _sequence(ending, at))
    return 0


def records_of(content: bytes) -> tuple[int, int]:
    """The last sequence in a block file, and where its last whole record ends.

    A damaged record is passed over where the next one can be found.
    """
    at = whole = last = before = removed = 0
    while length := _length(content, at):
        sequence = _sequence(content, at)
        if _is_removal(content, at):
            removed = max(removed, sequence)  # of an older one, or where an emptied log ends
        elif not last or abs(sequence - last) <= STEP_MAX:
            last, before = max(last, sequence), sequence
        else:
            if 0 < sequence - before <= STEP_MAX:
                last = sequence  # two that follow each other: the sequence before was damaged
            before = sequence
        at += length
        whole = at
        if at < len(content) and not _length(content, at):
            at = _next_record(content, at, last) or at
    if not at and content:
        at = _next_record(content, 0, 0)
        if at:
            last, rest = records_of(content[at:])
            whole = at + rest
    return (max(last, removed) if not last or removed - last <= STEP_MAX else last), whole


def _is_removal(content: bytes, at: int) -> bool:
    return bool(HEADER.unpack_from(content, at)[1] & REMOVAL)


def _length(content: bytes, at: int) -> int:
    """The length of the record that starts there; 0 if none can be there."""
    if at + RECORD_BYTES_MIN > len(content) and len(content) != SAMPLE_BYTES:
        return 0
    length: int = int.from_bytes(content[at : at + 4], "little") & LENGTH_BITS
    if not RECORD_BYTES_MIN <= length <= RECORD_BYTES_MAX:
        return 0
    return length if at + length <= len(content) or len(content) == SAMPLE_BYTES else 0


def _sequence(content: bytes, at: int) -> int:
    sequence: int = HEADER.unpack_from(content, at)[1] & SEQUENCE_BITS
    return sequence


def _next_record(content: bytes, at: int, last: int) -> int:
    """Where the first record after a damaged one starts; 0 if none is found."""
    if last:
        for sequence in range(last + 1, last + 9):
            found = content.find(sequence.to_bytes(8, "little"), at + 5) - 4
            if found > at and _length(content, found):
                return found
        return 0
    for start in range(at + 1, min(at + SEARCH_BYTES, len(content) - RECORD_BYTES_MIN)):
        if length := _length(content, start):
            following = start + length
            if _length(content, following) and (
                _sequence(content, following) == _sequence(content, start) + 1
            ):
                return start
    return 0


def block_files(store: str, walk: bool = False) -> dict[str, list[Block]]:
    """The block files of each stream, by account/stream."""
    root = os.path.join(store, "jetstream")
    found: dict[str, list[Block]] = {}
    for account in _names(root):
        for stream in _names(os.path.join(root, account, "streams")):
            folder = os.path.join(root, account, "streams", stream, "msgs")
            parts = [name.partition(".") for name in _names(folder)]
            numbers = sorted(int(n) for n, _, kind in parts if kind == "blk" and n.isdigit())
            blocks = found[f"{account}/{stream}"] = []
            for number in numbers:
                with contextlib.suppress(OSError):
                    path = os.path.join(folder, f"{number}.blk")
                    blocks.append(Block(path, number == numbers[-1], walk))
    return found


def cut_logs(before: dict[str, list[Block]]) -> dict[str, Cut]:
    """What the files of streams have lost since `before` was taken.

    Old blocks disappear when they expire; the last one only together with all others, or by a cut.
    """
    cuts: dict[str, Cut] = {}
    for stream, blocks in before.items():
        with contextlib.suppress(OSError):
            cut = _cut_of(blocks)
            if cut is not None:
                cuts[stream] = cut
    return cuts


def _cut_of(blocks: list[Block]) -> Cut | None:
    left = [block for block in blocks if not block.is_gone()]
    cut = Cut(bool(left))
    found = False
    for number, block in enumerate(left):
        following = left[number + 1] if number + 1 < len(left) else None
        if not block.was_cut():
            continue
        found = True
        kept = os.stat(block.path).st_size
        if following is None and block.last:
            cut.size += max(1, block.size - kept)
            cut.end = block.end
            # Clients may have appended since: then the old end is not compared. An encrypted log
            # has no end to compare; what its checkpoint has not seen is taken for a torn write.
            cut.torn, cut.readable = kept >= block.whole, block.readable
        elif following is not None:
            cut.inside.append(_hole(block, following))
    if blocks and blocks[-1] not in left:
        gone = [block for block in blocks if block not in left]
        cut.size += sum(block.size for block in gone)
        cut.end, found = blocks[-1].end, True
        cut.torn = gone == blocks[-1:] and blocks[-1].walked and not blocks[-1].whole
    return cut if found else None


def _hole(block: Block, following: Block) -> tuple[int, int]:
    """The sequences between what is left of a block and the next one; (0, 0): unknown."""
    if not block.readable or not following.first:
        return 0, 0
    with open(block.path, "rb") as file:
        last = records_of(file.read())[0]
    return (last + 1, following.first - 1) if last < following.first - 1 else (0, 0)


class LogEnds:
    """The checkpoint of a node's streams, and the losses that were found.

    In the file and in the reported losses a stream's checkpoint is called its mark.
    """

    def __init__(self, text: str = "") -> None:
        self.checkpoints: dict[str, dict[str, Any]] = {}
        self.losses: list[dict[str, Any]] = []
        with contextlib.suppress(ValueError, KeyError, TypeError):  # a torn file counts as none
            content = json.loads(text)
            self.checkpoints, self.losses = dict(content["marks"]), list(content["losses"])

    @classmethod
    def read(cls, path: str) -> LogEnds:
        """Those in a file; none if it does not exist."""
        try:
            with open(path, encoding="utf-8") as file:
                return cls(file.read())
        except (OSError, ValueError):
            return cls()

    def text(self) -> str:
        return json.dumps({"marks": self.checkpoints, "losses": self.losses})

    def see(
        self,
        answer: dict[str, Any],
        now: str,
        cut: Mapping[str, Cut] | None = None,
        key: str = "",
    ) -> list[str]:
        """Take the server's answer about its streams; returns the new losses, in words.

        `key`: the metadata in which a stream has its losses, and whether they are accepted.

        A stream that was deleted and created again has another creation time, and no history.
        """
        checkpoints: dict[str, dict[str, Any]] = {}
        fresh: list[dict[str, Any]] = []
        accepted: dict[str, Any] = {}
        for name, created, (first, last), metadata in _streams(answer):
            accepted[name] = metadata.get(key, "")
            checkpoint = self.checkpoints.get(name)
            if checkpoint is not None and checkpoint["created"] != created:
                checkpoint = None
            found = None if cut is None else cut.get(name)
            # A log that expired starts after its old end; one that was lost starts at 1.
            if found is not None and not (found.left or first <= 1):
                found = None
            if found is not None or (checkpoint is not None and last < checkpoint["last"]):
                about = {"stream": name, "created": created, "last": last, "found": now}
                fresh += _losses(about, first, checkpoint, found)
            same = checkpoint is not None and checkpoint["last"] == last
            at = checkpoint["at"] if checkpoint is not None and same else now
            checkpoints[name] = {"created": created, "last": last, "at": at}
        self.checkpoints = checkpoints
        known = [loss for loss in self.losses if _still_exists(loss, checkpoints)]
        self.losses = [*known, *fresh][-LOSSES_KEPT:]
        for loss in self.losses:
            if loss.get("lost") and accepted[loss["stream"]]:
                loss["accepted"] = _accepted(loss, accepted[loss["stream"]])
        return [loss_text(loss) for loss in fresh]

    def not_noted(self) -> list[dict[str, Any]]:
        """Losses that are not noted in their streams yet, where readers find them."""
        return [loss for loss in self.losses if loss.get("lost") and not loss.get("noted")]

    def moved(self, loss: dict[str, Any], last: int) -> None:
        """The log of a loss now ends at `last`, so that lost offsets are not used again."""
        checkpoint = self.checkpoints.get(loss["stream"])
        if checkpoint is not None and checkpoint["created"] == loss["created"]:
            checkpoint["last"] = last


def _losses(
    about: dict[str, Any], first: int, checkpoint: dict[str, Any] | None, cut: Cut | None
) -> list[dict[str, Any]]:
    """The losses of one stream, which now starts at `first`: in the middle, and at the end.

    `lost` has the first and the last offset that is gone; None for a write that was interrupted
    before it was acknowledged.
    """
    last = about["last"]
    marked = 0 if checkpoint is None else int(checkpoint["last"])
    about = {
        **about,
        "marked": None if checkpoint is None else marked,
        "marked_at": None if checkpoint is None else checkpoint["at"],
        "cut": cut is not None,
    }
    losses = []
    for start, end in [] if cut is None else cut.inside:
        # If it is not known which ones are gone, it may be any.
        losses.append({**about, "lost": [start, end] if start else [max(1, first), last]})
    if last < marked or (cut is not None and cut.at_end):
        end = max(marked, 0 if cut is None else cut.end)
        lost: list[int] | None = [last + 1, end]
        # If nothing says how many: there cannot be more than fit into the bytes that are gone.
        most = 0 if cut is None else max(1, cut.size // RECORD_BYTES_MIN)
        if end <= last:
            lost = None if cut is None or cut.torn else [last + 1, last + most]
        elif cut is not None and not cut.readable:
            lost = [last + 1, max(end, last + most)]
        losses.append({**about, "lost": lost})
    return losses


def loss_text(loss: dict[str, Any]) -> str:
    """A loss in words."""
    stream, last, lost = loss["stream"].partition("/")[2], loss["last"], loss.get("lost")
    seen = "" if loss["marked"] is None else f"; {loss['marked']} was seen at {loss['marked_at']}"
    if lost is None:
        return (
            f"the end of the log of '{stream}' was cut off when the server started at "
            f"{loss['found']}: the disk is damaged, or a crash interrupted the last write before "
            f"it was acknowledged. The log then ended at {last}{seen}"
        )
    where = f"the log of '{stream}' lost the offsets {lost[0]} to {lost[1]}"
    how = ", cut off when the server started," if loss["cut"] else ""
    then = (
        "The disk is damaged or was replaced by an older copy, or power failed under 'periodic': "
        "restore the events from a backup, or have them sent again. Readers stop there until "
        "'millstream topic accept-loss'"
    )
    if accepted := loss.get("accepted"):
        then = f"It was accepted at {accepted.get('at')} by {accepted.get('by') or 'unknown'}"
    return f"{where}{how} as was found at {loss['found']}{seen}. {then}"


def _accepted(loss: dict[str, Any], noted: str) -> dict[str, Any] | None:
    """Who accepted a loss and when, by what its stream has noted; None: nobody."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        for entry in json.loads(noted):
            if [entry["first"], entry["last"], entry["found"]] == [*loss["lost"], loss["found"]]:
                accepted: dict[str, Any] | None = entry.get("accepted")
                return accepted
    return None


def _still_exists(loss: dict[str, Any], checkpoints: dict[str, dict[str, Any]]) -> bool:
    checkpoint = checkpoints.get(loss["stream"])
    return checkpoint is not None and checkpoint["created"] == loss["created"]


def _streams(
    answer: dict[str, Any],
) -> Iterator[tuple[str, str, tuple[int, int], dict[str, str]]]:
    """Account/name, creation time, first and last sequence, metadata of every stream on disk."""
    for account in answer.get("account_details") or ():
        for stream in account.get("stream_detail") or ():
            config = stream.get("config") or {}
            if config.get("storage") == "memory":
                continue  # it is empty after every start
            name = f"{account.get('name', '')}/{stream.get('name', '')}"
            state = stream.get("state") or {}
            ends = int(state.get("first_seq", 0)), int(state.get("last_seq", 0))
            yield name, str(stream.get("created", "")), ends, config.get("metadata") or {}


def _names(folder: str) -> Iterable[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return ()
