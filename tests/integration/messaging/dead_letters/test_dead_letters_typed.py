"""Dead letters of a topic with a schema: shown, changed and brought back as values."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

import millstream
from millstream.errors import Unfit
from millstream.messaging import DeadLetterQueue, Delivery, Topic
from tests.integration.messaging.event_kit import take
from tests.integration.messaging.topic_kit import eventually


@dataclass
class Order:
    id: int
    product: str


@pytest.fixture
async def topic(millstream_url: str) -> AsyncIterator[Topic]:
    async with millstream.connect(millstream_url) as mill:
        yield await mill.create_topic("orders", schema=Order)


async def bury(topic: Topic, packed: bool) -> DeadLetterQueue:
    if packed:
        async with topic.producer() as producer:
            for number in range(3):
                await producer.send(Order(number, "tea"), "k")
    else:
        await topic.publish_many([Order(number, "tea") for number in range(3)])
    async with topic.subscribe("s") as member:
        for delivery in await take(member, 3):
            delivery.terminate("bad")
    return await topic.dead_letters("s")


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
async def test_typed_letters_are_shown_changed_and_redriven(topic: Topic, packed: bool) -> None:
    queue = await bury(topic, packed)
    letters = await queue.list()
    assert [fields(letter.value) for letter in letters] == [(n, "tea") for n in range(3)]
    changed: Any = {"id": 1, "product": "milk"} if packed else Order(1, "milk")
    edited = await queue.edit(letters[1].offset, value=changed)
    assert fields(edited.value) == (1, "milk")
    with pytest.raises(Unfit):
        await queue.edit(letters[0].offset, value={"id": "no number", "product": "x"})
    assert (await queue.redrive()).redriven == 3
    async with topic.subscribe("s") as member:
        again: list[Delivery] = await take(member, 3)
        assert [fields(d.value) for d in again] == [(0, "tea"), (1, "milk"), (2, "tea")]


async def test_a_value_that_cannot_be_read_is_listed_as_its_bytes(
    topic: Topic, millstream_url: str
) -> None:
    async with millstream.connect(millstream_url) as mill:
        await mill.publish_acked("orders.k", b"rubbish")

        async def handle(delivery: Delivery) -> None:
            fields(delivery.value)

        member = await topic.subscribe("s", millstream.SubscriptionSettings(max_deliver=1))
        running = member.run(handle)
        task = asyncio.ensure_future(running)

        async def letters() -> list[Any]:
            queue = await topic.dead_letters("s")
            return [letter.value for letter in await queue.list()]

        await eventually(letters, [b"rubbish"])
        await member.close()
        await task


def fields(value: Any) -> tuple[int, str]:
    return (value["id"], value["product"]) if isinstance(value, dict) else (value.id, value.product)
