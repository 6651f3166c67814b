"""Groups of upserts beside a fence, with a broker in memory."""

from __future__ import annotations

import pytest

from millstream.errors import FencedOut
from millstream.spark.sink.table_sink import _Group
from millstream.wire.message import OutgoingMessage
from tests.unit.events.test_fence_writer import FENCE, Broker
from tests.unit.spark.test_chain import MemoryFence


def upsert(value: bytes) -> OutgoingMessage:
    return OutgoingMessage(b"t.key", b"", value)


def values(broker: Broker) -> list[bytes]:
    return [message.payload for message in broker.messages if message.subject != FENCE]


def test_an_older_value_that_a_twin_writes_again_is_not_the_last_one() -> None:
    broker = Broker()
    first, twin = _Group(MemoryFence(broker), 0), _Group(MemoryFence(broker), 0)
    for value in (b"old", b"new"):
        first.add(upsert(value))
        first.store(final=False)
    twin.add(upsert(b"old"))
    twin.store(final=False)
    with pytest.raises(FencedOut):
        first.store(final=True)
    twin.add(upsert(b"new"))
    twin.store(final=True)
    assert values(broker) == [b"old", b"new", b"old", b"new"]


def test_an_attempt_whose_twin_was_faster_stores_nothing() -> None:
    broker = Broker()
    first, twin = _Group(MemoryFence(broker), 0), _Group(MemoryFence(broker), 0)
    for group in (first, twin):
        group.add(upsert(b"v"))
    first.store(final=True)
    twin.store(final=True)
    assert values(broker) == [b"v"]
