"""Whether the counts and lengths in a request fit its bytes, before kio reads it. Pure.

kio takes memory for as many parts as a request says, before it has read one of them: a request of
16 bytes could name billions, and the process would end at once. So each request is walked
through first, by the fields that kio's class has; nothing is made of it.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable
from functools import cache
from typing import Any, Final, NamedTuple

__all__ = ["PARTS_MAX", "check_shape"]

# Of all kinds together: walking through as many takes a tenth of a second.
PARTS_MAX: Final = 100_000
_FIXED: Final = {
    "bool": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "timedelta_i32": 4,
    "timedelta_i64": 8,
    "uuid": 16,
}
_LENGTHS: Final = {"string": 2, "bytes": 4, "records": 4}  # bytes of their length
_COUNT: Final = 4
_NULL: Final = -1
_COMPACT: Final = 0  # a length of variable size, one higher, with 0 for null
_VARIABLE_MAX: Final = 5  # bytes of such a length


class _Bytes(NamedTuple):
    """A text, or bytes: their length, as a number of so many bytes, is before them."""

    width: int


class _Many(NamedTuple):
    """Parts, with their count before them."""

    part: _Step
    width: int


class _Parts(NamedTuple):
    """Fields one after the other; tagged fields at the end, if `tags` is not None."""

    fields: tuple[_Step, ...]
    tags: dict[int, _Step] | None


_Step = int | _Bytes | _Many | _Parts  # a number: so many bytes


def check_shape(body: type, frame: bytes, at: int) -> None:
    """ValueError if a count or a length in the body, which begins there, does not fit the frame."""
    _Walk(frame).after(_shape_of(body), at)


class _Walk:
    """Goes through a frame, counting parts."""

    def __init__(self, frame: bytes) -> None:
        self._frame = frame
        self._parts = 0

    def after(self, step: _Step, at: int) -> int:
        """Where what follows begins."""
        if isinstance(step, int):
            at += step
        elif isinstance(step, _Bytes):
            size, at = _length(self._frame, at, step.width)
            at += size
        elif isinstance(step, _Many):
            at = self._after_many(step, at)
        else:
            for field in step.fields:
                at = self.after(field, at)
            if step.tags is not None:
                at = self._after_tags(step.tags, at)
        if at > len(self._frame):
            raise ValueError(f"a length reaches beyond the {len(self._frame):,} bytes of the frame")
        return at

    def _after_many(self, step: _Many, at: int) -> int:
        count, at = _length(self._frame, at, step.width)
        left = len(self._frame) - at
        if count > left:  # each takes at least a byte
            raise ValueError(f"{count:,} parts in {left:,} bytes")
        if isinstance(step.part, int):
            return at + count * step.part
        self._add(count)
        for _ in range(count):
            at = self.after(step.part, at)
        return at

    def _after_tags(self, tags: dict[int, _Step], at: int) -> int:
        count, at = _variable(self._frame, at)
        self._add(count)
        for _ in range(count):
            tag, at = _variable(self._frame, at)
            size, at = _variable(self._frame, at)
            end = at + size
            if tag in tags and self.after(tags[tag], at) != end:
                raise ValueError(f"tagged field {tag} does not have its size of {size:,} bytes")
            at = end
        return at

    def _add(self, count: int) -> None:
        self._parts += count
        if self._parts > PARTS_MAX:
            raise ValueError(f"more than {PARTS_MAX:,} parts in one request")


def _length(frame: bytes, at: int, width: int) -> tuple[int, int]:
    """A length, 0 for null, and where what follows it begins."""
    if width == _COMPACT:
        found, at = _variable(frame, at)
        return max(found - 1, 0), at
    size = int.from_bytes(frame[at : at + width], "big", signed=True)
    if size < _NULL:
        raise ValueError(f"a length of {size:,}")
    return max(size, 0), at + width


def _variable(frame: bytes, at: int) -> tuple[int, int]:
    found = 0
    for number, byte in enumerate(frame[at : at + _VARIABLE_MAX]):
        found |= (byte & 0x7F) << 7 * number
        if byte < 0x80:
            return found, at + number + 1
    raise ValueError("a length that does not end")


# -- from kio's classes -----------------------------------------------------------------------


@cache
def _shape_of(entity: Any) -> _Parts:
    flexible = bool(entity.__flexible__)
    fields: list[_Step] = []
    tags: dict[int, _Step] = {}
    for field in dataclasses.fields(entity):
        step = _step_of(field, flexible)
        if "tag" in field.metadata:
            tags[int(field.metadata["tag"])] = step
        else:
            fields.append(step)
    return _Parts(tuple(_joined(fields)), tags if flexible else None)


def _joined(steps: Iterable[_Step]) -> list[_Step]:
    """Those of a known size that follow each other are one step."""
    found: list[_Step] = []
    for step in steps:
        last = found[-1] if found else None
        if isinstance(step, int) and isinstance(last, int):
            found[-1] = last + step
        else:
            found.append(step)
    return found


def _step_of(field: Any, flexible: bool) -> _Step:
    hint = field.type
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(one for one in typing.get_args(hint) if one is not types.NoneType)
    if typing.get_origin(hint) is not tuple:
        return _single(field.metadata["kafka_type"], flexible)
    inner: Any = typing.get_args(hint)[0]
    if "kafka_type" not in field.metadata:  # parts with fields of their own
        shape = _shape_of(inner)
        (first, *others) = shape.fields
        part = shape if others or shape.tags is not None else first
    else:
        part = _single(field.metadata["kafka_type"], flexible)
    return _Many(part, _COMPACT if flexible else _COUNT)


def _single(kind: str, flexible: bool) -> _Step:
    if kind in _FIXED:
        return _FIXED[kind]
    return _Bytes(_COMPACT if flexible else _LENGTHS[kind])
