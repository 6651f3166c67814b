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

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Any, Final

__all__ = ["ENDS_FILE", "Block", "LogEnds", "block_files", "cut_logs", "loss_text"]

ENDS_FILE: Final = "log-ends.json"  # in the folder of a node
# Of the start and the end of a file: a record starts with its length, sequence and time and ends
# with its checksum, so no two are alike.
SAMPLE_BYTES: Final = 20
LOSSES_KEPT: Final = 100  # the newest ones


class Block:
    """One block file as it was before the server started; `last`: the last one of its stream."""

    def __init__(self, path: str, last: bool) -> None:
        self.path, self.last = path, last
        facts = os.stat(path)
        self.inode, self.size = facts.st_ino, facts.st_size
        self.head, self.tail = self.samples()

    def samples(self) -> tuple[bytes, bytes]:
        """The first bytes, and those where the file used to end; fewer if it is shorter now."""
        start = max(0, self.size - SAMPLE_BYTES)
        with open(self.path, "rb") as file:
            head = os.pread(file.fileno(), SAMPLE_BYTES, 0)
            # Only the last one grows: for the others the size is enough.
            return head, os.pread(file.fileno(), self.size - start, start) if self.last else b""

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


def block_files(store: str) -> dict[str, list[Block]]:
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
                    blocks.append(Block(path, number == numbers[-1]))
    return found


def cut_logs(before: dict[str, list[Block]]) -> dict[str, bool]:
    """Streams whose files lost their end since `before` was taken.

    False if none of those files is left: the stream was cut to nothing, or all of it expired.
    Old blocks disappear when they expire; the last one only together with all others, or by a cut.
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
        self, answer: dict[str, Any], now: str, cut: Mapping[str, bool] | None = None
    ) -> list[str]:
        """Take the server's answer about its streams; returns the new losses, in words.

        A stream that was deleted and created again has another creation time, and no history.
        """
        checkpoints: dict[str, dict[str, Any]] = {}
        fresh: list[dict[str, Any]] = []
        for name, created, first, last in _streams(answer):
            checkpoint = self.checkpoints.get(name)
            if checkpoint is not None and checkpoint["created"] != created:
                checkpoint = None
            # A log that expired starts after its old end; one that was lost starts at 1.
            ended = cut is not None and name in cut and (cut[name] or first <= 1)
            if ended or (checkpoint is not None and last < checkpoint["last"]):
                fresh.append(
                    {
                        "stream": name,
                        "created": created,
                        "last": last,
                        "marked": None if checkpoint is None else checkpoint["last"],
                        "marked_at": None if checkpoint is None else checkpoint["at"],
                        "cut": ended,
                        "found": now,
                    }
                )
            same = checkpoint is not None and checkpoint["last"] == last
            at = checkpoint["at"] if checkpoint is not None and same else now
            checkpoints[name] = {"created": created, "last": last, "at": at}
        self.checkpoints = checkpoints
        known = [loss for loss in self.losses if _still_exists(loss, checkpoints)]
        self.losses = [*known, *fresh][-LOSSES_KEPT:]
        return [loss_text(loss) for loss in fresh]


def loss_text(loss: dict[str, Any]) -> str:
    """A loss in words."""
    stream, last, marked = loss["stream"].partition("/")[2], loss["last"], loss["marked"]
    seen = f"{marked} was seen there at {loss['marked_at']}"
    if marked is not None and last < marked:
        return (
            f"the log of '{stream}' ends at {last}, though {seen}: the events after {last} are "
            f"lost, and new events reuse their offsets. The disk is damaged or was replaced by an "
            f"older copy, or power failed under 'periodic': restore the events from a backup, or "
            f"have them sent again"
        )
    known = "" if marked is None else f"; {seen}"
    return (
        f"the end of the log of '{stream}' was cut off when the server started at "
        f"{loss['found']}: the disk is damaged, or a crash interrupted the last write before it "
        f"was acknowledged. The log then ended at {last}{known}"
    )


def _still_exists(loss: dict[str, Any], checkpoints: dict[str, dict[str, Any]]) -> bool:
    checkpoint = checkpoints.get(loss["stream"])
    return checkpoint is not None and checkpoint["created"] == loss["created"]


def _streams(answer: dict[str, Any]) -> Iterator[tuple[str, str, int, int]]:
    """Account/name, creation time, first and last sequence of every stream on disk."""
    for account in answer.get("account_details") or ():
        for stream in account.get("stream_detail") or ():
            if (stream.get("config") or {}).get("storage") == "memory":
                continue  # it is empty after every start
            name = f"{account.get('name', '')}/{stream.get('name', '')}"
            state = stream.get("state") or {}
            first, last = int(state.get("first_seq", 0)), int(state.get("last_seq", 0))
            yield name, str(stream.get("created", "")), first, last


def _names(folder: str) -> Iterable[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return ()
