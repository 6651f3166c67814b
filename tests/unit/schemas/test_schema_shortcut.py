"""The fast path to columns accepts and refuses exactly what the slow path does."""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import uuid
import zoneinfo
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream import errors
from millstream.schemas import ColumnBuilder, Conformer, RowReader, Schema
from millstream.schemas import types as t
from tests.unit.schemas.schema_strategies import LEAVES, values


class Number(enum.IntEnum):
    ONE = 1


class Word(enum.StrEnum):
    A = "A"


class Text(str):
    __slots__ = ()


class Moment(dt.datetime):
    """A subclass of datetime with nanoseconds, like pandas' Timestamp."""

    nanosecond = 7


class OwnMoment(dt.datetime):
    """A subclass of datetime that holds nothing more."""


class OwnDate(dt.date):
    pass


class OwnTime(dt.time):
    pass


class OwnSpan(dt.timedelta):
    pass


class OwnDecimal(decimal.Decimal):
    pass


class OwnUuid(uuid.UUID):
    pass


class NoOffset(dt.tzinfo):
    """A zone without an offset, which makes a datetime naive."""

    def utcoffset(self, when: dt.datetime | None) -> None:
        return None

    def dst(self, when: dt.datetime | None) -> None:
        return None

    def tzname(self, when: dt.datetime | None) -> None:
        return None


class OwnZone(dt.tzinfo):
    """A zone of a class that only its author knows."""

    def __init__(self, **offset: int) -> None:
        self._offset = dt.timedelta(**offset)

    def utcoffset(self, when: dt.datetime | None) -> dt.timedelta:
        return self._offset

    def dst(self, when: dt.datetime | None) -> None:
        return None

    def tzname(self, when: dt.datetime | None) -> None:
        return None


class FailingZone(OwnZone):
    """A zone that does not know the offset of some times, and raises an error of its own."""

    class Unknown(Exception):
        pass

    def utcoffset(self, when: dt.datetime | None) -> dt.timedelta:
        raise self.Unknown


MOMENT = dt.datetime(2024, 5, 6, 7, 8, 9, 123456)  # noqa: DTZ001
EARLIEST = dt.datetime(1, 1, 1)  # noqa: DTZ001
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 127, 128, 255, 256, 2**24 + 1, 2**53 + 1, 2**63, -(2**63), 2**64,
    0.0, 1.0, 1.5, 1e39, -1e39, 3.5e38, float("nan"), float("inf"), 1e-50,
    "", "A", "a", "\ud800", Text("A"), Word.A, Number.ONE, b"", b"abc", bytearray(b"abc"),
    memoryview(b"abc"), decimal.Decimal("1"), decimal.Decimal("1.234"), decimal.Decimal("-0"),
    decimal.Decimal("1e40"), decimal.Decimal("NaN"), decimal.Decimal("0.00000000000000000001"),
    dt.date(2024, 1, 1), dt.date.min, dt.date.max, dt.time(1), dt.time(1, 2, 3, 4),
    dt.time(1, tzinfo=dt.UTC), MOMENT, MOMENT.replace(tzinfo=dt.UTC), MOMENT.replace(microsecond=0),
    MOMENT.replace(tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")), MOMENT.replace(tzinfo=NoOffset()),
    EARLIEST, dt.datetime.max.replace(tzinfo=dt.UTC),
    dt.datetime.min.replace(tzinfo=dt.timezone(dt.timedelta(hours=3))),
    dt.datetime.max.replace(tzinfo=dt.timezone(dt.timedelta(hours=-3))),
    Moment(2024, 1, 1), Moment(2024, 1, 1, tzinfo=dt.UTC), dt.timedelta(1), dt.timedelta.max,
    dt.timedelta.min, uuid.UUID(int=1), str(uuid.UUID(int=1)), [], [1], (1,), {1}, {}, {"A": 1},
    OwnMoment(2024, 1, 1), OwnMoment(2024, 1, 1, tzinfo=dt.UTC), OwnDate(2024, 1, 1), OwnTime(1),
    OwnSpan(1), OwnDecimal("1"), OwnUuid(int=3), {1: 1}, [None], [[1]], {"a": 1}, object(), int, 1j,
]  # fmt: skip
INNER = t.Record("I", (t.Field("a", t.Int(64)), t.Field("b", t.String(), "")))
COLUMNS: tuple[t.Type, ...] = (
    *LEAVES,
    t.Enum("E", ("A", "B")),
    t.List(t.Int(64)),
    t.List(t.Nullable(t.Int(8))),
    t.Map(t.Int(64)),
    t.Map(t.Int(64), t.Int(8)),
    INNER,
    t.Union((t.Int(64), t.String())),
    t.Union((INNER, t.Bool(), t.Float(32))),
)


