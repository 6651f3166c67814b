"""Keys: the events of one key, in topics of a thousand to ten million events."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from functools import partial

from bench.harness import Contestant, Result, Skipped, against
from millstream import connect
from millstream.messaging import Topic
from millstream.mill import Mill
from millstream.testing import running_broker

PAYLOAD = b"x" * 128
EACH = 10  # events of a key
SIZES = (1_000, 100_000, 1_000_000, 10_000_000)
QUICK_SIZES = SIZES[:3]
READS = 50  # keys that are read in one round
FEW = 5  # of those that take long
NEWEST = 50_000  # events
MIXED, PACKS = 1_000_000, 20
AHEAD = 20_000  # messages on their way to the broker while a topic is filled
ROUNDS = 9


def measure(quick: bool) -> Iterator[Result | Skipped]:
    """The time to read a key, against one request to the broker, by the size of the topic.

    The broker keeps a topic in files of 8 MB, and those that were used in the last seconds in
    memory. `any key` is mostly in a file that has to be read first when the topic is large;
    `newest keys` are in the last ones, as records that are being worked on. Their events are one
    after the other; `spread` ones have one event in each tenth of the topic.
    """
    with running_broker(durability="periodic") as broker, asyncio.Runner() as runner:
        mill = runner.run(_connected(broker.url))
        try:
            for size in QUICK_SIZES if quick else SIZES:
                topic = runner.run(_filled(mill, f"close-{size}", size, spread=False))
                for what, first in ("any key", 0), ("newest keys", max(0, size - NEWEST)):
                    yield from _reads(
                        topic, what, range(first // EACH, size // EACH), runner, quick
                    )
                yield from _several(topic, size, runner, quick)
                runner.run(mill.delete_topic(topic.name))
            for size in QUICK_SIZES[1:]:
                topic = runner.run(_filled(mill, f"spread-{size}", size, spread=True))
                yield from _reads(topic, "spread", range(size // EACH), runner, quick)
                runner.run(mill.delete_topic(topic.name))
            topic = runner.run(_filled(mill, "mixed", MIXED, spread=False, packs=PACKS))
            yield from _reads(topic, f"beside {PACKS} packs", range(MIXED // EACH), runner, quick)
        finally:
            runner.run(mill.close())


async def _connected(url: str) -> Mill:
    return await connect(url)


async def _filled(mill: Mill, name: str, size: int, spread: bool, packs: int = 0) -> Topic:
    """A topic of its own; without acks, which only the last of many waits for."""
    topic = await mill.create_topic(name, packs=bool(packs))
    connection, keys = mill.jetstream.connection, size // EACH
    for number in range(size):
        key = number % keys if spread else number // EACH
        connection.publish(f"{name}.a{key}".encode(), PAYLOAD)
        if number % 1000 == 999:
            await _stored(mill, name, number - AHEAD)
    await _stored(mill, name, size)
    for _ in range(packs):
        async with topic.producer() as producer:
            for number in range(EACH):
                await producer.send(PAYLOAD, f"packed-{number}")
    return topic


async def _stored(mill: Mill, stream: str, count: int) -> None:
    while True:
        if (await mill.jetstream.stream_info(stream)).state.last_seq >= count:
            return
        await asyncio.sleep(0.01)


def _reads(
    topic: Topic, what: str, keys: range, runner: asyncio.Runner, quick: bool
) -> Iterator[Result | Skipped]:
    dice = random.Random(7)

    async def ours() -> float:
        began = time.perf_counter()
        for _ in range(READS):
            key = f"a{dice.choice(keys)}"
            found = [event async for event in topic.read(keys=[key])]
            if len(found) != EACH:
                raise AssertionError(f"{len(found)} events of {key} instead of {EACH}")
        return (time.perf_counter() - began) / READS * 1e3

    async def two_filters() -> float:
        """As one consumer of the key and of packs, which is how any NATS client would do it."""
        began = time.perf_counter()
        for _ in range(FEW):
            subjects = [f"{topic.name}.a{dice.choice(keys)}", f"{topic.name}._pack.>"]
            async for event in topic.read(subjects=subjects):
                del event
        return (time.perf_counter() - began) / FEW * 1e3

    peers: dict[str, Contestant] = {"one request": partial(_request, topic)}
    if keys.stop * EACH <= MIXED:  # beyond, it takes seconds
        peers["consumer with two filters"] = two_filters
    yield from against(
        f"read {EACH} events of 1 key, {what}, of {keys.stop * EACH:,} events",
        "ms",
        ours,
        peers,
        quick=quick,
        better="lower",
        runner=runner,
        rounds=None if quick else ROUNDS,
    )


def _several(
    topic: Topic, size: int, runner: asyncio.Runner, quick: bool
) -> Iterator[Result | Skipped]:
    dice, count = random.Random(size), 10

    async def ours() -> float:
        began = time.perf_counter()
        for _ in range(READS // count):
            keys = [f"a{number}" for number in dice.sample(range(size // EACH), count)]
            found = [event async for event in topic.read(keys=keys)]
            if len(found) != EACH * count:
                raise AssertionError(f"{len(found)} events instead of {EACH * count}")
        return (time.perf_counter() - began) / (READS // count) * 1e3

    yield from against(
        f"read {EACH} events of {count} keys, any keys, of {size:,} events",
        "ms",
        ours,
        {"one request": partial(_request, topic)},
        quick=quick,
        better="lower",
        runner=runner,
        rounds=None if quick else ROUNDS,
    )


async def _request(topic: Topic) -> float:
    """The broker's answer to a small question."""
    began = time.perf_counter()
    for _ in range(READS):
        await topic.last("a0")
    return (time.perf_counter() - began) / READS * 1e3
