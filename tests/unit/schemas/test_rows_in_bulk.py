"""Objects of many rows at once are those of each row alone, whatever their type and class."""

from __future__ import annotations

import abc
import dataclasses
import datetime as dt
import enum
import gc
from typing import Any, ClassVar

import msgspec
import pyarrow as pa
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.bulk import collector_rests, moments
from millstream.errors import Unfit
from millstream.schemas import ColumnBuilder, declare
from millstream.schemas import types as t
from millstream.schemas.values.rows import RowReader, object_maker
from tests.unit.schemas.schema_strategies import quick, records, values

EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
FIRST, LAST = -62_135_596_800_000_000, 253_402_300_799_999_999  # the years 1 to 9999
FORM_ENDS = (1 << 34) * 1_000_000  # the first microsecond that the short form cannot hold
NUMBERS = st.one_of(
    st.integers(FIRST, LAST),
    st.integers(0, FORM_ENDS - 1),
    st.sampled_from([0, -1, 1, 999_999, 1_000_000, FORM_ENDS - 1, FORM_ENDS, FIRST, LAST]),
)
COLUMNS = st.one_of(
    st.lists(st.none() | NUMBERS, max_size=200),
    st.lists(st.integers(0, FORM_ENDS - 1), min_size=64, max_size=200),
    st.lists(st.none() | st.integers(0, FORM_ENDS - 1), min_size=64, max_size=200),
)


# -- times --------------------------------------------------------------------------------


@given(COLUMNS, st.integers(0, 70), st.integers(0, 70))
@quick
def test_times_read_in_one_go_are_those_of_adding(
    numbers: list[int | None], before: int, after: int
) -> None:
    whole = pa.array([*[5] * before, *numbers, *[7] * after], pa.int64())
    found = moments(whole.slice(before, len(numbers)))
    assert found == [None if n is None else EPOCH + dt.timedelta(0, 0, n) for n in numbers]
    assert all(at is None or at.tzinfo is dt.UTC for at in found)