@pytest.mark.parametrize("type_", COLUMNS, ids=t.kind)
@pytest.mark.parametrize("nullable", [False, True], ids=["", "or null"])
def test_odd_values_are_accepted_or_refused_alike(type_: t.Type, nullable: bool) -> None:
    record = t.Record("R", (t.Field("x", t.Nullable(type_) if nullable else type_),))
    builder, schema, reader = ColumnBuilder(record), Schema(record), RowReader(record)
    for value in ODD:
        row = {"x": value}
        try:
            plain = schema.fit(row)
        except errors.Unfit as misfit:
            field = misfit.field
            with pytest.raises(errors.Unfit) as found:
                builder.build([row])
            assert (found.value.field, found.value.row) == (field, 0)
            continue
        array = builder.build([row])
        assert repr(reader.read(array)) == repr([plain]), value
        assert Conformer(record).conform(array) is array


@pytest.mark.parametrize("type_", COLUMNS, ids=t.kind)
def test_a_misfit_among_good_values_is_found_in_its_row(type_: t.Type) -> None:
    record = t.Record("R", (t.Field("id", t.Int(64)), t.Field("x", type_)))
    builder, schema = ColumnBuilder(record), Schema(record)

    @settings(max_examples=10, deadline=None)
    @given(st.lists(values(type_), max_size=4), st.sampled_from(ODD), st.integers(0, 4))
    def check(good: list[Any], odd: Any, index: int) -> None:
        rows = [{"id": 1, "x": value} for value in good]
        rows.insert(index, {"id": 1, "x": odd})
        try:
            schema.fit({"id": 1, "x": odd})
        except errors.Unfit:
            with pytest.raises(errors.Unfit) as found:
                builder.build(rows)
            assert found.value.row == min(index, len(good))
        else:
            assert len(builder.build(rows)) == len(rows)

    check()


@given(st.lists(st.sampled_from(ODD), min_size=1, max_size=4))
def test_rows_that_are_not_records_are_refused(rows: list[Any]) -> None:
    builder = ColumnBuilder(t.Record("R", (t.Field("x", t.Int(64)),)))
    with pytest.raises(errors.Unfit) as found:
        builder.build(rows)
    assert found.value.row == 0


def test_text_columns_with_invalid_utf8_are_refused() -> None:
    record = t.Record("R", (t.Field("x", t.String()),))
    broken = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
    )
    with pytest.raises(errors.Unfit, match="field 'x': expected string"):
        Conformer(record).conform(pa.RecordBatch.from_arrays([broken], ["x"]))


ZONES = (dt.UTC, dt.timezone(dt.timedelta(hours=-5, seconds=13)),
         dt.timezone(dt.timedelta(microseconds=7)), zoneinfo.ZoneInfo("Europe/Berlin"),
         zoneinfo.ZoneInfo("Africa/Monrovia"), OwnZone(hours=5, minutes=45),
         OwnZone(seconds=1, microseconds=3))  # fmt: skip
