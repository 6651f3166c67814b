"""The offset formula against a model that lists every offset."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.gateways.kafka.offset_index import NO_EVENTS, RUN_MAX, UNKNOWN, OffsetIndex

TIMES = st.integers(-5, 40)
PACK = st.tuples(st.just("pack"), st.lists(TIMES, max_size=6))
PLAIN = st.tuples(st.just("plain"), TIMES | st.none())
RUN = st.tuples(st.just("run"), st.integers(1, 1500))
SKIP = st.tuples(st.just("skip"), st.integers(0, 50))
STEPS = st.lists(PACK | PLAIN | RUN | SKIP, max_size=40)


class Model:
    """Every offset with its sequence and time (None: unknown or no event)."""

    def __init__(self) -> None:
        self.index = OffsetIndex()
        self.bases: dict[int, int] = {}
        self.records: list[tuple[int, int, int | None]] = []  # offset, sequence, time
        self.sequence, self.offset = 1, 0

    def take(self, kind: str, what: object) -> None:
        if kind == "skip":
            assert isinstance(what, int)
            self.index.skip_to(self.offset + what)
            self.offset += what
        elif kind == "pack":
            assert isinstance(what, list)
            assert self.index.add_pack(len(what), max(what, default=0)) == self.offset
            self._message(what)
        elif kind == "plain":
            assert what is None or isinstance(what, int)
            time = NO_EVENTS if what is None else what
            assert self.index.add_plain(time) == self.offset
            self._message([what])
        else:
            assert isinstance(what, int)
            self.index.add_run(self.sequence + what)
            for _ in range(what):
                self._message([None])

    def _message(self, times: list[int | None]) -> None:
        self.bases[self.sequence] = self.offset
        for time in times:
            self.records.append((self.offset, self.sequence, time))
            self.offset += 1
        self.sequence += 1

    def check(self, index: OffsetIndex) -> None:
        assert (index.next_sequence, index.end_offset) == (self.sequence, self.offset)
        for sequence, base in self.bases.items():
            assert index.base_offset(sequence) == base
        for offset, sequence, _ in self.records:
            assert index.sequence_of(offset) == sequence


@given(STEPS)
def test_every_offset_leads_to_its_message_and_back(steps: list[tuple[str, object]]) -> None:
    model = Model()
    for kind, what in steps:
        model.take(kind, what)
    model.check(model.index)


@given(STEPS, st.integers(1, 7))
def test_an_index_kept_in_parts_is_the_same(steps: list[tuple[str, object]], size: int) -> None:
    model = Model()
    for kind, what in steps:
        model.take(kind, what)
    index = model.index
    parts = [index.part(1, size)]
    while parts[-1].next_sequence < index.next_sequence:
        parts.append(index.part(parts[-1].next_sequence, size))
    restored = OffsetIndex.restored(parts, index.next_sequence, index.end_offset)
    model.check(restored)
    for time in range(-6, 42):
        assert restored.next_unit(time, 1) == index.next_unit(time, 1)
    model.index = restored
    model.take("pack", [1, 2, 3])
    model.take("plain", 4)
    model.check(restored)


@given(st.lists(PACK | PLAIN, max_size=60), st.integers(-6, 41))
def test_the_first_unit_of_a_time_has_the_first_record_of_it(
    steps: list[tuple[str, object]], time: int
) -> None:
    model = Model()
    for kind, what in steps:
        model.take(kind, what)
    wanted = next((r for r in model.records if r[2] is not None and r[2] >= time), None)
    found = model.index.next_unit(time, 1)
    if wanted is None:
        assert found is None
    else:
        assert found is not None
        start, stop, known = found
        assert known
        assert start <= wanted[1] < stop


def test_an_unknown_time_is_looked_at_before_later_units_and_remembered() -> None:
    index = OffsetIndex()
    index.add_pack(10, 5)
    index.add_pack(10)
    index.add_pack(10, 50)
    assert index.next_unit(20, 1) == (2, 3, False)
    assert index.latest_unit(1) == (2, 3, False)
    index.set_time(2, 3, 15)
    assert index.next_unit(20, 1) == (3, 4, True)
    assert index.next_unit(10, 1) == (2, 3, True)
    assert index.next_unit(10, 3) == (3, 4, True)
    assert index.latest_unit(1) == (3, 4, True)
    assert index.next_unit(51, 1) is None


def test_a_run_that_grew_while_its_times_were_read_stays_unknown() -> None:
    index = OffsetIndex()
    index.add_plain(UNKNOWN)
    found = index.next_unit(3, 1)
    assert found == (1, 2, False)
    index.add_plain(7)
    index.set_time(1, 2, 1)
    assert index.next_unit(3, 1) == (1, 3, False)


def test_runs_have_a_limited_length() -> None:
    index = OffsetIndex()
    for _ in range(RUN_MAX + 1):
        index.add_plain(0)
    assert len(index) == 2
    index.add_run(5 * RUN_MAX)
    assert len(index) == 6
    assert index.base_offset(5 * RUN_MAX - 1) == 5 * RUN_MAX - 2


def test_a_gap_leads_to_the_message_before_it() -> None:
    index = OffsetIndex()
    index.add_pack(3, 0)
    index.skip_to(100)
    index.add_pack(2, 0)
    assert [index.sequence_of(offset) for offset in (2, 3, 99, 100, 101)] == [1, 1, 1, 2, 2]
    assert index.sequence_of(102) == 3
    assert index.end_offset == 102
    index.skip_to(50)
    assert index.end_offset == 102


def test_what_retention_removed_is_forgotten_and_the_rest_keeps_its_offsets() -> None:
    index = OffsetIndex()
    for _ in range(5000):
        index.add_pack(10, 0)
    index.trim(4001)
    assert index.first_sequence == 4001
    assert index.base_offset(4001) == 40_000
    assert index.sequence_of(40_005) == 4001
    assert index.sequence_of(5) == 4001
    with pytest.raises(LookupError):
        index.base_offset(4000)
    index.trim(4002)
    assert index.base_offset(5000) == 49_990


def test_parts_that_do_not_fit_together_are_refused() -> None:
    index = OffsetIndex()
    for _ in range(10):
        index.add_pack(10, 0)
    parts = [index.part(1, 5), index.part(6, 5)]
    assert index.units_from(6) == parts[1].units == 5
    with pytest.raises(ValueError, match="order"):
        OffsetIndex.restored(parts[::-1], index.next_sequence, index.end_offset)
    with pytest.raises(ValueError, match="order"):
        OffsetIndex.restored(parts, 3, index.end_offset)


def test_offsets_from_a_message_on_can_be_made_smaller() -> None:
    index = OffsetIndex()
    index.add_pack(3)
    index.add_run(4)
    index.skip_to(100)
    index.add_pack(2)
    index.add_plain(0)
    index.lower(4, 90)
    assert [index.base_offset(sequence) for sequence in range(1, 7)] == [0, 3, 4, 10, 12, 13]
    assert index.end_offset == 13
    assert [index.sequence_of(offset) for offset in (2, 4, 9, 10, 12)] == [1, 3, 3, 4, 5]
