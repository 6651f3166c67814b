"""A topic, an event, a subscription: the first ten lines.

`python -m examples.quickstart` starts its own broker, or uses the one at NATS_URL if that is set.
"""

from __future__ import annotations

import asyncio

import millstream
from examples.own_broker import broker_url


async def main() -> None:
    with broker_url() as url:
        async with millstream.connect(url) as mill:
            orders = await mill.create_topic("orders")
            receipt = await orders.publish("3 sacks of flour", key="ann")
            print(f"stored at offset {receipt.offset}")

            async with orders.subscribe("billing") as subscription:
                async for event in subscription:
                    print(f"{event.key} ordered {event.value.decode()}")
                    event.ack()
                    break


if __name__ == "__main__":
    asyncio.run(main())
