"""Messaging: our SDK, nats-py's own helpers and a bare socket, on one server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from statistics import median, quantiles
from typing import Any

from bench.floor import RawSocket, frames_with_ids, open_raw_protocol
from bench.harness import OURS, Contestant, PeerAbsent, Result, Skipped, against, raced, spread
from millstream import connect
from millstream.messaging import Client, NewEvent, SubscriptionSettings, Topic
from millstream.testing import running_broker
from millstream.wire.protocol import unique_token

PAYLOAD = b"x" * 128
WINDOW = 1024


def measure(quick: bool) -> Iterator[Result | Skipped]:
    """Every figure of the messaging table; sizes shrink with `quick`."""
    with running_broker(durability="periodic") as broker, asyncio.Runner() as runner:
        stage = runner.run(_Stage.open(broker.url, 30_000 if quick else 60_000))
        try:
            yield from _publish(stage, quick, runner)
            yield from _pull(stage, quick, runner)
            yield from _read(stage, quick, runner)
            yield from _core(stage, quick, runner)
            yield from _latency(stage, quick, runner)
        finally:
            runner.run(stage.close())


class _Aside:
    """A second figure of the same rounds; less of it is better."""

    def __init__(self) -> None:
        self._figures: dict[str, list[float]] = {}

    def note(self, who: str, figure: float) -> None:
        self._figures.setdefault(who, []).append(figure)

    def results(self, name: str, unit: str) -> Iterator[Result]:
        """Ours and each peer's: medians without the first round, which only warms up."""
        warm = {who: figures[1:] for who, figures in self._figures.items()}
        own = warm.pop(OURS, None)
        if own and not warm:
            yield Result(name, median(own), unit, spread=spread(own))
        for peer, theirs in warm.items() if own else ():
            yield raced(name, unit, own or [], peer, theirs, better="lower")


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

    def nats_py(self) -> Any:
        """nats-py's connection."""
        if self.peer is None:
            raise PeerAbsent("nats-py is not installed: pip install nats-py")
        return self.peer

    async def fill(self, count: int) -> Topic:
        topic = await self.mill.create_topic(f"fill-{unique_token(8)}", storage="memory")
        await topic.publish_many(NewEvent(PAYLOAD, "k") for _ in range(count))
        return topic


def _rounds(quick: bool) -> int:
    return 5 if quick else 9  # they are short, and a shared machine disturbs some


def _rate(count: int, began: float) -> float:
    return count / (time.perf_counter() - began)


def _publish(stage: _Stage, quick: bool, runner: asyncio.Runner) -> Iterator[Result | Skipped]:
    count, cpu = stage.count, _Aside()

    def timed(who: str, events: int, work: Callable[[], Awaitable[None]]) -> Contestant:
        async def run() -> float:
            began, busy = time.perf_counter(), time.process_time()
            await work()
            cpu.note(who, (time.process_time() - busy) / events * 1e6)
            return _rate(events, began)

        return run

    async def ours() -> None:
        async with stage.topic.event_producer() as producer:
            for _ in range(count):
                await producer.send(PAYLOAD, "k")

    few = count // 2  # it is slower: about the same time, fewer messages

    async def theirs() -> None:
        js = stage.nats_py().jetstream()
        for _ in range(few):
            await js.publish_async("bench.k", PAYLOAD)
        await js.publish_async_completed()

    async def theirs_with_ids() -> None:
        js, word = stage.nats_py().jetstream(), unique_token(16)
        for number in range(few):
            await js.publish_async("bench.k", PAYLOAD, headers={"Nats-Msg-Id": f"{word}{number}"})
        await js.publish_async_completed()

    def floor() -> float:
        frames = frames_with_ids("bench.k", stage.raw.inbox, count, PAYLOAD)
        return stage.raw.publish_rate(frames, WINDOW)

    name = "acked publish, many in flight"
    peers: dict[str, Contestant] = {
        "nats-py publish_async": timed("nats-py publish_async", few, theirs),
        "nats-py publish_async, ids": timed("nats-py publish_async, ids", few, theirs_with_ids),
        "raw socket": floor,
    }
    ourselves = timed(OURS, count, ours)
    yield from against(
        name, "events/s", ourselves, peers, quick=quick, runner=runner, rounds=_rounds(quick)
    )
    yield from cpu.results(f"{name}: CPU of the client", "us/event")


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
        await topic.subscriptions.delete(name)
        return rate

    async def theirs() -> float:
        few, got = count // 4, 0
        durable = f"p{unique_token(8)}"
        nats = stage.nats_py()
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
        {"nats-py fetch + ack": theirs},
        quick=quick,
        runner=runner,
        rounds=_rounds(quick),
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

    async def fetch() -> float:
        from nats.js.api import AckPolicy, ConsumerConfig

        few, got = count // 8, 0
        durable = f"r{unique_token(8)}"
        js = stage.nats_py().jetstream()
        config = ConsumerConfig(ack_policy=AckPolicy.NONE)
        sub = await js.pull_subscribe(f"{topic.name}.>", durable, config=config)
        began = time.perf_counter()
        while got < few:
            got += len(await sub.fetch(1000))
        rate = _rate(got, began)
        await js.delete_consumer(topic.name, durable)
        return rate

    async def ordered() -> float:
        few = count // 8
        js = stage.nats_py().jetstream()
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

    yield from against(
        "read a range, no acks",
        "events/s",
        ours,
        {"nats-py fetch": fetch, "nats-py ordered": ordered},
        quick=quick,
        runner=runner,
        rounds=_rounds(quick),
    )


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
        rounds=_rounds(quick),
    )


def _latency(stage: _Stage, quick: bool, runner: asyncio.Runner) -> Iterator[Result | Skipped]:
    """One awaited publish at a time. The floor of an await is an event loop with nothing on it."""
    count, tails = 1000 if quick else 2000, _Aside()
    protocol = runner.run(open_raw_protocol(stage.url))

    def middle(who: str, times: list[float]) -> float:
        tails.note(who, quantiles(times, n=100)[98] * 1e6)
        return median(times) * 1e6

    async def ours() -> float:
        return middle(OURS, await _times(count, lambda: stage.topic.publish(PAYLOAD, "k")))

    async def in_a_loop() -> float:
        frames = frames_with_ids("bench.k", protocol.inbox, count, PAYLOAD)
        return middle("raw asyncio protocol", await protocol.latencies(frames))

    def blocking() -> float:
        frames = frames_with_ids("bench.k", stage.raw.inbox, count, PAYLOAD)
        return middle("raw blocking socket", stage.raw.latencies(frames))

    async def theirs() -> float:
        js = stage.nats_py().jetstream()
        return middle(
            "nats-py publish", await _times(count, lambda: js.publish("bench.k", PAYLOAD))
        )

    yield from against(
        "one awaited publish, p50",
        "us",
        ours,
        {
            "raw asyncio protocol": in_a_loop,
            "raw blocking socket": blocking,
            "nats-py publish": theirs,
        },
        quick=quick,
        better="lower",
        runner=runner,
        rounds=_rounds(quick),
    )
    yield from tails.results("one awaited publish, p99", "us")


async def _times(count: int, work: Callable[[], Awaitable[Any]]) -> list[float]:
    """Seconds that each of `count` awaits took."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        await work()
        times.append(time.perf_counter() - began)
    return times
