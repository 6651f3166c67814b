"""Typed topics on a broker: what gateways store is what the SDK reads, and the other way round."""

from __future__ import annotations

import dataclasses
import io
import struct
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, cast

import fastavro
import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, timestamp_pb2

import millstream
from millstream import NEW, Mill, Personal, Topic
from millstream.errors import MillstreamError, SchemaNotFound
from millstream.events.event import PlainEvent
from millstream.events.packs.pack import Pack, decode, encode, envelope
from millstream.events.row_buffer import Columns
from millstream.gateways import values as module
from millstream.gateways.kafka.batch_heads import BadBatch
from millstream.gateways.kafka.protocol import ErrorCode
from millstream.gateways.kafka.records import from_pack, read_records, split_batches
from millstream.gateways.kafka.values import skips_guard, take
from millstream.gateways.rights import Rights
from millstream.gateways.values import BadValue, TopicValues, ValueForm, topic_values
from millstream.messaging.topics.lookup import open_topic
from millstream.schemas import to_avro, to_descriptor
from millstream.schemas.codecs import WIRE_FORMATS, WireFormat
from millstream.wire.aio.publisher import StreamPublisher
from millstream.wire.api import PubAck
from millstream.wire.message import RawMessage
from millstream.wire.protocol import parse_headers
from tests.integration.schemas.orders import PLACED, Order, OrderWithNote, order, version
from tests.unit.gateways.kafka_batches import Row, batch_of, joined

ROWS = [order(n, f"ada {n}") for n in range(700)]


@pytest.fixture
async def mill(millstream_url: str) -> AsyncIterator[Mill]:
    async with millstream.connect(millstream_url, request_timeout=30) as opened:
        yield opened


async def values_of(mill: Mill, name: str, form: ValueForm | None = None) -> TopicValues:
    return await topic_values(mill, await open_topic(mill.jetstream, name), form or ValueForm())


async def events_of(topic: Topic) -> list[Any]:
    return [event async for event in topic.read()]


async def stored_messages(mill: Mill, name: str) -> list[RawMessage]:
    """The messages of a topic as a follower of its stream gets them."""
    info = await mill.jetstream.stream_info(name)
    found = []
    for sequence in range(info.state.first_seq, info.state.last_seq + 1):
        one = await mill.jetstream.get_message(name, {"seq": sequence})
        assert one is not None
        found.append(RawMessage(one.subject.encode(), b"", one.headers, one.payload))
    return found


async def handed_out(mill: Mill, name: str, values: TopicValues) -> list[bytes | None]:
    """All values of a topic as a reader of the gateway gets them."""
    messages = await stored_messages(mill, name)
    await values.learn(messages)
    topic = await mill.topic(name)
    events = [one for one in await events_of(topic) if isinstance(one, PlainEvent)]
    plain = iter(events)
    out: list[bytes | None] = []
    for raw in messages:
        if b"\r\nMill-Pack: " not in raw.headers:
            out += values.event_values([next(plain)])
            continue
        pack = decode(parse_headers(raw.headers), raw.payload)
        convert = values.pack_values(pack)
        column = pack.column("value")
        out += column.to_pylist() if convert is None else convert(column)
    return out


def columns_of(payloads: Sequence[bytes | None]) -> pa.RecordBatch:
    keys = pa.array([b"k%d" % n for n in range(len(payloads))])
    return envelope(pa.array(payloads, pa.binary()), key=keys)


async def store(
    mill: Mill,
    topic: Topic,
    columns: pa.RecordBatch,
    schema_id: str | None,
    *,
    guarded: bool = True,
) -> PubAck:
    """Publish a pack as the gateway does."""
    publisher = StreamPublisher(mill.connection, guarded=guarded)
    try:
        pack = encode(columns, schema_id=schema_id)
        prefix = (await open_topic(mill.jetstream, topic.name)).prefix
        message = pack.message(f"{prefix}._pack.kafka", [("Mill-Times", "1:2")])
        return await publisher.publish(message, 15, lambda ack: ack)
    finally:
        publisher.close()


@contextmanager
def nothing_is_waited_for() -> Iterator[None]:
    """Versions are looked up each time."""
    patch = pytest.MonkeyPatch()
    patch.setattr(module, "RETRY_SECONDS", 0.0)
    try:
        yield
    finally:
        patch.undo()


# -- what others decode -------------------------------------------------------------------


def decode_avro(schema: Any, data: bytes) -> dict[str, Any]:
    stream = io.BytesIO(data)
    found = cast(dict[str, Any], fastavro.schemaless_reader(stream, to_avro(schema.record), None))
    assert stream.tell() == len(data)
    return found


