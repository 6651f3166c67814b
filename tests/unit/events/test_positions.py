"""Positions of writers: numbers and pairs, one by one and by column, always the same order."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import ConfigError, DataLoss
from millstream.events.fence import FenceState, read_state, state_headers
from millstream.events.positions import Position, Positions, as_position, order_of, spread_of
from millstream.messaging.publishing.writer_lane import Notes, Spread
from millstream.wire.protocol import encode_headers

WORD = st.integers(0, 2**64 - 1) | st.integers(0, 5)
PAIRS = st.lists(st.tuples(WORD, WORD), min_size=1, max_size=30, unique=True).map(sorted)
NUMBERS = st.lists(WORD, min_size=1, max_size=30, unique=True).map(sorted)
PLACES = st.one_of(PAIRS, NUMBERS)


def column(places: list[Position]) -> Positions:
    """Positions as a frame has them."""
    if isinstance(places[0], int):
        return Positions.given("at", pa.table({"at": pa.array(places, pa.uint64())}))
    major, minor = zip(*places, strict=True)
    arrays = [pa.array(part, pa.uint64()) for part in (major, minor)]
    return Positions.given(arrays, pa.table({"value": [b""] * len(places)}))


@given(PLACES, st.data())
def test_columns_order_positions_as_python_does(
    places: list[Position], data: st.DataObject
) -> None:
    found = column(places)
    assert [found.at(row) for row in range(len(found))] == places
    edge = data.draw(st.sampled_from(places))
    assert found.upto(edge) == sum(order_of(place) <= order_of(edge) for place in places)
    start = data.draw(st.integers(0, len(places)))
    joined = Positions.joined([found.slice(0, start), found.slice(start)])
    assert [joined.at(row) for row in range(len(joined))] == places
    assert found.spread().to_pylist() == [spread_of(place) for place in places]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=6))
def test_a_frame_whose_positions_do_not_grow_is_refused(places: list[tuple[int, int]]) -> None:
    if places == sorted(set(places)):
        column(list(places))
    else:
        with pytest.raises(ConfigError, match="must grow from row to row"):
            column(list(places))


@given(st.integers(1, 40), st.integers(0, 2**64 - 1) | st.integers(0, 50), WORD)
def test_rows_count_up_to_the_position_of_the_last(count: int, last: int, major: int) -> None:
    if count > last + 1:
        with pytest.raises(ConfigError, match="the first one would have"):
            Positions.up_to(last, count)
        return
    wanted = list(range(last - count + 1, last + 1))
    numbers, pairs = Positions.up_to(last, count), Positions.up_to((major, last), count)
    assert [numbers.at(row) for row in range(count)] == wanted
    assert [pairs.at(row) for row in range(count)] == [(major, number) for number in wanted]


@given(PLACES, st.integers(1, 5), st.integers(1, 4), st.booleans(), st.data())
def test_frames_and_single_events_go_to_the_same_lanes(
    places: list[Position], partitions: int, lanes: int, keyed: bool, data: st.DataObject
) -> None:
    spread = Spread(partitions, lanes)
    keys = [data.draw(st.sampled_from([None, b"a", b"b", b"c"])) if keyed else None for _ in places]
    named = {"key": pa.array(keys, pa.binary())} if keyed else {}
    rows = pa.RecordBatch.from_pydict({**named, "value": [b"%d" % n for n in range(len(places))]})
    for number, part in spread.parts(rows, column(places)):
        for row, value in enumerate(part.batch.column("value").to_pylist()):
            place = places[int(value)]
            assert part.positions.at(row) == place
            assert number == spread.lane(keys[int(value)], place)


@given(PLACES, st.data())
def test_the_note_of_a_position_is_the_last_one_up_to_it(
    places: list[Position], data: st.DataObject
) -> None:
    notes, model = Notes(), {}
    for place in places:
        if data.draw(st.booleans()):
            notes.add(place, f"at {place}")
            model[place] = f"at {place}"
    forgotten = data.draw(st.integers(0, len(places) - 1))
    notes.forget(places[forgotten])
    for place in places[forgotten:]:
        before = [known for known in model if order_of(known) <= order_of(place)]
        wanted = (before[-1], model[before[-1]]) if before else None
        assert notes.at(place) == wanted


def test_what_is_no_position_is_refused() -> None:
    wrong = ["7", 1.5, None, (1,), (1, 2, 3), (1, -1), (2**64, 0), (1, "a")]
    for given_one in wrong:
        with pytest.raises(ConfigError, match="position "):
            as_position(given_one)
    with pytest.raises(ConfigError, match="no column 'lsn'; found a"):
        Positions.given("lsn", pa.table({"a": [1]}))
    for values in (["x"], [1.5]):
        with pytest.raises(ConfigError, match="column of whole numbers"):
            Positions.given("a", pa.table({"a": values}))
    with pytest.raises(ConfigError, match="0 positions for 1 rows"):
        Positions.given("a", pa.table({"a": pa.array([None], pa.int64())}))
    with pytest.raises(ConfigError, match="positions from 0 to"):
        Positions.given("a", pa.table({"a": [-1]}))


@given(st.one_of(st.integers(0, 2**96), st.tuples(WORD, WORD)), st.booleans())
def test_a_fence_holds_numbers_and_pairs(place: Position, noted: bool) -> None:
    state = FenceState(4, 2, 9, owner="me").next(
        place, "text" if noted else None, place if noted else None
    )
    block = encode_headers(state_headers("w", state))
    assert read_state(4, block) == state
    assert read_state(4, block).place == place


def test_a_fence_of_an_earlier_version_is_read() -> None:
    old = [("Mill-Epoch", "3"), ("Mill-Number", "8"), ("Mill-Position", "77"), ("Mill-Note", "n")]
    state = read_state(5, encode_headers(old))
    assert (state.place, state.note, state.noted) == (77, "n", None)
    for damaged in ("", "7/", "/7", "7/8/9", "a/b"):
        with pytest.raises(DataLoss):
            read_state(5, encode_headers([*old[:2], ("Mill-Position", damaged)]))
