"""What fits a type and what does not, one by one and in columns."""

from __future__ import annotations

import copy
import dataclasses
import datetime as dt
import decimal
import enum
import pickle
import uuid
from typing import Any, ClassVar

import msgspec
import pyarrow as pa
import pydantic
import pytest

from millstream import errors
from millstream.schemas import (
    WIRE_FORMATS,
    ColumnBuilder,
    Conformer,
    RowReader,
    Schema,
    from_python,
    make_codec,
    object_maker,
)
from millstream.schemas import types as t

D = decimal.Decimal
BERLIN = dt.timezone(dt.timedelta(hours=2))
LOCAL = dt.datetime(2024, 5, 6, 7, 8, 9)  # noqa: DTZ001
AWARE = LOCAL.replace(tzinfo=dt.UTC)
STATUS = t.Enum("Status", ("open", "paid"))


class Status(enum.Enum):
    OPEN = "open"
    PAID = "paid"


class Level(enum.Enum):
    LOW = 1
    HIGH = 2


# Each of these values would be accepted, changed or lost by pa.array, or has another type.
MISFITS: list[tuple[t.Type, Any, str]] = [
    (t.Bool(), 1, "bool"),
    (t.Bool(), "true", "bool"),
    (t.Int(64), True, "int64"),
    (t.Int(64), 1.0, "int64"),
    (t.Int(64), 1.5, "int64"),
    (t.Int(64), D(1), "int64"),
    (t.Int(64), "1", "int64"),
    (t.Int(64), 2**63, "int64"),
    (t.Int(8), 128, r"int8 \(-128 to 127\)"),
    (t.Int(8, signed=False), -1, r"uint8 \(0 to 255\)"),
    (t.Float(64), True, "float64"),
    (t.Float(64), 2**53 + 1, "float64, exactly"),
    (t.Float(64), D("1.5"), "float64"),
    (t.Float(64), "1.5", "float64"),
    (t.Float(32), 1e39, "float32"),
    (t.Float(32), 2**24 + 1, "float32, exactly"),
    (t.String(), b"x", "string"),
    (t.String(), 1, "string"),
    (t.String(), "\ud800", "string in Unicode"),
    (t.Binary(), "x", "binary"),
    (t.Binary(2), b"abc", r"fixed\(2\)"),
    (t.Decimal(5, 2), 1, r"decimal\(5,2\)"),
    (t.Decimal(5, 2), 1.5, r"decimal\(5,2\)"),
    (t.Decimal(5, 2), D("1.234"), "too many digits after"),
    (t.Decimal(5, 2), D("1000"), "too many digits before"),
    (t.Decimal(5, 2), D("1E+30"), "too many digits before"),
    (t.Decimal(5, 2), D("NaN"), r"decimal\(5,2\)"),
    (t.Decimal(5, 2), D("Infinity"), r"decimal\(5,2\)"),
    (t.Date(), 1, "date"),
    (t.Date(), LOCAL, "date"),
    (t.Time(), 1, "time"),
    (t.Time(), dt.time(1, tzinfo=dt.UTC), "time without a zone"),
    (t.Time("ms"), dt.time(1, microsecond=1), "whole milliseconds"),
    (t.Timestamp(), 1, "timestamp"),
    (t.Timestamp(), LOCAL, "timestamp with a zone"),
    (t.Timestamp(), dt.date(2024, 1, 1), "timestamp"),
    (t.Timestamp(), dt.datetime(1, 1, 1, tzinfo=BERLIN), "years 1 to 9999"),
    (t.Timestamp(True, "ms"), AWARE.replace(microsecond=1), "whole milliseconds"),
    (t.Timestamp(False), AWARE, "local_timestamp without a zone"),
    (t.Duration(), 1, "duration"),
    (t.Duration(), dt.timedelta(days=999_999_999), "64 bits"),
    (t.Uuid(), "3bb4cf73-630c-476b-90b6-0fbd70a84404", "uuid"),
    (STATUS, "lost", r"enum Status \(open, paid\)"),
    (STATUS, 1, "enum Status"),
    (STATUS, Level.LOW, "enum Status"),
    (t.List(t.Int(64)), {1}, "list<int64>"),
    (t.List(t.Int(64)), "12", "list<int64>"),
    (t.List(t.Int(64)), [1, None], "int64"),
    (t.Map(t.Int(64)), [("a", 1)], "map<string, int64>"),
    (t.Map(t.Int(64)), {1: 1}, "string"),
    (t.Union((t.Int(64), t.String())), 1.5, "union<int64, string>"),
    (t.Record("I", (t.Field("a", t.Int(64)),)), {"a": 1, "b": 2}, "no such field in record I"),
    (t.Record("I", (t.Field("a", t.Int(64)),)), {}, "int64, found nothing: the field is missing"),
    (t.Record("I", (t.Field("a", t.Int(64)),)), 7, "record I"),
    (t.String(), None, "string, found null"),
]


