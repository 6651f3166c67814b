"""Rows of the replication stream: few of them take one way, many another, with one result."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.cdc.postgres import row_texts
from millstream.cdc.postgres.pgoutput import Relation
from millstream.cdc.postgres.row_texts import DecodedRows, Texts, decode_rows
from millstream.errors import LogUnreadable
from tests.unit.cdc.pgoutput_messages import UNCHANGED, Value, change, relation

WIDTH = 3
TABLE = relation("id", "name", "note")
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
VALUES: st.SearchStrategy[Value] = TEXTS | st.none() | st.just(UNCHANGED)
TUPLES = st.lists(VALUES, min_size=WIDTH, max_size=WIDTH)
Row = tuple[str, Sequence[Value] | None, Sequence[Value] | None, str]
ROWS: st.SearchStrategy[Row] = st.one_of(
    st.tuples(st.just("I"), TUPLES, st.none(), st.just("")),
    st.tuples(st.just("U"), TUPLES, st.none() | TUPLES, st.sampled_from("KO")),
    st.tuples(st.just("D"), st.none(), TUPLES, st.sampled_from("KO")),
)


@pytest.fixture(params=["many", "few"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of decoding, whatever the number of rows."""
    few = 10**9 if request.param == "few" else 1
    monkeypatch.setattr(row_texts, "_FEW", few)
    return str(request.param)


def both_ways(table: Relation, payloads: Sequence[bytes], **options: Any) -> list[DecodedRows]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_texts, "_FEW", 10**9)
        few = decode_rows(table, payloads, **options)
        patch.setattr(row_texts, "_FEW", 1)
        return [few, decode_rows(table, payloads, **options)]


def values(columns: Sequence[Texts | None] | None, row: int) -> list[Value] | None:
    """A row of what was decoded, as it was before it was encoded."""
    if columns is None:
        return None
    found: list[Value] = []
    for column in columns:
        assert column is not None
        column.texts.validate(full=True)
        gone = column.unchanged is not None and column.unchanged[row].as_py()
        found.append(UNCHANGED if gone else column.texts[row].as_py())
    return found


@given(st.lists(ROWS, min_size=1, max_size=8))
def test_rows_come_back_as_they_were_sent(rows: list[Row]) -> None:
    payloads = [change(kind, new, old, old_kind) for kind, new, old, old_kind in rows]
    for decoded in both_ways(TABLE, payloads):
        assert len(decoded) == len(rows)
        assert bytes(decoded.kind) == "".join(row[0] for row in rows).encode()
        for at, (_, new, old, old_kind) in enumerate(rows):
            nothing = [None] * WIDTH
            assert values(decoded.new, at) == (nothing if new is None else new)
            assert decoded.old_kind[at] == (0 if old is None else ord(old_kind))
            if decoded.old is not None:
                assert values(decoded.old, at) == (nothing if old is None else old)
            else:
                assert old is None


def test_unchanged_is_not_null_and_is_marked_only_where_there_is_any(way: str) -> None:
    rows = [change("U", ["1", UNCHANGED, None]), change("U", ["2", "b", None])]
    decoded = decode_rows(TABLE, rows)
    id_, name, note = decoded.new
    assert id_ is not None
    assert name is not None
    assert note is not None
    assert id_.unchanged is None
    assert note.unchanged is None
    assert name.unchanged is not None
    assert name.unchanged.to_pylist() == [True, False]
    assert name.texts.to_pylist() == [None, "b"]


def test_only_the_wanted_columns_are_decoded(way: str) -> None:
    payloads = [change("U", ["1", "a", "x"], ["2", "b", "y"])] * 3
    decoded = decode_rows(TABLE, payloads, wanted=[2])
    assert [column is None for column in decoded.new] == [True, True, False]
    assert decoded.new[2] is not None
    assert decoded.new[2].texts.to_pylist() == ["x"] * 3
    assert decoded.old is not None
    assert decoded.old[0] is None


def test_no_rows_are_no_rows() -> None:
    decoded = decode_rows(TABLE, [])
    assert len(decoded) == 0
    assert decoded.old is None
    assert [len(column.texts) for column in decoded.new if column] == [0, 0, 0]


