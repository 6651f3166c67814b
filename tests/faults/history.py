"""What every process of a run did and saw, in files that survive a kill.

A note is one appended line in one write, so that SIGKILL loses no note; times are
of the machine's monotonic clock, the same for all processes.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from pathlib import Path
from typing import Any, Final

__all__ = ["History", "Progress", "Record", "body_of", "id_of", "read_histories"]

Record = dict[str, Any]

# What a worker records when it has completed something.
DONE: Final = ("ok", "flushed", "settled", "end", "read-ok")


class History:
    """The records of one process."""

    def __init__(self, folder: Path, who: str) -> None:
        self.who = who
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._file = os.open(folder / f"{who}.jsonl", flags, 0o644)

    def note(self, what: str, **facts: Any) -> None:
        record = {"t": time.monotonic_ns(), "who": self.who, "what": what, **facts}
        os.write(self._file, json.dumps(record, separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)


def read_histories(folder: Path) -> list[Record]:
    """All records of a run, in order of time; an incomplete last line is ignored."""
    records: list[Record] = []
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_bytes().split(b"\n")[:-1]:
            records.append(json.loads(line))
    return sorted(records, key=lambda record: record["t"])


class Progress:
    """Counts what the processes of a run complete, reading only new records."""

    def __init__(self, folder: Path, files: str = "*.jsonl") -> None:
        self._folder = folder
        self._files = files
        self._read: dict[Path, int] = {}
        self._count = 0

    def count(self) -> int:
        """What has been completed since the start of the run."""
        for file in self._folder.glob(self._files):
            with file.open("rb") as notes:
                notes.seek(self._read.get(file, 0))
                fresh = notes.read()
            # A line that is still being written is read later.
            complete = fresh[: fresh.rfind(b"\n") + 1]
            self._read[file] = self._read.get(file, 0) + len(complete)
            self._count += sum(complete.count(f'"what":"{what}"'.encode()) for what in DONE)
        return self._count


def body_of(name: str) -> bytes:
    """The payload of an event, derived from its id: any changed byte is detected."""
    check = zlib.crc32(name.encode())
    return f"{name}|{check:08x}|".encode() + b"." * (check % 200)


def id_of(body: bytes) -> str | None:
    """The id of this payload; None if the payload was changed."""
    name = body.split(b"|", 1)[0].decode("utf-8", "replace")
    return name if body_of(name) == body else None
