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
# ruff: noqa: PTH116, PTH118, PTH123, PTH208
from __future__ import annotations

import contextlib
import json
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator
    from typing import Any, Final

__all__ = ["ENDS_FILE", "Block", "LogEnds", "block_files", "cut_logs", "loss_text"]

ENDS_FILE: Final = "log-ends.json"  # in the folder of a node
TAIL_BYTES: Final = 16  # of a file; a record ends with its checksum of 8, so none is like another
LOSSES_KEPT: Final = 100  # the newest; a disk with more is beyond listing


class Block:
    """One block file as it lay there before the server started; `last` of its stream or not."""

    def __init__(self, path: str, last: bool) -> None:
        self.path, self.last = path, last
        facts = os.stat(path)
        self.inode, self.size = facts.st_ino, facts.st_size
        self.tail = self.read_tail() if last else b""

    def read_tail(self) -> bytes:
        """The last bytes of what the file was; fewer when it is shorter now."""
        start = max(0, self.size - TAIL_BYTES)
        with open(self.path, "rb") as file:
            return os.pread(file.fileno(), self.size - start, start)

    def was_cut(self) -> bool:
        """Whether the file has lost its end since; one that was written anew has another inode."""
        try:
            facts = os.stat(self.path)
            if facts.st_ino != self.inode:
                return False
            # Clients may have made a log longer again by now: its old tail is gone all the same.
            return facts.st_size < self.size or (self.last and self.read_tail() != self.tail)
        except FileNotFoundError:
            # Old blocks expire; of a log that has expired altogether the last is written anew.
            return self.last and self.size > 0


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


def cut_logs(before: dict[str, list[Block]]) -> set[str]:
    """Streams whose files have lost an end since they were looked at."""
    cut: set[str] = set()
    for stream, blocks in before.items():
        with contextlib.suppress(OSError):
            if any(block.was_cut() for block in blocks):
                cut.add(stream)
    return cut


class LogEnds:
    """The marks of a node's streams, and the losses they have told."""

    def __init__(self, text: str = "") -> None:
        self.marks: dict[str, dict[str, Any]] = {}
        self.losses: list[dict[str, Any]] = []
        with contextlib.suppress(ValueError, KeyError, TypeError):  # torn: as if there was none
            content = json.loads(text)
            self.marks, self.losses = dict(content["marks"]), list(content["losses"])

    def text(self) -> str:
        return json.dumps({"marks": self.marks, "losses": self.losses})

    def see(self, answer: dict[str, Any], now: str, cut: Container[str] = ()) -> list[str]:
        """Take the server's answer about its streams; what was lost since the last one, in words.

        A stream that was made anew under its name has another time of creation, and no past.
        """
        marks: dict[str, dict[str, Any]] = {}
        fresh: list[dict[str, Any]] = []
        for name, created, last in _streams(answer):
            mark = self.marks.get(name)
            if mark is not None and mark["created"] != created:
                mark = None
            if name in cut or (mark is not None and last < mark["last"]):
                fresh.append(
                    {
                        "stream": name,
                        "created": created,
                        "last": last,
                        "marked": None if mark is None else mark["last"],
                        "marked_at": None if mark is None else mark["at"],
                        "cut": name in cut,
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
            f"lost, its place is given to new events. Damage of the disk or an older copy of it: "
            f"bring the events back from a backup or from who sent them"
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


def _streams(answer: dict[str, Any]) -> Iterator[tuple[str, str, int]]:
    for account in answer.get("account_details") or ():
        for stream in account.get("stream_detail") or ():
            if (stream.get("config") or {}).get("storage") == "memory":
                continue  # it begins anew with every start
            name = f"{account.get('name', '')}/{stream.get('name', '')}"
            last = int((stream.get("state") or {}).get("last_seq", 0))
            yield name, str(stream.get("created", "")), last


def _names(folder: str) -> Iterable[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return ()
