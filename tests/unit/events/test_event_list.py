"""Lists of events hold what reading one by one gives, in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millstream.errors import Undecodable
from millstream.events import unpack
from millstream.events.event import Event, Partition, Unreadable, datetime_of
from millstream.events.event_list import EventList
from millstream.events.packs.pack import encode, envelope
from millstream.events.unpack import event_lists_of, events_of, open_pack
from millstream.schemas.registry.binding import RawValues
from millstream.wire.message import RawMessage
from millstream.wire.protocol import encode_headers

STORED = 1_700_000_000_123_456_789
KEYS = st.sampled_from([b"a", b"b", b"\xff\xfe", "ü".encode(), None])
TIMES = st.none() | st.integers(-(10**15), 10**15)


class Picky:
    """Values of a topic with a schema, some of which cannot be decoded."""

    def decode(self, data: bytes, schema_id: str | None) -> Any:
        if data.startswith(b"!"):
            raise ValueError(f"cannot read {data!r}")
        return data.upper()

    def values(self, pack: Any) -> list[Any]:
        return [self._one(data) for data in pack.column("value").to_pylist()]

    def _one(self, data: bytes | None) -> Any:
        try:
            return None if data is None else self.decode(data, None)
        except ValueError as error:
            return Unreadable(error)

    async def learn(self, messages: object) -> None: ...


def partition(typed: bool) -> Partition:
    kind: Any = Picky() if typed else None
    return Partition("orders", "orders", 0, "orders", kind)


def message(number: int, token: bytes, headers: bytes, payload: bytes) -> RawMessage:
    reply = b"$JS.ACK.orders.c.1.%d.%d.%d.0" % (number, number, STORED + number)
    return RawMessage(b"orders." + token, reply, headers, payload)


def pack(rows: Sequence[tuple[bytes | None, int | None, bytes | None]]) -> tuple[bytes, bytes]:
    keys, times, values = (list(column) for column in zip(*rows, strict=True))
    batch = envelope(
        pa.array(values, pa.binary()),
        key=pa.array(keys, pa.binary()),
        timestamp=pa.array(times, pa.int64()).view(pa.timestamp("us", "UTC")),
    )
    made = encode(batch)
    return encode_headers(dict(made.headers)), bytes(made.payload)


VALUES = st.sampled_from([b"one", b"two", b"!bad", b"", None])
ROWS = st.lists(st.tuples(KEYS, TIMES, VALUES), min_size=1, max_size=80)
PLAIN = st.tuples(st.just("plain"), st.sampled_from([b"a", b"b", b"=C3=BC"]), VALUES)
KINDS = st.one_of(
    PLAIN,
    PLAIN,
    st.tuples(st.just("pack"), ROWS),
    st.tuples(st.just("own")),
    st.tuples(st.just("redriven")),
    st.tuples(st.just("broken")),
)


def messages(drawn: list[Any]) -> list[RawMessage]:
    found = []
    for number, (kind, *parts) in enumerate(drawn, 1):
        if kind == "plain":
            token, value = parts
            headers = encode_headers({"Mill-Null": "1"}) if value is None else b""
            found.append(message(number, token, headers, value or b""))
        elif kind == "pack":
            found.append(message(number, b"_pack.w", *pack(parts[0])))
        elif kind == "own":
            found.append(message(number, b"_fence.w", b"", b""))
        elif kind == "redriven":
            found.append(message(number, b"a", encode_headers({"Mill-For": "s"}), b"again"))
        else:
            found.append(message(number, b"a", encode_headers({"Mill-Pack": "9"}), b"rubbish"))
    return found


def seen(event: Event) -> Any:
    try:
        value = event.value
    except ValueError as error:
        value = str(error)
    key, times = event.key, (event.timestamp, event.timestamp_ns)
    return event.position, key, times, event.id, dict(event.headers), event.subject, value


def all_of(found: Any, into: list[Any]) -> str | None:
    """What was given, and the error that ended it."""
    try:
        for one in found:
            into.append(one)
    except Undecodable as error:
        return str(error)
    return None


@given(st.lists(KINDS, max_size=12), st.booleans(), st.sampled_from([(), ("a",), ("ü", "b")]))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@pytest.mark.parametrize("reported", [False, True])
def test_the_lists_one_after_the_other_are_what_is_read_one_by_one(
    reported: bool, drawn: list[Any], typed: bool, keys: tuple[str, ...]
) -> None:
    part, raws = partition(typed), messages(drawn)
    bad: list[Undecodable] = []
    bad_of_lists: list[Undecodable] = []
    one_by_one: list[Event] = []
    lists: list[EventList] = []
    end = all_of(events_of(part, raws, keys, bad.append if reported else None), one_by_one)
    report = bad_of_lists.append if reported else None
    assert all_of(event_lists_of(part, raws, keys, report), lists) == end
    assert list(map(str, bad_of_lists)) == list(map(str, bad))
    assert all(lists)
    expected = list(map(seen, one_by_one))
    assert [seen(event) for events in lists for event in events] == expected
    assert [seen(events[n]) for events in lists for n in range(len(events))] == expected
    assert [key for events in lists for key in events.keys] == [e.key for e in one_by_one]
    assert [o for events in lists for o in events.offsets] == [e.offset for e in one_by_one]
    assert [at for events in lists for at in events.timestamps] == [
        event.timestamp for event in one_by_one
    ]
    for events in lists:
        _check_values(events)


def _check_values(events: EventList) -> None:
    expected = [seen(event)[-1] for event in events]
    unreadable = [text for text in expected if isinstance(text, str)]
    if not unreadable:
        assert events.values == expected
        return
    with pytest.raises(Undecodable, match="cannot read") as raised:
        _ = events.values
    position = raised.value.partition, raised.value.offset, raised.value.index
    assert position == events[expected.index(unreadable[0])].position


def packed(count: int) -> EventList:
    start = 1_600_000_000_000_000
    rows = [(b"%d" % n, None if n % 7 == 0 else start + n, b"v%d" % n) for n in range(count)]
    raw = message(5, b"_pack.w", *pack(rows))
    [events] = event_lists_of(partition(typed=False), [raw])
    return events


@pytest.mark.parametrize("which", [slice(2, 5), slice(None, None, 3), slice(-4, None), slice(9, 2)])
def test_a_slice_is_a_list_of_the_same_events(which: slice) -> None:
    events = packed(100)
    part = events[which]
    assert isinstance(part, EventList)
    assert [seen(event) for event in part] == [seen(event) for event in list(events)[which]]
    assert part.values == events.values[which]
    assert part.keys == events.keys[which]
    assert part.timestamps == events.timestamps[which]
    assert part[:1].values == part.values[:1]


def test_a_list_is_a_sequence_with_its_parts_as_lists() -> None:
    events = packed(100)
    assert (len(events), events.topic, events.partition) == (100, "orders", 0)
    assert (events[-1].index, events[-1].value) == (99, b"v99")
    with pytest.raises(IndexError):
        _ = events[100]
    assert events.offsets == [5] * 100
    stored = datetime_of(STORED + 5)
    start = datetime(2020, 9, 13, 12, 26, 40, tzinfo=UTC)
    assert events.timestamps[:2] == [stored, start + timedelta(microseconds=1)]
    assert repr(events) == "<EventList of 100 event(s) of orders/0, offset 5>"
    assert repr(events[:0]) == "<EventList of 0 event(s) of orders/0, none>"
    single = [message(n, b"k", b"", b"x") for n in (3, 4)]
    [plain] = event_lists_of(partition(typed=False), single)
    assert repr(plain) == "<EventList of 2 event(s) of orders/0, offsets 3 to 4>"
    assert isinstance(plain[:1], EventList)
    assert plain[1:].values == [b"x"]


def test_values_are_made_once_and_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    values_of = Picky.values

    def counted(self: Picky, pack: Any) -> list[Any]:
        nonlocal calls
        calls += 1
        return values_of(self, pack)

    monkeypatch.setattr(Picky, "values", counted)
    raw = message(1, b"_pack.w", *pack([(b"a", None, b"x")] * 10))
    [events] = event_lists_of(partition(typed=True), [raw])
    assert events.keys == ["a"] * 10
    assert calls == 0
    assert events[2:4].values == [b"X", b"X"]
    assert events.values is events.values
    assert [event.value for event in events] == [b"X"] * 10
    assert calls == 1


def test_a_pack_is_decoded_when_its_turn_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []

    def counted(part: Partition, raw: RawMessage) -> Any:
        found = open_pack(part, raw)
        opened.append(found.address.sequence)
        return found

    monkeypatch.setattr(unpack, "open_pack", counted)
    raws = [message(n, b"_pack.w", *pack([(b"a", None, b"x")] * 2)) for n in range(1, 4)]
    events = events_of(partition(typed=False), raws)
    assert [next(events).offset for _ in range(3)] == [1, 1, 2]
    assert opened == [1, 2]


@pytest.mark.parametrize("in_lists", [False, True])
def test_a_stored_value_that_python_cannot_hold_is_left_out_alone(in_lists: bool) -> None:
    times = pa.array([1, 2**62, 3], pa.int64()).view(pa.timestamp("us"))
    made = encode(envelope(pa.StructArray.from_arrays([times], ["at"])), schema_id="orders-1")
    packed = message(1, b"_", encode_headers(dict(made.headers)), bytes(made.payload))
    stored = Partition("orders", "orders", 0, "orders", RawValues("orders"))
    reported: list[Undecodable] = []
    if in_lists:
        found = [e for part in event_lists_of(stored, [packed], (), reported.append) for e in part]
    else:
        found = list(events_of(stored, [packed], (), reported.append))
    assert [event.index for event in found] == [0, 2]
    assert [(error.offset, error.index) for error in reported] == [(1, 1)]
