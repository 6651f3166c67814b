"""Sending in groups: order, back-pressure, and what an error does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from millstream.blocking.loop import LoopThread
from millstream.blocking.sending import WAITING_MAX, Pending, Sending
from millstream.closing import AsyncClosing
from millstream.deadline import Deadline
from millstream.errors import ConfigError, ConnectionClosed


class Store(AsyncClosing):
    """An asynchronous producer that keeps what it gets, and can be made to wait."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.left: list[type[BaseException] | None] = []

    async def send(self, value: Any) -> asyncio.Future[int]:
        await self.gate.wait()
        if value == "bad":
            raise ConfigError("bad value")
        self.kept.append(value)
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(future.set_result, len(self.kept))
        return future

    async def _leave(self, error: BaseException | None) -> None:
        self.left.append(None if error is None else type(error))


class Sender(Sending):
    """As the generated classes are."""

    _inner: Store

    def send(self, value: Any) -> Pending[int]:
        return self._send_pending(self._inner.send, value)

    @property
    def kept(self) -> list[Any]:
        return self._look(lambda: list(self._inner.kept))


@pytest.fixture(scope="module")
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.stop()


@pytest.fixture
def store(loop: LoopThread) -> Store:
    return loop.invoke(Store)


@pytest.fixture
def sender(loop: LoopThread, store: Store) -> Sender:
    return Sender(loop, store)


def test_events_keep_their_order(sender: Sender) -> None:
    for n in range(5 * WAITING_MAX):
        sender.send(n)
    assert sender.kept == list(range(5 * WAITING_MAX))


def test_events_of_several_threads_all_arrive(sender: Sender) -> None:
    def work(first: int) -> None:
        for n in range(1000):
            sender.send((first, n))

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept = sender.kept
    assert len(kept) == 4000
    for first in range(4):
        assert [n for f, n in kept if f == first] == list(range(1000))


def test_each_event_has_its_receipt(sender: Sender) -> None:
    receipts = [sender.send(n) for n in range(10)]
    assert [receipt.result(timeout=30) for receipt in receipts] == list(range(1, 11))
    assert all(receipt.done() for receipt in receipts)


def test_waiting_for_a_receipt_ends_with_its_timeout(
    loop: LoopThread, store: Store, sender: Sender
) -> None:
    loop.invoke(store.gate.clear)
    receipt = sender.send(1)
    assert not receipt.done()
    with pytest.raises(TimeoutError):
        receipt.result(timeout=0.02)
    loop.invoke(store.gate.set)
    assert receipt.result(timeout=30) == 1


def test_the_sender_waits_when_too_much_is_in_flight(
    loop: LoopThread, store: Store, sender: Sender
) -> None:
    loop.invoke(store.gate.clear)
    sent: list[int] = []

    def work() -> None:
        for n in range(WAITING_MAX + 10):
            sender.send(n)
            sent.append(n)

    thread = threading.Thread(target=work)
    thread.start()
    deadline = Deadline(30)
    while len(sent) < WAITING_MAX and not deadline.passed:
        thread.join(0.01)
    thread.join(0.05)
    assert thread.is_alive()
    assert WAITING_MAX <= len(sent) <= WAITING_MAX + 1  # one is in the producer's hands
    loop.invoke(store.gate.set)
    thread.join(30)
    assert sender.kept == list(range(WAITING_MAX + 10))


def test_after_an_error_nothing_more_is_sent_and_every_call_says_why(
    loop: LoopThread, store: Store, sender: Sender
) -> None:
    loop.invoke(store.gate.clear)  # or the third call may know of the error already
    first, bad, behind = sender.send(1), sender.send("bad"), sender.send(2)
    loop.invoke(store.gate.set)
    assert first.result(timeout=30) == 1
    with pytest.raises(ConnectionClosed, match="bad value"):
        bad.result(timeout=30)
    with pytest.raises(ConnectionClosed, match="bad value"):
        behind.result(timeout=30)
    with pytest.raises(ConfigError, match="bad value"):
        sender.send(3)
    with pytest.raises(ConfigError, match="bad value"):
        _ = sender.kept
    assert store.kept == [1]


def test_the_end_of_with_raises_the_error_and_leaves_the_producer(
    store: Store, sender: Sender
) -> None:
    def use() -> None:
        with sender:
            sender.send("bad")

    with pytest.raises(ConfigError, match="bad value"):
        use()
    assert store.left == [ConfigError]


def test_an_error_of_the_application_is_not_replaced(store: Store, sender: Sender) -> None:
    def use() -> None:
        with sender:
            sender.send("bad")
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        use()
    assert store.left == [KeyError]
