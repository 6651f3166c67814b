"""Closing and draining a subscription's inbox; no broker needed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millstream.events.event import Event
from millstream.messaging.subscriptions.inbox import Inbox
from millstream.messaging.subscriptions.settings import SubscriptionSettings
from millstream.wire.aio.jetstream import JetStream

LONG_SECONDS = 30.0  # only a failure takes this long


class _Letters:
    """Dead letters whose storing never ends, until it is cancelled."""

    topic = "dead"

    def __init__(self) -> None:
        self.started = asyncio.Event()

    async def store(self, event: Event, reason: str, attempts: int) -> None:
        self.started.set()
        await asyncio.Event().wait()


def new_inbox(letters: _Letters) -> Inbox:
    """The inbox of a topic without partitions, which fetches nothing."""
    connection = SimpleNamespace(closed=False, connected=True, on_connected=[], on_closed=[])
    jetstream = cast(JetStream, SimpleNamespace(connection=connection))
    return Inbox(jetstream, "billing", SubscriptionSettings(), (), cast(Any, letters))


async def test_readers_end_when_closing_is_cancelled() -> None:
    letters = _Letters()
    inbox = new_inbox(letters)
    reading = asyncio.create_task(inbox.refill())
    inbox.leases.dead_letter(cast(Any, "event"), "broken", 1, lambda: None)
    await letters.started.wait()
    closing = asyncio.create_task(inbox.close())
    await asyncio.sleep(0)  # it waits for the dead letter now
    assert not closing.done()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    async with asyncio.timeout(LONG_SECONDS):
        assert await reading is False


async def test_two_drains_at_the_same_time_both_end() -> None:
    inbox = new_inbox(_Letters())
    inbox.in_hand(1)
    first = asyncio.create_task(inbox.idle(LONG_SECONDS))
    await asyncio.sleep(0)
    second = asyncio.create_task(inbox.idle(LONG_SECONDS))
    await asyncio.sleep(0)
    assert not first.done()
    assert not second.done()
    inbox.in_hand(-1)
    await asyncio.gather(first, second)