def one_field(type_: t.Type) -> t.Record:
    return t.Record("R", (t.Field("x", type_),))


@pytest.mark.parametrize(
    ("type_", "value", "expected"), MISFITS, ids=[f"{t.kind(m[0])}-{m[1]!r:.30}" for m in MISFITS]
)
def test_a_misfit_is_refused_alone_and_in_a_column_with_its_row(
    type_: t.Type, value: Any, expected: str
) -> None:
    record = one_field(type_)
    with pytest.raises(errors.Unfit, match=f"field 'x.*expected .*{expected}") as alone:
        Schema(record).fit({"x": value})
    assert alone.value.row is None
    good = GOOD.get(type(type_))
    rows = [{"x": good}, {"x": good}, {"x": value}] if good is not None else [{"x": value}]
    with pytest.raises(errors.Unfit, match=f"field 'x.*expected .*{expected}") as found:
        ColumnBuilder(record).build(rows)
    assert found.value.row == len(rows) - 1
    if type_ not in (t.String(),):
        nullable = one_field(t.Nullable(type_))
        with pytest.raises(errors.Unfit):
            ColumnBuilder(nullable).build([{"x": None}, {"x": value}])


GOOD: dict[type, Any] = {t.Bool: True, t.Int: 1, t.Float: 1.5, t.String: "x"}

# A value that fits, and its plain form.
FITS: list[tuple[t.Type, Any, Any]] = [
    (t.Float(64), 3, 3.0),
    (t.Float(32), 0.1, 0.10000000149011612),
    (t.Float(32), float("inf"), float("inf")),
    (t.Float(32), 3.4028234663852886e38, 3.4028234663852886e38),
    (t.Binary(), bytearray(b"ab"), b"ab"),
    (t.Binary(), memoryview(b"ab"), b"ab"),
    (t.Decimal(5, 2), D("1.5"), D("1.50")),
    (t.Decimal(5, 2), D("1.500"), D("1.50")),
    (t.Decimal(5, 2), D("1E+2"), D("100.00")),
    (t.Decimal(5, 2), D(0), D("0.00")),
    (t.Timestamp(), dt.datetime(2024, 1, 1, 2, tzinfo=BERLIN), dt.datetime(2024, 1, 1,
     tzinfo=dt.UTC)),
    (STATUS, Status.PAID, "paid"),
    (t.Enum("Level", ("LOW", "HIGH")), Level.HIGH, "HIGH"),
    (t.List(t.Int(64)), (1, 2), [1, 2]),
    (t.Nullable(t.List(t.Nullable(t.Int(64)))), [None, 1], [None, 1]),
    (t.Nullable(t.Int(64)), None, None),
]  # fmt: skip


def _id(value: object) -> str:
    """The same in every process: no address of an object."""
    return "memoryview" if isinstance(value, memoryview) else repr(value)[:40]


@pytest.mark.parametrize(("type_", "value", "plain"), FITS, ids=[_id(f[1]) for f in FITS])
def test_a_value_that_fits_has_one_plain_form_everywhere(
    type_: t.Type, value: Any, plain: Any
) -> None:
    record = one_field(type_)
    fitted = Schema(record).fit({"x": value})["x"]
    assert fitted == plain
    assert repr(fitted) == repr(plain)
    (row,) = RowReader(record).read(ColumnBuilder(record).build([{"x": value}]))
    assert row == {"x": plain}
    assert repr(row["x"]) == repr(plain)


@dataclasses.dataclass
class Line:
    sku: str
    count: int = 1


@dataclasses.dataclass
class Order:
    id: int
    status: Status
    level: Level
    lines: list[Line]
    by_name: dict[str, Line]
    first: Line | None = None
    tags: tuple[str, ...] = ()


class StructOrder(msgspec.Struct, kw_only=True):
    id: int
    note: str | None = None


class ModelOrder(pydantic.BaseModel):
    id: int
    status: Status
    at: dt.datetime
    line: Line | None = None


def test_objects_of_a_class_become_columns_and_objects_again() -> None:
    record = from_python(Order)
    line = Line("a", 2)
    orders = [
        Order(1, Status.OPEN, Level.LOW, [line], {"k": line}, line, ("x",)),
        Order(2, Status.PAID, Level.HIGH, [], {}),
    ]
    array = ColumnBuilder(record).build(orders)
    assert RowReader(record, Order).read(array) == orders
    for wire in WIRE_FORMATS:
        codec = make_codec(Schema(record), wire)
        plain = [codec.decode(codec.encode(order)) for order in orders]
        assert list(map(object_maker(Order, record), plain)) == orders


