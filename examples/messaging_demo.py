"""What messaging does, in ten seconds: `python -m examples.messaging_demo`.

A broker starts in a temporary folder, orders are published, two workers share them, one event
fails and is redelivered, the broker is killed while events arrive, and no acked event is lost.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import millstream
from millstream import Broker, BrokerSettings, Mill, SubscriptionSettings

PAYMENTS = 2_000
PATIENCE = 20.0  # seconds for any step, on a slow machine


def say(text: str) -> None:
    print(text, flush=True)


async def publish_and_read(mill: Mill) -> None:
    """A topic is a durable log: every event has a receipt, and reading removes nothing."""
    orders = await mill.create_topic("orders")
    for customer, sacks in (("ann", 3), ("ben", 5), ("cleo", 7), ("dora", 2)):
        receipt = await orders.publish(f"{sacks} sacks of flour", key=customer)
        say(f"   the order of {customer} is stored at offset {receipt.offset}")
    async for event in orders.read():
        say(f"   read back: {event.key} ordered {event.value.decode()}")


async def share_work(mill: Mill) -> None:
    """Members of one subscription share its events; a failed event is redelivered."""
    orders = await mill.topic("orders")
    billed: set[str | None] = set()
    finished = asyncio.Event()

    async def work(name: str) -> None:
        async with orders.subscribe("billing", SubscriptionSettings(max_in_flight=2)) as mine:
            async for order in mine:
                await asyncio.sleep(0.05)  # the work
                if order.key == "ben" and order.attempt == 1:
                    say(f"   {name} fails on the order of ben; it will be redelivered")
                    order.nack(delay=0.1)
                    continue
                order.ack()
                say(f"   {name} bills {order.key} (delivery {order.attempt})")
                billed.add(order.key)
                if len(billed) == 4:
                    finished.set()

    workers = [asyncio.create_task(work(name)) for name in ("worker 1", "worker 2")]
    await asyncio.wait_for(finished.wait(), PATIENCE)
    for worker in workers:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)


async def ask(mill: Mill) -> None:
    """Request and reply, on the same connection."""
    service = mill.service("prices", "1.0.0")

    @service.endpoint("prices.flour")
    async def price(request: millstream.Message) -> bytes:
        return b"12.50"

    async with service:
        answer = await mill.request("prices.flour")
        say(f"   a sack of flour costs {answer.data.decode()}")


async def survive_a_crash(mill: Mill, broker: Broker) -> None:
    """The broker is killed while events arrive; every acknowledged event is stored."""
    topic = await mill.create_topic("payments")
    acked: set[str] = set()
    quarter = asyncio.Event()

    async def publish(number: int) -> None:
        key = f"payment-{number}"
        await topic.publish(b"paid", key=key, id=key)
        acked.add(key)
        if len(acked) == PAYMENTS // 4:
            quarter.set()

    async def publish_all() -> None:
        for start in range(0, PAYMENTS, 50):
            await asyncio.gather(*(publish(number) for number in range(start, start + 50)))

    publishing = asyncio.create_task(publish_all())
    await asyncio.wait_for(quarter.wait(), PATIENCE)
    say(f"   {len(acked)} acknowledged; killing the server with SIGKILL")
    await asyncio.to_thread(broker.kill)
    await asyncio.to_thread(broker.restart)
    say("   started again; the publisher continues automatically")
    await publishing
    found = [event.key async for event in topic.read()]
    missing, twice = len(acked - set(found)), len(found) - len(set(found))
    say(f"   {len(acked):,} acknowledged: {missing} missing, {twice} stored twice")


async def show(broker: Broker) -> None:
    async with millstream.connect(broker.url) as mill:
        say("\n1. A durable log")
        await publish_and_read(mill)
        say("\n2. Work shared by two members of a subscription")
        await share_work(mill)
        say("\n3. Request and reply")
        await ask(mill)
        say("\n4. A crash while events arrive")
        await survive_a_crash(mill, broker)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="millstream-demo-") as folder:
        start = time.perf_counter()
        with Broker(BrokerSettings(data=Path(folder))) as broker:
            say(f"A broker with JetStream runs at {broker.url}, with every ack synced to disk.")
            say(f"It took {time.perf_counter() - start:.2f} s to start.")
            asyncio.run(show(broker))
    say("\nNext: 'millstream up' for a broker of your own, README.md for ten lines of code.")


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
