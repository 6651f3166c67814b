"""A task's chain of units, with a broker in memory."""

from __future__ import annotations

import pyarrow as pa
import pytest

from millstream.errors import DataLoss
from millstream.events.fence_writer import Answer, Request
from millstream.events.packs.pack import EncodedPack
from millstream.settings import ConnectionSettings
from millstream.spark.sink.chain import Chain, Fence, UnitLimits
from millstream.wire.message import StoredMessage
from millstream.wire.sync.connection import BlockingConnection
from tests.unit.events.test_fence_writer import FENCE, Broker


class MemoryFence(Fence):
    def __init__(self, broker: Broker) -> None:
        super().__init__(BlockingConnection(ConnectionSettings()), "s", FENCE, "w")
        self._broker = broker

    def _ask(self, request: Request) -> Answer:
        return self._broker.ask(request)


def pack(number: int) -> EncodedPack:
    return EncodedPack({}, pa.py_buffer(b"%d" % number), 1)


def rows(broker: Broker) -> list[bytes]:
    return [message.payload for message in broker.messages if message.payload]


def test_a_chain_does_not_continue_on_a_log_that_lost_its_first_units() -> None:
    broker = Broker()
    chain = Chain(MemoryFence(broker), 0, UnitLimits(messages=1))
    for number in range(3):
        chain.add(pack(number))
    assert rows(broker) == [b"0", b"1"]
    del broker.messages[1:]  # a server that lost power
    with pytest.raises(DataLoss):
        chain.finish()
    again = Chain(MemoryFence(broker), 0, UnitLimits(messages=1))
    for number in range(3):
        again.add(pack(number))
    again.finish()
    assert rows(broker) == [b"0", b"1", b"2"]


def test_a_chain_continues_when_its_fence_was_purged() -> None:
    broker = Broker()
    chain = Chain(MemoryFence(broker), 0, UnitLimits(messages=1))
    chain.add(pack(0))
    chain.add(pack(1))
    broker.messages = [StoredMessage("", m.sequence, b"", m.payload, "") for m in broker.messages]
    chain.finish()
    assert rows(broker) == [b"0", b"1"]
