"""Dicts and lists as JSON: what is written, what is refused, and what is read back."""

from __future__ import annotations

import dataclasses
import uuid
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import ConfigError, NotJson
from millstream.events.encoding import value_bytes
from millstream.events.json_value import as_json, json_bytes, read_json
from millstream.events.row_buffer import RowBuffer

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # UTF-8 has no lone surrogates.
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner)
    ),
    max_leaves=20,
)


@dataclasses.dataclass
class Point:
    x: object


def where() -> str:
    return "orders/0, offset 7, index 0"


@given(PLAIN)
def test_what_is_written_is_read_back(value: Any) -> None:
    assert read_json(json_bytes([value]), where) == [value]


def test_other_values_are_written_as_msgspec_writes_them() -> None:
    value = {
        1: Decimal("1.10"),
        "at": datetime(2026, 1, 2, tzinfo=UTC),
        "id": uuid.UUID(int=1),
        "tuple": (1, 2),
        "set": {3},
        "point": Point(4),
    }
    assert json_bytes(value) == (
        b'{"1":"1.10","at":"2026-01-02T00:00:00Z","id":"00000000-0000-0000-0000-000000000001",'
        b'"tuple":[1,2],"set":[3],"point":{"x":4}}'
    )


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"a": float("nan")}, "value['a'] is nan"),
        ([{"b": float("-inf")}], "value[0]['b'] is -inf"),
        ({"a": [0, {"b": b"x"}]}, "value['a'][1]['b'] is of type bytes"),
        ({"a": {"b": (1, memoryview(b""))}}, "value['a']['b'][1] is of type memoryview"),
        ({"a": {object()}}, "value['a'][0] is of type object"),
        ({"a": Point(b"x")}, "value['a'] is of type Point"),
        ({"a": Point(float("nan"))}, "value['a'] is of type Point"),
        ({"a": {None: 1}}, "value['a'] is a dict with a key that is neither text nor a number"),
        ({"a": "\ud800"}, "value['a'] is text with a lone surrogate"),
    ],
)
def test_what_json_cannot_hold_is_refused_and_located(value: Any, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        json_bytes(value)
    assert told in str(refused.value)


def test_a_value_that_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ConfigError, match="nested too deeply"):
        json_bytes(value)


@pytest.mark.parametrize("value", [42, 1.5, True, None, (1,), {1}, Point(1)])
def test_a_bare_value_is_refused_with_what_to_do(value: Any) -> None:
    told = f"found {type(value).__name__}. Declare the topic with a schema, or convert it"
    with pytest.raises(ConfigError) as refused:
        value_bytes(value)
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"secret", "malformed"),
        (b'{"secret":', "truncated"),
        (b'"secret\xff"', "not UTF-8"),
        (b"[" * 5000, "nested too deeply"),
        (b"", "empty"),
        (None, "no value"),
        ({"a": 1}, "schema"),
    ],
)
def test_what_is_not_json_is_named_and_not_shown(data: Any, reason: str) -> None:
    with pytest.raises(NotJson, match="orders/0, offset 7, index 0: not JSON") as refused:
        read_json(data, where)
    assert reason in str(refused.value)
    assert "secret" not in str(refused.value)


def test_the_content_type_of_the_caller_is_kept() -> None:
    assert as_json({}, None)[1] == {"content-type": "application/json"}
    assert as_json({}, {"a": "b"})[1] == {"content-type": "application/json", "a": "b"}
    assert as_json({}, {"Content-Type": "application/x"})[1] == {"Content-Type": "application/x"}
    assert as_json(b"x", None) == (b"x", None)


def test_a_pack_has_the_header_for_its_dicts_only() -> None:
    buffer = RowBuffer(None)
    for values in ([{"n": n} for n in range(3)], [b"x", {"a": 1}, None]):
        for value in values:
            buffer.add(value, "k")
        batch = buffer.build(buffer.drain())
        json_type = [("content-type", b"application/json")]
        expected = [json_type if isinstance(value, dict) else None for value in values]
        assert batch.column("headers").to_pylist(maps_as_pydicts=None) == [
            None if pairs is None else [{"key": k, "value": v} for k, v in pairs]
            for pairs in expected
        ]
    assert batch.column("value").to_pylist() == [b"x", b'{"a":1}', None]


def test_a_refused_value_leaves_the_buffer_as_it_was() -> None:
    buffer = RowBuffer(None)
    buffer.add(b"x", "k")
    with pytest.raises(ConfigError, match="nan"):
        buffer.add({"a": float("nan")}, "k")
    with pytest.raises(ConfigError, match="bytes"):
        buffer.add_event({"a": b""}, "k", {"h": "1"}, None, None)
    buffer.add({"a": 1}, "k")
    batch = buffer.build(buffer.drain())
    assert batch.column("value").to_pylist() == [b"x", b'{"a":1}']
    assert isinstance(batch, pa.RecordBatch)
