"""Typed topics: what fits comes back unchanged, what does not is stored by no path."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from nats.js import JetStreamContext

from millstream import GroupSettings, Mill, NewEvent, SubscriptionSettings, Topic
from millstream.errors import PartlyStored, ProcessFailed, SchemaError, SchemaNotFound, Unfit
from millstream.events.row_buffer import Columns
from millstream.messaging import Client, Connecting
from millstream.messaging.process import ProcessSettings
from millstream.schemas import WIRE_FORMATS, declare
from millstream.settings import ConnectionSettings
from tests.integration.schemas.orders import PLACED, Order, OrderWithNote, order, version

PLAIN = {
    "id": 1,
    "customer": "ada",
    "price": Decimal("9.90"),
    "placed": PLACED,
    "status": "open",
}
UNFIT = {**PLAIN, "id": "one"}


async def values(topic: Topic) -> list[Any]:
    return [event.value async for event in topic.read()]


# -- reading and writing ------------------------------------------------------------------


@pytest.mark.parametrize("wire_format", WIRE_FORMATS)
async def test_values_come_back_as_their_class_and_as_dicts(mill: Mill, wire_format: str) -> None:
    topic = await mill.create_topic("orders", schema=Order, wire_format=wire_format)
    await topic.publish(order(1), "ada")
    async with topic.producer() as producer:
        await producer.send(order(2), "bob")
        await producer.send({**PLAIN, "id": 3})
    assert await values(topic) == [order(1), order(2), order(3)]
    assert await values(await mill.topic("orders", Order)) == [order(1), order(2), order(3)]
    plain = await mill.topic("orders")
    assert await values(plain) == [{**PLAIN, "id": number} for number in (1, 2, 3)]
    last = await topic.last("ada")
    assert last is not None
    assert last.value == order(1)
    assert [event.value for event in await topic.get(2)] == [order(2), order(3)]


@pytest.mark.parametrize("wire_format", WIRE_FORMATS)
async def test_old_versions_are_read_as_the_readers_own(mill: Mill, wire_format: str) -> None:
    """Also by a reader that was opened before the version was registered."""
    old = await mill.create_topic("orders", schema=Order, wire_format=wire_format)
    await old.publish(order(1))
    async with old.producer() as producer:
        await producer.send(order(2))
    await mill.schemas.evolve("orders", version(OrderWithNote))
    new = await mill.topic("orders")
    await new.publish({**PLAIN, "id": 3, "note": "new"})
    async with new.producer() as producer:
        await producer.send({**PLAIN, "id": 4, "note": "new"})
    assert [(v["id"], v["note"]) for v in await values(new)] == [
        (1, None),
        (2, None),
        (3, "new"),
        (4, "new"),
    ]
    assert await values(old) == [order(number) for number in (1, 2, 3, 4)]


async def test_a_class_writes_its_own_version(mill: Mill) -> None:
    """A producer that was not redeployed works as before."""
    await mill.create_topic("orders", schema=Order)
    first = (await mill.schemas.topic("orders")).latest
    second = await mill.schemas.evolve("orders", version(OrderWithNote))
    old = await mill.topic("orders", Order)
    await old.publish(order(1))
    await (await mill.topic("orders")).publish(order(2))
    raw = [await mill.jetstream.get_message("orders", {"seq": number}) for number in (1, 2)]
    assert f"Mill-Schema: {first.id}\r\n".encode() in raw[0].headers  # type: ignore[union-attr]
    assert f"Mill-Schema: {second.id}\r\n".encode() in raw[1].headers  # type: ignore[union-attr]


async def test_a_class_with_some_of_the_fields_reads_those(mill: Mill) -> None:
    @dataclasses.dataclass
    class Brief:
        customer: str
        id: int
        source: str = "web"

    topic = await mill.create_topic("orders", schema=Order)
    await topic.publish(order(7))
    async with topic.producer() as producer:
        await producer.send(order(8))
    brief = await mill.topic("orders", Brief)
    assert await values(brief) == [Brief("ada", 7), Brief("ada", 8)]


async def test_a_class_that_cannot_read_the_topic_is_refused(mill: Mill) -> None:
    @dataclasses.dataclass
    class Other:
        id: str

    await mill.create_topic("orders", schema=Order)
    with pytest.raises(SchemaError, match="field 'id'"):
        await mill.topic("orders", Other)
    await mill.create_topic("plain")
    with pytest.raises(SchemaError, match="has no schema, so its values are bytes"):
        await mill.topic("plain", Order)


async def test_a_plain_message_without_an_id_is_read_as_the_current_version(
    mill: Mill, js: JetStreamContext
) -> None:
    topic = await mill.create_topic("orders", schema=Order)
    body = b'{"id": 5, "customer": "eve", "price": "1.00", "placed": "2026-05-06T07:08:09.00001Z"}'
    await js.publish("orders.eve", body)
    [event] = [event async for event in topic.read()]
    assert event.value == Order(5, "eve", Decimal("1.00"), PLACED)
    assert event.key == "eve"


async def test_an_unreadable_message_affects_no_other_message(
    mill: Mill, js: JetStreamContext
) -> None:
    topic = await mill.create_topic("orders", schema=Order)
    await topic.publish(order(1))
    await js.publish("orders.x", b"not json")
    await js.publish("orders.x", b"{}", headers={"Mill-Schema": "4711"})
    await js.publish("orders.x", b"{}", headers={"Mill-Schema": "first"})
    await topic.publish(order(2))
    events = [event async for event in topic.read()]
    assert [event.offset for event in events] == [1, 2, 3, 4, 5]
    assert (events[0].value, events[4].value) == (order(1), order(2))
    with pytest.raises(Unfit, match="JSON"):
        _ = events[1].value
    with pytest.raises(SchemaNotFound, match="schema id '4711'"):
        _ = events[2].value
    with pytest.raises(SchemaNotFound, match="not the id of a schema"):
        _ = events[3].value
    assert events[1].data == b"not json"  # type: ignore[attr-defined]


async def test_a_pack_of_another_shape_is_an_error_of_its_values(
    mill: Mill, connect: Callable[[], Awaitable[Mill]]
) -> None:
    """It was written without the SDK, or before the topic had its schema."""
    raw = await mill.create_topic("orders")
    async with raw.producer() as producer:
        await producer.send(b'{"id": 5}', "k")
        await producer.send(b'{"id": "no"}', "k")
    await mill.schemas.register(
        "orders",
        {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]},
        name="thing",
    )
    typed = await mill.topic("orders")
    events = [event async for event in typed.read()]
    assert (events[0].value, events[0].key) == ({"id": 5}, "k")
    with pytest.raises(Unfit, match="id"):
        _ = events[1].value


async def test_a_subscription_delivers_unreadable_values_to_the_application(
    mill: Mill, js: JetStreamContext
) -> None:
    topic = await mill.create_topic("orders", schema=Order)
    await topic.publish(order(1))
    await js.publish("orders.x", b"not json")
    await mill.schemas.evolve("orders", version(OrderWithNote))
    newer = await mill.topic("orders")
    await newer.publish({**PLAIN, "id": 2, "note": "n"})
    async with newer.producer() as producer:
        await producer.send({**PLAIN, "id": 3, "note": "n"})
    good = []
    async with topic.subscribe("s", SubscriptionSettings(max_deliver=3)) as subscription:
        async for delivery in subscription:
            try:
                good.append(delivery.value)
            except Unfit as error:
                delivery.terminate(str(error))
                continue
            delivery.ack()
            if len(good) == 3:
                break
    assert good == [order(1), order(2), order(3)]
    dead = await mill.topic("orders-s-dead")
    [letter] = [event async for event in dead.read()]
    assert letter.data == b"not json"  # type: ignore[attr-defined]


async def test_a_mirror_has_the_schema_of_its_origin(mill: Mill) -> None:
    topic = await mill.create_topic("orders", schema=Order)
    await topic.publish(order(1))
    copy = await mill.create_topic("copy", mirror="orders")
    async for event in copy.read(follow=True):
        assert event.value == {**PLAIN, "id": 1}
        break


async def test_a_promoted_mirror_keeps_the_schema(mill: Mill) -> None:
    topic = await mill.create_topic("orders", schema=Order)
    await topic.publish(order(1))
    copy = await mill.create_topic("copy", mirror="orders")
    async for _ in copy.read(follow=True):
        break
    versions = (await mill.schemas.topic("orders")).versions
    await mill.delete_topic("orders")
    assert await values(await mill.topic("copy", Order)) == [order(1)]
    info = await mill.promote_topic("copy", allow_lag=True)
    assert info.settings.wire_format == "json"
    assert (await mill.schemas.topic("copy")).versions == versions
    own = await mill.topic("copy", Order)
    with pytest.raises(Unfit):
        await own.publish(UNFIT)
    await own.publish(order(2))
    assert await values(own) == [order(1), order(2)]


async def test_a_collection_of_topics_is_read_with_their_schema(mill: Mill) -> None:
    for name in ("eu", "us"):
        topic = await mill.create_topic(name, schema=Order)
        await topic.publish(order(1, name))
    await mill.create_topic("all", sources=["eu", "us"])
    both = await mill.topic("all")
    found = set()
    async for event in both.read(follow=True):
        found.add(event.value["customer"])
        if len(found) == 2:
            break
    await mill.schemas.evolve("us", version(OrderWithNote))
    assert (await mill.topic("all")).value_type is None  # two versions: the reader must choose one
    typed = await mill.topic("all", Order)
    assert {value.customer for value in await values(typed)} == {"eu", "us"}


async def test_a_deletion_is_none_in_every_form(mill: Mill) -> None:
    topic = await mill.create_topic("orders", schema=Order)
    await topic.publish(None, "ada")
    async with topic.producer() as producer:
        await producer.send(order(1))
        await producer.send(None, "ada")
    assert await values(topic) == [None, order(1), None]


async def test_a_table_of_typed_values(mill: Mill) -> None:
    table = await mill.create_table("stock", schema=Order)
    revision = await table.put("a", order(1))
    with pytest.raises(Unfit, match="field 'id'"):
        await table.put("a", UNFIT)
    entry = await (await mill.table("stock", Order)).get("a")
    assert entry is not None
    assert (entry.value, entry.revision) == (order(1), revision)


# -- nothing unfit is stored --------------------------------------------------------------


async def test_a_connection_for_messaging_alone_cannot_write_unchecked(
    mill: Mill, millstream_url: str
) -> None:
    await mill.create_topic("orders", schema=Order)
    settings = ConnectionSettings.load(millstream_url)
    async with Connecting(Client, settings) as plain:
        topic = await plain.topic("orders")
        with pytest.raises(SchemaError, match=r"Connect with millstream.connect\(\)"):
            await topic.publish(b"{}")
        with pytest.raises(SchemaError):
            topic.producer()
    raw = await mill.topic("orders", bytes)
    with pytest.raises(SchemaError, match="type=bytes"):
        await raw.publish(b"{}")
    await (await mill.topic("orders")).publish(order(1))
    [stored] = await values(raw)
    assert stored.startswith(b'{"id":1,')


async def _publish(topic: Topic) -> None:
    await topic.publish(UNFIT, "k")


async def _publish_many(topic: Topic) -> None:
    await topic.publish_many([NewEvent(UNFIT, "k")])


async def _publish_atomic(topic: Topic) -> None:
    await topic.publish_atomic([NewEvent(UNFIT, "k")])


async def _event_producer(topic: Topic) -> None:
    async with topic.event_producer() as producer:
        await producer.send(UNFIT, "k")


async def _event_producer_with_id(topic: Topic) -> None:
    async with topic.event_producer() as producer:
        await producer.send(UNFIT, "k", id="1")


async def _pack_producer(topic: Topic) -> None:
    async with topic.producer() as producer:
        await producer.send(UNFIT, "k")


async def _pack_producer_frame(topic: Topic) -> None:
    async with topic.producer() as producer:
        await producer.send_batch(pa.RecordBatch.from_pylist([UNFIT]), Columns(key="customer"))


async def _writer(topic: Topic) -> None:
    async with topic.writer("w") as writer:
        await writer.write(UNFIT, "k", position=1)


async def _writer_frame(topic: Topic) -> None:
    async with topic.writer("w") as writer:
        await writer.write_batch(pa.RecordBatch.from_pylist([UNFIT]), position=1)


ENTRANCES = [
    _publish,
    _publish_many,
    _publish_atomic,
    _event_producer,
    _event_producer_with_id,
    _pack_producer,
    _pack_producer_frame,
    _writer,
    _writer_frame,
]


@pytest.mark.parametrize("entrance", ENTRANCES)
async def test_no_path_stores_what_does_not_fit(
    mill: Mill, entrance: Callable[[Topic], Awaitable[None]]
) -> None:
    topic = await mill.create_topic("orders", schema=declare(Order))
    with pytest.raises((Unfit, PartlyStored)) as caught:
        await entrance(topic)
    error: Any = caught.value
    if isinstance(error, PartlyStored):
        error = error.failed[0]
    assert error.field == "id"
    assert "int64" in error.expected
    assert "str" in error.found
    assert await values(topic) == []


@pytest.mark.parametrize("row", [0, 1, 2])
async def test_a_pack_names_the_event_that_does_not_fit_and_stores_the_others(
    mill: Mill, row: int
) -> None:
    topic = await mill.create_topic("orders", schema=Order)
    given: list[Any] = [order(1), order(2), order(3)]
    given[row] = UNFIT
    producer = topic.producer()
    for value in given:
        await producer.send(value)
    with pytest.raises(PartlyStored) as caught:
        await producer.close()
    assert list(caught.value.failed) == [row]
    assert await values(topic) == [value for value in given if value is not UNFIT]


async def test_a_process_stores_nothing_unfit(mill: Mill) -> None:
    source = await mill.create_topic("in")
    target = await mill.create_topic("out", schema=Order)
    await source.publish(b"x")
    process = mill.process(source, target, lambda _: UNFIT, ProcessSettings("p"))
    with pytest.raises(ProcessFailed, match="field 'id': expected int64, found str 'one'"):
        await process.run(once=True)
    assert await values(target) == []


async def test_one_misfit_does_not_hold_up_the_others(mill: Mill) -> None:
    topic = await mill.create_topic("orders", schema=Order)
    with pytest.raises(PartlyStored) as caught:
        await topic.publish_many([order(1), UNFIT, order(2)])
    assert list(caught.value.failed) == [1]
    assert await values(topic) == [order(1), order(2)]


async def test_times_must_have_a_zone(mill: Mill) -> None:
    topic = await mill.create_topic("orders", schema=Order)
    local = dt.datetime(2026, 1, 1)  # noqa: DTZ001
    with pytest.raises(Unfit, match="field 'placed'"):
        await topic.publish(Order(1, "ada", Decimal(1), local))


async def test_an_ordered_group_reads_versions_newer_than_itself(mill: Mill) -> None:
    topic = await mill.create_topic("orders", schema=Order, partitions=2)
    await topic.publish(order(1), "a")
    seen: list[Any] = []
    done = asyncio.Event()

    async def handle(event: Any) -> None:
        seen.append(event.value)
        if len(seen) == 3:
            done.set()

    async with topic.group("g", GroupSettings(lease=60.0)) as group:
        running = asyncio.create_task(group.run(handle))
        await mill.schemas.evolve("orders", version(OrderWithNote))
        newer = await mill.topic("orders")
        await newer.publish({**PLAIN, "id": 2, "note": "n"}, "a")
        async with newer.producer() as producer:
            await producer.send({**PLAIN, "id": 3, "note": "n"}, "a")
        async with asyncio.timeout(60):
            await done.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert seen == [order(1), order(2), order(3)]
