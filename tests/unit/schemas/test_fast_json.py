"""JSON values: the fast path accepts, refuses and returns exactly what the checker does."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import json
import keyword
import types
from collections import OrderedDict, UserDict
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream import errors
from millstream.schemas import Schema
from millstream.schemas import types as t
from millstream.schemas.formats.json_wire import JsonWire
from millstream.schemas.values.fast_json import REFUSALS, fast_dump, fast_load, fast_load_into
from millstream.schemas.values.fit import jsonable
from tests.unit.schemas.schema_strategies import LEAVES, quick, records_and_values, values
from tests.unit.schemas.test_schema_shortcut import COLUMNS, ODD

TEXTS = (
    "", "A", "a", "1", "-1", "1.5", "1e3", "1_0", " 1 ", "NaN", "Infinity", "-0", "0.001", "٣",
    "2024-05-06", "2024-05-06T07:08:09Z", "2024-05-06T07:08:09.123456+02:00",
    "2024-05-06 07:08:09Z",
    "2024-05-06T07:08:09.1234567Z", "2024-05-06t07:08:09z", "2024-02-30", "2024-05-06T24:00:00Z",
    "0001-01-01T00:00:00+05:00", "9999-12-31T23:59:59-05:00", "2024-05-06T07:08:09",
    "07:08:09", "07:08:09.123", "07:08:09.123456", "07:08:09Z", "P1D", "PT1.5S", "-P1DT2S", "P1Y",
    "P200000000D", "YWJj", "YWJ", "YWJj\n", "____", "00000000-0000-0000-0000-000000000001",
    "00000000000000000000000000000001", "{00000000-0000-0000-0000-000000000001}", "é\u2028",
)  # fmt: skip
# Used as they are: `json.dumps` would not write some of these, or not like this.
LITERALS = (
    "null", "true", "false", "0", "-0", "1", "-1", "127", "128", "255", "256", "-129", "1.0",
    "-0.0", "1e0", "16777217", "9007199254740991", "9007199254740992", "9007199254740993",
    "-9007199254740993", "9223372036854775807", "9223372036854775808", "18446744073709551615",
    "18446744073709551616", "123456789012345678901234567890", "1e39", "1e308", "1e400", "1E-400",
    "NaN", "Infinity", '"\\ud800"', "[]", "{}", "[null]", "[1]", '{"a":1}', '{"1":1,"1":2}',
    '{"01":1}', '{"-0":1}', '{"+1":1}', '{"--5":1}', '{"1.0":1}', '{"300":1}', '{"a":1,"b":"x"}',
    '{"a":1,"c":2}', '{"a":"x","a":1}', '{"b":"x","a":1}', "[1,]", "", "01", "+1",
    *map(json.dumps, TEXTS),
)  # fmt: skip


def outcome(work: Callable[[Any], object], given: Any) -> tuple[str, ...]:
    """The result of a call, comparable with another's; values include their types."""
    try:
        return "accepted", repr(work(given))
    except errors.Unfit as error:
        return "refused", str(error), error.field, str(error.__suppress_context__)
    except Exception as error:
        return "raised", type(error).__name__, str(error)


def same_both_ways(wire: JsonWire, value: Any) -> None:
    """Writing a value does what the checker does; so does reading what was written."""
    written = outcome(wire.dump, value)
    assert written == outcome(wire.dump_by_checker, value), value
    if written[0] == "accepted":
        same_reading(wire, wire.dump(value))


def same_reading(wire: JsonWire, data: bytes) -> None:
    assert outcome(wire.load, data) == outcome(wire.load_by_checker, data), data


def wire_of(record: t.Record) -> JsonWire | None:
    """The wire of a record that JSON can hold; None for the others."""
    try:
        return JsonWire(Schema(record))
    except errors.SchemaError:
        return None


@pytest.mark.parametrize("type_", COLUMNS, ids=t.kind)
@pytest.mark.parametrize("nullable", [False, True], ids=["", "or null"])
def test_odd_values_are_accepted_or_refused_as_by_the_checker(
    type_: t.Type, nullable: bool
) -> None:
    field = t.Nullable(type_) if nullable else type_
    wire = wire_of(t.Record("R", (t.Field("x", field), t.Field("y", t.Int(64), 3))))
    assert wire is not None
    for value in ODD:
        same_both_ways(wire, {"x": value})
        same_both_ways(wire, {"x": value, "y": 1})
        same_both_ways(wire, {"x": value, "z": 1})
        same_both_ways(wire, value)
    for literal in LITERALS:
        same_reading(wire, f'{{"x":{literal}}}'.encode())
        same_reading(wire, f'{{"y":1,"x":{literal},"x":{literal}}}'.encode())
        same_reading(wire, literal.encode())


