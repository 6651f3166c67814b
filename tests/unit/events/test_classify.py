"""What a message is: one rule, and every reader follows it."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.events.classify import Kind, is_for_another, kind_of
from millstream.events.event import Event, Partition
from millstream.events.packs.pack import encode, envelope
from millstream.events.unpack import events_in, events_of
from millstream.messaging.groups.event import group_events
from millstream.messaging.reading.batches import batches_of_messages
from millstream.messaging.reading.verify import Verification, _Walk
from millstream.spark.source.columns import RowBatches, kinds_of
from millstream.spark.source.frames import FrameCollector, Frames
from millstream.spark.source.offsets import PartitionState
from millstream.spark.source.values import BytesDecoder
from millstream.wire.message import RawMessage
from millstream.wire.protocol import encode_headers

PREFIX = "orders"
SIZE = len(PREFIX) + 1
MARKER = ("Nats-Marker-Reason", "MaxAge")
NULL = ("Mill-Null", "1")
PACK = ("Mill-Pack", "1")
FOR = ("Mill-For", "billing")


@pytest.mark.parametrize(
    ("subject", "pairs", "kind"),
    [
        ("orders.k", [], Kind.EVENT),
        ("orders.k", [("Nats-Msg-Id", "1"), ("Mill-Time", "5")], Kind.EVENT),
        ("orders._", [], Kind.EVENT),
        ("orders._", [NULL], Kind.DELETION),
        ("orders.k", [NULL], Kind.DELETION),
        ("orders.k", [MARKER], Kind.DELETION),
        ("orders.k", [("Nats-Msg-Id", "1"), MARKER, ("Nats-TTL", "1m")], Kind.DELETION),
        ("orders._pack.p1", [PACK], Kind.PACK),
        ("orders.k", [PACK], Kind.PACK),
        ("orders._pack.p1", [], Kind.OWN),
        ("orders._pack.p1", [MARKER], Kind.OWN),
        ("orders._redrive.q", [("Mill-Note", "1")], Kind.OWN),
        ("orders._for.billing.k", [FOR], Kind.REDRIVEN_EVENT),
        ("orders._for.billing.k", [FOR, NULL], Kind.REDRIVEN_DELETION),
        ("orders._for.billing._pack", [FOR, PACK], Kind.REDRIVEN_PACK),
        ("orders._for.billing.k", [MARKER], Kind.OWN),  # a redriven copy that expired
        ("orders.k", [("Note", "Mill-Pack: 1")], Kind.EVENT),
        ("orders.", [], Kind.DAMAGED),
        ("ord", [PACK], Kind.DAMAGED),
        ("orders.k", [("Note", "Mill-For: billing"), ("Mill-Nullable", "1")], Kind.EVENT),
    ],
)
def test_kinds(subject: str, pairs: list[tuple[str, str]], kind: Kind) -> None:
    block = encode_headers(pairs) if pairs else b""
    assert kind_of(subject.encode(), block, SIZE) is kind


def test_the_subjects_of_a_foreign_stream_say_nothing_about_the_kind() -> None:
    assert kind_of(b"_x.y", b"", 0) is Kind.EVENT
    assert kind_of(b"_x.y", encode_headers([NULL]), 0) is Kind.DELETION
    assert kind_of(b"_x.y", encode_headers([FOR]), 0) is Kind.REDRIVEN_EVENT


def test_a_redriven_copy_is_for_one_subscription() -> None:
    block = encode_headers([("Mill-For", "billing")])
    assert not is_for_another(block, "billing")
    assert is_for_another(block, "bill")
    assert is_for_another(block, "billing2")
    assert not is_for_another(encode_headers([("Nats-Msg-Id", "1")]), "bill")


# -- any headers --------------------------------------------------------------------------

LINES = st.one_of(
    st.sampled_from(
        [
            *(f"{name}: {text}".encode() for name, text in (MARKER, NULL, PACK, FOR)),
            b"Mill-Time: 5",
            b"Mill-Schema: 3",
            b"Nats-Msg-Id: a",
            b"Mill-Packed: 1",
            b"mill-pack: 1",
            b"Mill-Null:1",
            b"Nats-Marker-Reasons: x",
            b"X: Mill-Null: 1",
            b"X: Nats-Marker-Reason: MaxAge",
            b"Mill-: ",
            b"",
        ]
    ),
    st.binary(max_size=20).filter(lambda line: b"\r\n" not in line),
)
BLOCKS = st.one_of(
    st.just(b""),
    st.sampled_from(
        [b"N", b"\r\n", b"NATS/1.0\r\n", b"NATS/1.0\r\n\r\nv", b"NATS/1.0\r\nMill-For: a\r\n"]
    ),
    st.lists(LINES, max_size=5).map(
        lambda lines: b"".join(b"%b\r\n" % line for line in [b"NATS/1.0", *lines, b""])
    ),
)
TOKENS = st.sampled_from([b"k", b"_", b"_x", b"__", b"_pack.a", b"_for.s.k", b"k._x", b"=5F"])


def expected_kind(key: bytes, block: bytes, foreign: bool) -> Kind:
    """The rule again, by lines."""
    if not (key or foreign) or (block and not block.endswith(b"\r\n\r\n")):
        return Kind.DAMAGED
    names = {line.partition(b": ")[0] for line in block.split(b"\r\n")[1:] if b": " in line}
    deleted = bool(names & {b"Mill-Null", b"Nats-Marker-Reason"})
    if b"Mill-For" in names:
        plain = Kind.REDRIVEN_DELETION if deleted else Kind.REDRIVEN_EVENT
        return Kind.REDRIVEN_PACK if b"Mill-Pack" in names else plain
    if b"Mill-Pack" in names:
        return Kind.PACK
    if not foreign and len(key) > 1 and key[:1] == b"_":
        return Kind.OWN
    return Kind.DELETION if deleted else Kind.EVENT


def frames_of(messages: list[RawMessage]) -> Frames:
    collector = FrameCollector()
    collector.begin(b"1", len(messages))
    for message in messages:
        collector.add(message)
    return collector.end()[0]


def message(number: int, key: bytes, block: bytes, payload: bytes = b"v") -> RawMessage:
    reply = b"$JS.ACK.orders.c.1.%d.%d.%d.0" % (number, number, 10**18)
    return RawMessage(b"%b.%b" % (PREFIX.encode(), key), reply, block, payload)


@given(st.lists(st.tuples(TOKENS | st.just(b""), BLOCKS), min_size=1, max_size=8), st.booleans())
def test_spark_finds_the_same_kinds_in_a_window_of_messages(
    choices: list[tuple[bytes, bytes]], foreign: bool
) -> None:
    size = 0 if foreign else SIZE
    messages = [message(n, key, block) for n, (key, block) in enumerate(choices, 1)]
    single = [kind_of(raw.subject, raw.headers, size) for raw in messages]
    assert single == [expected_kind(key, block, foreign) for key, block in choices]
    found = kinds_of(frames_of(messages), size)
    assert [found.get(n, Kind.EVENT) for n in range(len(messages))] == single


# -- every reader -------------------------------------------------------------------------


@dataclass
class Tenure:
    epoch: int = 1


def packed(pairs: list[tuple[str, str]]) -> tuple[bytes, bytes]:
    pack = encode(envelope(pa.array([b"p1", b"p2"], pa.binary())))
    return encode_headers([*pairs, *pack.headers.items()]), bytes(memoryview(pack.payload))


@st.composite
def messages_of_a_partition(draw: st.DrawFn) -> list[RawMessage]:
    messages = []
    for number in range(1, draw(st.integers(1, 8)) + 1):
        pairs = draw(
            st.lists(st.sampled_from([MARKER, NULL, ("Mill-Time", "5"), FOR]), unique=True)
        )
        if draw(st.booleans()):
            block, payload = packed(pairs)
        else:
            block, payload = encode_headers(pairs) if pairs else b"", b"v"
        messages.append(message(number, draw(TOKENS), block, payload))
    return messages


Row = tuple[int, int, bytes | None]  # offset, index, value


def rows_of(events: list[Event]) -> list[Row]:
    return [(event.offset, event.index, event.value) for event in events]


def expected_rows(raw: RawMessage, size: int, offset: int, copies: bool) -> list[Row]:
    kind = kind_of(raw.subject, raw.headers, size)
    if kind is Kind.OWN or (kind.redriven and not copies):
        return []
    if kind.is_pack:
        return [(offset, 0, b"p1"), (offset, 1, b"p2")]
    deleted = kind in (Kind.DELETION, Kind.REDRIVEN_DELETION)
    return [(offset, 0, None if deleted else b"v")]


@given(messages_of_a_partition(), st.booleans())
def test_every_reader_finds_the_same_events(messages: list[RawMessage], foreign: bool) -> None:
    partition = Partition("orders", "orders", 0, None if foreign else PREFIX)
    size = partition.prefix_size
    numbered = list(enumerate(messages, 1))
    public = [row for n, raw in numbered for row in expected_rows(raw, size, n, copies=False)]
    everything = [row for n, raw in numbered for row in expected_rows(raw, size, n, copies=True)]

    assert rows_of(list(events_of(partition, messages))) == public
    assert rows_of([e for raw in messages for e in events_in(partition, raw)]) == everything
    of_group = [e for raw in messages for e in group_events(Tenure(), partition, raw)]
    assert rows_of(list(of_group)) == everything

    columns = ["offset", "index", "value"]
    batches = batches_of_messages(partition, messages, None)
    assert [
        row for b in batches for row in zip(*b.select(columns).to_pydict().values(), strict=True)
    ] == public

    report = Verification("orders")
    walk = _Walk(report, 0, 1, chained=True)
    for raw in messages:
        walk.message(partition, raw)
    assert report.events == len(public)

    schema = pa.schema([("offset", pa.int64()), ("index", pa.int32()), ("value", pa.binary())])
    maker = RowBatches(schema, state_of(partition.prefix), BytesDecoder(pa.binary()), "fail")
    spark = [
        row
        for b in maker.of(frames_of(messages))
        for row in zip(*b.to_pydict().values(), strict=True)
    ]
    assert spark == public


def state_of(prefix: str | None) -> PartitionState:
    return PartitionState("orders", 0, "orders", prefix, "", 1, 1)


def test_an_expired_key_has_no_value_in_spark() -> None:
    schema = pa.schema([("key", pa.binary()), ("value", pa.binary())])
    maker = RowBatches(schema, state_of(PREFIX), BytesDecoder(pa.binary()), "fail")
    marker = message(2, b"k", encode_headers([MARKER, ("Nats-TTL", "1m")]), b"")
    rows = [b.to_pylist() for b in maker.of(frames_of([message(1, b"a", b"", b"1"), marker]))]
    assert rows == [[{"key": b"a", "value": b"1"}, {"key": b"k", "value": None}]]
