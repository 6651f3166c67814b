"""Guarded topics: clients publish; what fits is stored, the rest is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any

import pytest
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.errors import APIError, BadRequestError

from millstream import Mill, Topic
from millstream.deadline import Deadline
from millstream.errors import ConfigError, SchemaNotFound, TopicConflict
from millstream.schemas.registry.guard import GuardSettings
from millstream.wire.api import ErrorCode
from millstream.wire.protocol import parse_headers
from tests.integration.schemas.orders import PLACED, Order, OrderWithNote, order, version

BODY = b'{"id": 1, "customer": "ada", "price": "9.90", "placed": "2026-05-06T07:08:09.00001Z"}'


@pytest.fixture
async def topic(mill: Mill) -> Topic:
    return await mill.create_topic("orders", schema=Order, guarded=True)


async def values(topic: Topic) -> list[Any]:
    return [event.value async for event in topic.read()]


async def test_a_jetstream_publish_of_another_library_is_checked_and_acknowledged(
    mill: Mill, topic: Topic, js: JetStreamContext
) -> None:
    async with mill.guard("orders") as guard:
        ack = await js.publish("ingress.orders.ada", BODY)
        assert (ack.stream, ack.seq) == ("orders", 1)
        ack = await js.publish("ingress.orders", BODY, headers={"source": "till 4"})
        assert ack.seq == 2
        with pytest.raises(BadRequestError) as refused:
            await js.publish("ingress.orders.ada", BODY.replace(b"1", b'"one"', 1))
        assert (guard.stored, guard.refused) == (2, 1)
    assert refused.value.err_code == ErrorCode.GUARD_UNFIT
    assert "field 'id': expected int64, found str 'one'" in (refused.value.description or "")
    events = [event async for event in topic.read()]
    assert [event.value for event in events] == [order(1), order(1)]
    assert [event.key for event in events] == ["ada", None]
    assert events[1].headers == {"source": "till 4"}
    assert [event.data for event in events] == [BODY, BODY]  # type: ignore[attr-defined]


async def test_what_is_stored_is_what_was_checked_in_every_format(
    mill: Mill, js: JetStreamContext
) -> None:
    for wire_format in ("avro", "protobuf"):
        topic = await mill.create_topic(
            wire_format, schema=Order, wire_format=wire_format, guarded=True
        )
        assert topic.value_type is not None
        body = topic.value_type.encode(order(7))
        async with mill.guard(wire_format):
            await js.publish(f"ingress.{wire_format}.k", body)
            with pytest.raises(BadRequestError):
                await js.publish(f"ingress.{wire_format}.k", b"\xff\xff\xff")
        assert await values(topic) == [order(7)]


async def test_an_id_is_stored_once(mill: Mill, topic: Topic, js: JetStreamContext) -> None:
    async with mill.guard("orders"):
        first = await js.publish("ingress.orders.a", BODY, headers={"Nats-Msg-Id": "x1"})
        again = await js.publish("ingress.orders.a", BODY, headers={"Nats-Msg-Id": "x1"})
    assert (first.seq, again.seq, again.duplicate) == (1, 1, True)
    assert len(await values(topic)) == 1


async def test_headers_of_jetstream_are_honoured_or_refused_but_never_ignored(
    mill: Mill, js: JetStreamContext
) -> None:
    topic = await mill.create_topic("orders", schema=Order, guarded=True, packs=False)
    expected = "Nats-Expected-Last-Subject-Sequence"
    async with mill.guard("orders"):
        await js.publish("ingress.orders.a", BODY, stream="orders")
        await js.publish("ingress.orders.a", BODY, headers={expected: "1", "Mill-Time": "1000"})
        with pytest.raises(APIError) as wrong:
            await js.publish("ingress.orders.a", BODY, headers={expected: "1"})
        assert wrong.value.err_code == 10071
        with pytest.raises(APIError, match="expected stream"):
            await js.publish("ingress.orders.a", BODY, stream="others")
        for name, text in (
            ("Nats-Expected-Last-Msg-Id", "x"),
            ("Nats-Rollup", "sub"),
            ("Mill-Epoch", "3"),
            ("Mill-Time", "noon"),
            (expected, "last"),
        ):
            with pytest.raises(BadRequestError) as refused:
                await js.publish("ingress.orders.a", BODY, headers={name: text})
            assert refused.value.err_code == ErrorCode.GUARD_HEADER
        await js.publish("ingress.orders.a", b"", headers={"Mill-Null": "1"})
    events = [event async for event in topic.read()]
    assert [event.offset for event in events] == [1, 2, 3]
    assert events[1].timestamp_ns == 1000
    assert events[2].value is None


async def test_a_condition_on_a_key_is_refused_where_the_key_may_be_in_packs(
    mill: Mill, topic: Topic, js: JetStreamContext
) -> None:
    expected = {"Nats-Expected-Last-Subject-Sequence": "0"}
    async with mill.guard("orders"):
        for subject in ("ingress.orders.a", "ingress.orders._as.a"):
            with pytest.raises(BadRequestError, match="packs=False"):
                await js.publish(subject, BODY, headers=expected)
    assert await values(topic) == []


async def test_packs_are_refused_where_the_topic_takes_none(
    mill: Mill, js: JetStreamContext
) -> None:
    """Also if they were encoded for another topic, by a client that does not ask."""
    topic = await mill.create_topic("orders", schema=Order, guarded=True)
    single = await mill.create_topic("single", schema=Order, guarded=True, packs=False)
    async with mill.guard("orders"), mill.guard("single"):
        async with topic.producer() as producer:
            await producer.send(order(1), "a")
        message = await mill.jetstream.get_message("orders", {"seq": 1})
        assert message is not None
        headers = {
            name: text
            for name, text in parse_headers(message.headers).items()
            if not name.startswith("Nats-")
        }
        with pytest.raises(BadRequestError, match="takes no packs"):
            await js.publish("ingress.single._as._pack.p", message.payload, headers=headers)
    assert await values(single) == []


async def test_tokens_of_the_subject_are_the_key(
    mill: Mill, topic: Topic, js: JetStreamContext
) -> None:
    async with mill.guard("orders"):
        for words in ("eu.42", "a=2Eb", "_"):
            await js.publish(f"ingress.orders.{words}", BODY)
    assert [event.key async for event in topic.read()] == ["eu.42", "a.b", None]


async def test_a_new_version_is_accepted_as_soon_as_it_is_registered(
    mill: Mill, topic: Topic, js: JetStreamContext
) -> None:
    noted = BODY.replace(b"}", b', "note": "hi"}')
    old = (await mill.schemas.topic("orders")).latest.id
    async with mill.guard("orders"):
        with pytest.raises(BadRequestError, match="note"):
            await js.publish("ingress.orders.a", noted)
        new = await mill.schemas.evolve("orders", version(OrderWithNote))
        deadline = Deadline(60)
        while True:
            try:
                await js.publish("ingress.orders.a", noted)
                break
            except BadRequestError:
                assert not deadline.passed
                await asyncio.sleep(0.01)
        await js.publish("ingress.orders.a", BODY, headers={"Mill-Schema": str(old)})
        with pytest.raises(BadRequestError, match="has no version with schema id"):
            await js.publish("ingress.orders.a", BODY, headers={"Mill-Schema": "999"})
        with pytest.raises(BadRequestError, match="note"):
            await js.publish("ingress.orders.a", noted, headers={"Mill-Schema": str(old)})
    stored = [await mill.jetstream.get_message("orders", {"seq": n}) for n in (1, 2)]
    for message, id_ in zip(stored, (new.id, old), strict=True):
        assert message is not None
        assert f"Mill-Schema: {id_}\r\n".encode() in message.headers
    assert [v["note"] for v in await values(await mill.topic("orders"))] == ["hi", None]


async def test_guards_share_the_work_and_closing_one_loses_nothing(
    mill: Mill, connect: Callable[[], Awaitable[Mill]], js: JetStreamContext
) -> None:
    topic = await mill.create_topic("many", schema=Order, guarded=True, partitions=3)
    other = await connect()
    async with other.guard("many") as second:
        first = await mill.guard("many").open()
        await mill.flush()

        async def publish(number: int) -> None:
            body = BODY.replace(b"1", b"%d" % number, 1)
            await js.publish(f"ingress.many.k{number % 9}", body)

        await asyncio.gather(*(publish(number) for number in range(200)))
        more = asyncio.gather(*(publish(number) for number in range(200, 300)))
        await first.close()
        await more
        assert first.stored
        assert second.stored
        assert first.stored + second.stored == 300
    assert sorted(value.id for value in await values(topic)) == list(range(300))
    by_key: dict[str | None, list[int]] = {}
    async for event in topic.read(keys=["k1"]):
        by_key.setdefault(event.key, []).append(event.partition)
    assert len(set(by_key["k1"])) == 1


async def test_too_many_messages_are_answered_not_lost(
    mill: Mill, topic: Topic, peer: Client
) -> None:
    settings = GuardSettings(max_in_flight=1, messages_max=5)
    async with mill.guard("orders", settings) as guard:
        answers = await asyncio.gather(
            *(peer.request("ingress.orders.a", BODY, timeout=60) for _ in range(100))
        )
    parsed = [json.loads(answer.data) for answer in answers]
    busy = [answer for answer in parsed if "error" in answer]
    assert busy
    assert all(answer["error"]["err_code"] == ErrorCode.GUARD_BUSY for answer in busy)
    assert guard.refused == len(busy)
    assert len(await values(topic)) == 100 - len(busy)


async def test_a_guard_is_refused_where_it_would_guard_nothing(mill: Mill) -> None:
    await mill.create_topic("plain", schema=Order)
    with pytest.raises(ConfigError, match="is not guarded"):
        await mill.guard("plain").open()
    with pytest.raises(TopicConflict, match="those of a guarded topic are its own"):
        await mill.edit_topic("plain", guarded=True)
    await mill.create_topic("closed", schema=Order, guarded=True)
    with pytest.raises(TopicConflict, match="those of a guarded topic are its own"):
        await mill.edit_topic("closed", guarded=False)
    async with mill.guard("closed"):
        pass
    with pytest.raises(ConfigError, match="would be the entrance of guarded topics"):
        await mill.create_topic("ingress")
    with pytest.raises(ConfigError, match="starts with a token that guarded topics use"):
        await mill.create_topic("other", prefix="_guarded.closed")
    await mill.jetstream.create_stream({"name": "greedy", "subjects": ["ingress.>"]})
    with pytest.raises(ConfigError, match="would bypass the guard"):
        await mill.guard("closed").open()
    with pytest.raises(ConfigError, match="against a schema"):
        await mill.create_topic("bare", guarded=True)


async def test_a_guard_without_a_registered_schema_is_refused(mill: Mill, topic: Topic) -> None:
    await mill.schemas.forget("orders")
    with pytest.raises(SchemaNotFound, match="has no schema"):
        await mill.guard("orders").open()


async def test_a_message_without_a_reply_subject_is_stored_as_well(
    mill: Mill, topic: Topic, peer: Client
) -> None:
    async with mill.guard("orders") as guard:
        await peer.publish("ingress.orders.a", BODY)
        await peer.publish("ingress.orders.a", b"{}")
        await peer.flush()
        deadline = Deadline(60)
        while guard.stored + guard.refused < 2:
            assert not deadline.passed
            await asyncio.sleep(0.01)
    assert await values(topic) == [Order(1, "ada", Decimal("9.90"), PLACED)]