def test_a_table_without_columns_has_rows_all_the_same(way: str) -> None:
    assert len(decode_rows(relation(), [change("I", []), change("I", [])])) == 2


GOOD = change("U", ["1", "abc", None], ["7", UNCHANGED, "x"])


def test_a_row_that_is_cut_anywhere_is_refused(way: str) -> None:
    decode_rows(TABLE, [GOOD, GOOD])
    for size in range(len(GOOD)):
        for payloads in ([GOOD[:size]], [GOOD, GOOD[:size]], [GOOD[:size], GOOD]):
            with pytest.raises(LogUnreadable, match="cannot be decoded"):
                decode_rows(TABLE, payloads)


WRONG = {
    "more bytes": GOOD + b"\0",
    "another relation": change("I", ["1", "a", "b"], oid=1),
    "too few columns": change("I", ["1", "a"]),
    "too many columns": change("I", ["1", "a", "b", "c"]),
    "an unknown kind": b"X" + GOOD[1:],
    "an insert with an old tuple": b"I" + GOOD[1:],
    "a deletion with a new tuple": change("D", ["1", "a", "b"]),
    "binary values": change("I", ["1", "a", "b"]).replace(b"t", b"b"),
    "a length beyond the end": change("I", ["1", "a", "b"]).replace(b"\0\0\0\1", b"\0\0\1\1"),
    "a negative length": change("I", ["1", "a", "b"]).replace(b"\0\0\0\1", b"\xff\xff\xff\xff"),
    "no new tuple": change("U", None, ["1", "a", "b"]),
}


@pytest.mark.parametrize("payload", WRONG.values(), ids=WRONG.keys())
def test_a_row_is_refused_that_has(payload: bytes, way: str) -> None:
    good = change("I", ["1", "a", "b"])
    decode_rows(TABLE, [good] * 3)
    with pytest.raises(LogUnreadable, match=r"public\.orders"):
        decode_rows(TABLE, [good, payload, good])


def test_a_text_that_is_not_utf8_is_refused_with_the_column_named(way: str) -> None:
    bad = change("I", ["1", "abc", None]).replace(b"abc", b"a\xffc")
    with pytest.raises(LogUnreadable, match="'name' has a text that is not UTF-8"):
        decode_rows(TABLE, [change("I", ["1", "abc", None]), bad])


def test_texts_split_by_a_row_boundary_are_not_taken_for_one(way: str) -> None:
    # Two halves of one character: together they are UTF-8, each alone is not.
    halves = [change("I", ["1", mark, None]).replace(b"?", byte) for mark, byte in HALVES]
    with pytest.raises(LogUnreadable, match="not UTF-8"):
        decode_rows(TABLE, halves)


HALVES = (("?", b"\xc3"), ("?", b"\xa9"))


def test_garbled_rows_are_refused_or_read_the_same_in_both_ways(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(15)
    outcomes = set()
    for _ in range(400):
        rows = [bytearray(GOOD) for _ in range(3)]
        for _ in range(rng.randint(1, 3)):
            row = rng.choice(rows)
            row[rng.randrange(len(row))] = rng.choice(b"ntuNKOIUD\0\1\xff")
        payloads = [bytes(row) for row in rows]
        try:
            few, many = both_ways(TABLE, payloads)
        except LogUnreadable:
            monkeypatch.setattr(row_texts, "_FEW", 1)
            with pytest.raises(LogUnreadable):
                decode_rows(TABLE, payloads)
            monkeypatch.undo()
            outcomes.add("refused")
            continue
        outcomes.add("read")
        for at in range(3):
            assert values(few.new, at) == values(many.new, at)
            assert values(few.old, at) == values(many.old, at)
    assert outcomes == {"refused", "read"}


def test_the_length_of_a_text_may_need_three_bytes(way: str) -> None:
    large = "x" * (2**16 + 3)
    decoded = decode_rows(TABLE, [change("I", ["1", large, None])] * 2)
    assert decoded.new[1] is not None
    assert decoded.new[1].texts.to_pylist() == [large, large]
