"""Core publish and subscribe: one process sends on one connection and reads on another.

The clock runs from the first publish to the last message read. Both sides get room for all
messages, so nothing is dropped and the same work is done.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from bench.harness import PeerAbsent
from millstream.messaging.core.message import publish
from millstream.messaging.core.overload import SubscriberSettings
from millstream.messaging.core.subscriber import Subscriber
from millstream.settings import ConnectionSettings
from millstream.wire.aio.connection import Connection

__all__ = ["nats_py_publish_subscribe", "publish_subscribe"]

SUBJECT = "core.bench"  # no topic stores it
ROUND_SECONDS_MAX = 60.0  # a lost message would otherwise hang the round
ROOM_BYTES = 1 << 30


async def publish_subscribe(url: str, count: int, payload: bytes) -> float:
    """Messages a second through our subscriber."""
    settings = replace(ConnectionSettings(), urls=(url,))
    sender, receiver = Connection(settings), Connection(settings)
    await sender.open()
    await receiver.open()
    room = SubscriberSettings(messages_max=count, bytes_max=ROOM_BYTES)
    try:
        async with Subscriber(receiver, SUBJECT, room) as subscriber:

            async def read() -> None:
                left = count
                async for _ in subscriber:
                    left -= 1
                    if not left:
                        return

            began = time.perf_counter()
            reading = asyncio.create_task(read())
            for _ in range(count):
                await publish(sender, SUBJECT, payload)
            async with asyncio.timeout(ROUND_SECONDS_MAX):
                await reading
            return count / (time.perf_counter() - began)
    finally:
        await sender.close()
        await receiver.close()


async def nats_py_publish_subscribe(url: str, count: int, payload: bytes) -> float:
    """Messages a second through nats-py, written in the way its documentation shows."""
    try:
        import nats
    except ImportError as error:
        raise PeerAbsent("nats-py is not installed: pip install nats-py") from error
    sender, receiver = await nats.connect(url), await nats.connect(url)
    try:
        subscription = await receiver.subscribe(
            SUBJECT, pending_msgs_limit=count, pending_bytes_limit=ROOM_BYTES
        )
        await receiver.flush()

        async def read() -> None:
            left = count
            async for _ in subscription.messages:
                left -= 1
                if not left:
                    return

        began = time.perf_counter()
        reading = asyncio.create_task(read())
        for _ in range(count):
            await sender.publish(SUBJECT, payload)
        async with asyncio.timeout(ROUND_SECONDS_MAX):
            await reading
        return count / (time.perf_counter() - began)
    finally:
        await sender.close()
        await receiver.close()
