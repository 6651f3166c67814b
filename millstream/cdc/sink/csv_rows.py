"""Rows as CSV in PostgreSQL's form: nothing is null, `""` is an empty text. Pure.

Arrow writes texts in quotes and nulls without, which is how `COPY ... (FORMAT csv)` tells them
apart. What Arrow does not write, or writes in a way that PostgreSQL does not read, becomes text
here.
"""

from __future__ import annotations

import io
import json
from collections.abc import Collection
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from millstream.cdc.sink.sql import is_binary, is_document, is_list

__all__ = ["array_texts", "csv_rows", "document_texts", "json_texts"]

_OPTIONS: Final = csv.WriteOptions(include_header=False, quoting_style="needed")
# Years that Arrow writes as PostgreSQL reads them: 1 to 9999.
_FIRST_DAY: Final = -719_162
_LAST_DAY: Final = 2_932_896
_DAY_US: Final = 86_400_000_000


def csv_rows(batch: pa.RecordBatch, documents: Collection[str] = ()) -> bytes:
    """The rows as `COPY` reads them; the columns in `documents` are written as JSON."""
    columns = [
        json_texts(column) if name in documents and is_list(column.type) else _written(column)
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]
    numbered = [str(number) for number in range(len(columns))]  # names do not matter here
    out = io.BytesIO()
    csv.write_csv(pa.RecordBatch.from_arrays(columns, names=numbered), out, _OPTIONS)
    return out.getvalue()


def _written(column: pa.Array) -> pa.Array:
    """The column, or its texts where Arrow's own form is not PostgreSQL's."""
    types, kind = pa.types, column.type
    if is_binary(kind):
        return _hex(column)
    if is_document(kind):
        return json_texts(column)
    if is_list(kind):
        return array_texts(column)
    if types.is_duration(kind):
        amounts = column.cast(pa.duration("us")).cast(pa.int64()).cast(pa.string())
        return pc.binary_join_element_wise(amounts, " microseconds", "")
    if types.is_date(kind):
        days = column.cast(pa.date32()).cast(pa.int32())
        return _old_dates(column, days) if _beyond(days, _FIRST_DAY, _LAST_DAY) else column
    if types.is_timestamp(kind):
        ticks = column.cast(pa.timestamp("us", kind.tz), safe=False).cast(pa.int64())
        if _beyond(ticks, _FIRST_DAY * _DAY_US, (_LAST_DAY + 1) * _DAY_US - 1):
            return _old_times(ticks, "+00" if kind.tz else "")
        # Arrow needs a database of zones for any other than UTC.
        return column.cast(pa.timestamp("us", "UTC")) if kind.tz not in (None, "UTC") else column
    return column


def _beyond(numbers: pa.Array, low: int, high: int) -> bool:
    edges = pc.min_max(numbers)
    least, most = edges["min"].as_py(), edges["max"].as_py()
    return least is not None and (least < low or most > high)


def _hex(column: pa.Array) -> pa.Array:
    r"""Bytes as PostgreSQL reads them: `\x00ff`."""
    values = column.cast(pa.large_binary())
    texts = [None if value is None else "\\x" + value.hex() for value in values.to_pylist()]
    return pa.array(texts, pa.large_string())


# -- arrays and documents -------------------------------------------------------------------


def array_texts(column: pa.Array) -> pa.Array:
    """Lists as array literals: `{1,NULL,3}`; lists in lists are more dimensions."""
    kind = column.type
    if pa.types.is_fixed_size_list(kind):
        column = column.cast(pa.list_(kind.value_type))
    items = column.flatten()
    texts = _item_texts(items)
    if texts.null_count:
        texts = texts.fill_null("NULL")
    lengths = pc.list_value_length(column).fill_null(0)
    ends = pc.cumulative_sum(lengths.cast(pa.int32()))
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), ends])
    joined = pc.binary_join(pa.ListArray.from_arrays(offsets, texts), ",")
    found = pc.binary_join_element_wise("{", joined, "}", "")
    return pc.if_else(column.is_valid(), found, pa.scalar(None, found.type))


def _item_texts(items: pa.Array) -> pa.Array:
    kind = items.type
    if is_list(kind):
        return array_texts(items)
    texts = _written(items)
    if not pa.types.is_string(texts.type):
        texts = texts.cast(pa.string())
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return texts
    escaped = pc.replace_substring(pc.replace_substring(texts, "\\", "\\\\"), '"', '\\"')
    return pc.binary_join_element_wise('"', escaped, '"', "")


def json_texts(column: pa.Array) -> pa.Array:
    """Values as JSON."""
    return pa.array(document_texts(column), pa.large_string())


def document_texts(column: pa.Array) -> list[str | None]:
    """Values as JSON, one by one; maps become objects."""
    read = _reader(column.type)
    return [
        None if value is None else json.dumps(read(value), default=_plain, separators=(",", ":"))
        for value in column.to_pylist()
    ]


def _reader(kind: pa.DataType) -> Any:
    """How a value of a type becomes one that JSON has."""
    types = pa.types
    if types.is_map(kind):
        inner = _reader(kind.item_type)
        return lambda pairs: {str(key): None if v is None else inner(v) for key, v in pairs}
    if types.is_struct(kind):
        parts = {field.name: _reader(field.type) for field in kind}
        return lambda row: {n: None if v is None else parts[n](v) for n, v in row.items()}
    if is_list(kind):
        item = _reader(kind.value_type)
        return lambda values: [None if v is None else item(v) for v in values]
    return lambda value: value


def _plain(value: Any) -> str:
    """What JSON has no form of its own for: bytes in hex, others as they are written."""
    return value.hex() if isinstance(value, bytes) else str(value)


# -- years before 1 and after 9999 ----------------------------------------------------------


def _old_dates(column: pa.Array, days: pa.Array) -> pa.Array:
    return pa.array([None if d is None else _date_text(d) for d in days.to_pylist()], pa.string())


def _old_times(ticks: pa.Array, zone: str) -> pa.Array:
    return pa.array([_time_text(tick, zone) for tick in ticks.to_pylist()], pa.string())


def _time_text(tick: int | None, zone: str) -> str | None:
    if tick is None:
        return None
    days, rest = divmod(tick, _DAY_US)
    seconds, fraction = divmod(rest, 1_000_000)
    minutes, second = divmod(seconds, 60)
    hour, minute = divmod(minutes, 60)
    date, _, era = _date_text(days).partition(" ")
    time = f"{date} {hour:02}:{minute:02}:{second:02}.{fraction:06}{zone}"
    return f"{time} {era}" if era else time


def _date_text(days: int) -> str:
    """A day since 1970 as PostgreSQL writes it.

    >>> _date_text(0), _date_text(-719_528), _date_text(2_932_897)
    ('1970-01-01', '0001-01-01 BC', '10000-01-01')
    """
    # The calendar repeats every 400 years, which are 146,097 days.
    cycles, day = divmod(days + 719_468, 146_097)
    of_cycle = (day - day // 1460 + day // 36_524 - day // 146_096) // 365
    of_year = day - (365 * of_cycle + of_cycle // 4 - of_cycle // 100)
    shifted = (5 * of_year + 2) // 153
    month = shifted + 3 if shifted < 10 else shifted - 9
    year = of_cycle + cycles * 400 + (1 if month <= 2 else 0)
    text = f"{month:02}-{of_year - (153 * shifted + 2) // 5 + 1:02}"
    return f"{year:04}-{text}" if year > 0 else f"{1 - year:04}-{text} BC"
