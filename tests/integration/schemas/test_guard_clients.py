"""Guarded topics as Millstream's own clients use them: all they publish goes through the guard."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from nats.js import JetStreamContext
from nats.js.errors import BadRequestError

from millstream import Mill, NewEvent, PublishOptions, Topic
from millstream.deadline import Deadline
from millstream.errors import (
    FencedOut,
    NoGuard,
    PartlyStored,
    SchemaError,
    Unfit,
    WrongSequence,
)
from millstream.events.event import SCHEMA_HEADER
from millstream.events.packs.pack import encode, envelope
from millstream.wire.aio.atomic import publish_batch
from millstream.wire.aio.publisher import StreamPublisher
from millstream.wire.api import ErrorCode, PubAck
from millstream.wire.message import OutgoingMessage
from millstream.wire.protocol import encode_headers
from tests.integration.schemas.orders import Order, order

PARTITIONS = [1, 3]


@pytest.fixture(params=PARTITIONS)
async def topic(mill: Mill, request: pytest.FixtureRequest) -> Topic:
    return await mill.create_topic("orders", schema=Order, guarded=True, partitions=request.param)


async def ids(topic: Topic) -> list[int]:
    return sorted([event.value.id async for event in topic.read()])


async def test_every_way_to_publish_goes_through_the_guard(mill: Mill, topic: Topic) -> None:
    async with mill.guard("orders") as guard:
        receipt = await topic.publish(order(1), "ada", headers={"source": "till 4"})
        assert receipt.offset == 1
        await topic.publish_many([NewEvent(order(n), f"k{n}") for n in (2, 3)])
        await topic.publish_atomic([NewEvent(order(n), "ada") for n in (4, 5)])
        async with topic.producer() as producer:
            for number in (6, 7):
                await producer.send(order(number), f"k{number}")
        async with topic.event_producer() as events:
            await events.send(order(8), "x")
        async with topic.writer("loader") as writer:
            for number in (9, 10, 11):
                await writer.write(order(number), f"k{number}", position=number)
        await topic.publish(None, "gone")
        assert guard.stored > 8
        assert guard.refused == 0
    events_read = [event async for event in topic.read()]
    assert sorted(event.value.id for event in events_read if event.value) == list(range(1, 12))
    assert [event.key for event in events_read if event.value is None] == ["gone"]
    assert all(part.stream.startswith("orders") for part in (await topic.info()).partitions)


@pytest.mark.parametrize("partitions", PARTITIONS)
async def test_an_expected_offset_holds_through_the_guard(mill: Mill, partitions: int) -> None:
    given: dict[str, Any] = {"guarded": True, "partitions": partitions, "packs": False}
    topic = await mill.create_topic("orders", schema=Order, **given)
    async with mill.guard("orders"):
        first = await topic.publish(order(1), "ada")
        after = PublishOptions(expected_last=first.offset)
        await topic.publish(order(2), "ada", options=after)
        with pytest.raises(WrongSequence):
            await topic.publish(order(3), "ada", options=after)
        again = [await topic.publish(order(4), "b", id="x1") for _ in range(2)]
        assert [receipt.duplicate for receipt in again] == [False, True]
    assert await ids(topic) == [1, 2, 4]


@pytest.mark.parametrize("partitions", PARTITIONS)
async def test_a_scheduled_event_arrives_checked(mill: Mill, partitions: int) -> None:
    given: dict[str, Any] = {"guarded": True, "partitions": partitions, "schedules": True}
    topic = await mill.create_topic("orders", schema=Order, **given)
    async with mill.guard("orders"):
        soon = datetime.now(UTC) + timedelta(seconds=1)
        await topic.publish(order(1), "ada", options=PublishOptions(deliver_at=soon))
        async for event in topic.read(follow=True):
            assert (event.key, event.value) == ("ada", order(1))
            break


async def test_a_writer_is_fenced_out_and_continues_through_the_guard(
    mill: Mill, topic: Topic
) -> None:
    async with mill.guard("orders"):
        old = await topic.writer("loader").open()
        await old.write(order(1), position=1)
        await old.flush()
        async with topic.writer("loader") as new:
            assert new.position == 1
            await old.write(order(2), position=2)
            with pytest.raises(FencedOut):
                await old.flush()
            for number in (1, 2, 3):
                await new.write(order(number), position=number)
            await new.flush()
            assert new.skipped == 1
    assert await ids(topic) == [1, 2, 3]


async def test_a_guard_that_dies_stops_nobody(
    mill: Mill, topic: Topic, connect: Callable[[], Awaitable[Mill]]
) -> None:
    """Clients find the next guard; nothing is lost and nothing is stored twice."""
    dying = await connect()
    await dying.guard("orders").open()
    async with topic.writer("loader") as writer:
        for number in range(1, 21):
            await writer.write(order(number), position=number)
            await writer.flush()
            if number == 10:
                await dying.connection.close(timeout=0)
                await mill.guard("orders").open()
        await topic.publish_atomic([NewEvent(order(n), "ada") for n in (21, 22)])
    assert await ids(topic) == list(range(1, 23))


async def test_without_a_guard_nothing_is_stored_and_the_error_says_so(
    mill: Mill, topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("publisher", "atomic"):
        monkeypatch.setattr(f"millstream.wire.aio.{module}.GUARD_SECONDS", 0.2)
    for publish in (
        topic.publish(order(1), "ada"),
        topic.publish_atomic([NewEvent(order(1), "a"), NewEvent(order(2), "a")]),
    ):
        with pytest.raises(NoGuard, match="no guard of topic 'orders' answers") as refused:
            await publish
        assert refused.value.topic == "orders"
    with pytest.raises(PartlyStored) as partly:
        async with topic.producer() as producer:
            await producer.send(order(1), "ada")
    assert isinstance(partly.value.failed[0], NoGuard)
    assert await ids(topic) == []


def pack_of(schema_id: str, values: Any) -> OutgoingMessage:
    """A pack that no producer of ours would write."""
    pack = encode(envelope(values, key=pa.array(["a"] * len(values))), schema_id=schema_id)
    return pack.message("_guarded.orders._pack.forged", [("Nats-Msg-Id", "forged")])


@pytest.mark.parametrize("topic", [1], indirect=True)
async def test_each_event_of_a_pack_is_checked(mill: Mill, topic: Topic) -> None:
    assert topic.value_type is not None
    publisher = StreamPublisher(mill.connection)
    schema_id = topic.value_type.schema_id
    good = topic.value_type.column([order(1), order(2)])
    wrong = good.field("price").cast(pa.string())
    forged = pa.StructArray.from_arrays(
        [good.field(0), good.field(1), wrong, good.field(3)],
        names=[good.type.field(n).name for n in range(4)],
    )

    async def send(message: OutgoingMessage) -> PubAck:
        return await publisher.publish(message, 30, lambda ack: ack)

    async with mill.guard("orders") as guard:
        for values, reason in (
            (forged, "field 'price'"),
            (pa.array([b"{}", b"{}"], pa.binary()), "field 'id'"),
        ):
            with pytest.raises(Unfit, match=reason):
                await send(pack_of(schema_id, values))
        with pytest.raises(SchemaError, match="has no version with schema id '999'"):
            await send(pack_of("999", good))
        broken = pack_of(schema_id, good)
        with pytest.raises(SchemaError, match="not a valid pack"):
            await send(broken._replace(payload=bytes(broken.payload)[:-8]))
        assert guard.refused == 4
        await send(pack_of(schema_id, good))
    assert await ids(topic) == [1, 2]


@pytest.mark.parametrize("topic", [1], indirect=True)
async def test_one_bad_event_refuses_its_whole_batch(mill: Mill, topic: Topic) -> None:
    assert topic.value_type is not None
    block = encode_headers([(SCHEMA_HEADER, topic.value_type.schema_id)])
    good = OutgoingMessage(b"_guarded.orders.a", block, topic.value_type.encode(order(1)))
    bad = good._replace(payload=b'{"id": "one"}')
    async with mill.guard("orders"):
        for messages in ([bad, good, good], [good, bad, good], [good, good, bad]):
            with pytest.raises(Unfit, match="field 'id': expected int64, found str 'one'"):
                await publish_batch(mill.jetstream, "orders", messages, 30)
        assert await ids(topic) == []
        ack = await publish_batch(mill.jetstream, "orders", [good] * 3, 30)
        assert ack.count == 3
    assert await ids(topic) == [1, 1, 1]


@pytest.mark.parametrize("topic", [1], indirect=True)
@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("Nats-Rollup", "all"),
        ("nats-rollup", "sub"),
        ("Nats-Marker-Reason", "MaxAge"),
        ("Nats-Schedule", "@every 1s"),
        ("Nats-Schedule-Target", "_guarded.orders.b"),
        ("Nats-Incr", "+1"),
    ],
)
async def test_a_header_with_power_is_refused_at_both_entrances(
    mill: Mill, topic: Topic, js: JetStreamContext, header: str, value: str
) -> None:
    assert topic.value_type is not None
    body = topic.value_type.encode(order(1))
    version = {SCHEMA_HEADER: topic.value_type.schema_id}
    async with mill.guard("orders"):
        for subject in ("ingress.orders.a", "ingress.orders._as.a"):
            with pytest.raises(BadRequestError) as refused:
                await js.publish(subject, body, headers={**version, header: value})
            assert refused.value.err_code == ErrorCode.GUARD_HEADER
    assert await ids(topic) == []


async def test_the_copy_of_a_guarded_topic_is_guarded_when_it_is_promoted(
    mill: Mill, js: JetStreamContext
) -> None:
    topic = await mill.create_topic("orders", schema=Order, guarded=True)
    async with mill.guard("orders"):
        await topic.publish(order(1), "ada")
    await mill.create_topic("spare", mirror="orders")
    deadline = Deadline(60)
    while (await (await mill.topic("spare")).info()).messages < 1:
        assert not deadline.passed
    await mill.delete_topic("orders")
    assert (await mill.promote_topic("spare")).settings.guarded
    async with mill.guard("spare") as guard:
        assert guard.subject == "ingress.orders"  # it has the subjects of its origin
        spare = await mill.topic("spare")
        await spare.publish(order(2), "ada")
        with pytest.raises(BadRequestError):
            await js.publish("ingress.orders.ada", b"{}")
        assert guard.stored == 1
    assert [value["id"] for value in [event.value async for event in spare.read()]] == [1, 2]
