"""The processes that are killed: python -m tests.faults.worker ROLE PLAN

PLAN is JSON: url, folder (for the history), name, life, and what the role needs. A role works until
SIGTERM, finishes its work and leaves; SIGKILL may come at any line.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import time
import zlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import millstream
from millstream.errors import ApiError, FencedOut, MillstreamError, NoResponders, WrongSequence
from millstream.events.packs.packing import Packing
from millstream.messaging import (
    Delivery,
    Event,
    GroupEvent,
    GroupSettings,
    NewEvent,
    SubscriptionSettings,
    Topic,
)
from millstream.settings import Reconnect
from tests.faults.history import History, body_of, id_of
from tests.faults.store_worker import append_to_store

__all__ = ["ROLES", "Worker", "outputs_of", "reader_settings"]

CONNECT_TRIES: Final = 600  # a tenth of a second apart: longer than any outage of a run
PAUSE: Final = 0.1


@dataclass(frozen=True)
class Worker:
    """One process: its connection, its records, its plan."""

    mill: millstream.Mill
    history: History
    plan: dict[str, Any]
    stopping: asyncio.Event
    chance: random.Random

    @property
    def name(self) -> str:
        return str(self.plan["name"])

    async def rest(self, seconds: float) -> None:
        """Wait, but not longer than until the end."""
        try:
            async with asyncio.timeout(seconds):
                await self.stopping.wait()
        except TimeoutError:
            return


async def produce(worker: Worker) -> None:
    """Publish events of some keys, each awaited before the next of its key."""
    topic = await worker.mill.topic(worker.plan["topic"])
    keys = [f"k{number}" for number in range(worker.plan["keys"])]
    await asyncio.gather(*(_produce_key(worker, topic, key) for key in keys))


async def _produce_key(worker: Worker, topic: Topic, key: str) -> None:
    sender = f"{worker.name}.{worker.plan['life']}:{key}"
    number = 0
    while not worker.stopping.is_set():
        number += 1
        name = f"{sender}:{number}"
        worker.history.note("invoke", id=name)
        try:
            receipt = await topic.publish(body_of(name), key)
        except (ApiError, NoResponders) as error:
            worker.history.note("refused", id=name, error=str(error))
            await worker.rest(PAUSE)
        except MillstreamError as error:
            worker.history.note("unknown", id=name, error=str(error))
            await worker.rest(PAUSE)
        else:
            worker.history.note("ok", id=name, partition=receipt.partition, offset=receipt.offset)
        await worker.rest(worker.plan["pace"] * worker.chance.random() * 2)


async def write(worker: Worker) -> None:
    """Write numbered events exactly once, continuing where an earlier life ended."""
    topic = await worker.mill.topic(worker.plan["topic"])
    packing = Packing(max_events=50, linger=0.02)
    writer_name = worker.plan["writer"]
    async with topic.writer(writer_name, packing, lanes=worker.plan["lanes"]) as writer:
        worker.history.note("opened", writer=writer_name, position=writer.position)
        position = writer.position
        while not worker.stopping.is_set():
            many = worker.chance.randrange(1, 120)
            worker.history.note("given", writer=writer_name, position=position + many)
            for _ in range(many):
                position += 1
                key = f"k{zlib.crc32(b'%d' % position) % worker.plan['keys']}"
                body = body_of(f"{writer_name}:{key}:{position}")
                await writer.write(body, key, position=position)
            if worker.chance.random() < 0.5:
                await writer.flush()
                worker.history.note("flushed", writer=writer_name, position=writer.position)
            await worker.rest(worker.plan["pace"])
        await writer.flush()
        worker.history.note("flushed", writer=writer_name, position=writer.position)


def reader_settings(plan: Mapping[str, Any]) -> SubscriptionSettings:
    """The subscription of a consumer with this plan."""
    return SubscriptionSettings(
        ack_wait=plan.get("lease", 3.0), max_deliver=plan.get("max_deliver"), max_in_flight=200
    )


async def consume(worker: Worker) -> None:
    """Be a member of a subscription; acknowledge, sometimes fail, sometimes be slow."""
    topic = await worker.mill.topic(worker.plan["topic"])
    async with topic.subscribe("readers", reader_settings(worker.plan)) as subscription:
        while not worker.stopping.is_set():
            # All together: a killed server does not remember what it delivered just before, and
            # each of those acks takes until its timeout.
            deliveries = await subscription.pull(50, timeout=0.2)
            await asyncio.gather(*(_settle(worker, delivery) for delivery in deliveries))


async def _settle(worker: Worker, delivery: Delivery) -> None:
    name = id_of(delivery.value)
    position = {"partition": delivery.partition, "offset": delivery.offset}
    worker.history.note("delivered", id=name, **position)
    if worker.chance.random() < worker.plan.get("nacks", 0.02):
        delivery.nack(delay=0.1)
        return
    try:
        if worker.chance.random() < 0.1:
            await delivery.ack_sync()
        else:
            delivery.ack()
        worker.history.note("settled", id=name)
    except MillstreamError as error:
        worker.history.note("unsettled", id=name, error=str(error))


async def join(worker: Worker) -> None:
    """Be a member of an ordered group."""
    topic = await worker.mill.topic(worker.plan["topic"])

    async def handle(event: GroupEvent) -> None:
        facts = {
            "id": id_of(event.value),
            "key": event.key,
            "partition": event.partition,
            "offset": event.offset,
            "epoch": event.epoch,
        }
        worker.history.note("start", **facts)
        try:
            await asyncio.sleep(worker.plan["pace"] * worker.chance.random())
        except asyncio.CancelledError:
            worker.history.note("stopped", **facts)
            raise
        worker.history.note("end", **facts)

    settings = GroupSettings(lease=worker.plan["lease"], commit_every=0.3, concurrency=8)
    async with topic.group("team", settings) as group:
        working = asyncio.create_task(group.run(handle))
        stopping = asyncio.create_task(worker.stopping.wait())
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        await group.stop()
        await working
        stopping.cancel()


def outputs_of(name: str) -> list[str]:
    """The function of the process scenario: none, one or two outputs for an input."""
    return [f"{name}>{number}" for number in range(zlib.crc32(name.encode()) % 3)]


async def transform(worker: Worker) -> None:
    """Consume, transform, produce."""
    # Imported here because it loads Arrow, half of a worker's start-up time, for one role.
    from millstream.messaging.process import ProcessSettings

    source = await worker.mill.topic(worker.plan["topic"])
    target = await worker.mill.topic(worker.plan["target"])

    def function(event: Event) -> list[NewEvent]:
        name = id_of(event.value)
        if name is None:
            raise ValueError(f"offset {event.offset} of the input is damaged")
        return [NewEvent(body_of(output), event.key) for output in outputs_of(name)]

    settings = ProcessSettings("transform", commit_every=0.05, commit_events=200)
    process = source.process(target, function, settings)
    running = asyncio.create_task(process.run())
    stopping = asyncio.create_task(worker.stopping.wait())
    await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    process.stop()
    stopping.cancel()
    await running


async def compare_and_set(worker: Worker) -> None:
    """Read a key, then replace what was read, if it is still the current value."""
    table = await worker.mill.table(worker.plan["table"])
    note = worker.history.note
    for number in range(10**9):
        if worker.stopping.is_set():
            return
        # A key is used for a few seconds: short histories are checked quickly.
        slot = worker.chance.randrange(worker.plan["keys"])
        key = f"k{slot}.{_age()}"
        op = f"{worker.name}.{worker.plan['life']}.{number}"
        note("read", op=f"{op}r", key=key)
        try:
            entry = await table.get(key)
        except MillstreamError as error:
            note("unknown", op=f"{op}r", error=str(error))
            await worker.rest(PAUSE)
            continue
        seen = None if entry is None else entry.value.decode()
        revision = 0 if entry is None else entry.revision
        note("read-ok", op=f"{op}r", value=seen)
        if worker.chance.random() < 0.3:
            continue
        note("write", op=op, key=key, expected=seen)
        try:
            await table.put(key, op.encode(), revision=revision)
            note("ok", op=op)
        except WrongSequence as error:
            note("refused", op=op, error=str(error))
        except MillstreamError as error:
            note("unknown", op=op, error=str(error))
            await worker.rest(PAUSE)
        await worker.rest(worker.plan["pace"] * worker.chance.random())


def _age() -> int:
    """The same number in every process for two seconds."""
    return time.monotonic_ns() // 2_000_000_000


ROLES: Final[dict[str, Callable[[Worker], Awaitable[None]]]] = {
    "produce": produce,
    "write": write,
    "consume": consume,
    "join": join,
    "transform": transform,
    "table": compare_and_set,
    "append": append_to_store,
}


async def _connect(plan: dict[str, Any]) -> millstream.Mill:
    """A connection, even if the broker is down at first."""
    reconnect = Reconnect(wait_max=0.5)
    for attempt in range(CONNECT_TRIES):
        try:
            return await millstream.connect(
                plan["url"], reconnect=reconnect, ping_interval=2.0, request_timeout=2.0
            )
        except MillstreamError:
            if attempt + 1 == CONNECT_TRIES:
                raise
            await asyncio.sleep(PAUSE)
    raise AssertionError


async def _jump(history: History, chance: random.Random) -> None:
    """Move this process's wall clock by hours, forwards and back, as a bad time server does.

    The server cannot be treated so here: it reads the kernel's clock without a call that could be
    caught, and a namespace for the wall clock does not exist.
    """
    real = time.time_ns
    offset = 0

    def moved_ns() -> int:
        return real() + offset

    def moved() -> float:
        return moved_ns() / 1e9

    time.time, time.time_ns = moved, moved_ns
    while True:
        hours = chance.uniform(-5.0, 5.0)
        history.note("jump", hours=round(hours, 2))
        offset = int(hours * 3600e9)
        await asyncio.sleep(chance.uniform(0.2, 1.0))


async def _main(role: str, plan: dict[str, Any]) -> None:
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    history = History(Path(plan["folder"]), f"{plan['name']}.{plan['life']}")
    history.note("started", role=role)
    chance = random.Random(f"{plan['seed']}.{plan['name']}.{plan['life']}")
    jumping = asyncio.create_task(_jump(history, chance)) if plan.get("clock") else None
    for attempt in range(CONNECT_TRIES):
        mill = await _connect(plan)
        try:
            await ROLES[role](Worker(mill, history, plan, stopping, chance))
            break
        except FencedOut as error:
            history.note("fenced", error=str(error))
            if plan.get("rival"):
                break
        except MillstreamError as error:
            history.note("failed", error=f"{type(error).__name__}: {error}")
            if stopping.is_set() and attempt + 1 >= CONNECT_TRIES // 2:
                break
        finally:
            await mill.close()
        # A supervised program is restarted; its numbers must not start again.
        plan = {**plan, "life": f"{plan['life']}r"}
        await asyncio.sleep(PAUSE)
    if jumping is not None:
        jumping.cancel()
    history.note("ended")


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], json.loads(sys.argv[2])))
