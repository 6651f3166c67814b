"""Fenced writing: the same scenarios for the asynchronous and the blocking writer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

import pytest

import millstream
from millstream.errors import DataLoss, FencedOut, Unconfirmed
from millstream.events.fence import FenceState, chain_headers
from millstream.events.fence_writer import FenceWriter, Outcome, Steps
from millstream.events.packs.pack import empty
from millstream.messaging.publishing import fenced_lane
from millstream.messaging.publishing.fenced_lane import FencedLane
from millstream.settings import ConnectionSettings, Reconnect
from millstream.spark.sink import chain
from millstream.spark.sink.chain import Fence
from millstream.wire.aio import atomic, publisher
from millstream.wire.aio.connection import Connection
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.aio.publisher import StreamPublisher
from millstream.wire.sync import publish
from millstream.wire.sync.connection import BlockingConnection
from tests.integration.wire.frame_proxy import FrameProxy, frame_proxy

T = TypeVar("T")
FENCE = "s._pack.w"


class Run(Protocol):
    """Asks the broker what a fence wants to know."""

    async def __call__(self, steps: Steps[T]) -> T: ...


@asynccontextmanager
async def aio(url: str) -> AsyncIterator[Run]:
    connection = Connection(settings_of(url))
    await connection.open()
    sending = StreamPublisher(connection)
    try:
        yield FencedLane(JetStream(connection), sending, "s", FENCE, "w")._run
    finally:
        sending.close()
        await connection.close()


@asynccontextmanager
async def sync(url: str) -> AsyncIterator[Run]:
    connection = BlockingConnection(settings_of(url))
    fence = Fence(connection, "s", FENCE, "w")

    async def run(steps: Steps[T]) -> T:
        return await asyncio.to_thread(fence._run, steps)

    try:
        yield run
    finally:
        connection.close()


def settings_of(url: str) -> ConnectionSettings:
    return ConnectionSettings(urls=(url,), reconnect=Reconnect(wait=0.02, wait_max=0.1))


class Bench:
    """A stream `s`, a proxy before it, and a client that writes through the proxy."""

    def __init__(self, proxy: FrameProxy, run: Run, mill: millstream.Mill) -> None:
        self.proxy, self.run, self.mill = proxy, run, mill

    async def claimed(self, owner: str) -> FenceWriter:
        writer = FenceWriter(FENCE, "w")
        await self.run(writer.claim(owner))
        return writer

    async def sequences(self) -> int:
        return (await self.mill.jetstream.stream_info("s")).state.last_seq


@pytest.fixture(params=[aio, sync], ids=["aio", "sync"])
async def bench(
    request: pytest.FixtureRequest, millstream_url: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Bench]:
    # A message without an answer is sent again; sooner here than a busy broker needs.
    monkeypatch.setattr(publisher, "RESEND_SECONDS", 0.3)
    monkeypatch.setattr(atomic, "ATTEMPT_SECONDS", 0.5)
    monkeypatch.setattr(publish, "ATTEMPT_SECONDS", 0.5)
    client: Callable[[str], Any] = request.param
    async with (
        millstream.connect(millstream_url) as mill,
        frame_proxy(millstream_url) as (proxy, url),
    ):
        config = {"name": "s", "subjects": ["s.>"], "allow_atomic": True}
        await mill.jetstream.create_stream(config)
        async with client(url) as run:
            yield Bench(proxy, run, mill)


def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fenced_lane, "STORE_SECONDS", 1.5)
    monkeypatch.setattr(chain, "PATIENCE_SECONDS", 1.5)


def is_publish(frame: bytes) -> bool:
    return frame.startswith(b"HPUB s.")


def is_ack(frame: bytes) -> bool:
    """An ack, or the refusal of a copy that was sent again."""
    return b'"stream":"s"' in frame and b'"seq":' in frame and b'"config"' not in frame


async def test_units_follow_each_other_and_a_restarted_writer_finds_its_position(
    bench: Bench,
) -> None:
    writer = await bench.claimed("a")
    await bench.run(writer.store([empty()], 10, "note"))
    state = await bench.run(writer.store([empty()] * 3, 20))
    assert state == writer.state == FenceState(5, 1, 3, 20, "note", "a")
    assert (await bench.claimed("b")).state == FenceState(6, 2, 4, 20, "note", "b")
    assert await bench.sequences() == 6


async def test_a_writer_that_was_taken_over_stores_nothing(bench: Bench) -> None:
    old, new = await bench.claimed("a"), await bench.claimed("b")
    for packs in ([empty()], [empty()] * 2):
        with pytest.raises(FencedOut):
            await bench.run(old.store(packs, 1))
    assert await bench.sequences() == 2
    await bench.run(new.store([empty()], 1))


async def test_a_new_fence_always_starts_with_an_empty_pack(bench: Bench) -> None:
    first = await bench.run(FenceWriter(FENCE, "w").begin())
    assert first == FenceState(1, 0, 1)
    assert await bench.run(FenceWriter(FENCE, "w").begin()) == first
    assert await bench.sequences() == 1


async def test_concurrent_attempts_store_the_same_unit_once(bench: Bench) -> None:
    writer, twin = FenceWriter(FENCE, "w"), FenceWriter(FENCE, "w")
    wanted = (await bench.run(writer.begin())).next(1, "rows=3")
    assert (await bench.run(writer.offer(wanted, [empty()]))).outcome is Outcome.STORED
    found = await bench.run(twin.offer(wanted, [empty()]))
    assert (found.outcome, found.state) == (Outcome.FOUND, wanted.stored_at(2))
    other = await bench.run(twin.offer(wanted.stored_at(1).next(2), [empty()]))
    assert other.outcome is Outcome.REFUSED
    assert await bench.sequences() == 2


@pytest.mark.parametrize("packs", [1, 3])
@pytest.mark.parametrize("cut", [False, True])
async def test_a_unit_whose_ack_was_lost_is_recognised(bench: Bench, packs: int, cut: bool) -> None:
    writer = await bench.claimed("a")
    lost: list[bytes] = []

    def lose_one(frame: bytes) -> bool:
        if lost or not is_ack(frame):
            return True
        lost.append(frame)
        if cut:
            bench.proxy.cut()
        return False

    bench.proxy.to_client = lose_one
    state = await bench.run(writer.store([empty()] * packs, 5))
    assert state == FenceState(1 + packs, 1, 2, 5, "", "a")
    assert lost
    await bench.run(writer.store([empty()], 6))
    assert await bench.sequences() == 2 + packs


async def test_a_unit_without_an_answer_is_searched_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stored; every ack and every refusal of a copy got lost."""
    writer = await bench.claimed("a")
    impatient(monkeypatch)
    bench.proxy.to_client = lambda frame: not is_ack(frame)
    state = await bench.run(writer.store([empty()], 5))
    assert state == FenceState(2, 1, 2, 5, "", "a")


