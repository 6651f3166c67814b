"""Texts of PostgreSQL as Arrow arrays, and its types in topics, without a server."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.cdc.model import Column
from millstream.cdc.postgres.arrays import array_items, split_arrays
from millstream.cdc.postgres.types import (
    TypeFacts,
    from_adbc,
    from_text,
    select_expression,
    type_of,
)
from millstream.errors import Unfit
from millstream.schemas import types as t
from millstream.schemas.arrow_types import arrow_type

ITEMS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.none()
PLAIN = set("abcdefghijklmnopqrstuvwxyz0123456789")


def array_text(items: list[str | None]) -> str:
    """As PostgreSQL writes it: what could be taken for something else is in quotes."""

    def text(item: str | None) -> str:
        if item is None:
            return "NULL"
        if item and PLAIN.issuperset(item):
            return item
        return '"' + item.replace("\\", "\\\\").replace('"', '\\"') + '"'

    return "{" + ",".join(map(text, items)) + "}"


def lists_of(texts: list[str | None]) -> list[list[str | None] | None] | int:
    found = split_arrays(pa.array(texts, pa.string()))
    if isinstance(found, int):
        return found
    items, offsets = found
    lists: list[list[str | None] | None] = pa.ListArray.from_arrays(offsets, items).to_pylist()
    return lists


@given(st.lists(st.lists(ITEMS, max_size=4) | st.none(), max_size=5))
def test_arrays_come_back_from_their_texts(arrays: list[list[str | None] | None]) -> None:
    texts = [None if items is None else array_text(items) for items in arrays]
    assert lists_of(texts) == arrays


WORDS = st.lists(st.text("ab1", min_size=1, max_size=3) | st.none(), max_size=4)


@given(st.lists(WORDS | st.none(), max_size=5))
def test_arrays_without_quotes_are_read_alike_in_bulk_and_one_by_one(
    arrays: list[list[str | None] | None],
) -> None:
    texts = [None if items is None else array_text(items) for items in arrays]
    assert lists_of(texts) == arrays
    # One with quotes sends all of them the other way.
    assert lists_of([*texts, '{"q"}']) == [*arrays, ["q"]]


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "}", "{}}", "{1,}", "{,1}", "{1,,2}", "{{1},{2}}", "[0:1]={1,2}", "1,2"),
        *('{"a}', '{"a"b}', '{a"b"}', "{a}b", '{"a\\"}', "{{}}", '{"a",}', "{\\}"),
    ],
)
def test_what_is_no_array_of_one_dimension_is_refused(text: str) -> None:
    assert array_items(text) is None
    assert lists_of(["{1}", None, text]) == 2


@given(st.text('{}",\\aN', max_size=30))
def test_any_text_is_an_array_or_refused_alike_in_bulk_and_one_by_one(text: str) -> None:
    items = array_items(text)
    assert lists_of([text]) == (0 if items is None else [items])


def test_a_long_text_is_refused_as_an_array_quickly() -> None:
    assert array_items('{"' + "\\a" * 500_000) is None
    assert array_items("{" + "a" * 1_000_000) is None
    assert array_items('{"' + "a" * 1_000_000 + "}") is None


# -- types --------------------------------------------------------------------------------


def test_numeric_is_a_decimal_only_if_a_decimal_can_hold_it() -> None:
    def numeric(precision: int, scale: int) -> t.Type:
        return type_of(1700, ((precision << 16) | (scale & 0x7FF)) + 4, {})

    assert numeric(10, 2) == t.Decimal(10, 2)
    assert numeric(38, 38) == t.Decimal(38, 38)
    assert numeric(39, 0) == t.String()
    assert numeric(3, 5) == t.String()
    assert numeric(3, -2) == t.String()
    assert type_of(1700, -1, {}) == t.String()


def test_a_domain_is_its_base_type_with_the_domains_own_precision() -> None:
    facts = {
        1: TypeFacts(1, "inner", "d", base=1700, base_typmod=(10 << 16 | 2) + 4),
        2: TypeFacts(2, "outer", "d", base=1),
        3: TypeFacts(3, "outer[]", item=2),
        4: TypeFacts(4, "list", "d", base=3),
    }
    assert type_of(2, -1, facts) == t.Decimal(10, 2)
    assert type_of(3, -1, facts) == t.List(item=t.Nullable(of=t.Decimal(10, 2)))
    assert type_of(4, -1, facts) == type_of(3, -1, facts)


def test_a_domain_that_is_its_own_base_does_not_hang() -> None:
    assert type_of(1, -1, {1: TypeFacts(1, "loop", "d", base=1)}) == t.String()


def test_an_enum_that_a_schema_cannot_have_is_text() -> None:
    assert type_of(1, -1, {1: TypeFacts(1, "m.x", "e", ("a", "b"))}) == t.Enum("m_x", ("a", "b"))
    assert type_of(1, -1, {1: TypeFacts(1, "mood", "e", ("", "b"))}) == t.String()
    assert type_of(1, -1, {1: TypeFacts(1, "mood", "e", ())}) == t.String()


def test_an_array_of_arrays_or_with_another_separator_is_text() -> None:
    facts = {
        1: TypeFacts(1, "list", "d", base=1007),
        2: TypeFacts(2, "list[]", item=1),
        1007: TypeFacts(1007, "_int4", item=23),
        3: TypeFacts(3, "_box", item=603),
        603: TypeFacts(603, "box", separator=";"),
    }
    assert type_of(2, -1, facts) == t.String()
    assert type_of(3, -1, facts) == t.String()


def test_an_unknown_type_is_text() -> None:
    assert type_of(999_999, -1, {}) == t.String()


# -- values -------------------------------------------------------------------------------

EVERY = (
    *(t.Bool(), t.Int(16), t.Int(32), t.Int(64), t.Float(32), t.Float(64), t.Decimal(10, 2)),
    *(t.String(), t.Binary(), t.Date(), t.Time(), t.Timestamp(), t.Timestamp(utc=False)),
    *(t.Uuid(), t.Enum("mood", ("sad", "ok"))),
    *(t.List(item=t.Nullable(of=t.Int(32))), t.List(item=t.Nullable(of=t.Binary()))),
)


@pytest.mark.parametrize("type_", EVERY, ids=t.kind)
def test_nothing_and_null_have_the_right_type(type_: t.Type) -> None:
    for texts in ([], [None], [None, None]):
        found = from_text(pa.array(texts, pa.string()), type_, "c")
        found.validate(full=True)
        assert found.type == arrow_type(type_)
        assert found.to_pylist() == texts


@pytest.mark.parametrize("type_", EVERY, ids=t.kind)
@given(text=st.text(max_size=12))
def test_any_text_is_a_value_or_refused(type_: t.Type, text: str) -> None:
    try:
        found = from_text(pa.array([None, text], pa.string()), type_, "c")
    except Unfit:
        return
    found.validate(full=True)
    assert found.type == arrow_type(type_)
    assert len(found) == 2


@given(st.lists(st.binary(max_size=9) | st.none(), max_size=9), st.integers(0, 9))
def test_bytes_come_back_from_hex_also_from_a_slice(values: list[bytes | None], cut: int) -> None:
    texts = [None if value is None else "\\x" + value.hex() for value in values]
    sliced = pa.array(texts, pa.string()).slice(cut)
    assert from_text(sliced, t.Binary(), "c").to_pylist() == values[cut:]


def test_the_first_value_that_does_not_fit_is_named_with_what_to_do() -> None:
    texts = pa.array([*["2026-01-01"] * 70, None, "infinity", "-infinity"])
    with pytest.raises(Unfit) as refused:
        from_text(texts, t.Date(), "public.orders.due")
    assert str(refused.value) == (
        "field 'public.orders.due': expected date of the years 1 to 9999, found 'infinity'; list "
        "the column under 'text' in the table's settings to capture it as PostgreSQL writes it"
    )


def test_a_long_value_is_not_repeated_in_the_error() -> None:
    with pytest.raises(Unfit) as refused:
        from_text(pa.array(["x" * 10_000]), t.Int(), "c")
    assert len(str(refused.value)) < 300


def test_an_unknown_label_of_an_enum_asks_for_a_restart() -> None:
    with pytest.raises(Unfit, match="'glad', a label that was added since"):
        from_text(pa.array(["sad", "glad"]), t.Enum("mood", ("sad", "ok")), "c")


def test_a_native_value_beyond_the_years_is_refused() -> None:
    moments = pa.array([None, 2**63 - 1], pa.int64()).cast(pa.timestamp("us", "UTC"))
    with pytest.raises(Unfit, match="list the column under 'text'"):
        from_adbc(moments, t.Timestamp(), "c")


def test_chunks_of_a_snapshot_are_one_array() -> None:
    chunks = pa.chunked_array([["1.50"], ["2.00"]])
    assert from_adbc(chunks, t.Decimal(10, 2), "c").to_pylist() == [
        *from_text(pa.array(["1.50", "2.00"]), t.Decimal(10, 2), "c").to_pylist()
    ]


def test_names_in_expressions_are_quoted() -> None:
    expression = select_expression(Column('a"b', t.String(), "inet"))
    assert expression.endswith('AS "a""b"')
    assert expression.count('"a""b"') == 3
