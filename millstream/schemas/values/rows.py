"""Arrow columns to many Python objects, fast.

Arrow's own `to_pylist` is quick for numbers and text (25-75 ns a value) and slow for the rest
(4 µs a timestamp, 0.8 µs a decimal), and slowest for structs. So columns are read one by one, with
readers of our own where that is faster, and zipped into dicts or the user's class.
"""

from __future__ import annotations

import abc
import datetime as dt
import decimal
import enum
import inspect
import types as pytypes
import typing
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from itertools import pairwise, repeat, starmap
from operator import itemgetter, sub
from typing import Any, Final, TypeAlias

import pyarrow as pa

from millstream import errors
from millstream.bulk import collector_rests, moments
from millstream.schemas import types as t
from millstream.schemas.values.fit import field_names

__all__ = ["RowReader", "object_maker", "reader_for", "takes_by_position"]

_Read: TypeAlias = Callable[[Any], list[Any]]

_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_LOCAL_EPOCH: Final = dt.datetime(1970, 1, 1)  # noqa: DTZ001 (a wall clock has no zone)
_EPOCH_ORDINAL: Final = dt.date(1970, 1, 1).toordinal()


class RowReader:
    """Converts struct arrays of one record to dicts, or into objects of `cls`."""

    def __init__(self, record: t.Record, cls: type | None = None) -> None:
        self.record = record
        self.cls = cls
        self._columns = _columns_reader(record)
        self._make = _list_maker(cls, record)

    def read(self, array: pa.StructArray | pa.RecordBatch) -> list[Any]:
        """The rows of a struct array or record batch, None where a struct is null."""
        struct = array if hasattr(array, "flatten") else array.to_struct_array()
        try:
            with collector_rests():
                return self._read(struct)
        except (OverflowError, ValueError) as error:
            if isinstance(error, errors.MillstreamError):
                raise
            # This package never stores such a value; another writer may have.
            kind = t.kind(self.record)
            raise errors.Unfit("", kind, f"a value that Python cannot hold: {error}") from error

    def _read(self, struct: Any) -> list[Any]:
        if not struct.null_count:
            return self._make(self._columns(struct))
        # No object may be created from the columns of a null row.
        present = struct.is_valid()
        rows = iter(self._make(self._columns(struct.filter(present))))
        return [next(rows) if here else None for here in present.to_pylist()]


def _with_nulls(rows: list[Any], array: Any) -> list[Any]:
    valid = array.is_valid().to_pylist()
    return [row if here else None for row, here in zip(rows, valid, strict=True)]


def _columns_reader(record: t.Record) -> Callable[[Any], list[list[Any]]]:
    readers = [reader_for(field.type) for field in record.fields]

    def read(array: Any) -> list[list[Any]]:
        children = array.flatten()
        if len(children) != len(readers):
            raise errors.SchemaError(
                f"a batch of {len(children)} columns was read as {t.kind(record)}, "
                f"which has {len(readers)}; resolve it to the reader's schema first"
            )
        return [reader(child) for reader, child in zip(readers, children, strict=True)]

    return read


def object_maker(cls: type, record: t.Record) -> Callable[[dict[str, Any]], Any]:
    """A function from one plain value (as a codec decodes it) to an object of the class."""
    make, names = _maker(cls, record), tuple(field.name for field in record.fields)
    if len(names) > 1:  # half the time: single rows of tables are read this way
        row_of = itemgetter(*names)
        return lambda plain: make((row_of(plain),))[0]
    return lambda plain: make([tuple(plain[name] for name in names)])[0]


def takes_by_position(cls: type, record: t.Record) -> bool:
    """Whether `object_maker` calls the class with the plain values of a record, in their order."""
    if hasattr(cls, "model_validate"):
        return False
    if not _in_order(cls, tuple(field.name for field in record.fields)):
        return False
    hints = typing.get_type_hints(cls)
    return not any(_converter(hints[field.name], field.type) for field in record.fields)


