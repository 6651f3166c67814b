"""Attacks on a store with users of every role, and on reading by push consumers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import millstream
from millstream import Mill
from millstream.errors import MillstreamError
from tests.integration.event_store.bank import EVENTS, Account, Deposited
from tests.integration.security.test_matrix import PATIENT, Broker, Role, running_broker


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with running_broker(auth=True) as running:
        yield running


@asynccontextmanager
async def as_user(broker: Broker, role: Role) -> AsyncIterator[Mill]:
    who = broker.credentials(role, "main")
    async with millstream.connect(
        broker.url, user=who.user, password=who.password, **PATIENT
    ) as mill:
        yield mill


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("deed", ["load", "append", "all", "change", "delete", "archive"])
async def test_roles(broker: Broker, role: Role, deed: str) -> None:
    async with as_user(broker, Role.ADMIN) as admin:
        for info in await admin.topics():
            if info.name.startswith("accounts"):
                await admin.delete_topic(info.name)
        store = await admin.event_store("accounts", Account, events=EVENTS)
        await store.append("a1", [Deposited(1)])
    denied: list[Any] = []
    async with as_user(broker, role) as mill:
        mill.connection.on_denied.append(denied.append)
        try:
            store = await mill.event_store("accounts", Account, events=EVENTS)
        except MillstreamError as error:
            print("ROLE", role, deed, "OPEN FAILED", type(error).__name__, str(error)[:200])
            return
        try:
            if deed == "load":
                await store.load("a1")
            elif deed == "append":
                await store.append("a1", [Deposited(1)], 1)
            elif deed == "all":
                assert [e async for e in store.all()]
            elif deed == "change":
                async with store.change("a1") as a:
                    a.deposit(1)
            elif deed == "delete":
                await store.delete("a1")
            else:
                await store.archive("a1")
            print("ROLE", role, deed, "ok", denied)
        except MillstreamError as error:
            print("ROLE", role, deed, type(error).__name__, str(error)[:250], denied)


async def consumers(mill: Mill, stream: str) -> int:
    info = await mill.jetstream.stream_info(stream)
    return info.state.consumer_count


async def test_cancelled_loads_leave_nothing(mill: Mill) -> None:
    store = await mill.event_store("accounts", Account, events=EVENTS)
    for n in range(500):
        await store.append("a1", [Deposited(1)])
    subscriptions = (
        len(mill.connection._subscriptions) if hasattr(mill.connection, "_subscriptions") else None
    )
    for n in range(50):
        task = asyncio.create_task(store.load("a1"))
        for _ in range(n % 10):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    async with asyncio.timeout(20):
        while await consumers(mill, "accounts"):
            await asyncio.sleep(0.2)
    if subscriptions is not None:
        assert len(mill.connection._subscriptions) == subscriptions


async def test_a_large_aggregate_and_a_busy_loop(mill: Mill) -> None:
    """1,500 appends of 100 KB: more than the server holds for a client that does not read."""
    import time

    store = await mill.event_store("accounts", Account, events=EVENTS)
    from tests.integration.event_store.bank import Opened

    big = Opened("x" * 100_000)
    for n in range(15):
        await asyncio.gather(*(store.append("a1", [big]) for _ in range(1)))
    for n in range(1485):
        await store.append("a1", [big])
    before = mill.connection.reconnects
    began = time.monotonic()
    task = asyncio.create_task(store.load("a1"))
    for _ in range(20):
        await asyncio.sleep(0.001)
    time.sleep(3)  # the program is busy
    assert (await task).version == 1500
    print("LARGE", time.monotonic() - began, mill.connection.reconnects - before)
    assert mill.connection.reconnects == before


async def test_more_than_two_thousand(mill: Mill) -> None:
    import time

    store = await mill.event_store("accounts", Account, events=EVENTS)
    for n in range(5):
        await asyncio.gather(*(store.append(f"b{i}", [Deposited(1)]) for i in range(500)))
    for n in range(2500):
        await store.append("a1", [Deposited(1)])
    began = time.monotonic()
    assert (await store.load("a1")).version == 2500
    print("2500", time.monotonic() - began)


async def test_delete_while_reading(mill: Mill) -> None:
    import time

    store = await mill.event_store("accounts", Account, events=EVENTS)
    for round in range(15):
        for n in range(30):
            await store.append("a1", [Deposited(1)])
        began = time.monotonic()
        loads = [asyncio.create_task(store.load("a1")) for _ in range(5)]
        for _ in range(round):
            await asyncio.sleep(0.0005)
        await store.delete("a1", reusable=True)
        results = await asyncio.gather(*loads, return_exceptions=True)
        for r in results:
            if isinstance(r, Exception):
                assert isinstance(r, millstream.errors.AggregateNotFound), r
            else:
                assert r.version == len(r.state.history), r
                assert r.version == 30, r.version
        if time.monotonic() - began > 1:
            print("SLOW", round, time.monotonic() - began)