@pytest.mark.parametrize("type_", COLUMNS, ids=t.kind)
def test_a_constructor_gets_the_values_that_a_dict_would_have(type_: t.Type) -> None:
    def make(x: Any, y: Any) -> dict[str, Any]:
        return {"x": x, "y": y}

    def load_into(data: bytes) -> Any:
        return made(decode(data))

    record = t.Record("R", (t.Field("x", type_), t.Field("y", t.Int(64), 3)))
    steps = fast_load_into(make, record)
    assert steps is not None
    decode, made = steps
    load = fast_load(record)
    for literal in LITERALS:
        data = f'{{"x":{literal}}}'.encode()
        try:
            wanted = repr(load(data))
        except REFUSALS:
            with pytest.raises(REFUSALS):
                load_into(data)
        else:
            assert repr(load_into(data)) == wanted


@quick
@given(records_and_values(finite=True), st.data())
def test_random_records_behave_as_by_the_checker(
    case: tuple[t.Record, list[Any]], data: st.DataObject
) -> None:
    record, plain = case
    wire = wire_of(record)
    if wire is None:
        return
    for value in plain:
        same_both_ways(wire, value)
        same_both_ways(wire, as_object(value, data.draw))
        same_both_ways(wire, changed(value, data.draw, st.sampled_from(ODD)))
        form = changed(jsonable(value), data.draw, st.sampled_from(LITERALS).map(Literal))
        same_reading(wire, literally(form).encode())


class Literal:
    """JSON text inside a value, used as it is."""

    def __init__(self, text: str) -> None:
        self.text = text


def literally(form: Any) -> str:
    """The form as JSON, literals in it unchanged."""
    match form:
        case Literal():
            return form.text
        case dict():
            return f"{{{','.join(f'{json.dumps(k)}:{literally(v)}' for k, v in form.items())}}}"
        case list():
            return f"[{','.join(map(literally, form))}]"
        case _:
            return json.dumps(form)


def changed(value: Any, draw: Any, odd: st.SearchStrategy[Any]) -> Any:
    """The value with something odd in one part, a field less, or a field more."""
    if isinstance(value, dict) and value and draw(st.integers(0, 5)):
        key = draw(st.sampled_from(sorted(value, key=repr)))
        match draw(st.integers(0, 5)):
            case 0:
                return {k: v for k, v in value.items() if k != key}
            case 1:
                return {**value, "surely_unknown": draw(odd)}
            case _:
                return {**value, key: changed(value[key], draw, odd)}
    if isinstance(value, list) and value and draw(st.integers(0, 5)):
        index = draw(st.integers(0, len(value) - 1))
        return [*value[:index], changed(value[index], draw, odd), *value[index + 1 :]]
    return draw(odd)


def as_object(value: Any, draw: Any) -> Any:
    """The value with some of its dicts as objects or other mappings."""
    match value:
        case list():
            made = [as_object(item, draw) for item in value]
            return tuple(made) if draw(st.booleans()) else made
        case dict():
            items = {key: as_object(item, draw) for key, item in value.items()}
            return draw(st.sampled_from(SHAPES))(items)
        case _:
            return value


def _dataclass(items: dict[Any, Any]) -> Any:
    if not all(isinstance(k, str) and k.isidentifier() and not keyword.iskeyword(k) for k in items):
        return items
    return dataclasses.make_dataclass("Some", list(items))(**items)


def _struct(items: dict[Any, Any]) -> Any:
    if not all(isinstance(k, str) and k.isidentifier() for k in items):
        return items
    return msgspec.defstruct("Some", list(items))(**items)


def _reversed(items: dict[Any, Any]) -> Any:
    return _dataclass(dict(reversed(items.items())))


SHAPES: tuple[Callable[[dict[Any, Any]], Any], ...] = (
    dict, dict, _dataclass, _struct, _reversed, OrderedDict, UserDict, types.MappingProxyType,
)  # fmt: skip


@pytest.mark.parametrize(
    "type_",
    [*LEAVES, t.Enum("E", ("A", "B")), t.List(t.Int(8)), t.Map(t.Date()), t.Map(t.Bool(), t.Int(8)),
     t.Record("I", (t.Field("a", t.Int(64)), t.Field("b", t.String(), "")))],
    ids=t.kind,
)  # fmt: skip
def test_the_values_of_every_type_take_the_fast_path(type_: t.Type) -> None:
    record = t.Record("R", (t.Field("x", type_), t.Field("y", t.List(t.Nullable(type_)))))
    dump, load, wire = fast_dump(record), fast_load(record), JsonWire(Schema(record))

    @quick
    @given(values(type_, finite=True))
    def check(value: Any) -> None:
        if isinstance(value, float) and abs(value) >= 2**53:
            return  # a whole number of this size may have been rounded: the checker decides
        row = {"x": value, "y": [None, value]}
        data = dump(row)
        assert data == wire.dump_by_checker(row)
        assert repr(load(data)) == repr(wire.load_by_checker(data))

    check()