def _in_order(cls: type, names: tuple[str, ...]) -> bool:
    """Whether the class takes the names by position, in this order.

    `__match_args__` are usually those, but not if a dataclass has a constructor of its own.
    """
    if getattr(cls, "__match_args__", None) != names:
        return False
    try:
        parameters = inspect.signature(cls).parameters.values()
    except (TypeError, ValueError):  # of a class that is written in C
        return True
    named = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    by_name = {*named, *(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)}
    return tuple(named[: len(names)]) == names or not by_name.issuperset(names)


# -- columns ------------------------------------------------------------------------------


def reader_for(type_: t.Type) -> _Read:
    """A function from a column of the type to its plain values."""
    type_, _ = t.strip(type_)
    match type_:
        case t.Record():
            return RowReader(type_).read
        case t.List():
            return _list_reader(type_)
        case t.Map():
            return _map_reader(type_)
        case t.Union():
            return _union_reader(type_)
        case t.Timestamp(utc):
            return _read_moments if utc else _read_wall_clocks
        case _:
            return _LEAF_READERS.get(type(type_), _to_pylist)


def _to_pylist(array: Any) -> list[Any]:
    values: list[Any] = array.to_pylist()
    return values


def _numbers(array: Any, bits: int) -> list[Any]:
    """The integers under a column of dates or times."""
    values: list[Any] = array.view(pa.int64() if bits == 64 else pa.int32()).to_pylist()
    return values


def _read_moments(array: Any) -> list[Any]:
    return moments(array.view(pa.int64()))


def _read_wall_clocks(array: Any) -> list[Any]:
    found = moments(array.view(pa.int64()))
    if array.null_count:
        return [None if at is None else _LOCAL_EPOCH + (at - _EPOCH) for at in found]
    # Only C code in the loop; `replace(tzinfo=None)` takes eight times as long.
    return list(map(_LOCAL_EPOCH.__add__, map(sub, found, repeat(_EPOCH))))


def _read_dates(array: Any) -> list[Any]:
    day = dt.date.fromordinal
    return [None if n is None else day(_EPOCH_ORDINAL + n) for n in _numbers(array, 32)]


def _read_times(array: Any) -> list[Any]:
    span = dt.timedelta
    numbers = _numbers(array, 64)
    return [None if n is None else (_LOCAL_EPOCH + span(0, 0, n)).time() for n in numbers]


def _read_durations(array: Any) -> list[Any]:
    span = dt.timedelta
    return [None if n is None else span(0, 0, n) for n in _numbers(array, 64)]


def _read_decimals(array: Any) -> list[Any]:
    number = decimal.Decimal
    texts = array.cast(pa.string()).to_pylist()
    return [None if text is None else number(text) for text in texts]


def _read_uuids(array: Any) -> list[Any]:
    parse = uuid.UUID
    return [None if text is None else parse(text) for text in array.to_pylist()]


_LEAF_READERS: Final[dict[type, _Read]] = {
    t.Date: _read_dates,
    t.Time: _read_times,
    t.Duration: _read_durations,
    t.Decimal: _read_decimals,
    t.Uuid: _read_uuids,
}


def _ranges(array: Any) -> tuple[int, int, list[tuple[int, int]]]:
    """Where a list column starts and ends in its values, and each row's range from there."""
    offsets = array.offsets.to_pylist()
    first = offsets[0] if offsets else 0
    return first, (offsets[-1] if offsets else 0), list(pairwise(o - first for o in offsets))


def _list_reader(type_: t.List) -> _Read:
    item = reader_for(type_.item)

    def read(array: Any) -> list[Any]:
        first, last, ranges = _ranges(array)
        flat = item(array.values.slice(first, last - first))
        rows: list[Any] = [flat[start:end] for start, end in ranges]
        return rows if not array.null_count else _with_nulls(rows, array)

    return read


