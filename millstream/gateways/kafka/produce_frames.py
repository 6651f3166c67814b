"""Count what a Produce request names before it is read: the one request that may be large. Pure.

Its size is that of its records; topics and partitions become objects, so a large frame of nothing
else would take twenty times its size, and seconds.
"""

from __future__ import annotations

from typing import Final

__all__ = ["PARTS_MAX", "check_parts"]

PARTS_MAX: Final = 20_000  # topics and partitions in one request
_FLEXIBLE: Final = 9  # the version from which lengths are of variable size
_FIXED_HEADER: Final = 8  # api, version, correlation id
_ACKS_AND_TIMEOUT: Final = 6
_INDEX: Final = 4


def check_parts(frame: bytes, version: int) -> None:
    """ValueError when a Produce request has more than PARTS_MAX topics and partitions, or its
    lengths do not fit the frame."""
    walk = _Walk(frame, flexible=version >= _FLEXIBLE)
    walk.skip(_FIXED_HEADER)
    walk.skip_text(short=True)  # client id
    walk.skip_tags()
    walk.skip_text()  # transactional id
    walk.skip(_ACKS_AND_TIMEOUT)
    for _ in range(walk.count()):
        walk.skip_text()
        for _ in range(walk.count()):
            walk.skip(_INDEX)
            walk.skip_bytes()
            walk.skip_tags()
        walk.skip_tags()


class _Walk:
    def __init__(self, frame: bytes, *, flexible: bool) -> None:
        self._frame = frame
        self._flexible = flexible
        self._at = 0
        self._parts = 0

    def skip(self, size: int) -> None:
        self._at += max(size, 0)  # a negative length stands for null
        if self._at > len(self._frame):
            raise ValueError(f"a length reaches beyond the {len(self._frame):,} bytes of the frame")

    def skip_text(self, *, short: bool = False) -> None:
        self.skip(self._compact() - 1 if self._flexible and not short else self._fixed(2))

    def skip_bytes(self) -> None:
        self.skip(self._compact() - 1 if self._flexible else self._fixed(4))

    def skip_tags(self) -> None:
        if not self._flexible:
            return
        for _ in range(self._added(self._compact())):
            self._compact()
            self.skip(self._compact())

    def count(self) -> int:
        return self._added(self._compact() - 1 if self._flexible else self._fixed(4))

    def _added(self, parts: int) -> int:
        self._parts += max(parts, 0)
        if self._parts > PARTS_MAX:
            raise ValueError(f"more than {PARTS_MAX:,} topics and partitions in one request")
        return parts

    def _fixed(self, size: int) -> int:
        start = self._at
        self.skip(size)
        return int.from_bytes(self._frame[start : self._at], "big", signed=True)

    def _compact(self) -> int:
        found = 0
        for shift in range(0, 35, 7):
            start = self._at
            self.skip(1)
            byte = self._frame[start]
            found |= (byte & 0x7F) << shift
            if byte < 0x80:
                return found
        raise ValueError("a length of more than five bytes")