@pytest.mark.parametrize("number", [FIRST - 1, LAST + 1, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("count", [1, 100])
def test_a_time_that_python_cannot_hold_is_refused_among_many(number: int, count: int) -> None:
    with pytest.raises(OverflowError):
        moments(pa.array([*[0] * (count - 1), number], pa.int64()))


@given(COLUMNS)
@quick
def test_wall_clocks_have_no_zone(numbers: list[int | None]) -> None:
    @dataclasses.dataclass
    class Clock:
        at: dt.datetime | None

    record = declare(Clock).record
    column = pa.array(numbers, pa.int64()).view(pa.timestamp("us"))
    local = dataclasses.replace(
        record,
        fields=(dataclasses.replace(record.fields[0], type=_wall_clock(record.fields[0].type)),),
    )
    rows = RowReader(local).read(pa.StructArray.from_arrays([column], ["at"]))
    start = EPOCH.replace(tzinfo=None)
    expected = [None if n is None else start + dt.timedelta(0, 0, n) for n in numbers]
    assert [row["at"] for row in rows] == expected


def _wall_clock(type_: Any) -> Any:
    return dataclasses.replace(type_, of=dataclasses.replace(type_.of, utc=False))


# -- every type ---------------------------------------------------------------------------


@given(st.data())
@quick
def test_many_rows_are_read_as_each_row_alone(data: st.DataObject) -> None:
    record = data.draw(records())
    few = data.draw(st.lists(values(record), min_size=1, max_size=4))
    column = ColumnBuilder(record).build([few[n % len(few)] for n in range(70)])
    reader = RowReader(record)
    alone = [reader.read(column.slice(n, 1))[0] for n in range(70)]
    assert repr(reader.read(column)) == repr(alone)  # types, zones and signs of zeros too
    assert repr(reader.read(column.slice(3, 66))) == repr(alone[3:69])


# -- every class --------------------------------------------------------------------------


class Side(enum.Enum):
    BUY = "buy"
    SELL = "sell"


@dataclasses.dataclass
class Place:
    street: str
    number: int | None


def made(**options: Any) -> Any:
    """A class with fields of several kinds, decorated with these options."""

    @dataclasses.dataclass(**options)
    class Order:
        id: int
        side: Side
        at: dt.datetime
        place: Place | None = None
        tags: tuple[str, ...] = ()
        counts: dict[str, int] = dataclasses.field(default_factory=dict)

    return Order


def plain(**options: Any) -> Any:
    @dataclasses.dataclass(**options)
    class Trade:
        id: int
        note: str | None
        at: dt.datetime

    return Trade


@dataclasses.dataclass(frozen=True)
class Checked:
    id: int
    note: str | None
    at: dt.datetime
    seen: ClassVar[list[int]] = []

    def __post_init__(self) -> None:
        object.__setattr__(self, "note", f"<{self.note}>")


@dataclasses.dataclass(frozen=True, slots=True)
class Base:
    id: int
    note: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class Derived(Base):
    at: dt.datetime


@dataclasses.dataclass(frozen=True)
class Handmade:
    id: int
    note: str | None
    at: dt.datetime

    def __new__(cls, *_: Any, **__: Any) -> Handmade:
        one = object.__new__(cls)
        object.__setattr__(one, "extra", "there")
        return one


@dataclasses.dataclass(frozen=True, init=False)
class OwnInit:
    id: int
    note: str | None
    at: dt.datetime

    def __init__(self, id: int, note: str | None, at: dt.datetime) -> None:
        for name, value in (("id", -id), ("note", note), ("at", at)):
            object.__setattr__(self, name, value)


@dataclasses.dataclass(init=False)
class NamesOnly:
    id: int
    side: Side

    def __init__(self, *, side: Side, id: int) -> None:
        self.id, self.side = id, side


class Replaced(plain(frozen=True)):  # type: ignore[misc]
    def __init__(self, id: int, note: str | None, at: dt.datetime) -> None:
        super().__init__(-id, note, at)


class Counting(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        one = super().__call__(*args, **kwargs)
        object.__setattr__(one, "id", 1000)
        return one


@dataclasses.dataclass(frozen=True)
class Meta(metaclass=Counting):
    id: int
    note: str | None
    at: dt.datetime


@dataclasses.dataclass(frozen=True)
class Abstract(abc.ABC):
    id: int
    note: str | None
    at: dt.datetime


class Struct(msgspec.Struct):
    id: int
    note: str | None
    at: dt.datetime


class FrozenStruct(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    note: str | None
    at: dt.datetime


class Model(pydantic.BaseModel):
    id: int
    note: str | None
    at: dt.datetime


OPTIONS: list[dict[str, bool]] = [
    {},
    {"slots": True},
    {"frozen": True},
    {"frozen": True, "slots": True},
    {"kw_only": True},
    {"frozen": True, "kw_only": True},
    {"frozen": True, "eq": False, "slots": True},
]
CLASSES = [
    *(plain(**options) for options in OPTIONS),
    *(made(**options) for options in OPTIONS),
    *(Checked, Derived, Handmade, OwnInit, NamesOnly, Replaced, Meta, Abstract),
    *(Struct, FrozenStruct, Model),
]


def state(one: Any) -> Any:
    """All that an object holds, in a form that can be compared."""
    names = ("id", "note", "at", "side", "place", "tags", "counts", "extra")
    own = {name: getattr(one, name, "unset") for name in names}
    return type(one), own, dict(vars(one)) if hasattr(one, "__dict__") else None


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("count", [1, 70])
def test_objects_of_columns_are_those_of_the_constructor(cls: Any, count: int) -> None:
    record = declare(cls).record
    fill: dict[str, Any] = {
        "side": "sell",
        "place": {"street": "s", "number": None},
        "tags": ["a", "b"],
        "counts": {"x": 1},
        "note": "n",
        "at": EPOCH + dt.timedelta(0, 0, 1),
    }
    names = [field.name for field in record.fields]
    rows = [{name: fill.get(name, n) for name in names} for n in range(count)]
    for row in rows[1::2]:
        row.update({name: None for name in ("note", "place") if name in row})
    column = ColumnBuilder(record).build(rows)
    one_by_one = object_maker(cls, record)
    found = RowReader(record, cls).read(column)
    expected = [one_by_one(row) for row in RowReader(record).read(column)]
    assert list(map(state, found)) == list(map(state, expected))


def test_a_frozen_class_refuses_changes_and_compares_as_before() -> None:
    cls = plain(frozen=True, slots=True)
    column = ColumnBuilder(declare(cls).record).build([{"id": 1, "note": None, "at": EPOCH}])
    [one] = RowReader(declare(cls).record, cls).read(column)
    assert one == cls(1, None, EPOCH)
    assert hash(one) == hash(cls(1, None, EPOCH))
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.id = 2


# -- the collector ------------------------------------------------------------------------


def test_the_collector_is_afterwards_as_it_was() -> None:
    assert gc.isenabled()
    with collector_rests():
        assert not gc.isenabled()
        with collector_rests():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with collector_rests():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_constructor_that_fails_leaves_the_collector_on() -> None:
    @dataclasses.dataclass
    class Picky:
        id: int

        def __post_init__(self) -> None:
            raise ValueError("no")

    record = declare(Picky).record
    with pytest.raises(Unfit):
        RowReader(record, Picky).read(ColumnBuilder(record).build([{"id": 1}]))
    assert gc.isenabled()


@dataclasses.dataclass(init=False)
class OtherOrder:
    city: str
    name: str

    def __init__(self, name: str, city: str) -> None:
        self.name, self.city = name, city


@dataclasses.dataclass(init=False)
class OtherOrderOfNames:
    city: str
    name: str

    def __init__(self, *, name: str, city: str) -> None:
        self.name, self.city = name, city


@pytest.mark.parametrize("cls", [OtherOrder, OtherOrderOfNames])
def test_a_constructor_with_another_order_is_called_by_names(cls: type) -> None:
    record = t.Record("Person", (t.Field("city", t.String()), t.Field("name", t.String())))
    (read,) = RowReader(record, cls).read(
        ColumnBuilder(record).build([{"city": "Bern", "name": "Ann"}])
    )
    assert (read.city, read.name) == ("Bern", "Ann")
    assert object_maker(cls, record)({"city": "Bern", "name": "Ann"}) == read
