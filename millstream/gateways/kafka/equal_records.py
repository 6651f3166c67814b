"""Many records of few sizes and without headers, read all at once with numpy. Pure.

Records of one size are what metrics, sensors and binary formats often send. Where each of them
begins is then known without a look at one after the other, and everything else is a matter of
columns: 0.1 us a record, where aiokafka's objects take 0.27 us. Records of many sizes would have
to be found one by one, which takes as long as the objects do: so everything unusual, and everything
wrong, is left to those.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

__all__ = ["RECORDS_MIN", "EqualRecords", "read_equal"]

RECORDS_MIN: Final = 1000  # with fewer the objects are as fast
_RUNS_MAX: Final = 16  # of records of one size; times and offsets grow, so there are a few
_DIGITS: Final = 7  # bits of a number in each byte
_MORE: Final = 0x80  # marks a byte that another one follows
_NUMBER_BYTES_MAX: Final = 5
_SPANS: Final = 4  # where the key begins and ends, and the value


class EqualRecords(NamedTuple):
    """The records of a batch, column by column."""

    keys: pa.Array
    values: pa.Array
    time_deltas: Any  # milliseconds, a numpy array


class _Unusual(Exception):
    """Something that only the other way can read, or refuse."""


def read_equal(data: bytes | memoryview, at: int, count: int) -> EqualRecords | None:
    """The records from `at` to the end of the data; None: they have to be read one by one."""
    try:
        ends = _ends(data, at, count)
        starts = np.concatenate(([at], ends[:-1]))
        return _columns(_Fields(np.frombuffer(data, np.uint8), starts, ends), data)
    except _Unusual:
        return None


def _ends(data: bytes | memoryview, at: int, count: int) -> Any:
    """Where each record ends."""
    view = np.frombuffer(data, np.uint8)
    ends = np.empty(count, np.int64)
    found = 0
    for _ in range(_RUNS_MAX):
        size = _size(data, at)
        run = _run(view, at, size, min(count - found, (len(data) - at) // size))
        ends[found : found + run] = np.arange(at + size, at + run * size + 1, size)
        found += run
        at += run * size
        if found == count:
            break
    if found < count or at != len(data):
        raise _Unusual
    return ends


def _size(data: bytes | memoryview, at: int) -> int:
    """The size of a record with the number that says it, which has one byte or two."""
    head = data[at : at + 2]
    if len(head) < 2 or head[0] & 1:  # cut off, or a negative number
        raise _Unusual
    if head[0] < _MORE:
        return 1 + (head[0] >> 1)
    if head[1] >= _MORE:  # 8 KiB or more: there are not many of them
        raise _Unusual
    return 2 + ((head[0] & ~_MORE | head[1] << _DIGITS) >> 1)


def _run(view: Any, at: int, size: int, most: int) -> int:
    """How many records of this size follow each other: each begins where the one before ends."""
    if most < 1:
        raise _Unusual
    stop = at + most * size
    same = view[at:stop:size] == view[at]
    if view[at] >= _MORE:
        same &= view[at + 1 : stop : size] == view[at + 1]
    return most if same.all() else int(same.argmin())


class _Fields:
    """Reads one field of all records after the other."""

    def __init__(self, view: Any, starts: Any, ends: Any) -> None:
        self._view, self._ends = view, ends
        self.at = starts  # of the next field, for each record

    def number(self) -> Any:
        """A number of variable length."""
        self._check(self.at < self._ends)
        found = self._view[self.at].astype(np.int64)
        at = self.at + 1
        longer = np.flatnonzero(found & _MORE)
        found &= _MORE - 1
        for place in range(1, _NUMBER_BYTES_MAX):
            if not len(longer):
                break
            here = at[longer]
            self._check(here < self._ends[longer])
            digits = self._view[here]
            found[longer] |= (digits & (_MORE - 1)).astype(np.int64) << (place * _DIGITS)
            at[longer] += 1
            longer = longer[digits >= _MORE]
        self._check(not len(longer))
        self.at = at
        return (found >> 1) ^ -(found & 1)

    def check_end(self) -> None:
        """Nothing follows the last field."""
        self._check(self.at == self._ends)

    @staticmethod
    def _check(fits: Any) -> None:
        if not np.all(fits):
            raise _Unusual


def _columns(fields: _Fields, data: bytes | memoryview) -> EqualRecords:
    fields.number()  # the size
    attributes, deltas, offsets = (fields.number() for _ in range(3))
    count = len(deltas)
    if attributes.any() or not np.array_equal(offsets, np.arange(count)):
        raise _Unusual
    spans = np.empty(_SPANS * count, np.int32)
    absent = [_skip_bytes(fields, spans[first:]) for first in (0, 2)]
    if fields.number().any():  # headers
        raise _Unusual
    fields.check_end()
    # Of an array of keys, values and what is between them, Arrow takes the keys, then the values.
    buffers = [None, pa.py_buffer(spans), pa.py_buffer(data)]
    pieces = pa.Array.from_buffers(pa.binary(), len(spans) - 1, buffers)
    places = np.arange(0, len(spans), _SPANS)
    keys, values = (
        pieces.take(pa.array(places + first, mask=nulls))
        for first, nulls in zip((0, 2), absent, strict=True)
    )
    return EqualRecords(keys, values, deltas)


def _skip_bytes(fields: _Fields, spans: Any) -> Any:
    """Write down where a key or value is; which are null, or None if none is."""
    sizes = fields.number()
    absent = None
    if sizes.min() < 0:
        absent = sizes == -1
        if sizes.min() < -1:
            raise _Unusual
        sizes = np.maximum(sizes, 0)
    spans[::_SPANS] = fields.at
    fields.at = fields.at + sizes
    spans[1::_SPANS] = fields.at
    return absent