# Whole seconds, whole milliseconds and others: each has a form of its own on the way.
INSTANTS = st.builds(
    lambda when, micro, zone, fold: when.replace(microsecond=micro, tzinfo=zone, fold=fold),
    st.one_of(
        st.datetimes(dt.datetime(1970, 1, 2), dt.datetime(2500, 1, 1)),  # noqa: DTZ001
        st.datetimes(dt.datetime(1, 1, 3), dt.datetime(9999, 12, 29)),  # noqa: DTZ001
    ),
    st.sampled_from([0, 0, 1, 1000, 123000, 123456, 999999]),
    st.sampled_from(ZONES),
    st.integers(0, 1),
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(INSTANTS, min_size=1, max_size=8),
    st.sampled_from([99, 100, 250]),
    st.sampled_from(["us", "ms"]),
    st.booleans(),
    st.one_of(st.none(), st.tuples(st.sampled_from(ODD), st.integers(0, 300))),
)
def test_long_columns_of_instants_are_what_the_slow_path_makes_of_them(
    some: list[dt.datetime], count: int, unit: Any, nullable: bool, odd: tuple[Any, int] | None
) -> None:
    type_ = t.Timestamp(True, unit)
    record = t.Record("R", (t.Field("x", t.Nullable(type_) if nullable else type_),))
    column: list[Any] = [some[number % len(some)] for number in range(count)]
    if odd is not None:
        column.insert(odd[1] % count, odd[0])
    rows = [{"x": value} for value in column]
    builder, schema = ColumnBuilder(record), Schema(record)
    expected: list[Any] = []
    for row in rows:
        try:
            expected.append(schema.fit(row)["x"])
        except errors.Unfit:
            with pytest.raises(errors.Unfit) as found:
                builder.build(rows)
            assert found.value.row == len(expected)
            return
    assert builder.build(rows).field("x").equals(pa.array(expected, pa.timestamp("us", "UTC")))


@pytest.mark.parametrize("count", [1, 100])
def test_an_error_of_somebodys_own_zone_is_raised_for_columns_of_any_length(count: int) -> None:
    record = t.Record("R", (t.Field("x", t.Timestamp()),))
    value = dt.datetime(2026, 1, 1, tzinfo=FailingZone())
    with pytest.raises(FailingZone.Unknown):
        ColumnBuilder(record).build([{"x": value}] * count)


@pytest.mark.parametrize("count", [100, 65535, 65536])
@pytest.mark.parametrize("micro", [0, 1])
def test_a_column_of_instants_may_have_any_length(count: int, micro: int) -> None:
    first = dt.datetime(2026, 1, 1, microsecond=micro, tzinfo=dt.UTC)
    column = [first + dt.timedelta(seconds=number) for number in range(count)]
    record = t.Record("R", (t.Field("x", t.Timestamp()),))
    built = ColumnBuilder(record).build([{"x": value} for value in column]).field("x")
    assert built.equals(pa.array(column, pa.timestamp("us", "UTC")))


def test_fields_whose_names_are_no_identifiers_are_found() -> None:
    names = ("class", "a b", "\ufb01", "x", "'")
    record = t.Record("R", tuple(t.Field(name, t.Int(64)) for name in names))
    row = dict(zip(names, range(5), strict=True))
    struct = msgspec.defstruct("S", [(name, int) for name in names if name.isidentifier()])
    assert ColumnBuilder(record).build([row, row]).to_pylist() == [row, row]
    some = t.Record("R", tuple(t.Field(name, t.Int(64)) for name in struct.__struct_fields__))
    made = struct(*range(len(some.fields)))
    assert ColumnBuilder(some).build([made]).to_pylist() == [
        {name: getattr(made, name) for name in struct.__struct_fields__}
    ]


@pytest.mark.parametrize("count", [1, 100])
def test_whole_milliseconds_are_those_in_utc(count: int) -> None:
    odd = dt.datetime(2000, 1, 1, tzinfo=dt.timezone(dt.timedelta(microseconds=7)))
    record = t.Record("R", (t.Field("x", t.Timestamp(True, "ms")),))
    with pytest.raises(errors.Unfit, match="whole milliseconds"):
        ColumnBuilder(record).build([{"x": odd}] * count)
