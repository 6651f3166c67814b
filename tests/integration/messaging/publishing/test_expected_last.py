"""Events that name the one they follow: sound, because such a topic never holds packs."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from typing import Any

import pytest

import millstream
from millstream.cli.files.writer import open_writer
from millstream.errors import ConfigError, MillstreamError, TopicConflict, WrongSequence
from millstream.messaging import NewEvent, PublishOptions, Topic
from millstream.messaging.topics.admin import edit, open_topic
from millstream.mill import Mill
from tests.integration.messaging.event_kit import read, values

KEYS = ("ann", "bob", "cy")
CLIENTS, ADDITIONS = 4, 10


def after(offset: int) -> PublishOptions:
    return PublishOptions(expected_last=offset)


async def test_an_event_in_a_pack_cannot_be_overlooked(topic: Topic) -> None:
    """The balance is 30 after the pack; a writer that knows only the 100 must not succeed."""
    first = await topic.publish(b"100", "ann")
    async with topic.producer() as producer:
        await producer.send(b"-70", "ann")
    with pytest.raises(ConfigError, match=r"packs=False .*or a table"):
        await topic.publish(b"-100", "ann", options=after(first.offset))
    assert await values(topic) == [b"100", b"-70"]


@pytest.mark.parametrize("given", [{"packs": False}, {"history": 5}], ids=["packs", "history"])
async def test_no_way_to_write_packs_leads_into_a_topic_without_them(
    mill: Mill, topic: Topic, given: dict[str, Any]
) -> None:
    await mill.create_topic("single", **given)
    single = await mill.topic("single")  # as any other client finds it
    assert not single.settings.takes_packs
    for write in (single.producer, lambda: single.writer("w")):
        with pytest.raises(ConfigError, match="takes no packs"):
            write()
    if "packs" in given:  # with a history it is a table, which a process writes row by row
        with pytest.raises(ConfigError, match="takes no packs"):
            mill.process(topic, single, lambda event: event.value)
        with pytest.raises(ConfigError, match="an import writes packs"):
            open_writer(single, "file")
    receipt = await single.publish(b"1", "k", options=after(0))
    with pytest.raises(WrongSequence):
        await single.publish(b"2", "k", options=after(0))
    await single.publish(b"3", "k", options=after(receipt.offset))
    assert await values(single) == [b"1", b"3"]


async def test_whether_a_topic_takes_packs_never_changes(mill: Mill) -> None:
    await mill.create_topic("packed")
    await mill.create_topic("single", packs=False)
    await mill.create_table("table")
    for name, wanted in (("packed", False), ("single", True), ("single", None)):
        with pytest.raises(TopicConflict, match="packs is"):
            await mill.create_topic(name, packs=wanted)
    for name, wanted in (("packed", False), ("single", True)):
        with pytest.raises(TopicConflict, match="cannot be changed"):
            await mill.edit_topic(name, packs=wanted)
    # A history would remove packs with events of other keys; without one they would be allowed.
    with pytest.raises(ConfigError, match="takes packs"):
        await mill.edit_topic("packed", history=1)
    for history in (7, None):
        await mill.edit_topic("table", history=history)
        assert not (await mill.topic("table")).settings.takes_packs
    await (await mill.topic("table")).publish(b"1", "k", options=after(0))
    await mill.edit_topic("single", history=3)
    assert (await mill.topic("packed")).settings.takes_packs


async def test_a_table_of_an_earlier_version_takes_none_either(mill: Mill) -> None:
    """Its stream does not say so."""
    await mill.create_table("table")
    config = (await mill.jetstream.stream_info("table")).config
    old = {key: text for key, text in config["metadata"].items() if key != "millstream.packs"}
    await mill.jetstream.update_stream({**config, "metadata": old})
    table = await mill.create_table("table")
    await table.put("k", b"1", revision=0)
    await edit(mill.jetstream, "table", {"history": None})
    assert not (await open_topic(mill.jetstream, "table")).settings.takes_packs


async def test_of_two_kinds_of_topic_declared_together_one_is_created(millstream_url: str) -> None:
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(millstream.connect(millstream_url)) for _ in range(4)
        ]

        async def declare(client: Mill, number: int) -> bool:
            topic = await client.create_topic("t", partitions=3, packs=number % 2 == 0)
            return topic.settings.takes_packs

        results = await asyncio.gather(
            *(declare(clients[number % 4], number) for number in range(12)),
            return_exceptions=True,
        )
        kinds = {result for result in results if isinstance(result, bool)}
        assert len(kinds) == 1
        assert all(isinstance(result, bool | TopicConflict) for result in results)
        info = await open_topic(clients[0].jetstream, "t")
        assert kinds == {info.settings.takes_packs}
        assert not info.uneven


async def test_no_update_is_lost_while_writers_of_packs_try_the_same_topic(
    millstream_url: str, mill: Mill
) -> None:
    """Each client adds to what it has read; every addition counts, in each of three partitions."""
    await mill.create_topic("sums", partitions=3, packs=False)
    refused = 0

    async def add(topic: Topic, key: str) -> None:
        while True:
            last = await topic.last(key)
            offset, total = (0, 0) if last is None else (last.offset, int(last.value))
            event = NewEvent(b"%d" % (total + 1), key, options=after(offset))
            try:
                if random.random() < 0.5:
                    await topic.publish_atomic([event])
                else:
                    await topic.publish(event.value, key, options=event.options)
            except WrongSequence:
                continue
            return

    async def pack(topic: Topic, key: str) -> None:
        nonlocal refused
        try:
            async with topic.producer() as producer:
                await producer.send(b"1000", key)
        except MillstreamError:
            refused += 1

    async def work(client: Mill) -> None:
        topic = await client.topic("sums")
        for _ in range(ADDITIONS):
            for key in KEYS:
                await add(topic, key)
                await pack(topic, key)

    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(millstream.connect(millstream_url))
            for _ in range(CLIENTS)
        ]
        await asyncio.gather(*map(work, clients))
    topic = await mill.topic("sums")
    for key in KEYS:
        totals = [int(event.value) for event in await read(topic, keys=[key])]
        assert totals == list(range(1, CLIENTS * ADDITIONS + 1))
    assert refused == CLIENTS * ADDITIONS * len(KEYS)