def decode_protobuf(schema: Any, data: bytes) -> dict[str, Any]:
    pool = descriptor_pool.DescriptorPool()
    imported = descriptor_pb2.FileDescriptorProto()
    timestamp_pb2.DESCRIPTOR.CopyToProto(imported)
    pool.AddSerializedFile(imported.SerializeToString())
    file = to_descriptor(schema.record)
    pool.AddSerializedFile(file.SerializeToString())
    found = message_factory.GetMessageClass(pool.FindMessageTypeByName("Order")).FromString(data)
    return {"id": found.id, "customer": found.customer, "price": found.price}


def confluent_parts(data: bytes, form: WireFormat) -> tuple[int, bytes]:
    """The id and the value, as Confluent's deserializers cut them."""
    magic, schema_id = struct.unpack(">bI", data[:5])
    assert magic == 0
    if form == "protobuf":
        assert data[5:6] == b"\0"  # the first message of the file
        return schema_id, data[6:]
    return schema_id, data[5:]


# -- tests --------------------------------------------------------------------------------


@pytest.mark.parametrize("form", WIRE_FORMATS)
async def test_what_clients_send_is_what_the_sdk_reads(mill: Mill, form: WireFormat) -> None:
    topic = await mill.create_topic("orders", schema=Order, wire_format=form)
    assert topic.value_type is not None
    values = await values_of(mill, "orders")
    assert values.typed
    sent: list[bytes | None] = [topic.value_type.encode(one) for one in ROWS]
    sent = [data for data in sent if data and data[0]]  # Avro of id 0 looks like a prefix
    for data in (sent, [None]):
        await store(mill, topic, *await values.take(columns_of(data)))
    events = await events_of(topic)
    assert [event.value for event in events] == [*ROWS[-len(sent) :], None]
    assert [event.key for event in events[:2]] == ["k0", "k1"]


@pytest.mark.parametrize("form", WIRE_FORMATS)
async def test_what_the_sdk_writes_is_what_others_decode(mill: Mill, form: WireFormat) -> None:
    topic = await mill.create_topic("orders", schema=Order, wire_format=form)
    async with topic.producer() as producer:
        await producer.send_many(ROWS)
    await topic.publish(order(7), key="k")
    await topic.publish(None, key="k")
    await mill.create_topic("orders", schema=version(OrderWithNote), wire_format=form)
    second = await mill.topic("orders")
    async with second.producer() as producer:
        await producer.send({**dataclasses.asdict(order(8)), "note": "two"})
    versions = (await mill.schemas.topic("orders")).versions
    schemas = [await mill.schemas.schema(one.id) for one in versions]
    values = await values_of(mill, "orders", ValueForm("topic", prefix=True))
    *found, deleted, last = await handed_out(mill, "orders", values)
    assert deleted is None
    for data, expected in zip(found, [*ROWS, order(7)], strict=True):
        schema_id, body = confluent_parts(data or b"", form)
        assert schema_id == versions[0].id
        check(form, schemas[0], body, dataclasses.asdict(expected))
    schema_id, body = confluent_parts(last or b"", form)
    assert schema_id == versions[1].id
    check(form, schemas[1], body, dataclasses.asdict(order(8)))
    # And what is handed out can be sent again.
    copy = await mill.create_topic("copy", schema=Order, wire_format=form)
    await mill.create_topic("copy", schema=version(OrderWithNote), wire_format=form)
    assert (await mill.schemas.topic("copy")).versions == versions
    taken = await (await values_of(mill, "copy")).take(columns_of([*found, deleted, last]))
    await store(mill, copy, *taken)
    rows = [event.value for event in await events_of(await mill.topic("copy"))]
    plain = [{**dataclasses.asdict(one), "note": None} for one in [*ROWS, order(7)]]
    assert rows == [*plain, None, {**dataclasses.asdict(order(8)), "note": "two"}]


def check(form: WireFormat, schema: Any, body: bytes, expected: dict[str, Any]) -> None:
    match form:
        case "json":
            assert body.startswith(b'{"id":%d,"customer":"' % expected["id"])
        case "avro":
            assert expected.items() <= decode_avro(schema, body).items()
        case "protobuf":
            texts = {**expected, "price": str(expected["price"])}
            assert decode_protobuf(schema, body).items() <= texts.items()


