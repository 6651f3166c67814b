"""The log file of a server. Standard library only: the keeper loads this file on its own."""

# Importing pathlib would take longer than everything else at start-up.
# ruff: noqa: PTH105
from __future__ import annotations

import contextlib
import os
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

__all__ = ["TAIL_LINES", "RotatedLog"]

TAIL_LINES: Final = 40  # of the log, kept for failure reports
LINE_BYTES: Final = 2000  # of one log line, kept for failure reports


class RotatedLog:
    """A log file of at most `limit` bytes, with `count` older ones next to it."""

    def __init__(self, path: str, limit: int, count: int) -> None:
        self._path, self._limit, self._count = path, limit, count
        self._file = self._open()
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._rest = b""

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, data: bytes) -> None:
        """Write it; a full disk loses log lines but never blocks the server."""
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-LINE_BYTES:]
        self.tail.extend(line[:LINE_BYTES].decode("utf-8", "replace") for line in lines)
        with contextlib.suppress(OSError):
            if os.fstat(self._file).st_size + len(data) > self._limit:
                self._rotate()
            os.write(self._file, data)

    def _rotate(self) -> None:
        for number in range(self._count - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                os.replace(f"{self._path}.{number}", f"{self._path}.{number + 1}")
        os.replace(self._path, f"{self._path}.1")
        os.close(self._file)
        self._file = self._open()

    def text(self) -> str:
        rest = self._rest.decode("utf-8", "replace")
        return "\n".join([*self.tail, rest] if rest else self.tail)