def _map_reader(type_: t.Map) -> _Read:
    key, value = reader_for(type_.key), reader_for(type_.value)

    def read(array: Any) -> list[Any]:
        first, last, ranges = _ranges(array)
        keys = key(array.keys.slice(first, last - first))
        values = value(array.items.slice(first, last - first))
        pairs = list(zip(keys, values, strict=True))
        rows: list[Any] = [dict(pairs[start:end]) for start, end in ranges]
        return rows if not array.null_count else _with_nulls(rows, array)

    return read


def _union_reader(type_: t.Union) -> _Read:
    readers = [reader_for(option) for option in type_.options]

    def read(array: Any) -> list[Any]:
        children = array.flatten()
        columns = [reader(child) for reader, child in zip(readers, children, strict=True)]
        return [
            next((member for member in members if member is not None), None)
            for members in zip(*columns, strict=True)
        ]

    return read


# -- rows ---------------------------------------------------------------------------------


def _dict_maker(record: t.Record) -> Callable[[Iterable[tuple[Any, ...]]], list[Any]]:
    """A function from tuples to dicts.

    The dict display is compiled for the record's own names, as `dataclasses` does for `__init__`:
    it takes a third of the time of `dict(zip(names, row))`. Names enter the code only as literals.
    """
    variables = [f"v{i}" for i in range(len(record.fields))]
    pairs = ", ".join(
        f"{field.name!r}: {name}" for field, name in zip(record.fields, variables, strict=True)
    )
    code = f"lambda rows: [{{{pairs}}} for {', '.join(variables)}, in rows]"
    maker: Callable[[Iterable[tuple[Any, ...]]], list[Any]] = eval(code, {"__builtins__": {}})
    return maker


def _list_maker(cls: type | None, record: t.Record) -> Callable[[list[list[Any]]], list[Any]]:
    """A function from columns to dicts, or to objects of a class whose fields are the record's."""
    if cls is None:
        make = _dict_maker(record)
        return lambda columns: make(zip(*columns, strict=True))
    make = _maker(cls, record)
    names = tuple(field.name for field in record.fields)
    if hasattr(cls, "model_validate") or not _in_order(cls, names):
        return lambda columns: make(zip(*columns, strict=True))
    hints = typing.get_type_hints(cls)
    converters = [_converter(hints[f.name], f.type) for f in record.fields]
    fill = _frozen_filler(cls, names) or _by_position(cls)
    if not any(converters):
        return fill
    if not _init_is_written(cls, names):  # one that takes names only may be anybody's own
        return lambda columns: make(zip(*columns, strict=True))
    return lambda columns: fill(
        [
            column if convert is None else list(map(convert, column))
            for convert, column in zip(converters, columns, strict=True)
        ]
    )


def _by_position(cls: type) -> Callable[[list[list[Any]]], list[Any]]:
    return lambda columns: list(starmap(cls, zip(*columns, strict=True)))


def _init_is_written(cls: type, names: tuple[str, ...]) -> bool:
    """Whether `dataclass` wrote the constructor, with these parameters and no others."""
    params, init = vars(cls).get("__dataclass_params__"), vars(cls).get("__init__")
    code = getattr(init, "__code__", None)
    if params is None or not params.init or code is None or code.co_filename != "<string>":
        return False
    return not code.co_kwonlyargcount and code.co_varnames[1 : code.co_argcount] == names


