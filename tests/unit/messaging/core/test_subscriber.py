"""The books of a subscriber under random arrivals, reads and limits; no broker needed."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import ConfigError, SubscriberClosed
from millstream.messaging.core.overload import Overload, SubscriberSettings
from millstream.messaging.core.subscriber import Subscriber
from millstream.settings import ConnectionSettings
from millstream.wire.aio.connection import Connection
from tests.books import balanced

STEPS = st.lists(st.one_of(st.integers(0, 40), st.none()), max_size=80)


class Model:
    """What the policies mean, written as slowly and plainly as possible."""

    def __init__(self, policy: Overload, messages_max: int, bytes_max: int) -> None:
        self.policy, self.messages_max, self.bytes_max = policy, messages_max, bytes_max
        self.pending: deque[bytes] = deque()
        self.dropped = 0

    def full_for(self, data: bytes) -> bool:
        size = sum(map(len, self.pending)) + len(data)
        return bool(self.pending) and (
            len(self.pending) >= self.messages_max or size > self.bytes_max
        )

    def take(self, data: bytes) -> None:
        if self.policy is Overload.DROP_NEW and self.full_for(data):
            self.dropped += 1
            return
        while self.full_for(data):
            self.pending.popleft()
            self.dropped += 1
        self.pending.append(data)


@pytest.mark.parametrize("policy", [Overload.DROP_NEW, Overload.DROP_OLD])
@given(steps=STEPS, messages_max=st.integers(1, 6), bytes_max=st.integers(1, 80))
@settings(max_examples=60, deadline=None)
def test_the_counters_add_up_after_every_step(
    policy: Overload, steps: list[int | None], messages_max: int, bytes_max: int
) -> None:
    async def run() -> None:
        limits = SubscriberSettings(overload=policy, messages_max=messages_max, bytes_max=bytes_max)
        subscriber = Subscriber(Connection(ConnectionSettings()), "s", limits)
        subscriber.start()
        model = Model(policy, messages_max, bytes_max)
        arrived = taken = 0
        for step in steps:
            if step is not None:
                data = bytes([arrived % 256]) * step
                subscriber._take(b"s", b"", b"", data)
                model.take(data)
                arrived += 1
            elif model.pending:
                assert (await subscriber.next()).data == model.pending.popleft()
                taken += 1
            counters = subscriber.counters
            assert arrived == taken + counters.dropped + counters.pending
            assert (counters.dropped, counters.pending) == (model.dropped, len(model.pending))
            assert counters.pending_bytes == sum(map(len, model.pending))
        await subscriber.close()
        assert balanced(subscriber.counters)
        assert arrived == taken + subscriber.counters.dropped

    asyncio.run(run())


async def test_reading_before_opening_and_opening_twice_are_mistakes() -> None:
    subscriber = Subscriber(Connection(ConnectionSettings()), "s")
    with pytest.raises(ConfigError, match="is not open"):
        await subscriber.next()
    subscriber.start()
    with pytest.raises(ConfigError, match="opened before"):
        subscriber.start()
    await subscriber.close()
    with pytest.raises(SubscriberClosed):
        await subscriber.next()


async def test_a_closed_subscriber_keeps_no_listener_on_its_connection() -> None:
    connection = Connection(ConnectionSettings())
    subscriber = Subscriber(connection, "s", handler=lambda _: None)
    subscriber.start()
    assert connection.on_denied
    assert connection.on_disconnected
    assert connection.on_closed
    await subscriber.close()
    await subscriber.close()
    assert not connection.on_denied
    assert not connection.on_disconnected
    assert not connection.on_closed
    assert not connection._interests
    assert not connection._handlers


def test_settings_are_a_value() -> None:
    assert SubscriberSettings() == SubscriberSettings()
    with pytest.raises(AttributeError):
        SubscriberSettings().queue = "x"  # type: ignore[misc]
