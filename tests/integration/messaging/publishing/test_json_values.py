"""Dicts and lists in topics without a schema: every way to send them, and to read them back."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.errors import ConfigError, NotJson
from millstream.messaging import Message, NewEvent, PublishOptions, Topic
from millstream.mill import Mill

JSON = {"content-type": "application/json"}


async def test_every_way_to_send_a_dict_or_list(mill: Mill, topic: Topic, accounts: Topic) -> None:
    sent: list[Any] = [{"n": number, "text": "ä"} for number in range(9)] + [[1, {"a": None}]]
    await topic.publish(sent[0], "k")
    await topic.publish_many([sent[1], NewEvent(sent[2], "k")])
    await topic.publish_atomic([sent[3], NewEvent(sent[4], "k")])
    async with topic.event_producer() as events:
        await events.send(sent[5])
    async with topic.producer() as packs:
        await packs.send(sent[6], "k")
        await packs.send(sent[7], headers={"own": "1"})
    async with topic.writer("w") as writer:
        await writer.write(sent[8], "k", position=1)
        await writer.write(sent[9], position=2)
    read = [event async for event in topic.read()]
    assert [event.json() for event in read] == sent
    assert [event.headers for event in read] == [
        {**JSON, "own": "1"} if event.json() == sent[7] else JSON for event in read
    ]
    assert read[0].value == '{"n":0,"text":"ä"}'.encode()
    await accounts.publish({"a": 1}, "k", options=PublishOptions(expected_last=0))
    table = await mill.create_table("prices")
    await table.put("a", {"price": 1})
    entry = await table.get("a")
    assert entry is not None
    assert entry.json() == {"price": 1}


async def test_a_value_that_cannot_be_written_stores_nothing(topic: Topic) -> None:
    for unfit in ({"a": float("nan")}, [b"x"], 42):
        with pytest.raises(ConfigError):
            await topic.publish(unfit, "k")
        with pytest.raises(ConfigError):
            await topic.publish_atomic([{"a": 1}, unfit])
        async with topic.producer() as packs:
            with pytest.raises(ConfigError):
                await packs.send(unfit)
    with pytest.raises(ConfigError, match=r"key=str\(42\)"):
        await topic.publish({"a": 1}, 42)  # type: ignore[arg-type]
    assert [event async for event in topic.read()] == []


async def test_json_of_a_delivery_a_dead_letter_and_a_process(mill: Mill, topic: Topic) -> None:
    await topic.publish({"a": 1}, "k")
    await topic.publish(b"none")
    await topic.publish(None, "k")
    target = await mill.create_topic("out")
    process = topic.process(target, lambda event: {"got": event.key} if event.value else None)
    await process.run(once=True)
    assert [event.json() async for event in target.read()] == [{"got": "k"}, {"got": None}]
    async with topic.subscribe("s") as subscription:
        first, second, third = [await anext(aiter(subscription)) for _ in range(3)]
        assert first.json() == {"a": 1}
        with pytest.raises(NotJson, match="orders/0, offset 2, index 0: not JSON"):
            second.json()
        with pytest.raises(NotJson, match="no value"):
            third.json()
        second.terminate("bad")
        await subscription.close()
    letters = await topic.dead_letters("s")
    (letter,) = await letters.list()
    with pytest.raises(NotJson, match="dead letter 1 of 'orders'"):
        letter.json()
    edited = await letters.edit(letter.offset, value=[1, 2])
    assert (edited.json(), edited.headers) == ([1, 2], JSON)


async def test_requests_and_services_speak_json(mill: Mill) -> None:
    service = mill.service("sums", "1.0.0")

    @service.endpoint("sum")
    async def add(request: Message) -> dict[str, int]:
        return {"sum": sum(request.json())}

    async with service:
        answer = await mill.request("sum", [1, 2, 3])
    assert answer.json() == {"sum": 6}
    assert answer.headers == JSON
    async with mill.subscribe("news") as subscriber:
        await mill.publish("news", {"a": "ä"})
        await mill.publish("news", "not json")
        assert (await anext(aiter(subscriber))).json() == {"a": "ä"}
        with pytest.raises(NotJson, match="message on 'news'"):
            (await anext(aiter(subscriber))).json()