def test_keyword_only_structs_and_models_are_read_back_as_their_class() -> None:
    structs = [StructOrder(id=1, note="n"), StructOrder(id=2)]
    record = from_python(StructOrder)
    assert RowReader(record, StructOrder).read(ColumnBuilder(record).build(structs)) == structs
    models = [ModelOrder(id=1, status=Status.PAID, at=AWARE, line=Line("a")),
              ModelOrder(id=2, status=Status.OPEN, at=AWARE)]  # fmt: skip
    record = from_python(ModelOrder)
    assert RowReader(record, ModelOrder).read(ColumnBuilder(record).build(models)) == models


class Renamed(pydantic.BaseModel):
    id: int = pydantic.Field(alias="ID")


@dataclasses.dataclass
class Counted:
    made: ClassVar[int] = 0
    id: int
    twice: int = dataclasses.field(init=False, default=0)


def test_aliases_class_variables_and_closed_fields_are_not_mistaken_for_fields() -> None:
    record = from_python(Renamed)
    models = [Renamed(ID=1)]
    assert RowReader(record, Renamed).read(ColumnBuilder(record).build(models)) == models
    record = from_python(Counted)
    assert [field.name for field in record.fields] == ["id", "twice"]
    assert len(ColumnBuilder(record).build([Counted(1)])) == 1
    with pytest.raises(errors.SchemaError, match="Counted does not accept 'twice'"):
        RowReader(record, Counted)


def test_schemas_can_be_pickled_for_other_processes() -> None:
    schema = Schema(from_python(Order))
    again = pickle.loads(pickle.dumps(schema))
    assert again == schema
    assert again.record.fields[0].default is t.MISSING
    assert copy.deepcopy(schema) == schema
    assert again.fingerprint == schema.fingerprint


def test_a_class_with_other_fields_than_the_record_is_refused() -> None:
    with pytest.raises(errors.SchemaError, match=r"Line has the fields sku, count; record Order"):
        RowReader(from_python(Order), Line)


def test_dicts_may_leave_out_defaults_and_nothing_else() -> None:
    record = from_python(Line)
    builder = ColumnBuilder(record)
    assert RowReader(record).read(builder.build([{"sku": "a"}, {"sku": "b", "count": 2}])) == [
        {"sku": "a", "count": 1},
        {"sku": "b", "count": 2},
    ]
    with pytest.raises(errors.Unfit, match="row 1, field 'sku': expected string, found nothing"):
        builder.build([{"sku": "a"}, {"count": 2}])
    with pytest.raises(errors.Unfit, match="row 0, field 'colour': expected no such field"):
        builder.build([{"sku": "a", "colour": "red"}])
    # As many keys as the record has fields, one of them unknown.
    with pytest.raises(errors.Unfit, match="'colour'"):
        builder.build([{"sku": "a", "colour": "red"}, {"sku": "a", "count": 1}])


def test_rows_of_mixed_kinds_are_accepted_together() -> None:
    record = from_python(Line)
    array = ColumnBuilder(record).build([Line("a", 1), {"sku": "b"}])
    assert RowReader(record).read(array) == [{"sku": "a", "count": 1}, {"sku": "b", "count": 1}]
    assert len(ColumnBuilder(record).batch([])) == 0


def test_null_structs_come_back_as_none_without_creating_an_object() -> None:
    record = from_python(Line)
    array = pa.array([{"sku": "a", "count": 1}, None], ColumnBuilder(record).type)
    assert RowReader(record, Line).read(array) == [Line("a", 1), None]


def test_the_default_of_a_union_is_kept_with_its_option() -> None:
    union = t.Union((t.Binary(), t.Date(), t.Map(t.Int(8), t.Int(64)), t.String()))
    for default in (b"A000", dt.date(2024, 1, 1), {7: 1}, "A000", "2024-01-01"):
        schema = Schema(t.Record("R", (t.Field("x", t.Nullable(union), default),)))
        assert Schema.from_json(schema.to_json()) == schema
        text = schema.to_json().replace('"default":[', '"default":[9,')
        with pytest.raises(errors.SchemaError, match="the default of field 'x' does not fit"):
            Schema.from_json(text)


def test_a_changed_default_does_not_change_the_schema() -> None:
    schema = Schema(t.Record("R", (t.Field("x", t.List(t.Int(64)), []),)))
    schema.fit({})["x"].append(1)
    assert schema.fit({}) == {"x": []}


# -- Arrow data from outside --------------------------------------------------------------

TYPED = t.Record(
    "R",
    (
        t.Field("id", t.Int(64)),
        t.Field("status", STATUS),
        t.Field("key", t.Nullable(t.Uuid()), None),
        t.Field("at", t.Nullable(t.Timestamp(True, "ms")), None),
    ),
)


