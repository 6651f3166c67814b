"""Messaging: our SDK beside nats-py's own helpers and beside a bare socket, on one server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from statistics import median, quantiles
from typing import Any

from bench.floor import RawSocket, frames_with_ids, open_raw_protocol
from bench.harness import Contestant, PeerAbsent, Result, Skipped, against
from millstream.messaging import Client, NewEvent, SubscriptionSettings, Topic, connect
from millstream.testing import running_broker
from millstream.wire.protocol import unique_token

PAYLOAD = b"x" * 128
WINDOW = 1024


def measure(quick: bool) -> Iterator[Result | Skipped]:
    """Every figure of the messaging table; sizes shrink with `quick`."""
    with running_broker(durability="periodic") as broker, asyncio.Runner() as runner:
        stage = runner.run(_Stage.open(broker.url, 20_000 if quick else 60_000))
        try:
            yield from _publish(stage, quick, runner)
            yield from _pull(stage, quick, runner)
            yield from _read(stage, quick, runner)
            yield from _core(stage, quick, runner)
            yield from _latency(stage, quick, runner)
        finally:
            runner.run(stage.close())


class _Stage:
    """The contestants on one server: our connection, nats-py's, and a bare socket."""

    def __init__(self, mill: Client, topic: Topic, peer: Any, url: str, count: int) -> None:
        self.mill, self.topic, self.peer, self.url, self.count = mill, topic, peer, url, count
        self.raw = RawSocket(url)

    @classmethod
    async def open(cls, url: str, count: int) -> _Stage:
        mill = await connect(url)
        topic = await mill.create_topic("bench")
        try:
            import nats
        except ImportError:
            return cls(mill, topic, None, url, count)
        return cls(mill, topic, await nats.connect(url), url, count)

    async def close(self) -> None:
        self.raw.close()
        if self.peer is not None:
            await self.peer.close()
        await self.mill.close()

    def nats_py(self, work: Callable[[Any], Awaitable[float]]) -> Callable[[], Awaitable[float]]:
        async def run() -> float:
            if self.peer is None:
                raise PeerAbsent("nats-py is not installed: pip install nats-py")
            return await work(self.peer)

        return run

    async def fill(self, count: int) -> Topic:
        topic = await self.mill.create_topic(f"fill-{unique_token(8)}", storage="memory")
        await topic.publish_many(NewEvent(PAYLOAD, "k") for _ in range(count))
        return topic


def _rate(count: int, began: float) -> float:
    return count / (time.perf_counter() - began)


def _publish(stage: _Stage, quick: bool, runner: asyncio.Runner) -> Iterator[Result | Skipped]:
    count = stage.count

    async def ours() -> float:
        began = time.perf_counter()
        async with stage.topic.event_producer(WINDOW) as producer:
            for _ in range(count):
                await producer.send(PAYLOAD, "k")
        return _rate(count, began)

    async def theirs(nats: Any) -> float:
        js = nats.jetstream(publish_async_max_pending=WINDOW)
        few = count // 4  # it is slower: the same time, fewer messages
        began = time.perf_counter()
        for _ in range(few):
            await js.publish_async("bench.k", PAYLOAD)
        await js.publish_async_completed()
        return _rate(few, began)

    def floor() -> float:
        return stage.raw.publish_rate(
            frames_with_ids("bench.k", stage.raw.inbox, count, PAYLOAD), WINDOW
        )

    peers: dict[str, Contestant] = {
        "nats-py publish_async": stage.nats_py(theirs),
        "raw socket": floor,
    }
    yield from against(
        "acked publish, many in flight", "events/s", ours, peers, quick=quick, runner=runner
    )


def _pull(stage: _Stage, quick: bool, runner: asyncio.Runner) -> Iterator[Result | Skipped]:
    count = stage.count
    topic = runner.run(stage.fill(count))

    async def ours() -> float:
        name = f"s{unique_token(8)}"
        subscription = await topic.subscribe(name, SubscriptionSettings())
        began, got = time.perf_counter(), 0
        async with subscription:
            async for delivery in subscription:
                delivery.ack()
                got += 1
                if got == count:
                    break
            await stage.mill.flush()
            rate = _rate(count, began)
        await topic.delete_subscription(name)
        return rate

    async def theirs(nats: Any) -> float:
        few, got = count // 4, 0
        durable = f"p{unique_token(8)}"
        js = nats.jetstream()
        sub = await js.pull_subscribe(f"{topic.name}.>", durable)
        began = time.perf_counter()
        while got < few:
            for message in await sub.fetch(min(1000, few - got)):
                await message.ack()
                got += 1
        await nats.flush()
        rate = _rate(few, began)
        await js.delete_consumer(topic.name, durable)
        return rate

    yield from against(
        "pull subscription, explicit acks",
        "events/s",
        ours,
        {"nats-py fetch + ack": stage.nats_py(theirs)},
        quick=quick,
        runner=runner,
    )