async def test_json_topics_are_plain_json_of_the_latest_version(mill: Mill) -> None:
    topic = await mill.create_topic("orders", schema=Order)
    async with topic.producer() as producer:
        await producer.send(order(1))
    await topic.publish(order(2))
    values = await values_of(mill, "orders")
    text = b'{"id":%d,"customer":"ada","price":"9.90","placed":"%b","status":"open"}'
    placed = PLACED.isoformat().replace("+00:00", "Z").encode()
    assert await handed_out(mill, "orders", values) == [text % (n, placed) for n in (1, 2)]
    await mill.schemas.evolve("orders", version(OrderWithNote))
    with nothing_is_waited_for():
        assert await values.fresh(0.0)
    longer = text.replace(b'"open"}', b'"open","note":null}')
    assert await handed_out(mill, "orders", values) == [longer % (n, placed) for n in (1, 2)]


async def test_a_topic_is_handed_out_in_another_format(mill: Mill) -> None:
    topic = await mill.create_topic("orders", schema=Order)
    async with topic.producer() as producer:
        await producer.send_many(ROWS)
    await topic.publish(order(7))
    (known,) = (await mill.schemas.topic("orders")).versions
    schema = await mill.schemas.schema(known.id)
    values = await values_of(mill, "orders", ValueForm("avro"))
    found = await handed_out(mill, "orders", values)
    for data, expected in zip(found, [*ROWS, order(7)], strict=True):
        schema_id, body = confluent_parts(data or b"", "avro")
        assert (schema_id, decode_avro(schema, body)) == (known.id, dataclasses.asdict(expected))


async def test_a_format_that_cannot_hold_a_topic_is_refused_by_name(mill: Mill) -> None:
    await mill.create_topic("big", schema=pa.schema([pa.field("n", pa.uint64(), False)]))
    with pytest.raises(
        millstream.errors.SchemaError, match=r"topic 'big' cannot be .* avro: .*'n'"
    ):
        await values_of(mill, "big", ValueForm("avro"))


async def test_what_does_not_fit_is_refused_with_batch_and_record(mill: Mill) -> None:
    await mill.create_topic("orders", schema=Order)
    values = await values_of(mill, "orders")
    good = b'{"id": 1, "customer": "ada", "price": "9.90", "placed": "2026-05-06T07:08:09Z"}'
    bad = good.replace(b'"ada"', b"7")
    with pytest.raises(BadBatch) as refused:
        await take(values, columns_of([good, good, good, None, bad]), [2, 3])
    error = refused.value
    assert (error.code, error.batch, error.index) == (ErrorCode.invalid_record, 1, 2)
    assert "field 'customer': expected string, found int 7" in str(error)
    columns, schema_id = await take(values, columns_of([good]))
    assert (columns.num_rows, schema_id) == (1, values.schema_id)


async def test_many_records_are_taken_in_turns(mill: Mill) -> None:
    await mill.create_topic("orders", schema=Order)
    values = await values_of(mill, "orders")
    good = b'{"id": 1, "customer": "ada", "price": "9.90", "placed": "2026-05-06T07:08:09Z"}'
    sent = [good] * 9000
    columns, _ = await values.take(columns_of(sent))
    assert columns.num_rows == 9000
    sent[8500] = b"{}"
    with pytest.raises(BadValue, match="field 'id'") as refused:
        await values.take(columns_of(sent))
    assert refused.value.row == 8500


async def test_a_version_that_was_registered_a_moment_ago_is_known(mill: Mill) -> None:
    await mill.create_topic("orders", schema=Order, wire_format="avro")
    values = await values_of(mill, "orders")
    added = await mill.schemas.evolve("orders", version(OrderWithNote))
    topic = await mill.topic("orders")
    assert topic.value_type is not None
    row = {**dataclasses.asdict(order(1)), "note": "new"}
    data = struct.pack(">bI", 0, added.id) + topic.value_type.encode(row)
    with nothing_is_waited_for():
        await store(mill, topic, *await values.take(columns_of([data])))
        assert values.schema_id == str(added.id)
        with pytest.raises(BadValue, match="schema id 999"):
            await values.take(columns_of([struct.pack(">bI", 0, 999) + data[5:]]))
    assert [event.value for event in await events_of(topic)] == [row]


async def test_a_reader_learns_of_a_version_from_a_pack(mill: Mill) -> None:
    await mill.create_topic("orders", schema=Order)
    values = await values_of(mill, "orders")
    await mill.schemas.evolve("orders", version(OrderWithNote))
    topic = await mill.topic("orders")
    async with topic.producer() as producer:
        await producer.send({**dataclasses.asdict(order(1)), "note": "new"})
    with nothing_is_waited_for():
        (text,) = await handed_out(mill, "orders", values)
    assert (text or b"").endswith(b'"note":"new"}')


