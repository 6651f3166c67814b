"""Rows in memory: each read is a copy, whether it is made of bytes or of kept fields."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import PayloadTooLarge, Unfit
from millstream.messaging.processing import state_table
from millstream.messaging.processing.settings import ProcessTarget
from millstream.messaging.processing.state_table import Meter, StateTable
from millstream.schemas import Schema
from millstream.schemas.declaration import declare
from millstream.schemas.registry.binding import TypedValues
from millstream.schemas.registry.records import new_record


@dataclass
class Flat:
    amount: int
    note: str = ""


@dataclass
class Nested:
    amount: int
    notes: list[str]


async def _nothing(_: int) -> Schema:
    raise AssertionError("no other version is needed")


def make_table(cls: type, message_max: int = 1_000_000) -> StateTable:
    schema = declare(cls)
    record = new_record("t", "json", None).followed_by(10, schema.fingerprint)
    values = TypedValues(record, [schema], _nothing, cls)
    shape = SimpleNamespace(route=lambda key: (0, key.encode()))
    target: Any = SimpleNamespace(value_type=values, shape=shape)
    return StateTable(ProcessTarget("t", target, True, message_max), Meter())


def undo(table: StateTable) -> None:
    """What a worker does when the function raises."""
    for _, key, old, first in reversed(table._meter.journal):
        table.put_back(key, old, first)
    table._meter.journal.clear()


KEYS = st.sampled_from(["a", "b", "c", "d"])
STEP = st.one_of(
    st.tuples(st.just("add"), KEYS, st.integers(-5, 5)),
    st.tuples(st.just("change only"), KEYS, st.integers(-5, 5)),
    st.tuples(st.just("keep what is assigned"), KEYS, st.integers(-5, 5)),
    st.tuples(st.just("long"), KEYS, st.just(0)),
    st.tuples(st.just("delete"), KEYS, st.just(0)),
    st.tuples(st.just("unfit"), KEYS, st.just(0)),
)
# Steps of one event, whether it fails, and whether there is a commit after it.
EVENT = st.tuples(st.lists(STEP, max_size=4), st.booleans(), st.booleans())


def do(rows: Any, make: Any, step: tuple[str, str, int], is_model: bool) -> None:
    """One step of a function; the model does what a table promises, with copies of its own."""
    what, key, number = step
    row = deepcopy(rows.get(key)) or make()
    if what == "add":
        row.amount += number
        rows[key] = row
    elif what == "change only":
        row.amount += number
    elif what == "keep what is assigned":
        row.amount += number
        rows[key] = deepcopy(row) if is_model else row
        row.amount = 1000
    elif what == "long":
        row.amount += 1
        if isinstance(row, Flat):
            row.note = "x" * 300
        rows[key] = row
    elif what == "delete":
        rows.pop(key, None)
    elif not is_model:
        row.amount = "x"
        with pytest.raises(Unfit):
            rows[key] = row


def test_a_row_that_a_failed_event_deletes_and_makes_again_is_committed() -> None:
    table = make_table(Nested)
    table["a"] = Nested(1, [])
    table._meter.journal.clear()
    del table["a"]
    table["a"] = Nested(2, [])
    undo(table)
    assert [row.payload for _, row in table.take()] == [b'{"amount":1,"notes":[]}']


@pytest.mark.parametrize("kept", [2, 20_000])
@pytest.mark.parametrize("cls", [Flat, Nested])
@settings(max_examples=150, deadline=None)
@given(st.lists(EVENT, max_size=12), st.booleans())
def test_a_table_is_a_dict_of_copies_wherever_commits_are(
    kept: int, cls: type, events: list[Any], rewinds: bool
) -> None:
    make = (lambda: Flat(0)) if cls is Flat else (lambda: Nested(0, []))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_table, "KEPT_ROWS", kept)
        table, model = make_table(cls), dict[str, Any]()
        stored, committed = dict[str, bytes](), dict[str, Any]()
        for steps, fails, commits in events:
            before = deepcopy(model)
            for step in steps:
                do(table, make, step, is_model=False)
                do(model, make, step, is_model=True)
                assert {key: table.get(key) for key in "abcd" if key in table} == model
            if fails:
                undo(table)
                model = before
            table._meter.journal.clear()
            if commits:
                stored.update({row.subject.decode(): bytes(row.payload) for _, row in table.take()})
                committed = deepcopy(model)
            assert dict(table) == model
        if rewinds:
            table.roll_back()
            assert dict(table) == committed
    decode = cast(Any, table._decode)
    assert {key: decode(data, "10") for key, data in stored.items() if data} == committed
    assert len(table._kept) <= kept


def test_rows_of_plain_fields_are_not_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    table = make_table(Flat)
    table["a"] = Flat(1)
    monkeypatch.setattr(StateTable, "_decode", property(), raising=False)
    for _ in range(2):
        assert table["a"] == table.get("a") == Flat(1)
        assert table["a"] is not table["a"]
        assert len(list(table.take())) == 1
        table["a"] = Flat(1)


def test_rows_of_plain_fields_are_encoded_once_for_a_commit() -> None:
    table = make_table(Flat)
    encoded: list[Any] = []
    encode = table._encode

    def counted(value: Any) -> bytes:
        encoded.append(value)
        return encode(value)

    table._encode = counted
    for number in range(10):
        table["a"] = Flat(number)
    assert encoded == []
    assert table.changed_bytes() == len("a") + len(b'{"amount":9,"note":""}')
    assert [row.payload for _, row in table.take()] == [b'{"amount":9,"note":""}']
    assert encoded == [{"amount": 9, "note": ""}]


def test_a_row_that_may_be_too_large_for_its_table_is_encoded_at_once() -> None:
    table = make_table(Flat, message_max=900)
    table["a"] = Flat(1, "x" * 200)
    with pytest.raises(PayloadTooLarge):
        table["b"] = Flat(1, "x" * 400)
    assert list(table) == ["a"]
