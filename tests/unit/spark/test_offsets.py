"""SourceOffset and planning: pure functions, checked against what they promise."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import ConfigError, DataLoss
from millstream.spark.source.offsets import (
    OffsetRange,
    PartitionOffset,
    PartitionState,
    SourceOffset,
    TaskSplit,
    TopicPartition,
    from_json,
    lag,
    limited_ends,
    message_counts,
    offset_ranges,
    task_counts,
    to_json,
)
from millstream.spark.source.partitions import check_partition

CREATED = "2026-01-01T00:00:00Z"
partitions = st.tuples(st.sampled_from(["a", "b", "c-1"]), st.integers(0, 12))
partition_offsets = st.builds(
    PartitionOffset,
    next=st.integers(1, 1000),
    created=st.sampled_from([CREATED, "other"]),
    last_time=st.sampled_from(["", "t"]),
    tasks=st.integers(1, 9),
)
offsets = st.dictionaries(partitions, partition_offsets, max_size=8)


@given(offsets)
def test_json_keeps_an_offset_and_its_order_of_keys(given_: SourceOffset) -> None:
    text = json.dumps(to_json(given_))
    assert from_json(json.loads(text)) == given_
    backwards = dict(reversed(list(given_.items())))
    assert json.dumps(to_json(backwards)) == text


def test_the_offset_of_another_source_is_rejected() -> None:
    with pytest.raises(ConfigError, match="another source"):
        from_json({"orders": {"0": 17}})


def test_the_lag_counts_a_new_stream_from_its_first_message() -> None:
    done = {("a", 0): PartitionOffset(5, CREATED), ("a", 1): PartitionOffset(5, "older")}
    end = {key: PartitionOffset(9, CREATED) for key in (("a", 0), ("a", 1), ("a", 2))}
    assert lag(to_json(done), json.dumps(to_json(end))) == 4 + 8 + 8


@given(offsets, offsets)
def test_ranges_cover_a_batch_exactly_once_and_in_order(
    start: SourceOffset, end: SourceOffset
) -> None:
    ranges = offset_ranges(start, end)
    assert ranges == offset_ranges(dict(reversed(list(start.items()))), end)
    covered: dict[TopicPartition, list[int]] = {}
    for part in ranges:
        assert part.start < part.end
        covered.setdefault((part.topic, part.partition), []).extend(range(part.start, part.end))
    for key, reached in end.items():
        known = start.get(key)
        first = known.next if known is not None and known.created == reached.created else 1
        assert covered.get(key, []) == list(range(first, reached.next))


A0, A1 = ("a", 0), ("a", 1)


def state_of(key: TopicPartition, following: int, size: int = 100) -> PartitionState:
    return PartitionState(*key, "s", "p", CREATED, 1, following, message_bytes=size)


@given(
    st.dictionaries(partitions, st.tuples(st.integers(1, 500), st.integers(0, 500))),
    st.integers(1, 900),
)
def test_a_limit_is_kept_and_shared_by_backlog(
    given_: dict[TopicPartition, tuple[int, int]], most: int
) -> None:
    start = {key: PartitionOffset(first, CREATED) for key, (first, _) in given_.items()}
    states = {key: state_of(key, first + size) for key, (first, size) in given_.items()}
    ends = limited_ends(start, states, most)
    taken = {key: ends[key] - start[key].next for key in given_}
    backlog = sum(size for _, size in given_.values())
    assert sum(taken.values()) == min(most, backlog)
    assert all(0 <= taken[key] <= size for key, (_, size) in given_.items())


def test_no_limit_reads_to_the_end() -> None:
    states = {A0: state_of(A0, 10)}
    assert limited_ends({A0: PartitionOffset(3, CREATED)}, states, None) == {A0: 10}
    # A stream that lost its end is read from its new end.
    assert limited_ends({A0: PartitionOffset(30, CREATED)}, states, 5) == {A0: 10}


def test_tasks_follow_the_options_or_the_size() -> None:
    states = {A0: state_of(A0, 1, 1024 * 1024), A1: state_of(A1, 1, 10)}
    backlog = {A0: 100, A1: 100}
    assert task_counts(backlog, states, TaskSplit()) == {A0: 1, A1: 1}
    assert task_counts(backlog, states, TaskSplit(by_size=True)) == {A0: 13, A1: 1}
    assert task_counts(backlog, states, TaskSplit(min_tasks=4)) == {A0: 2, A1: 2}
    assert task_counts(backlog, states, TaskSplit(messages_per_task=30)) == {A0: 4, A1: 4}
    assert task_counts({A0: 2, A1: 0}, states, TaskSplit(min_tasks=50)) == {A0: 2, A1: 1}
    assert task_counts({A0: 10**6, A1: 0}, states, TaskSplit(by_size=True))[A0] == 32


def test_one_partition_is_split_by_offset() -> None:
    end = {A0: PartitionOffset(11, CREATED, tasks=3)}
    assert offset_ranges({A0: PartitionOffset(1, CREATED)}, end) == [
        OffsetRange("a", 0, 1, 4),
        OffsetRange("a", 0, 4, 7),
        OffsetRange("a", 0, 7, 11),
    ]
    assert message_counts({}, end) == {A0: 10}


LOST = [
    (PartitionOffset(5, "older"), "was created again"),
    (PartitionOffset(50, CREATED), "lost messages at its end"),
    (PartitionOffset(2, CREATED), "offsets 2 to 3 expired"),
]


@pytest.mark.parametrize(("start", "text"), LOST)
def test_lost_data_stops_the_query_or_warns(
    start: PartitionOffset, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    state = replace(state_of(A0, 20), first=4)
    with pytest.raises(DataLoss, match=text):
        check_partition(start, state, fail=True)
    check_partition(start, state, fail=False)
    assert text in caplog.text


def test_a_table_loses_nothing_when_old_values_are_dropped() -> None:
    state = replace(state_of(A0, 20), first=4, gaps=True)
    check_partition(PartitionOffset(2, CREATED), state, fail=True)