async def test_topics_without_a_schema_are_left_as_they_are(mill: Mill) -> None:
    topic = await mill.create_topic("raw")
    values = await values_of(mill, "raw")
    assert not values.typed
    columns = columns_of([b"\0any", None])
    assert await values.take(columns) == (columns, None)
    await store(mill, topic, columns, None)
    await topic.publish(b"one")
    await topic.publish(None, key="k")
    async with topic.producer() as producer:
        frame = pa.table({"v": [{"a": 1, "b": "x"}]})
        await producer.send_batch(frame, Columns(value="v"))
    found = await handed_out(mill, "raw", values)
    assert found == [b"\0any", None, b"one", None, b'{"a":1,"b":"x"}']


async def test_a_topic_that_gets_a_schema_is_typed_from_then_on(mill: Mill) -> None:
    await mill.create_topic("late")
    values = await values_of(mill, "late")
    await mill.schemas.register("late", Order)
    assert await values.fresh(0.0)
    with pytest.raises(BadValue):
        await values.take(columns_of([b"not json"]))


async def test_a_typed_topic_whose_schema_is_missing_takes_nothing(mill: Mill) -> None:
    with pytest.raises(SchemaNotFound):
        await mill.create_topic("half", wire_format="json")
    with pytest.raises(SchemaNotFound, match="'half'"):
        await values_of(mill, "half")


async def test_a_mirror_is_read_with_the_schema_of_its_origin(mill: Mill) -> None:
    topic = await mill.create_topic("orders", schema=Order, wire_format="avro")
    await mill.create_topic("copy", mirror="orders")
    async with topic.producer() as producer:
        await producer.send(order(3))
    (raw,) = await stored_messages(mill, "orders")
    values = await values_of(mill, "copy")
    await values.learn([raw])
    pack = decode(parse_headers(raw.headers), raw.payload)
    assert_same_value(values, pack, await mill.schemas.schema(int(values.schema_id or 0)))


def assert_same_value(values: TopicValues, pack: Pack, schema: Any) -> None:
    convert = values.pack_values(pack)
    assert convert is not None
    (data,) = convert(pack.column("value"))
    _, body = confluent_parts(data or b"", "avro")
    assert decode_avro(schema, body) == dataclasses.asdict(order(3))


@dataclasses.dataclass
class Registered:
    name: Annotated[str, Personal()]


@dataclasses.dataclass
class Person:
    name: str = ""

    def apply(self, event: Registered) -> None:
        self.name = event.name


async def test_personal_fields_stay_sealed(mill: Mill) -> None:
    store = await mill.event_store("people", Person, events=[Registered])
    await store.append("p1", [Registered("Ada Lovelace")], NEW)
    values = await values_of(mill, "people")
    (text,) = await handed_out(mill, "people", values)
    assert b"Lovelace" not in (text or b"")
    assert b"mill:enc:1:" in (text or b"")


async def test_packs_of_a_guarded_topic_pass_the_guard_or_skip_it(mill: Mill) -> None:
    topic = await mill.create_topic("safe", schema=Order, guarded=True)
    values = await values_of(mill, "safe")
    assert topic.value_type is not None
    sent = await values.take(columns_of([topic.value_type.encode(one) for one in ROWS]))
    async with mill.guard("safe") as guard:
        first = await store(mill, topic, *sent)
        assert guard.stored == 1
        foreign = envelope(pa.array([{"x": 1}]))
        with pytest.raises(MillstreamError):
            await store(mill, topic, foreign, values.schema_id)
    assert skips_guard(Rights("admin", "main"), "_guarded.safe")
    second = await store(mill, topic, *sent, guarded=False)
    assert (first.seq, second.seq) == (1, 2)
    assert [event.value for event in await events_of(topic)] == ROWS + ROWS


async def test_the_records_of_a_batch_come_back_as_they_were(mill: Mill) -> None:
    topic = await mill.create_topic("orders", schema=Order)
    values = await values_of(mill, "orders")
    assert topic.value_type is not None
    sent = [topic.value_type.encode(one) for one in ROWS]
    columns = read_records(
        split_batches(batch_of([Row(value=data) for data in sent]), 1 << 20)
    ).columns
    typed, schema_id = await take(values, columns, [len(sent)])
    made = encode(typed, schema_id=schema_id)
    pack = decode(made.headers, made.payload)
    again = joined(from_pack(pack, 0, 0, values.pack_values(pack)))
    assert read_records(split_batches(again, 1 << 20)).columns.column("value").to_pylist() == sent
