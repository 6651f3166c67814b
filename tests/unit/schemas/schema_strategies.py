"""Generated schemas and values for the property tests."""

from __future__ import annotations

import datetime as dt
import decimal
import uuid
import zlib
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from millstream import errors
from millstream.schemas import types as t

# Nested schemas are slow to draw, so there are few; rare bugs need hundreds (raise it by hand).
quick = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NAMES = st.from_regex(r"[a-z][a-z0-9]{0,5}", fullmatch=True)
SYMBOLS = st.lists(st.from_regex(r"[A-Z][A-Z0-9]{0,4}", fullmatch=True), min_size=1, max_size=4,
                   unique=True)  # fmt: skip

LEAVES: tuple[t.Type, ...] = (
    t.Bool(),
    *(t.Int(bits, signed) for bits in (8, 16, 32, 64) for signed in (True, False)),
    t.Float(32),
    t.Float(64),
    t.String(),
    t.Binary(),
    t.Binary(3),
    t.Decimal(1, 0),
    t.Decimal(9, 2),
    t.Decimal(38, 10),
    t.Date(),
    t.Time(),
    t.Time("ms"),
    t.Timestamp(),
    t.Timestamp(True, "ms"),
    t.Timestamp(False),
    t.Timestamp(False, "ms"),
    t.Duration(),
    t.Uuid(),
)


@st.composite
def enums(draw: st.DrawFn) -> t.Type:
    symbols = tuple(draw(SYMBOLS))
    # The name follows from the symbols, so that one name never means two enums.
    return t.Enum("E" + "_".join(symbols), symbols, draw(st.sampled_from((None, symbols[0]))))


def _unions(options: st.SearchStrategy[t.Type]) -> st.SearchStrategy[t.Type]:
    @st.composite
    def build(draw: st.DrawFn) -> t.Type:
        types = tuple(draw(st.lists(options, min_size=2, max_size=3)))
        try:
            return t.Union(types)
        except errors.SchemaError:
            return types[0]

    return build()


def types(depth: int = 2, *, unions: bool = True) -> st.SearchStrategy[t.Type]:
    """Any type, nested at most `depth` times."""
    leaf = st.one_of(st.sampled_from(LEAVES), enums())
    if depth == 0:
        return leaf
    below = types(depth - 1, unions=unions)
    maybe = st.one_of(below, below.filter(lambda x: not isinstance(x, t.Nullable)).map(t.Nullable))
    keys = st.sampled_from((t.String(), t.String(), t.Int(32), t.Int(64)))
    kinds = [
        leaf,
        maybe,
        st.builds(t.List, maybe),
        st.builds(t.Map, maybe, keys),
        records(depth - 1, unions=unions),
    ]
    if unions:
        kinds.append(_unions(below.filter(lambda x: not isinstance(x, (t.Nullable, t.Union)))))
    return st.one_of(kinds)


@st.composite
def records(draw: st.DrawFn, depth: int = 2, *, unions: bool = True) -> t.Record:
    """A record of one to five fields, some with defaults, docs and aliases."""
    names = draw(st.lists(NAMES, min_size=1, max_size=5, unique=True))
    fields = []
    for name in names:
        type_ = draw(types(depth, unions=unions))
        default: Any = t.MISSING
        if draw(st.booleans()):
            default = draw(values(type_, finite=True))
        doc = draw(st.sampled_from(("", "", "what it means")))
        aliases = draw(st.sampled_from(((), (), (f"old_{name}",))))
        fields.append(t.Field(name, type_, default, doc, aliases))
    # The name follows from the fields, so that one name never means two records.
    name = f"R{zlib.crc32(repr(fields).encode()):x}"
    return t.Record(name, tuple(fields), draw(st.sampled_from(("", "a record"))))


def values(type_: t.Type, *, finite: bool = False) -> st.SearchStrategy[Any]:
    """Plain values of a type."""
    match type_:
        case t.Nullable():
            return st.none() | values(type_.of, finite=finite)
        case t.List():
            return st.lists(values(type_.item, finite=finite), max_size=3)
        case t.Map():
            inner = values(type_.value, finite=finite)
            return st.dictionaries(values(type_.key), inner, max_size=3)
        case t.Union():
            return st.one_of([values(option, finite=finite) for option in type_.options])
        case t.Record():
            return st.fixed_dictionaries(
                {field.name: values(field.type, finite=finite) for field in type_.fields}
            )
        case t.Enum():
            return st.sampled_from(type_.symbols)
        case _:
            return _leaf_values(type_, finite)


def _leaf_values(type_: t.Type, finite: bool) -> st.SearchStrategy[Any]:
    match type_:
        case t.Bool():
            return st.booleans()
        case t.Int():
            return st.integers(type_.low, type_.high)
        case t.Float(bits):
            return st.floats(width=32 if bits == 32 else 64, allow_nan=False,
                             allow_infinity=not finite)  # fmt: skip
        case t.String():
            return TEXT
        case t.Binary(size):
            return st.binary(min_size=size or 0, max_size=size or 8)
        case t.Decimal(precision, scale):
            limit = 10**precision - 1
            step = decimal.Decimal((0, (1,), -scale))
            context = decimal.Context(prec=60)
            return st.integers(-limit, limit).map(
                lambda n: decimal.Decimal(n).scaleb(-scale, context).quantize(step, context=context)
            )
        case t.Date():
            return st.dates()
        case t.Time(unit):
            return st.times().map(lambda v: _whole(v, unit))
        case t.Timestamp(utc, unit):
            zone = st.just(dt.UTC) if utc else st.none()
            return st.datetimes(timezones=zone).map(lambda v: _whole(v, unit))
        case t.Duration():
            return st.timedeltas(dt.timedelta(days=-3_000_000), dt.timedelta(days=3_000_000))
        case t.Uuid():
            return st.integers(0, 2**128 - 1).map(lambda n: uuid.UUID(int=n))
        case _:
            raise AssertionError(f"no values for {type_}")


def _whole(value: Any, unit: str) -> Any:
    micro = value.microsecond // 1000 * 1000 if unit == "ms" else value.microsecond
    return value.replace(microsecond=micro, fold=0)


@st.composite
def records_and_values(draw: st.DrawFn, *, finite: bool = False) -> tuple[t.Record, list[Any]]:
    """A record and a few of its values."""
    record = draw(records())
    return record, draw(st.lists(values(record, finite=finite), min_size=1, max_size=4))
