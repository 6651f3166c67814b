"""Lists of values and keys: checked first, cut into lots, a field as the key."""

from __future__ import annotations

import enum
import uuid
from collections import deque
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import ConfigError, Unfit
from millstream.events.key_field import KeyField
from millstream.events.lots import LotLimits, lots_of
from millstream.events.row_buffer import RowBuffer
from millstream.events.subject import key_bytes
from millstream.schemas import ColumnBuilder, declare

LIMITS = LotLimits(events=3, bytes=100)


class Side(enum.StrEnum):
    BUY = "buy"


@dataclass
class Order:
    name: str
    number: int
    id: uuid.UUID
    side: Side
    data: bytes
    note: str | None = None
    price: float = 0.0


ORDER = Order("ann", 7, uuid.UUID(int=1), Side.BUY, b"\xff")


class Typed:
    """As much of a topic's schema as a buffer needs."""

    schema_id = "1"

    def __init__(self) -> None:
        self._builder = ColumnBuilder(declare(Order).record)

    def column(self, values: Any) -> Any:
        return self._builder.build(values)


TYPED: Any = Typed()


def cut(values: Any, keys: Any = None, key: Any = None, typed: Any = None) -> list[tuple[Any, Any]]:
    return [(lot.values, lot.keys) for lot in lots_of(values, keys, key, typed, LIMITS)]


@pytest.mark.parametrize(
    "kind", [list, tuple, iter, deque, lambda given: dict.fromkeys(given).keys()]
)
def test_values_are_cut_by_number(kind: Any) -> None:
    given = [b"%d" % number for number in range(7)]
    lots = cut(kind(given))
    assert [len(values) for values, _ in lots] == [3, 3, 1]
    assert [value for values, _ in lots for value in values] == given
    assert cut(kind([])) == []


def test_values_of_bytes_are_cut_by_size() -> None:
    lots = cut([b"x" * 60, b"y" * 60, b"z", {"a": 1}, None])
    assert [[len(value or b"") for value in values] for values, _ in lots] == [[60, 60], [1, 7, 0]]


@given(st.lists(st.one_of(st.none(), st.text(max_size=5), st.binary(max_size=5)), max_size=8))
def test_keys_are_what_send_makes_of_them(keys: list[str | bytes | None]) -> None:
    one_by_one, at_once = RowBuffer(TYPED), RowBuffer(TYPED)
    try:
        for key in keys:
            one_by_one.add(ORDER, key)
    except ConfigError:
        with pytest.raises(ConfigError, match=f"key {len(one_by_one)}: "):
            cut([ORDER] * len(keys), keys, typed=TYPED)
        return
    for lot in lots_of([ORDER] * len(keys), keys, None, TYPED, LIMITS):
        at_once.add_lot(lot)
    assert len(at_once) == len(keys)
    if keys:
        found = at_once.build(at_once.drain())
        assert found.equals(one_by_one.build(one_by_one.drain()))
        stored = found.column("key").to_pylist() if any(k is not None for k in keys) else None
        assert stored in (None, [None if key is None else key_bytes(key) for key in keys])


def test_nothing_is_taken_of_a_list_with_something_wrong() -> None:
    many = [b"v"] * 10
    for arguments, message in (
        ((many, ["k"] * 9), "keys for 9 of 10 values"),
        ((many, ["k"] * 11), "keys for more of 10 values"),
        ((many, (f"{n}" for n in range(12))), "keys for more of 10 values"),
        ((many, ["k"] * 9 + [5]), "key 9: a key is text or bytes, found int"),
        ((many, ["k"] * 9 + ["k" * 1025]), "key 9: a key of 1,025 bytes"),
        ((many, ["k"] * 9 + ["é" * 513]), "key 9: a key of 1,026 bytes"),
        ((many, ["k"] * 9 + ["\ud800"]), "key 9: .*lone surrogate"),
        (([*many, 5],), "value 10: .*found int"),
        (([*many, {"a": b"1"}],), "value 10: .*JSON"),
        ((many, ["k"] * 10, "name"), "not both"),
        ((many, None, "name"), "value 0 has no field 'name'"),
        (([{"name": 1.5}], None, "name"), "value 0: a key is text or bytes, found float"),
        ((many, None, 5), "the name of a field"),
        ((many, "kkkkkkkkkk"), "keys are a list"),
        (("text",), "values are a list .*found str"),
        (({"a": 1},), "values are a list .*found dict"),
        ((5,), "values are a list .*found int"),
        ((pa.table({"a": [1]}),), "send_batch"),
    ):
        given: Any = (*arguments, None, None)
        lots = lots_of(given[0], given[1], given[2], None, LIMITS)
        with pytest.raises(ConfigError, match=message):
            next(lots)