def conform(**columns: Any) -> list[Any]:
    batch = pa.RecordBatch.from_pydict(columns)
    return RowReader(TYPED).read(Conformer(TYPED).conform(batch))


def test_columns_are_matched_by_name_widened_and_filled() -> None:
    key = str(uuid.UUID(int=5))
    rows = conform(
        status=pa.array(["open", "paid"]).dictionary_encode(),
        key=pa.array([key, None], pa.large_string()),
        id=pa.array([1, 2], pa.int16()),
        at=pa.array([1_000_000, None], pa.timestamp("ns", "UTC")),
    )
    assert rows == [
        {"id": 1, "status": "open", "key": uuid.UUID(int=5), "at": dt.datetime(1970, 1, 1, 0, 0,
         0, 1000, dt.UTC)},
        {"id": 2, "status": "paid", "key": None, "at": None},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        ({"id": pa.array([1, None]), "status": ["open", "open"]}, "row 1, field 'id'.*null"),
        ({"id": pa.array([1]), "status": ["lost"]}, "row 0, field 'status'.*'lost'"),
        ({"id": pa.array([1])}, "field 'status'.*no such column"),
        ({"id": pa.array([1]), "status": ["open"], "zz": [1]}, "field 'zz'"),
        ({"id": pa.array([1.5]), "status": ["open"]}, "field 'id'.*a column of double"),
        ({"id": pa.array(["1"]), "status": ["open"]}, "field 'id'.*a column of string"),
        ({"id": pa.array([1], pa.uint64()), "status": ["open"]}, "a column of uint64"),
        ({"id": [1], "status": ["open"], "key": ["no"]}, "row 0, field 'key': expected uuid"),
        ({"id": [1], "status": ["open"], "at": pa.array([1], pa.timestamp("ns", "UTC"))},
         "field 'at'.*would change"),
        ({"id": [1], "status": ["open"], "at": pa.array([1], pa.timestamp("us", "UTC"))},
         "row 0, field 'at': expected timestamp_ms"),
        ({"id": [1], "status": ["open"], "at": pa.array([1], pa.timestamp("us"))},
         "field 'at'.*a column of timestamp"),
    ],
)  # fmt: skip
def test_unfit_columns_are_refused_with_field_and_row(columns: dict[str, Any], match: str) -> None:
    with pytest.raises(errors.Unfit, match=match):
        conform(**columns)


@pytest.mark.parametrize(
    ("type_", "column", "found"),
    [
        (t.Date(), pa.array([0, 4_000_000]).cast(pa.int32()).view(pa.date32()), "4000000"),
        (
            t.Timestamp(),
            pa.array([0, 2**62]).view(pa.timestamp("us", "UTC")),
            "4611686018427387904",
        ),
        (
            t.Timestamp(False),
            pa.array([0, -(2**62)]).view(pa.timestamp("us")),
            "-4611686018427387904",
        ),
        (t.Time(), pa.array([0, 86_400_000_000]).view(pa.time64("us")), "86400000000"),
        (t.Time(), pa.array([0, -1]).view(pa.time64("us")), "-1"),
    ],
)
def test_times_that_python_cannot_hold_are_refused_and_never_read_as_others(
    type_: t.Type, column: pa.Array, found: str
) -> None:
    record = one_field(type_)
    array = pa.StructArray.from_arrays([column], fields=list(ColumnBuilder(record).type))
    with pytest.raises(errors.Unfit, match=f"row 1, field 'x': expected {t.kind(type_)}.*{found}"):
        Conformer(record).conform(array)
    if not isinstance(type_, t.Time):
        with pytest.raises(errors.Unfit, match="a value that Python cannot hold"):
            RowReader(record).read(array)


def test_nested_nulls_and_half_set_unions_are_found_in_arrow_data() -> None:
    inner = t.Record("I", (t.Field("a", t.Int(64)),))
    record = one_field(t.Nullable(inner))
    loose = pa.struct([("x", pa.struct([("a", pa.int64())]))])
    good = pa.array([{"x": {"a": 1}}, {"x": None}], loose)
    assert RowReader(record).read(Conformer(record).conform(good)) == [{"x": {"a": 1}}, {"x": None}]
    with pytest.raises(errors.Unfit, match=r"row 1, field 'x.a': expected int64, found null"):
        Conformer(record).conform(pa.array([{"x": None}, {"x": {"a": None}}], loose))
    union = one_field(t.Union((t.Int(64), t.String())))
    both = pa.array([{"x": {"member0": 1, "member1": "a"}}], ColumnBuilder(union).type)
    with pytest.raises(errors.Unfit, match="one option of"):
        Conformer(union).conform(both)
    listed = one_field(t.List(t.Int(64)))
    with pytest.raises(errors.Unfit, match=r"field 'x\[\]'.*null"):
        Conformer(listed).conform(pa.array([{"x": [1, None]}]))