async def test_a_unit_that_never_arrived_is_unconfirmed_and_can_be_stored_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = await bench.claimed("a")
    impatient(monkeypatch)
    bench.proxy.to_server = lambda frame: not is_publish(frame)
    with pytest.raises(Unconfirmed):
        await bench.run(writer.store([empty()], 5))
    monkeypatch.undo()
    bench.proxy.to_server = lambda _: True
    assert (await bench.run(writer.store([empty()], 5))).sequence == 2


async def test_a_log_that_lost_what_it_confirmed_is_reported(bench: Bench) -> None:
    writer = await bench.claimed("a")
    await bench.run(writer.store([empty()], 5))
    await bench.mill.jetstream.delete_message("s", 2)
    with pytest.raises(DataLoss, match="position 0"):
        await bench.run(writer.store([empty()], 6))
    assert await bench.sequences() == 2


async def test_a_unit_sent_ahead_does_not_follow_the_claim_of_another_writer(bench: Bench) -> None:
    """The claim has the very sequence that was expected of the unit before."""
    old = await bench.claimed("a")
    expected = old.state.next(1).stored_at(old.state.sequence + 1)
    assert (await bench.claimed("b")).state.sequence == expected.sequence
    wanted = expected.next(2)
    headers = chain_headers(wanted, expected)
    refused = await bench.run(old.offer(wanted, [empty()], (), headers))
    assert (refused.outcome, refused.state.owner) == (Outcome.REFUSED, "b")
    assert await bench.sequences() == 2


async def test_a_unit_sent_ahead_does_not_follow_one_before_the_one_it_names(bench: Bench) -> None:
    """An earlier unit was stored one later than expected: at the sequence of the refused one."""
    writer = await bench.claimed("a")
    first = writer.state.next(1)
    second = first.stored_at(first.sequence + 1).next(2)
    third = second.stored_at(second.sequence + 1).next(3)
    await bench.mill.jetstream.connection.request("s.other")
    stored = await bench.run(writer.offer(first, [empty()], (), chain_headers(first, None)))
    assert stored.state.sequence == third.sequence
    for wanted, follows in ((second, first), (third, second)):
        headers = chain_headers(wanted, follows)
        refused = await bench.run(writer.offer(wanted, [empty()], (), headers))
        assert refused.outcome is Outcome.REFUSED
    assert await bench.sequences() == 3
