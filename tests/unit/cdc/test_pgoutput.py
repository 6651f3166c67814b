"""Messages of the replication stream, one by one."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.cdc.postgres.pgoutput import (
    Relation,
    RelationColumn,
    lsn_number,
    lsn_text,
    parse_begin,
    parse_commit,
    parse_relation,
    parse_truncate,
    relation_of,
)
from millstream.errors import LogUnreadable
from tests.unit.cdc.pgoutput_messages import change, relation_payload

MICROSECONDS_OF_2000 = 946_684_800_000_000
NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
COLUMNS = st.builds(
    RelationColumn,
    NAMES,
    st.booleans(),
    st.integers(0, 2**32 - 1),
    st.integers(-(2**31), 2**31 - 1),
)
RELATIONS = st.builds(
    Relation,
    st.integers(0, 2**32 - 1),
    NAMES.filter(bool),
    NAMES,
    st.sampled_from("dnfi"),
    st.lists(COLUMNS, max_size=5).map(tuple),
)


@given(RELATIONS)
def test_a_relation_comes_back_as_it_was_sent(one: Relation) -> None:
    assert parse_relation(relation_payload(one)) == one


def test_times_of_begin_and_commit_count_from_1970() -> None:
    begin = struct.pack(">cQqI", b"B", 0x16B374D848, 1_000_000, 77)
    assert parse_begin(begin) == (0x16B374D848, MICROSECONDS_OF_2000 + 1_000_000, 77)
    commit = struct.pack(">cBQQq", b"C", 0, 5, 9, -1)
    assert parse_commit(commit) == (5, 9, MICROSECONDS_OF_2000 - 1)


def test_a_truncate_names_all_its_relations() -> None:
    assert parse_truncate(struct.pack(">cIBII", b"T", 2, 3, 10, 2**32 - 1)) == (3, (10, 2**32 - 1))


PAYLOADS: dict[Callable[[bytes], object], bytes] = {
    parse_relation: relation_payload(
        Relation(1, "public", "t", "d", (RelationColumn("id", True, 23, -1),))
    ),
    parse_begin: struct.pack(">cQqI", b"B", 1, 2, 3),
    parse_commit: struct.pack(">cBQQq", b"C", 0, 1, 2, 3),
    parse_truncate: struct.pack(">cIBI", b"T", 1, 0, 10),
}


@pytest.mark.parametrize("parse", PAYLOADS, ids=lambda parse: parse.__name__)
def test_a_message_that_is_cut_or_too_long_is_refused(parse: Callable[[bytes], object]) -> None:
    whole = PAYLOADS[parse]
    parse(whole)
    for wrong in [*(whole[:size] for size in range(len(whole))), whole + b"\0"]:
        with pytest.raises(LogUnreadable, match="PostgreSQL's stream cannot be decoded"):
            parse(wrong)


def test_a_count_that_the_message_cannot_hold_is_refused_before_anything_is_read() -> None:
    with pytest.raises(LogUnreadable, match="4294967295 relations"):
        parse_truncate(struct.pack(">cIB", b"T", 2**32 - 1, 0))
    with pytest.raises(LogUnreadable, match="65535 columns"):
        parse_relation(b"R\0\0\0\1public\0t\0d\xff\xff")


def test_a_name_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(LogUnreadable, match="not UTF-8"):
        parse_relation(b"R\0\0\0\1\xff\0t\0d\0\0")


def test_the_relation_of_a_change_is_known_without_decoding_it() -> None:
    assert relation_of(change("I", ["1"], oid=99)) == 99
    with pytest.raises(LogUnreadable):
        relation_of(b"I\0\0")


@given(st.integers(0, 2**64 - 1))
def test_a_log_position_comes_back_from_its_text(number: int) -> None:
    assert lsn_number(lsn_text(number)) == number


@pytest.mark.parametrize("text", ["", "16", "16/", "/1", "x/1", "1/100000000", "-1/1", "1/2/3"])
def test_what_is_no_log_position_is_refused(text: str) -> None:
    with pytest.raises(LogUnreadable, match="not a log position"):
        lsn_number(text)
