"""JSON exactly as the codec writes it: the fields found by where the quotes are, without a parser.

Most events of a type have one form: all fields, in the order of the schema, no spaces, no escapes.
Then every text has the same number of quotes, and their positions say where every value is. All
that is not known to be of this form is left to `JsonColumns`, whose result is the same.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from millstream.schemas import types as t
from millstream.schemas.arrow_types import arrow_type
from millstream.schemas.formats.json_columns import NotFast, checked
from millstream.spark.source.blocks import Words, cut

__all__ = ["PlainTexts"]

_QUOTE: Final = 34
_MINUS: Final = 45
_ZERO: Final = 48
_SPACE: Final = 32  # bytes below it are control characters
_CLOSING: Final = b"}\n"


@dataclass(frozen=True, slots=True)
class _Field:
    type: t.Type
    mark: bytes  # from the bracket or comma before its name to its value
    quotes: int  # of the text before the field
    is_text: bool
    needed: bool  # else its values are only checked


class PlainTexts:
    """Reads texts of one record, each followed by a line end, as a struct array."""

    def __init__(self, record: t.Record, needed: Collection[str]) -> None:
        """`needed`: the other fields are checked too, but may be null in the result.

        NotFast for a record that only `JsonColumns` reads.
        """
        self._types = list(arrow_type(record))
        self._fields: list[_Field] = []
        self._quotes = 0
        for field in record.fields:
            if not field.name.isascii() or '"' in field.name or "\\" in field.name:
                raise NotFast
            type_, _ = t.strip(field.type)
            is_text = _is_text(type_)
            mark = b'%b"%b":%b' % (
                b"," if self._fields else b"{",
                field.name.encode(),
                b'"' if is_text else b"",
            )
            self._fields.append(_Field(type_, mark, self._quotes, is_text, field.name in needed))
            self._quotes += 4 if is_text else 2

    def column(self, texts: bytes, count: int) -> pa.StructArray:
        """The values of `count` texts; NotFast or an Arrow error if one of them is not plain."""
        block = np.frombuffer(texts, np.uint8)
        found = np.flatnonzero(block == _QUOTE)
        if not count or len(found) != count * self._quotes or found[0] != 1:
            raise NotFast
        if b"\\" in texts or np.count_nonzero(block < _SPACE) != count:
            raise NotFast
        if not texts.isascii():
            texts.decode()
        # A row for each quote of a text, a column for each text.
        quotes = np.ascontiguousarray(found.reshape(count, self._quotes).T)
        words = Words(block)
        closing = np.append(quotes[0, 1:] - 1 - len(_CLOSING), len(block) - len(_CLOSING))
        _all(words.match(closing, _CLOSING))
        columns = []
        for number, field in enumerate(self._fields):
            mark = quotes[field.quotes] - 1
            _all(words.match(mark, field.mark))
            last = number + 1 == len(self._fields)
            after = closing if last else quotes[self._fields[number + 1].quotes] - 1
            end = quotes[field.quotes + 3] if field.is_text else after
            _all(end + field.is_text == after)
            columns.append(_values(field, words, mark + len(field.mark), end))
        return pa.StructArray.from_arrays(columns, fields=self._types)


def _is_text(type_: t.Type) -> bool:
    match type_:
        case t.Int() | t.Bool():
            return False
        case t.String() | t.Enum() | t.Uuid() | t.Timestamp() | t.Date() | t.Decimal():
            return True
        case _:
            raise NotFast


def _all(holds: Any) -> None:
    if not holds.all():
        raise NotFast


def _values(field: _Field, words: Words, start: Any, end: Any) -> pa.Array:
    match field.type:
        case t.Int():
            return _whole_numbers(words.block, start, end).cast(arrow_type(field.type))
        case t.Bool():
            true = words.match(start, b"true") & (end - start == len("true"))
            _all(true | words.match(start, b"false") & (end - start == len("false")))
            return pa.array(true)
        case t.String() if not field.needed:
            return pa.nulls(len(start), pa.string())
        case _:
            # That the bytes are UTF-8 is known.
            return checked(field.type)(cut(words.block, start, end).view(pa.string()))


def _whole_numbers(block: Any, start: Any, end: Any) -> pa.Array:
    """Texts of numbers for Arrow, which also reads `05` and `0x1F`: these are refused here."""
    first = block[start + (block[start] == _MINUS)]
    _all((first != _ZERO) | (end - start == 1))
    return cut(block, start, end).view(pa.string())
