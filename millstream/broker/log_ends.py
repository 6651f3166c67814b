"""Where the logs of a single server end, remembered outside of them.

A server that was killed reads its files anew when it starts. A damaged record it takes for a last
write that was torn: it cuts the file there, and the log ends earlier without a word. Two looks
tell, and neither needs the log itself:

- at every start, block files before and after: one that was cut in place, or whose stream lost
  its last one. This needs no mark, but cannot tell damage from a write that a crash tore.
- while the server runs and before it is stopped, the last sequence of each stream: a mark. A log
  that ends before its mark has lost what was between.

A replicated stream heals itself from its copies, and its files may be behind its Raft log: this is
for single servers only. Standard library only: the keeper loads this file by itself.
"""

# pathlib would cost more start-up time than all the rest.
# ruff: noqa: PTH110, PTH116, PTH118, PTH123, PTH208
from __future__ import annotations

import contextlib
import json
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Any, Final

__all__ = ["ENDS_FILE", "Block", "LogEnds", "block_files", "cut_logs", "loss_text"]

ENDS_FILE: Final = "log-ends.json"  # in the folder of a node
# Of a file, at its ends: a record begins with its length, sequence and time and ends with its
# checksum, so none is like another.
SAMPLE_BYTES: Final = 20
LOSSES_KEPT: Final = 100  # the newest; a disk with more is beyond listing


class Block:
    """One block file as it lay there before the server started; `last` of its stream or not."""

    def __init__(self, path: str, last: bool) -> None:
        self.path, self.last = path, last
        facts = os.stat(path)
        self.inode, self.size = facts.st_ino, facts.st_size
        self.head, self.tail = self.samples()

    def samples(self) -> tuple[bytes, bytes]:
        """The first bytes, and the last ones of what the file was; fewer when it is shorter now."""
        start = max(0, self.size - SAMPLE_BYTES)
        with open(self.path, "rb") as file:
            head = os.pread(file.fileno(), SAMPLE_BYTES, 0)
            # Only the last one grows: for the others their size tells.
            return head, os.pread(file.fileno(), self.size - start, start) if self.last else b""

    def was_cut(self) -> bool:
        """Whether the file has lost its end since.

        One that was written anew, compacted for example, is another file: it has another inode,
        or, if the old one was removed before, another head.
        """
        facts = os.stat(self.path)
        if facts.st_ino != self.inode or (facts.st_size >= self.size and not self.last):
            return False
        head, tail = self.samples()
        # Clients may have made a log longer again by now: its old tail is gone all the same.
        same = head == self.head[: facts.st_size]
        return same and (facts.st_size < self.size or tail != self.tail)

    def is_gone(self) -> bool:
        return self.size > 0 and not os.path.exists(self.path)


def block_files(store: str) -> dict[str, list[Block]]:
    """The block files of each stream, by account/stream."""
    root = os.path.join(store, "jetstream")
    found: dict[str, list[Block]] = {}
    for account in _names(root):
        for stream in _names(os.path.join(root, account, "streams")):
            place = os.path.join(root, account, "streams", stream, "msgs")
            parts = [name.partition(".") for name in _names(place)]
            numbers = sorted(int(n) for n, _, kind in parts if kind == "blk" and n.isdigit())
            blocks = found[f"{account}/{stream}"] = []
            for number in numbers:
                with contextlib.suppress(OSError):
                    path = os.path.join(place, f"{number}.blk")
                    blocks.append(Block(path, number == numbers[-1]))
    return found


def cut_logs(before: dict[str, list[Block]]) -> dict[str, bool]:
    """Streams whose files have lost an end since they were looked at.

    False for one that has no file left of those: it was cut to nothing, or all of it has expired.
    Old blocks that are gone have expired; the last one goes with all the others, or was cut.
    """
    cut: dict[str, bool] = {}
    for stream, blocks in before.items():
        left = [block for block in blocks if not block.is_gone()]
        with contextlib.suppress(OSError):
            if any(block.was_cut() for block in left):
                cut[stream] = True
            elif blocks and blocks[-1] not in left:
                cut[stream] = bool(left)
    return cut