def test_of_a_generator_the_lots_before_an_error_are_taken() -> None:
    lots = lots_of((b"%d" % n for n in range(5)), iter(["k"] * 6), None, None, LIMITS)
    assert [len(next(lots)), len(next(lots))] == [3, 2]
    with pytest.raises(ConfigError, match="more keys than values: there are 5"):
        next(lots)
    lots = lots_of((n for n in [b"0", b"1", b"2", 3]), None, None, None, LIMITS)
    assert len(next(lots)) == 3
    with pytest.raises(ConfigError, match="value 3: "):
        next(lots)


def test_no_more_of_a_generator_is_read_than_a_lot() -> None:
    read: list[int] = []

    def endless() -> Any:
        while True:
            read.append(1)
            yield b"v"

    next(lots_of(endless(), None, None, None, LIMITS))
    assert len(read) == LIMITS.events


@pytest.mark.parametrize(
    ("field", "key"),
    [
        ("name", b"ann"),
        ("number", b"7"),
        ("id", b"00000000-0000-0000-0000-000000000001"),
        ("side", b"buy"),
        ("data", b"\xff"),
        ("note", None),
    ],
)
def test_a_field_is_the_key(field: str, key: bytes | None) -> None:
    of_type = KeyField(field, TYPED)
    assert of_type.column(TYPED.column([ORDER])).to_pylist() == [key]
    as_dict = {name: getattr(ORDER, name) for name in ORDER.__dataclass_fields__}
    for values in ([ORDER, ORDER], [as_dict], [ORDER, as_dict]):
        routed = [None if k is None else key_bytes(k) for k in of_type.keys_of(values)]
        assert routed == [key] * len(values)


def test_a_field_that_cannot_be_the_key_is_refused_at_once() -> None:
    with pytest.raises(
        ConfigError, match="no field 'nome', which is to be the key; the fields are name,"
    ):
        cut([], key="nome", typed=TYPED)
    with pytest.raises(ConfigError, match="field 'price' is double: a key is text"):
        cut([], key="price", typed=TYPED)


def test_values_without_a_usable_key_have_no_partition_and_are_unfit() -> None:
    field = KeyField("name", TYPED)
    long = Order("x" * 1025, 1, ORDER.id, Side.BUY, b"")
    odd = Order(5, 1, ORDER.id, Side.BUY, b"")  # type: ignore[arg-type]
    half = Order("\ud800", 1, ORDER.id, Side.BUY, b"")
    assert field.keys_of([ORDER, long, half]) == ["ann", None, None]
    assert field.keys_of([ORDER, odd, None, 7]) == [b"ann", None, None, None]
    with pytest.raises(Unfit) as found:
        field.column(TYPED.column([ORDER, long]))
    assert (found.value.field, found.value.row) == ("name", 1)


def test_a_field_and_given_keys_may_meet_in_a_buffer() -> None:
    buffer = RowBuffer(TYPED)
    for keys, key in ((["a"], None), (None, "name"), (None, "number"), (None, None)):
        for lot in lots_of([ORDER], keys, key, TYPED, LIMITS):
            buffer.add_lot(lot)
    buffer.add(ORDER, b"\xfe")
    buffer.add_event(ORDER, "z", None, None, "id-1")
    for lot in lots_of([ORDER], None, "name", TYPED, LIMITS):
        buffer.add_lot(lot)
    first = buffer.drain(5)
    assert [first.count, len(buffer)] == [5, 2]
    rest = buffer.build(buffer.drain())
    assert buffer.build(first).column("key").to_pylist() == [b"a", b"ann", b"7", None, b"\xfe"]
    assert rest.column("key").to_pylist() == [b"z", b"ann"]
    assert rest.column("id").to_pylist() == ["id-1", None]


def test_the_rest_of_a_buffer_knows_its_bytes() -> None:
    buffer = RowBuffer(None)
    for lot in lots_of([b"12", None, {"a": 1}, b"1"], None, None, None, LIMITS):
        buffer.add_lot(lot)
    assert buffer.bytes == 10
    buffer.drain(1)
    assert buffer.bytes == 8
