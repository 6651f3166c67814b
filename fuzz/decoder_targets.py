"""Every decoder of untrusted bytes, and what must hold for any input.

Shared by the atheris harness (fuzz/decoders.py) and the tests: a target either uses what it decoded
or refuses it with an error of Millstream's own; anything else is a bug.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from fuzz import kafka_targets as kafka
from millstream import settings
from millstream.cdc.postgres import pgoutput
from millstream.cdc.postgres.row_texts import decode_rows
from millstream.cli.views.event_text import event_record, json_line
from millstream.errors import MillstreamError, Undecodable
from millstream.events.escapes import escaped, unescaped
from millstream.events.event import Partition, PlainEvent
from millstream.events.fence import read_state
from millstream.events.packs.headers import read_headers
from millstream.events.subject import key_of_token, key_token
from millstream.events.unpack import events_of
from millstream.messaging.groups.records import MemberRecord, PartitionRecord, decode_record
from millstream.messaging.reading.batches import batches_of_messages
from millstream.schemas import Schema, declare, make_codec
from millstream.schemas.registry.records import read_record
from millstream.spark.source.offsets import from_json
from millstream.wire.api import parse_ack_address
from millstream.wire.handshake import denied_subject, parse_address, parse_info
from millstream.wire.message import RawMessage
from millstream.wire.protocol import Parser, parse_header_items, parse_headers, status_of

__all__ = ["TARGETS", "Target", "check"]


class Target(NamedTuple):
    """A decoder and valid inputs."""

    decode: Callable[[bytes], object]
    seeds: tuple[bytes, ...]


def check(name: str, data: bytes) -> str:
    """Decode an input; "sound" or the reason of its refusal. Any other error is a bug."""
    try:
        TARGETS[name].decode(data)
    except MillstreamError as error:
        return type(error).__name__
    return "sound"


def _frames(data: bytes) -> object:
    """The same frames, however the bytes are split; the first byte chooses how."""
    # Long ones in fewer pieces: a line without an end is scanned again with each of them.
    step = (data[0] % 7 if data else 0) + 1 + len(data) // 4096
    whole, pieces = _parsed([data[1:]]), []
    cut = _parsed([data[at : at + step] for at in range(1, len(data), step)])
    if whole[1] is None and cut[1] is None and whole[0] != cut[0]:
        raise AssertionError(f"split differently, read differently: {whole} {cut}")
    if (runs := _parsed([data[1:]], in_runs=True)) != whole:
        raise AssertionError(f"in runs, read differently: {whole} {runs}")
    pieces.append(whole)
    return pieces


def _parsed(
    chunks: list[bytes], in_runs: bool = False
) -> tuple[list[tuple[bytes, ...]], str | None]:
    frames: list[tuple[bytes, ...]] = []
    handlers: Any = {} if in_runs else {b"1": lambda *frame: frames.append(frame)}
    runs: Any = {b"1": frames.extend} if in_runs else {}
    parser = Parser(handlers, lambda op, rest: frames.append((op, rest)), runs)
    try:
        for chunk in chunks:
            parser.feed(chunk)
    except MillstreamError as error:
        return frames, str(error)
    return frames, None


def _headers(data: bytes) -> object:
    return parse_headers(data), parse_header_items(data), status_of(data)


def _fence(data: bytes) -> object:
    return read_state(7, data)


def _pack_headers(data: bytes) -> object:
    return read_headers(parse_headers(data))


def _key(data: bytes) -> object:
    key = key_of_token(data)
    if key is not None and key_of_token(key_token(key).encode()) != key:
        raise AssertionError(f"{data!r}: the key {key!r} does not come back")
    return key


def _event(data: bytes) -> object:
    """A plain event with untrusted subject, headers and value."""
    subject, _, rest = data.partition(b"\0")
    block, _, value = rest.partition(b"\0")
    partition = Partition("orders", "orders", 0, "orders")
    raw = RawMessage(b"orders." + subject, _REPLY, b"NATS/1.0\r\n" + block, value)
    event = PlainEvent(partition, raw)
    return event.key, event.value, event.headers, event.id, event.timestamp, repr(event)


def _message(data: bytes) -> object:
    """A message with untrusted subject, headers and value: all readers find the same events."""
    subject, _, rest = data.partition(b"\0")
    block, _, value = rest.partition(b"\0")
    partition = Partition("orders", "orders", 0, "orders")
    lines = b"NATS/1.0\r\n" + block.rstrip(b"\r\n") + b"\r\n\r\n"
    raw = RawMessage(b"orders." + subject, _REPLY, lines, value)
    bad: list[Undecodable] = []
    events = list(events_of(partition, [raw], report=bad.append))
    for event in events:
        json_line(event_record(event))
    rows = sum(b.num_rows for b in batches_of_messages(partition, [raw], None, bad.append))
    if rows != len(events) or len(bad) not in (0, 2):
        raise AssertionError(f"{data!r}: {len(events)} events, {rows} rows, {bad}")
    return events


def _name(data: bytes) -> object:
    name = data.decode("utf-8", "surrogateescape")
    if unescaped(escaped(name)) != name:
        raise AssertionError(f"{data!r}: the name does not come back")
    return escaped(name).encode()


def _offsets(data: bytes) -> object:
    try:
        kept = json.loads(data)
    except (ValueError, RecursionError):
        return None  # Spark gives what it parsed itself
    return from_json(kept)


def _codec(format_: Any) -> Callable[[bytes], object]:
    codec = make_codec(declare(_ORDER, format="avro"), format_)
    return codec.decode


def _declared(format_: str) -> Callable[[bytes], object]:
    def decode(data: bytes) -> object:
        return declare(data.decode("utf-8", "replace"), format=format_)

    return decode


def _words(data: bytes) -> object:
    """Settings written by hand."""
    text = data.decode("utf-8", "replace")
    for parse in (settings.parse_duration, settings.parse_size, parse_address):
        check_one(parse, text)
    return None


def _postgres_message(data: bytes) -> object:
    """One message of a replication stream; a change is of the same relation always."""
    parsers: dict[int, Callable[[bytes], object]] = {
        pgoutput.BEGIN: pgoutput.parse_begin,
        pgoutput.COMMIT: pgoutput.parse_commit,
        pgoutput.RELATION: pgoutput.parse_relation,
        pgoutput.TRUNCATE: pgoutput.parse_truncate,
    }
    parse = parsers.get(data[0] if data else 0)
    return _postgres_rows(data) if parse is None else parse(data)


def _postgres_rows(data: bytes) -> object:
    """A change alone, and among many, which is decoded in another way."""
    few = many = None
    with contextlib.suppress(MillstreamError):
        few = decode_rows(_TABLE, [data])
    with contextlib.suppress(MillstreamError):
        many = decode_rows(_TABLE, [*[_ROW] * 99, data])
    if few is None or many is None:
        if few is not many:
            raise AssertionError(f"{data!r}: alone {few}, among many {many}")
        return decode_rows(_TABLE, [data])  # the refusal
    for one, other in zip(few.new, many.new, strict=True):
        if one is None or other is None or one.texts[0] != other.texts[99]:
            raise AssertionError(f"{data!r}: alone and among many it is read differently")
    return few


def check_one(parse: Callable[[str], object], text: str) -> None:
    """Parse, or refuse with an error of Millstream's own."""
    try:
        parse(text)
    except MillstreamError:
        return