@dataclasses.dataclass
class Order:
    id: int
    at: dt.datetime
    price: decimal.Decimal = decimal.Decimal("1.00")


ORDER = t.Record(
    "Order",
    (
        t.Field("id", t.Int(64)),
        t.Field("at", t.Timestamp()),
        t.Field("price", t.Decimal(9, 2), decimal.Decimal("1.00")),
        t.Field("tags", t.List(t.String()), ["new"]),
    ),
)
NOON = dt.datetime(2024, 5, 6, 12, tzinfo=dt.UTC)


def test_an_object_takes_the_fast_path_and_gets_the_defaults_its_class_does_not_have() -> None:
    data = fast_dump(ORDER)(Order(7, NOON, decimal.Decimal(3)))
    assert data == b'{"id":7,"at":"2024-05-06T12:00:00Z","price":"3.00","tags":["new"]}'


def test_defaults_of_read_values_are_plain_and_belong_to_the_reader() -> None:
    load = fast_load(ORDER)
    first = load(b'{"id":7,"at":"2024-05-06T14:00:00+02:00"}')
    assert first == {"id": 7, "at": NOON, "price": decimal.Decimal("1.00"), "tags": ["new"]}
    first["tags"].append("old")
    assert load(b'{"id":7,"at":"2024-05-06T12:00:00Z"}')["tags"] == ["new"]


def test_an_attribute_that_is_not_a_field_of_its_class_is_ignored() -> None:
    class WithPrice(Order):
        tags = ("not a field",)

    schema = Schema(ORDER)
    assert b'"tags":["new"]' in JsonWire(schema).dump(WithPrice(7, NOON))


def test_an_object_that_only_has_the_attributes_is_refused() -> None:
    wire = JsonWire(Schema(ORDER))
    look_alike = types.SimpleNamespace(id=1, at=NOON, price=decimal.Decimal(1), tags=[])
    with pytest.raises(errors.Unfit, match="expected record Order"):
        wire.dump(look_alike)


@dataclasses.dataclass
class ItemsAndFields(UserDict[str, Any]):
    """A mapping whose class is also a dataclass: its items count."""

    id: int = 0
    at: dt.datetime = NOON
    price: decimal.Decimal = decimal.Decimal(0)
    tags: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.data = {"id": 5, "at": NOON}


def test_the_items_of_a_mapping_count_not_its_fields() -> None:
    assert JsonWire(Schema(ORDER)).dump(ItemsAndFields()).startswith(b'{"id":5,')


@pytest.mark.parametrize("name", ['a"b', "a\\b", "class", "__init__", "f1", "mro", "a b", "é", "1"])
def test_every_field_name_works(name: str) -> None:
    inner = t.Record("I", (t.Field(name, t.Int(8)), t.Field("f0", t.Date(), dt.date(2024, 1, 1))))
    wire = JsonWire(Schema(t.Record("R", (t.Field(name, t.Nullable(inner), None),))))
    same_both_ways(wire, {name: {name: 1}})
    same_both_ways(wire, {name: {name: 1000}})
    same_both_ways(wire, {})
    same_both_ways(JsonWire(Schema(inner)), {name: 1})


def test_a_subtle_mismatch_is_explained_by_the_checker() -> None:
    wire = JsonWire(Schema(ORDER))
    with pytest.raises(
        errors.Unfit, match=r"field 'price': expected decimal\(9,2\), found .*point"
    ):
        wire.dump({"id": 1, "at": NOON, "price": decimal.Decimal("1.234")})
    with pytest.raises(errors.Unfit, match=r"field 'tags': expected list<string>, found .*set"):
        wire.dump({"id": 1, "at": NOON, "tags": {"a"}})
    with pytest.raises(errors.Unfit, match="field 'id': expected int64, found bool True"):
        wire.load(b'{"id":true,"at":"2024-05-06T12:00:00Z"}')


def test_a_refusal_does_not_show_the_fast_path() -> None:
    wire = JsonWire(Schema(ORDER))
    for work, wrong in ((wire.dump, {"id": 1}), (wire.load, b'{"id":1}')):
        with pytest.raises(errors.Unfit) as found:
            work(wrong)  # type: ignore[arg-type]
        assert found.value.__context__ is None