def _read(stage: _Stage, quick: bool, runner: asyncio.Runner) -> Iterator[Result | Skipped]:
    count = stage.count * 2
    topic = runner.run(stage.fill(count))

    async def ours() -> float:
        began, got = time.perf_counter(), 0
        async for _ in topic.read():
            got += 1
        if got != count:
            raise RuntimeError(f"read {got} of {count} events")
        return _rate(got, began)

    async def fetch(nats: Any) -> float:
        from nats.js.api import AckPolicy, ConsumerConfig

        few, got = count // 8, 0
        durable = f"r{unique_token(8)}"
        js = nats.jetstream()
        config = ConsumerConfig(ack_policy=AckPolicy.NONE)
        sub = await js.pull_subscribe(f"{topic.name}.>", durable, config=config)
        began = time.perf_counter()
        while got < few:
            got += len(await sub.fetch(1000))
        rate = _rate(got, began)
        await js.delete_consumer(topic.name, durable)
        return rate

    async def ordered(nats: Any) -> float:
        few = count // 8
        js = nats.jetstream()
        sub = await js.subscribe(
            f"{topic.name}.>",
            ordered_consumer=True,
            pending_msgs_limit=count * 2,
            pending_bytes_limit=1 << 30,
        )
        began = time.perf_counter()
        for _ in range(few):
            await sub.next_msg()
        rate = _rate(few, began)
        await sub.unsubscribe()
        return rate

    peers = {"nats-py fetch": stage.nats_py(fetch), "nats-py ordered": stage.nats_py(ordered)}
    yield from against("read a range, no acks", "events/s", ours, peers, quick=quick, runner=runner)


def _core(stage: _Stage, quick: bool, runner: asyncio.Runner) -> Iterator[Result | Skipped]:
    from bench.core import nats_py_publish_subscribe, publish_subscribe

    count = stage.count

    async def ours() -> float:
        return await publish_subscribe(stage.url, count, PAYLOAD)

    async def theirs() -> float:
        return await nats_py_publish_subscribe(stage.url, count, PAYLOAD)

    yield from against(
        "core publish and subscribe",
        "messages/s",
        ours,
        {"nats-py": theirs},
        quick=quick,
        runner=runner,
    )


def _latency(stage: _Stage, quick: bool, runner: asyncio.Runner) -> Iterator[Result | Skipped]:
    """One awaited publish at a time. The floor of an await is an event loop with nothing on it."""
    count = 500 if quick else 1500
    protocol = runner.run(open_raw_protocol(stage.url))

    async def ours() -> list[float]:
        times = []
        for _ in range(count):
            began = time.perf_counter()
            await stage.topic.publish(PAYLOAD, "k")
            times.append(time.perf_counter() - began)
        return times

    async def floor() -> list[float]:
        return await protocol.latencies(frames_with_ids("bench.k", protocol.inbox, count, PAYLOAD))

    def blocking() -> list[float]:
        return stage.raw.latencies(frames_with_ids("bench.k", stage.raw.inbox, count, PAYLOAD))

    async def theirs(nats: Any) -> list[float]:
        js = nats.jetstream()
        times = []
        for _ in range(count):
            began = time.perf_counter()
            await js.publish("bench.k", PAYLOAD)
            times.append(time.perf_counter() - began)
        return times

    async def nats_py() -> list[float]:
        if stage.peer is None:
            raise PeerAbsent("nats-py is not installed: pip install nats-py")
        return await theirs(stage.peer)

    for name, pick in (("p50", median), ("p99", _p99)):
        yield from against(
            f"one awaited publish, {name}",
            "us",
            _picked(ours, pick),
            {
                "raw asyncio protocol": _picked(floor, pick),
                "raw blocking socket": _picked_now(blocking, pick),
                "nats-py publish": _picked(nats_py, pick),
            },
            quick=quick,
            better="lower",
            runner=runner,
        )


def _p99(times: list[float]) -> float:
    return quantiles(times, n=100)[98]


def _picked(
    work: Callable[[], Awaitable[list[float]]], pick: Callable[[list[float]], float]
) -> Callable[[], Awaitable[float]]:
    async def run() -> float:
        return pick(await work()) * 1e6

    return run


def _picked_now(
    work: Callable[[], list[float]], pick: Callable[[list[float]], float]
) -> Callable[[], float]:
    return lambda: pick(work()) * 1e6