class LogEnds:
    """The marks of a node's streams, and the losses they have told."""

    def __init__(self, text: str = "") -> None:
        self.marks: dict[str, dict[str, Any]] = {}
        self.losses: list[dict[str, Any]] = []
        with contextlib.suppress(ValueError, KeyError, TypeError):  # torn: as if there was none
            content = json.loads(text)
            self.marks, self.losses = dict(content["marks"]), list(content["losses"])

    @classmethod
    def read(cls, path: str) -> LogEnds:
        """Those in a file; none when there is no such file."""
        try:
            with open(path, encoding="utf-8") as file:
                return cls(file.read())
        except (OSError, ValueError):
            return cls()

    def text(self) -> str:
        return json.dumps({"marks": self.marks, "losses": self.losses})

    def see(
        self, answer: dict[str, Any], now: str, cut: Mapping[str, bool] | None = None
    ) -> list[str]:
        """Take the server's answer about its streams; what was lost since the last one, in words.

        A stream that was made anew under its name has another time of creation, and no past.
        """
        marks: dict[str, dict[str, Any]] = {}
        fresh: list[dict[str, Any]] = []
        for name, created, first, last in _streams(answer):
            mark = self.marks.get(name)
            if mark is not None and mark["created"] != created:
                mark = None
            # A log that has expired begins after its old end; one that was lost, at its start.
            ended = cut is not None and name in cut and (cut[name] or first <= 1)
            if ended or (mark is not None and last < mark["last"]):
                fresh.append(
                    {
                        "stream": name,
                        "created": created,
                        "last": last,
                        "marked": None if mark is None else mark["last"],
                        "marked_at": None if mark is None else mark["at"],
                        "cut": ended,
                        "found": now,
                    }
                )
            same = mark is not None and mark["last"] == last
            at = mark["at"] if mark is not None and same else now
            marks[name] = {"created": created, "last": last, "at": at}
        self.marks = marks
        known = [loss for loss in self.losses if _still_there(loss, marks)]
        self.losses = [*known, *fresh][-LOSSES_KEPT:]
        return [loss_text(loss) for loss in fresh]


def loss_text(loss: dict[str, Any]) -> str:
    """What is known of a loss, in words."""
    stream, last, marked = loss["stream"].partition("/")[2], loss["last"], loss["marked"]
    seen = f"{marked} was seen there at {loss['marked_at']}"
    if marked is not None and last < marked:
        return (
            f"the log of '{stream}' ends at {last}, though {seen}: what came after {last} is "
            f"lost, its place is given to new events. A damaged disk, an older copy of it, or a "
            f"power cut under 'periodic': bring the events back from a backup or who sent them"
        )
    known = "" if marked is None else f"; {seen}"
    return (
        f"the end of the log of '{stream}' was cut off when the server started at "
        f"{loss['found']}: the disk is damaged, or a crash tore the last write before it was "
        f"acknowledged. It ended at {last} then{known}"
    )


def _still_there(loss: dict[str, Any], marks: dict[str, dict[str, Any]]) -> bool:
    mark = marks.get(loss["stream"])
    return mark is not None and mark["created"] == loss["created"]


def _streams(answer: dict[str, Any]) -> Iterator[tuple[str, str, int, int]]:
    """Account/name, time of creation, first and last sequence of every stream on disk."""
    for account in answer.get("account_details") or ():
        for stream in account.get("stream_detail") or ():
            if (stream.get("config") or {}).get("storage") == "memory":
                continue  # it begins anew with every start
            name = f"{account.get('name', '')}/{stream.get('name', '')}"
            state = stream.get("state") or {}
            first, last = int(state.get("first_seq", 0)), int(state.get("last_seq", 0))
            yield name, str(stream.get("created", "")), first, last


def _names(folder: str) -> Iterable[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return ()