_REPLY: Final = b"$JS.ACK.orders.c.1.5.5.1700000000000000000.0"
_ORDER: Final = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "who", "type": ["null", "string"], "default": None},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "tags", "type": {"type": "array", "items": "string"}},
        {"name": "more", "type": {"type": "map", "values": "double"}},
    ],
}
_TABLE: Final = pgoutput.Relation(
    7, "public", "t", "d", tuple(pgoutput.RelationColumn(n, n == "a", 25, -1) for n in "abc")
)
_ROW: Final = b"I\0\0\0\7N\0\3t\0\0\0\1xnt\0\0\0\2yz"
_FENCE: Final = (
    b"NATS/1.0\r\nMill-Writer: w\r\nMill-Epoch: 3\r\nMill-Number: 9\r\nMill-Previous: 4\r\n"
    b"Mill-Position: 77\r\nMill-Owner: abc\r\n\r\n"
)

TARGETS: Final[dict[str, Target]] = {
    "frames": Target(
        _frames,
        (
            b"\x03MSG a.b 1 5\r\nhello\r\nPING\r\n",
            b"\x01HMSG a 1 r 12 14\r\nNATS/1.0\r\n\r\nhi\r\n",
        ),
    ),
    "headers": Target(_headers, (_FENCE, b"NATS/1.0 503 No Responders\r\n\r\n", b"")),
    "info": Target(parse_info, (b'{"server_id":"x","max_payload":1048576,"headers":true}', b"{}")),
    "denial": Target(
        lambda data: denied_subject(data.decode("utf-8", "replace")),
        (b"'Permissions Violation for Publish to \"x\"'",),
    ),
    "ack address": Target(
        parse_ack_address, (_REPLY, b"$JS.ACK.hub.hash.orders.c.1.5.5.17.0.token")
    ),
    "fence": Target(_fence, (_FENCE,)),
    "pack headers": Target(
        _pack_headers,
        (b"NATS/1.0\r\nMill-Pack: 1\r\nMill-Count: 2\r\nMill-Checksum: 00000000\r\n\r\n",),
    ),
    "key": Target(_key, (b"abc", b"=", b"=5Fx=FF", b"_")),
    "event": Target(
        _event, (b"a\0Mill-Time: 1700000000000000000\r\nMill-Key: x\r\nMill-Null: 1\r\n\r\n\0v",)
    ),
    "message": Target(
        _message,
        (
            b"a\0Mill-Time: 99999999999999999999\r\nMill-Id: \xff\r\nX-\xff: \xfe\0v",
            b"_pack.w\0Mill-Pack: 9\0v",
            b"_pack.w\0Mill-Pack: 1\r\nMill-Count: 0\r\nMill-Checksum: 00000000\r\n"
            b"Content-Type: application/vnd.apache.arrow.stream\0",
        ),
    ),
    "name": Target(_name, (b"trace", b"X-\xff", "\uef80\uefff".encode())),
    "group partition": Target(
        lambda data: decode_record(data, PartitionRecord), (b'{"position":[5,0],"version":1}',)
    ),
    "group member": Target(lambda data: decode_record(data, MemberRecord), (b'{"version":1}',)),
    "schema record": Target(read_record, (b'{"topic":"orders","versions":[]}',)),
    "schema": Target(Schema.from_json, (declare(_ORDER, format="avro").to_json().encode(),)),
    "offsets": Target(_offsets, (b'{"orders":{"0":{"next":5,"log":"x"}}}',)),
    "declare avro": Target(_declared("avro"), (json.dumps(_ORDER).encode(),)),
    "declare json": Target(
        _declared("json"), (b'{"type":"object","properties":{"n":{"type":"integer"}}}',)
    ),
    "declare protobuf": Target(
        _declared("protobuf"), (b'syntax = "proto3"; message A { int64 n = 1; }',)
    ),
    "avro": Target(_codec("avro"), (bytes(12),)),
    "json": Target(_codec("json"), (b'{"id":1,"price":"1","at":"2026-01-01T00:00:00Z"}',)),
    "protobuf": Target(_codec("protobuf"), (b"\x08\x01",)),
    "postgres": Target(
        _postgres_message,
        (
            _ROW,
            b"U\0\0\0\7O\0\3t\0\0\0\1xnuN\0\3nnu",
            b"D\0\0\0\7K\0\3t\0\0\0\1xnn",
            b"R\0\0\0\7public\0t\0d\0\1\1a\0\0\0\0\x19\xff\xff\xff\xff",
            b"B" + bytes(20),
            b"T\0\0\0\1\0\0\0\0\7",
        ),
    ),
    "kafka batches": Target(kafka.read_batches, kafka.seeds()),
    "kafka request": Target(kafka.read_kafka_request, kafka.REQUESTS),
    "words": Target(_words, (b"1m30s", b"64MiB", b"nats://a:b@host:4222")),
}