def _frozen_filler(
    cls: type, names: tuple[str, ...]
) -> Callable[[list[list[Any]]], list[Any]] | None:
    """A function that does for many objects what `__init__` of a frozen dataclass does for one.

    That calls `object.__setattr__` for each field; a column at a time it takes less than half as
    long. None for a class whose constructor may do anything else.
    """
    params = vars(cls).get("__dataclass_params__")
    if params is None or not params.frozen or hasattr(cls, "__post_init__"):
        return None
    if not names or not _init_is_written(cls, names):
        return None
    if inspect.getattr_static(cls, "__new__") is not vars(object)["__new__"]:
        return None
    if type(cls) not in (type, abc.ABCMeta):  # another one may have a `__call__` of its own
        return None
    slots = [getattr(cls, name, None) for name in names]

    def fill(columns: list[list[Any]]) -> list[Any]:
        objects: list[Any] = list(map(object.__new__, repeat(cls, len(columns[0]))))
        for name, slot, column in zip(names, slots, columns, strict=True):
            if isinstance(slot, pytypes.MemberDescriptorType):
                deque(map(slot.__set__, objects, column), maxlen=0)
            else:
                deque(map(object.__setattr__, objects, repeat(name), column), maxlen=0)
        return objects

    return fill


def _maker(cls: type, record: t.Record) -> Callable[[Iterable[tuple[Any, ...]]], list[Any]]:
    """A function from tuples to objects of a class whose fields are the record's."""
    names = tuple(field.name for field in record.fields)
    known = field_names(cls)
    if known is None or set(known) != set(names):
        raise errors.SchemaError(
            f"{cls.__name__} has the fields {', '.join(known or ('none',))}; "
            f"{t.kind(record)} has {', '.join(names)}: resolve to the class's own schema first"
        )
    closed = [f.name for f in getattr(cls, "__dataclass_fields__", {}).values() if not f.init]
    if closed:
        raise errors.SchemaError(
            f"{cls.__name__} does not accept '{closed[0]}' in its constructor; read dicts instead"
        )
    hints = typing.get_type_hints(cls)
    converters = [_converter(hints[f.name], f.type) for f in record.fields]
    if hasattr(cls, "model_validate") and not any(converters):
        from pydantic import TypeAdapter

        # One call for all rows takes half the time of one model_validate per row.
        dicts = _dict_maker(record)
        validate = TypeAdapter(list[cls]).validate_python  # type: ignore[valid-type]
        # By field name: aliases are for data outside the program.
        return lambda rows: validate(dicts(rows), by_name=True, by_alias=False)
    if any(converters):
        keep = [convert or _same for convert in converters]
        return lambda rows: [
            cls(**{n: c(v) for n, c, v in zip(names, keep, row, strict=True)}) for row in rows
        ]
    if takes_by_position(cls, record):
        return lambda rows: list(starmap(cls, rows))
    return lambda rows: [cls(**dict(zip(names, row, strict=True))) for row in rows]


def _same(value: Any) -> Any:
    return value


def _converter(hint: Any, type_: t.Type) -> Callable[[Any], Any] | None:
    """From a plain value to the annotated type; None if they are the same."""
    type_, nullable = t.strip(type_)
    if typing.get_origin(hint) in (typing.Union, pytypes.UnionType):
        options = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        hint = options[0] if len(options) == 1 else None
    inner: Callable[[Any], Any] | None = None
    match type_:
        case t.Record() if isinstance(hint, type) and hint is not dict:
            inner = object_maker(hint, type_)
        case t.Enum() if isinstance(hint, type) and issubclass(hint, enum.Enum):
            texts = all(isinstance(member.value, str) for member in hint)
            inner = hint if texts else hint.__getitem__
        case t.List() if typing.get_args(hint):
            inner = _list_converter(hint, type_)
        case t.Map() if typing.get_args(hint):
            value = _converter(typing.get_args(hint)[1], type_.value)
            if value is not None:
                inner = lambda v: {k: value(e) for k, e in v.items()}  # noqa: E731
    if inner is None or not nullable:
        return inner
    return lambda v: None if v is None else inner(v)


def _list_converter(hint: Any, type_: t.List) -> Callable[[Any], Any] | None:
    item = _converter(typing.get_args(hint)[0], type_.item)
    container = tuple if typing.get_origin(hint) is tuple else list
    if item is not None:
        return lambda v: container(map(item, v))
    return tuple if container is tuple else None
