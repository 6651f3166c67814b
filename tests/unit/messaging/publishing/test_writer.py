"""A writer whose calls are cancelled, with a broker in memory that answers when the test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from millstream.errors import Unconfirmed
from millstream.events.encoding import TopicShape
from millstream.events.event import Partition
from millstream.events.fence_writer import Answer, Publish, Request
from millstream.events.packs.packing import Packing
from millstream.messaging.publishing.acks import Acks
from millstream.messaging.publishing.fenced_lane import FencedLane
from millstream.messaging.publishing.target import PackTarget
from millstream.messaging.publishing.writer import Writer
from millstream.settings import ConnectionSettings
from millstream.wire.aio.connection import Connection
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.aio.publisher import StreamPublisher
from tests.unit.events.test_fence_writer import Broker


class SlowBroker(Broker):
    """Stores immediately, but sends its acks only while it is `open`."""

    def __init__(self) -> None:
        super().__init__()
        self.open = asyncio.Event()
        self.open.set()

    async def answer(self, request: Request) -> Answer:
        answer = self.ask(request)
        if isinstance(request, Publish):
            await self.open.wait()
        return answer

    @property
    def packs(self) -> int:
        """The stored packs that hold events."""
        return sum(1 for message in self.messages if message.payload)


@pytest.fixture
async def broker(monkeypatch: pytest.MonkeyPatch) -> SlowBroker:
    broker = SlowBroker()
    monkeypatch.setattr(FencedLane, "_ask", lambda _, request: broker.answer(request))
    return broker


async def writer_of(lanes: int, events: int) -> Writer:
    connection = Connection(ConnectionSettings())
    target = PackTarget(
        JetStream(connection),
        StreamPublisher(connection),
        TopicShape("t", ["t"]),
        [Partition("t", "t", 0, "t")],
        None,
        Acks("t", ["unknown"], demanded=False, shortfall=None, patience=1),
    )
    return await Writer(target, "w", Packing(max_events=events, linger=60), lanes).open()


async def cancelled_when(work: asyncio.Task[None], reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not reached():  # noqa: ASYNC110
            await asyncio.sleep(0)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work


async def test_a_cancelled_flush_does_not_lose_the_next_event(broker: SlowBroker) -> None:
    """The flush stores the position of a lane without events; it is stored, its ack is late."""
    writer = await writer_of(lanes=2, events=1)
    await writer.write(b"a", position=1)
    await writer._lanes[1].idle()
    broker.open.clear()
    before = len(broker.messages)
    flush = asyncio.create_task(writer.flush())
    await cancelled_when(flush, lambda: len(broker.messages) > before)
    broker.open.set()
    await writer.write(b"b", position=2)
    await writer.close()
    assert broker.packs == 2
    assert writer.position == 2


async def test_a_write_cancelled_before_its_pack_is_sent_ends_the_writer(
    broker: SlowBroker,
) -> None:
    """The events before it were taken: a later position must not cover them."""
    writer = await writer_of(lanes=1, events=2)
    broker.open.clear()
    await writer.write(b"a", position=1)
    await writer.write(b"b", position=2)
    await writer.write(b"c", position=3)
    write = asyncio.create_task(writer.write(b"d", position=4))
    await cancelled_when(write, lambda: not writer._lanes[0].positions)
    broker.open.set()
    with pytest.raises(Unconfirmed, match="continue from its position"):
        await writer.write(b"e", position=5)
    await writer.abandon()
    assert (broker.packs, writer.position) == (1, 2)
