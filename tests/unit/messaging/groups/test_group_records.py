"""Positions and what is done beyond them: the record that a partition's next owner reads."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import MillstreamError
from millstream.messaging.groups.records import (
    OPEN_MAX,
    MemberRecord,
    ParkedAt,
    PartitionProgress,
    PartitionRecord,
    Position,
    decode_record,
)


def written(progress: PartitionProgress, before: PartitionRecord) -> PartitionRecord:
    position, high, unfinished = progress.state()
    record = msgspec.structs.replace(before, position=position, high=high, open=unfinished)
    return decode_record(msgspec.json.encode(record), PartitionRecord)


def test_nothing_done_is_written_as_it_was() -> None:
    before = PartitionRecord(position=(7, 2))
    assert PartitionProgress(before).state() == ((7, 2), (7, 2), ())


def test_the_position_waits_for_the_first_unfinished_event() -> None:
    progress = PartitionProgress(PartitionRecord(position=(1, 0)))
    for offset in range(1, 5):
        progress.add((offset, 0))
        progress.read_up_to((offset + 1, 0))
    progress.done((1, 0))
    progress.done((3, 0))
    assert progress.state() == ((2, 0), (5, 0), ((2, 0), (4, 0)))
    progress.done((2, 0))
    progress.done((4, 0))
    assert progress.state() == ((5, 0), (5, 0), ())


def test_events_finished_after_the_position_are_not_repeated() -> None:
    record = PartitionRecord(position=(2, 0), high=(5, 0), open=((2, 0), (4, 0)))
    progress = PartitionProgress(record)
    wanted = [offset for offset in range(1, 8) if progress.wants((offset, 0))]
    assert wanted == [2, 4, 5, 6, 7]


def test_an_owner_that_has_not_read_everything_again_forgets_nothing() -> None:
    record = PartitionRecord(position=(2, 0), high=(9, 0), open=((2, 0), (6, 0)))
    progress = PartitionProgress(record)
    progress.add((2, 0))
    progress.read_up_to((3, 0))
    progress.done((2, 0))
    assert progress.state() == ((6, 0), (9, 0), ((6, 0),))


def test_the_record_names_a_limited_number_of_unfinished_events() -> None:
    progress = PartitionProgress(PartitionRecord(position=(1, 0)))
    for offset in range(1, OPEN_MAX + 101):
        progress.add((offset, 0))
        progress.read_up_to((offset + 1, 0))
    position, high, unfinished = progress.state()
    assert position == (1, 0)
    assert len(unfinished) == OPEN_MAX
    assert high == (OPEN_MAX + 1, 0)


EVENTS = [(offset, index) for offset in range(1, 7) for index in range(3)]  # packs of three


def end_of(position: Position) -> Position:
    offset, index = position
    return (offset, index + 1) if index < 2 else (offset + 1, 0)


@given(data=st.data(), owners=st.integers(1, 6))
def test_over_any_number_of_crashes_each_event_is_done_once_if_all_was_written(
    data: st.DataObject, owners: int
) -> None:
    record = PartitionRecord(position=(1, 0))
    done: list[Position] = []
    for owner in range(owners + 1):
        progress = PartitionProgress(record)
        todo = [place for place in EVENTS if place >= (record.position[0], 0)]
        last = owner == owners
        amount = len(todo) if last else data.draw(st.integers(0, len(todo)))
        running: list[Position] = []
        for place in todo[:amount]:
            if progress.wants(place):
                progress.add(place)
                running.append(place)
            progress.read_up_to(end_of(place))
        chosen = running if last else data.draw(st.sets(st.sampled_from(running or EVENTS)))
        for place in running:
            if place in chosen:
                progress.done(place)
                done.append(place)
        record = written(progress, record)
    assert sorted(done) == EVENTS
    assert record.position == (7, 0)


def test_a_record_survives_its_json() -> None:
    record = PartitionRecord(
        position=(3, 1),
        owner="m-1",
        epoch=4,
        parked={"a=2Eb": ParkedAt(2, 0, 99)},
        mark=(2, 123),
        trying=(3, 1),
    )
    assert decode_record(msgspec.json.encode(record), PartitionRecord) == record


def test_a_record_of_a_newer_version_is_refused() -> None:
    payload = msgspec.json.encode(MemberRecord(name="m", lease=1.0, version=2))
    with pytest.raises(MillstreamError, match="Upgrade all members"):
        decode_record(payload, MemberRecord)


def test_a_record_that_is_not_json_is_refused() -> None:
    with pytest.raises(MillstreamError, match="not readable"):
        decode_record(b"{", PartitionRecord)
