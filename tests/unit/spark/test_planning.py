"""Offsets and planning: pure functions, checked against what they promise."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import ConfigError, DataLoss
from millstream.spark.source.offsets import Offsets, Position, from_json, to_json
from millstream.spark.source.planning import (
    Cut,
    Log,
    Piece,
    check_log,
    limited,
    pieces,
    sizes,
    tasks_for,
)

LOG = "2026-01-01T00:00:00Z"
places = st.tuples(st.sampled_from(["a", "b", "c-1"]), st.integers(0, 12))
positions = st.builds(
    Position,
    next=st.integers(1, 1000),
    log=st.sampled_from([LOG, "other"]),
    last=st.sampled_from(["", "t"]),
    tasks=st.integers(1, 9),
)
offsets = st.dictionaries(places, positions, max_size=8)


@given(offsets)
def test_json_keeps_an_offset_and_its_order_of_keys(given_: Offsets) -> None:
    text = json.dumps(to_json(given_))
    assert from_json(json.loads(text)) == given_
    backwards = dict(reversed(list(given_.items())))
    assert json.dumps(to_json(backwards)) == text


def test_the_offset_of_another_source_is_refused() -> None:
    with pytest.raises(ConfigError, match="another source"):
        from_json({"orders": {"0": 17}})


@given(offsets, offsets)
def test_pieces_cover_a_range_exactly_once_and_in_order(start: Offsets, end: Offsets) -> None:
    cut = pieces(start, end)
    assert cut == pieces(dict(reversed(list(start.items()))), end)
    covered: dict[tuple[str, int], list[int]] = {}
    for piece in cut:
        assert piece.start < piece.end
        covered.setdefault((piece.topic, piece.partition), []).extend(range(piece.start, piece.end))
    for where, position in end.items():
        begin = start[where].next if where in start and start[where].log == position.log else 1
        assert covered.get(where, []) == list(range(begin, position.next))


def log_of(where: tuple[str, int], following: int, size: int = 100) -> Log:
    return Log(where[0], where[1], "s", "p", LOG, 1, following, message_bytes=size)


@given(
    st.dictionaries(places, st.tuples(st.integers(1, 500), st.integers(0, 500))),
    st.integers(1, 900),
)
def test_a_limit_is_kept_and_shared_by_backlog(
    logs: dict[tuple[str, int], tuple[int, int]], most: int
) -> None:
    start = {where: Position(begin, LOG) for where, (begin, _) in logs.items()}
    known = {where: log_of(where, begin + size) for where, (begin, size) in logs.items()}
    ends = limited(start, known, most)
    taken = {where: ends[where] - start[where].next for where in logs}
    backlog = sum(size for _, size in logs.values())
    assert sum(taken.values()) == min(most, backlog)
    assert all(0 <= taken[where] <= size for where, (_, size) in logs.items())


def test_no_limit_reads_to_the_end() -> None:
    where = ("a", 0)
    assert limited({where: Position(3, LOG)}, {where: log_of(where, 10)}, None) == {where: 10}
    # A log that lost its end is followed from where it is now.
    assert limited({where: Position(30, LOG)}, {where: log_of(where, 10)}, 5) == {where: 10}


def test_tasks_follow_the_options_or_the_size() -> None:
    where, other = ("a", 0), ("a", 1)
    logs = {where: log_of(where, 1, 1024 * 1024), other: log_of(other, 1, 10)}
    backlog = {where: 100, other: 100}
    assert tasks_for(backlog, logs, Cut()) == {where: 1, other: 1}
    assert tasks_for(backlog, logs, Cut(by_size=True)) == {where: 13, other: 1}
    assert tasks_for(backlog, logs, Cut(min_tasks=4)) == {where: 2, other: 2}
    assert tasks_for(backlog, logs, Cut(messages_per_task=30)) == {where: 4, other: 4}
    assert tasks_for({where: 2, other: 0}, logs, Cut(min_tasks=50)) == {where: 2, other: 1}
    assert tasks_for({where: 10**6, other: 0}, logs, Cut(by_size=True))[where] == 32


def test_one_partition_is_cut_by_sequence() -> None:
    end = {("a", 0): Position(11, LOG, tasks=3)}
    assert pieces({("a", 0): Position(1, LOG)}, end) == [
        Piece("a", 0, 1, 4),
        Piece("a", 0, 4, 7),
        Piece("a", 0, 7, 11),
    ]
    assert sizes({}, end) == {("a", 0): 10}


LOST = [
    (Position(5, "older"), "was made anew"),
    (Position(50, LOG), "lost messages at its end"),
    (Position(2, LOG), "offsets 2 to 3 expired"),
]


@pytest.mark.parametrize(("position", "text"), LOST)
def test_lost_data_stops_the_query_or_warns(
    position: Position, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    log = replace(log_of(("a", 0), 20), first=4)
    with pytest.raises(DataLoss, match=text):
        check_log(position, log, fail=True)
    check_log(position, log, fail=False)
    assert text in caplog.text


def test_a_table_loses_nothing_when_old_values_go() -> None:
    check_log(Position(2, LOG), replace(log_of(("a", 0), 20), first=4, gaps=True), fail=True)
