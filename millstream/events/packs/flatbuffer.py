"""Read the few flatbuffers tables of Arrow's metadata, with every access checked.

Arrow's own reader allocates what the metadata declares (sizes, key-value lists) before it can be
checked, so a pack's metadata is read here first. Nothing is allocated beyond what the caller asks
for.
"""

from __future__ import annotations

import struct

from millstream.errors import PackError

__all__ = ["FlatTable", "root"]

_U8 = struct.Struct("<B")
_I16 = struct.Struct("<h")
_U16 = struct.Struct("<H")
_I32 = struct.Struct("<i")
_U32 = struct.Struct("<I")
_I64 = struct.Struct("<q")


def root(data: memoryview) -> FlatTable:
    """The root table of a flatbuffer."""
    return FlatTable(data, _read(_U32, data, 0))


def _read(kind: struct.Struct, data: memoryview, at: int) -> int:
    # unpack_from counts a negative offset from the end and would silently read wrong bytes.
    if at < 0 or at + kind.size > len(data):
        raise PackError(
            f"metadata points to byte {at} of {len(data)}: it is truncated or damaged", "metadata"
        )
    value: int = kind.unpack_from(data, at)[0]
    return value


class FlatTable:
    """One flatbuffers table; a field that is absent reads as its default."""

    __slots__ = ("_at", "_data", "_slots", "_vtable")

    def __init__(self, data: memoryview, at: int) -> None:
        self._data = data
        self._at = at
        self._vtable = at - _read(_I32, data, at)
        self._slots = _read(_U16, data, self._vtable)
        if self._vtable + self._slots > len(data):
            raise PackError("a metadata table reaches beyond its message", "metadata")

    def _position(self, field: int) -> int:
        slot = 4 + 2 * field
        if slot + 2 > self._slots:
            return 0
        offset = _read(_U16, self._data, self._vtable + slot)
        return self._at + offset if offset else 0

    def _scalar(self, kind: struct.Struct, field: int, default: int) -> int:
        position = self._position(field)
        return _read(kind, self._data, position) if position else default

    def u8(self, field: int, default: int = 0) -> int:
        """An unsigned byte: union tags, enums of one byte, booleans."""
        return self._scalar(_U8, field, default)

    def i16(self, field: int, default: int = 0) -> int:
        """A signed 16-bit number: most of Arrow's enums."""
        return self._scalar(_I16, field, default)

    def i32(self, field: int, default: int = 0) -> int:
        """A signed 32-bit number."""
        return self._scalar(_I32, field, default)

    def i64(self, field: int, default: int = 0) -> int:
        """A signed 64-bit number."""
        return self._scalar(_I64, field, default)

    def _target(self, field: int) -> int:
        position = self._position(field)
        return position + _read(_U32, self._data, position) if position else 0

    def table(self, field: int) -> FlatTable | None:
        """The table a field points to."""
        target = self._target(field)
        return FlatTable(self._data, target) if target else None

    def text(self, field: int, limit: int) -> str | None:
        """The string a field points to, of at most `limit` bytes of UTF-8."""
        target = self._target(field)
        if not target:
            return None
        size = _read(_U32, self._data, target)
        start = target + 4
        if size > limit or start + size > len(self._data):
            raise PackError(
                f"a name of {size:,} bytes in the metadata; at most {limit:,} are allowed",
                "metadata",
            )
        try:
            return str(self._data[start : start + size], "utf-8")
        except UnicodeDecodeError as error:
            raise PackError("a name in the metadata is not UTF-8", "metadata") from error

    def count(self, field: int) -> int:
        """How many entries the vector of a field claims to have; 0 when absent."""
        target = self._target(field)
        return _read(_U32, self._data, target) if target else 0

    def pairs(self, field: int, count: int) -> tuple[int, ...]:
        """The vector of exactly `count` pairs of 64-bit numbers of a field, as one flat tuple."""
        found = self.count(field)
        if found != count:
            raise PackError(
                f"a record batch lists {found:,} entries where its schema needs {count:,}",
                "metadata",
            )
        if count == 0:
            return ()
        start = self._target(field) + 4
        if start + 16 * count > len(self._data):
            raise PackError("a vector reaches beyond its message", "metadata")
        return struct.unpack_from(f"<{2 * count}q", self._data, start)

    def tables(self, field: int) -> list[FlatTable]:
        """The tables in the vector of a field. The caller bounds `count(field)` first."""
        target = self._target(field)
        if not target:
            return []
        found = []
        for number in range(_read(_U32, self._data, target)):
            position = target + 4 + 4 * number
            found.append(FlatTable(self._data, position + _read(_U32, self._data, position)))
        return found
