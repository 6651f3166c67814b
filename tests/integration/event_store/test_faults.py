"""Appends whose answers are lost while the broker is killed: stored once, and never misreported.

The duplicate window is so short that the broker has forgotten every id by then: only the store
itself can recognise an append.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import millstream
from millstream import ANY, NEW, Append, EventStore, Mill
from millstream.broker import Broker
from millstream.errors import VersionConflict
from millstream.event_store.events import AppendReceipt, Expected
from millstream.settings import Reconnect
from millstream.testing import running_broker
from tests.faults.history import History, Progress, read_histories
from tests.faults.ledger import EVENTS as LEDGER_EVENTS
from tests.faults.ledger import Account as LedgerAccount
from tests.faults.proxy import DeafProxy
from tests.faults.store_checker import StoredMark, check_store
from tests.faults.store_worker import SNAPSHOT_EVERY, append_to_store
from tests.faults.supervisor import until
from tests.faults.worker import Worker
from tests.integration.event_store.bank import EVENTS, Account, Deposited, Opened, Withdrawn
from tests.integration.messaging.topic_kit import eventually

WINDOW_SECONDS = 0.1
QUICK = Reconnect(wait=0.02, wait_max=0.1, give_up_after=120)
ACK = b'{"stream":'  # how the ack of a stored message begins
ANSWER_SECONDS = 1.0  # for a request of the client whose answers are lost


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with running_broker() as running:
        yield running


@dataclass
class Scene:
    """A store, as a client sees it whose answers can be lost, and as another one sees it."""

    broker: Broker
    proxy: DeafProxy
    mine: EventStore
    other: EventStore

    async def loses_its_answer(
        self,
        call: Awaitable[Any],
        stored: int,
        meanwhile: Callable[[], Awaitable[Any]],
        down: float,
    ) -> Any:
        """The result of a call whose answer never arrived, because the broker was killed."""
        self.proxy.holds = ACK
        self.proxy.hears.clear()
        calling = asyncio.ensure_future(call)
        await eventually(self._messages, stored)
        await meanwhile()
        self.proxy.target = None
        await asyncio.to_thread(self.broker.kill)
        self.proxy.cut()
        self.proxy.hears.set()
        await asyncio.sleep(down)
        await asyncio.to_thread(self.broker.start)
        self.proxy.target = ("127.0.0.1", port_of(self.broker))
        return await calling

    async def _messages(self) -> int:
        return (await self.other.topic.info()).messages


def port_of(broker: Broker) -> int:
    return int(broker.url.rpartition(":")[2])


async def opened(mill: Mill, name: str) -> EventStore:
    return await mill.event_store(name, Account, events=EVENTS, duplicate_window="100ms")


@asynccontextmanager
async def scene(broker: Broker, name: str) -> AsyncIterator[Scene]:
    async with (
        DeafProxy("127.0.0.1", port_of(broker)) as proxy,
        millstream.connect(broker.url, reconnect=QUICK) as direct,
        millstream.connect(
            f"nats://127.0.0.1:{proxy.port}", reconnect=QUICK, request_timeout=ANSWER_SECONDS
        ) as through,
    ):
        other = await opened(direct, name)
        await other.append("a1", [Opened("ann"), Deposited(100)], NEW)
        await other.append("a2", [Opened("ben")], NEW)
        yield Scene(broker, proxy, await opened(through, name), other)


async def amounts(store: EventStore, id: str) -> list[int]:
    loaded = await store.load(id)
    assert [e.version async for e in store.events(id)] == list(range(1, loaded.version + 1))
    history: list[int] = loaded.state.history
    return history


@pytest.mark.parametrize("expected", [2, ANY, NEW])
@pytest.mark.parametrize("followers", [0, 2])
async def test_an_append_whose_answer_was_lost_is_recognised(
    broker: Broker, expected: Expected, followers: int
) -> None:
    async with scene(broker, f"one-{expected}-{followers}".replace(" ", "-")) as it:
        id = "a3" if expected is NEW else "a1"

        async def follow() -> None:
            for _ in range(followers):
                await it.other.append(id, [Deposited(1)])

        call = it.mine.append(id, [Deposited(7), Deposited(8)], expected)
        receipt: AppendReceipt = await it.loses_its_answer(call, 3, follow, 2 * WINDOW_SECONDS)
        before = [] if id == "a3" else [100]
        assert await amounts(it.other, id) == [*before, 7, 8, *[1] * followers]
        first = 1 if id == "a3" else 3
        assert (receipt.first_version, receipt.version) == (first, first + 1)
        (event,) = [e async for e in it.other.events(id, start=first, limit=1)]
        assert event.offset == receipt.offset
        # What the client remembers is right as well.
        assert (await it.mine.append(id, [Deposited(9)])).version == first + 2 + followers


@pytest.mark.parametrize(
    ("expected", "followers", "down"),
    [
        (2, 0, 2 * WINDOW_SECONDS),
        (ANY, 1, 2 * WINDOW_SECONDS),
        (2, 1, ANSWER_SECONDS + 0.5),
        (ANY, 0, ANSWER_SECONDS + 0.5),
    ],
)
async def test_appends_to_several_aggregates_whose_answer_was_lost_are_recognised(
    broker: Broker, expected: Expected, followers: int, down: float
) -> None:
    """Even if the broker is away for so long that the client cannot look for them in between."""
    async with scene(broker, f"all-{down:g}-{followers}".replace(".", "-")) as it:

        async def follow() -> None:
            for _ in range(followers):
                await it.other.append("a2", [Deposited(1)])

        parts = [Append("a1", [Withdrawn(5)], expected), Append("a2", [Deposited(5)])]
        call = it.mine.append_all(parts)
        receipts: list[AppendReceipt] = await it.loses_its_answer(call, 4, follow, down)
        assert await amounts(it.other, "a1") == [100, -5]
        assert await amounts(it.other, "a2") == [5, *[1] * followers]
        assert [(r.id, r.first_version, r.version) for r in receipts] == [
            ("a1", 3, 3),
            ("a2", 2, 2),
        ]
        assert receipts[1].offset == receipts[0].offset + 1


async def test_a_lost_append_of_which_nothing_was_stored_is_a_conflict(broker: Broker) -> None:
    """The answer that is lost is that of another request, and somebody else is faster."""
    async with scene(broker, "beaten") as it:
        it.proxy.holds = b"HPUB "
        it.proxy.hears.clear()
        calling = asyncio.ensure_future(it.mine.append("a1", [Deposited(7)], 2))
        await asyncio.wait_for(it.proxy.held.wait(), 60)
        await it.other.append("a1", [Deposited(1)], 2)
        it.proxy.cut()
        it.proxy.hears.set()
        with pytest.raises(VersionConflict) as found:
            await calling
        assert found.value.actual == 3
        assert await amounts(it.other, "a1") == [100, 1]


async def test_whoever_repeats_an_append_with_its_id_stores_nothing_twice(broker: Broker) -> None:
    """Another process, later than any duplicate window, after others have appended."""
    async with scene(broker, "again") as it:

        async def transfer(store: EventStore, number: int) -> list[AppendReceipt]:
            out = Append("a1", [Withdrawn(5)], number, append_id="out")
            return await store.append_all([out, Append("a2", [Deposited(5)], append_id="in")])

        async def change(store: EventStore) -> Any:
            changing = store.change("a1", append_id="change")
            async with changing as account:
                account.deposit(11)
            return changing.result

        async def update(store: EventStore) -> Any:
            return await store.update("a1", lambda a: a.deposit(12), append_id="update")

        calls: list[Callable[[EventStore], Awaitable[Any]]] = [
            lambda store: store.append("a1", [Deposited(9)], 2, append_id="nine"),
            lambda store: store.append("a1", [Deposited(10)], ANY, append_id="ten"),
            change,
            update,
            lambda store: transfer(store, 6),
        ]
        first = [await call(it.mine) for call in calls]
        assert await amounts(it.other, "a1") == [100, 9, 10, 11, 12, -5]
        await it.other.append("a1", [Deposited(1)])
        await asyncio.sleep(2 * WINDOW_SECONDS)
        for store in (it.other, it.mine):
            again = [await call(store) for call in calls]
            assert await amounts(it.other, "a1") == [100, 9, 10, 11, 12, -5, 1]
            assert await amounts(it.other, "a2") == [5]
            assert [r.version for r in again[:4]] == [r.version for r in first[:4]] == [3, 4, 5, 6]
            assert [r.state.balance for r in again[2:4]] == [130, 142]
            assert [r.version for r in again[4]] == [r.version for r in first[4]] == [7, 2]
            assert [r.offset for r in again[4]] == [r.offset for r in first[4]]


async def test_a_deletion_does_not_remove_what_was_stored_after_it(broker: Broker) -> None:
    """Its answer is late: meanwhile the id was deleted by another process, and began again."""
    async with scene(broker, "reused") as it:
        it.proxy.holds = ACK
        it.proxy.hears.clear()
        deleting = asyncio.ensure_future(it.mine.delete("a1", reusable=True))
        await asyncio.wait_for(it.proxy.held.wait(), 60)
        await it.other.delete("a1", reusable=True)
        await it.other.append("a1", [Opened("ben")], NEW)
        it.proxy.hears.set()
        await deleting
        assert (await it.other.load("a1")).state == Account("ben")


async def test_an_interrupted_archiving_is_completed_by_the_next(broker: Broker) -> None:
    async with scene(broker, "moved") as it:
        for amount in (1, 2, 3):
            await it.other.append("a1", [Deposited(amount)])
        it.proxy.holds = ACK
        it.proxy.hears.clear()
        archiving = asyncio.ensure_future(it.mine.archive("a1"))
        await asyncio.wait_for(it.proxy.held.wait(), 60)  # the first copy is stored
        archiving.cancel()
        await asyncio.gather(archiving, return_exceptions=True)
        assert await amounts(it.other, "a1") == [100, 1, 2, 3]
        await it.other.append("a1", [Deposited(4)])
        await it.other.archive("a1")
        assert await amounts(it.other, "a1") == [100, 1, 2, 3, 4]
        (end,) = [event async for event in it.other.all() if event.id == "a1"]
        assert end.deleted
        it.proxy.hears.set()


async def test_sixteen_writers_and_a_broker_that_is_killed(broker: Broker, tmp_path: Path) -> None:
    """Checked against the model of tests/faults, which also kills the writers."""
    async with (
        DeafProxy("127.0.0.1", port_of(broker)) as proxy,
        millstream.connect(broker.url, reconnect=QUICK) as direct,
    ):
        store = await direct.event_store(
            "ledger", LedgerAccount, events=LEDGER_EVENTS, snapshot_every=SNAPSHOT_EVERY
        )
        stopping = asyncio.Event()
        working = [
            asyncio.create_task(work(proxy.port, f"w{number}", tmp_path, stopping))
            for number in range(4)
        ]
        progress = Progress(tmp_path)
        for wanted in (60, 120):
            assert await until(partial(progressed, progress, wanted))
            proxy.target = None
            await asyncio.to_thread(broker.kill)
            await asyncio.to_thread(broker.start)
            proxy.target = ("127.0.0.1", port_of(broker))
        assert await until(partial(progressed, progress, 200))
        stopping.set()
        await asyncio.gather(*working)
        stored = [StoredMark(e.id, e.version, e.offset, e.data) async for e in store.all()]
    found = check_store(read_histories(tmp_path), stored)
    assert found.sound, dict(found.examples)
    assert found.counts["acked"] > 50


def progressed(progress: Progress, wanted: int) -> bool:
    return progress.count() >= wanted


async def work(port: int, name: str, folder: Path, stopping: asyncio.Event) -> None:
    plan = {"name": name, "life": 0, "folder": str(folder), "store": "ledger"}
    plan |= {"writers": 4, "pace": 0.01}
    history = History(folder, f"{name}.0")
    url = f"nats://127.0.0.1:{port}"
    async with millstream.connect(url, reconnect=QUICK, request_timeout=2.0) as mill:
        await append_to_store(Worker(mill, history, plan, stopping, random.Random(name)))
    history.close()
