"""What users of each role can do with a store; what is refused changes nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import millstream
from millstream import EventStore, Mill
from millstream.broker import Broker, Role
from millstream.errors import PermissionDenied
from millstream.testing import running_broker
from tests.integration.event_store.bank import EVENTS, Account, Deposited

PATIENT: dict[str, Any] = {"connect_timeout": 30.0, "request_timeout": 30.0}


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with running_broker(auth=True) as running:
        yield running


@asynccontextmanager
async def as_user(broker: Broker, role: Role) -> AsyncIterator[Mill]:
    who = broker.credentials(role)
    async with millstream.connect(
        broker.url, user=who.user, password=who.password, **PATIENT
    ) as mill:
        yield mill


async def opened(mill: Mill) -> EventStore:
    return await mill.event_store("accounts", Account, events=EVENTS)


@pytest.fixture(autouse=True)
async def accounts(broker: Broker) -> None:
    """A store with one aggregate, created by the admin."""
    async with as_user(broker, Role.ADMIN) as admin:
        for info in await admin.topics():
            if info.name == "accounts":
                await admin.delete_topic(info.name)
        await (await opened(admin)).append("a1", [Deposited(1)])


async def test_a_reader_can_load_and_not_append(broker: Broker) -> None:
    async with as_user(broker, Role.READER) as mill:
        store = await opened(mill)
        assert (await store.load("a1")).version == 1  # nobody has stored a snapshot yet
        assert [e.version async for e in store.all()] == [1]
        with pytest.raises(PermissionDenied):
            await store.append("a1", [Deposited(1)])
        assert (await store.load("a1")).version == 1


async def test_an_app_can_append_and_change(broker: Broker) -> None:
    async with as_user(broker, Role.APP) as mill:
        store = await opened(mill)
        await store.append("a1", [Deposited(2)], 1)
        async with store.change("a1") as account:
            account.deposit(3)
        assert (await store.load("a1")).state.history == [1, 2, 3]


@pytest.mark.parametrize("deed", ["delete", "archive"])
async def test_an_end_that_is_refused_changes_nothing(broker: Broker, deed: str) -> None:
    async with as_user(broker, Role.APP) as mill:
        store = await opened(mill)
        with pytest.raises(PermissionDenied):
            await getattr(store, deed)("a1")
        assert (await store.append("a1", [Deposited(1)])).version == 2
        assert [info.name for info in await mill.topics() if "archive" in info.name] == []
