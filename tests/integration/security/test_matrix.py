"""Permissions: every role and action is tried, and a refused action must change nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import millstream
from millstream import Mill, NewEvent, Start, SubscriberSettings
from millstream.broker import Account, Broker, Role
from millstream.errors import (
    AuthenticationFailed,
    MillstreamError,
    PermissionDenied,
)
from millstream.messaging.topics.admin import Purge
from millstream.testing import running_broker

SCHEMA: dict[str, Any] = {
    "type": "record",
    "name": "Order",
    "fields": [{"name": "n", "type": "long"}],
}

# A refusal or answer comes immediately, unless the broker is delayed.
PATIENT: dict[str, Any] = {"connect_timeout": 30.0, "request_timeout": 30.0}


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with running_broker(auth=True, accounts=(Account("acme"),)) as running:
        yield running


@asynccontextmanager
async def as_user(broker: Broker, role: Role, account: str = "main") -> AsyncIterator[Mill]:
    who = broker.credentials(role, account)
    async with millstream.connect(
        broker.url, user=who.user, password=who.password, **PATIENT
    ) as mill:
        yield mill


@pytest.fixture(autouse=True)
async def orders(broker: Broker) -> None:
    """A topic with two events, a subscription, a table and a schema, created by the admin."""
    async with as_user(broker, Role.ADMIN) as admin:
        for info in await admin.topics():
            await admin.delete_topic(info.name)
        topic = await admin.create_topic("orders")
        await topic.publish_many([NewEvent(b"1", "a"), NewEvent(b"2", "b")])
        await topic.subscribe("audit")
        await (await admin.create_table("stock")).put("apples", b"5")
        await admin.create_topic("typed", schema=SCHEMA)


class NothingTaken(Exception):
    """A pull that the server ignores, as it does without permission."""


async def _look(mill: Mill) -> None:
    await (await mill.topic("orders")).info()


async def _list(mill: Mill) -> None:
    assert "orders" in [info.name for info in await mill.topics()]


async def _read(mill: Mill) -> None:
    assert [e.value async for e in (await mill.topic("orders")).read()] == [b"1", b"2"]


async def _verify(mill: Mill) -> None:
    assert [r.messages async for r in (await mill.topic("orders")).admin.verify()][-1] == 2


async def _get(mill: Mill) -> None:
    entry = await (await mill.table("stock")).get("apples")
    assert entry is not None
    assert entry.value == b"5"


async def _hear(mill: Mill) -> None:
    async with mill.subscribe("news.>") as subscriber:
        await subscriber.flush()


async def _publish(mill: Mill) -> None:
    await (await mill.topic("orders")).publish(b"3", "c")


async def _publish_atomic(mill: Mill) -> None:
    await (await mill.topic("orders")).publish_atomic([b"3", b"4"])


async def _write(mill: Mill) -> None:
    async with (await mill.topic("orders")).writer("w") as writer:
        await writer.write(b"3", position=1)


async def _put(mill: Mill) -> None:
    await (await mill.table("stock")).put("apples", b"6")


async def _create(mill: Mill) -> None:
    await mill.create_topic("fresh")


async def _subscribe(mill: Mill) -> None:
    async with (await mill.topic("orders")).subscribe("mine") as subscription:
        (await subscription.pull(1, timeout=30))[0].ack()


async def _steal(mill: Mill) -> None:
    """Take from a subscription that others use."""
    denied = asyncio.Event()
    mill.connection.on_denied.append(lambda _: denied.set())
    end = time.monotonic() + 30
    async with (await mill.topic("orders")).subscribe("audit") as subscription:
        while not (deliveries := await subscription.pull(1, timeout=0.5)):
            if denied.is_set() or time.monotonic() > end:
                raise NothingTaken
        deliveries[0].ack()


async def _join(mill: Mill) -> None:
    async with (await mill.topic("orders")).group("team") as group:
        await group.info()


async def _say(mill: Mill) -> None:
    await mill.publish("news.today", b"x")
    await mill.flush()


async def _serve(mill: Mill) -> None:
    service = mill.service("clock", "1.0.0")
    async with service:
        await mill.flush()


async def _share(mill: Mill) -> None:
    async with mill.subscribe("news.>", SubscriberSettings(queue="team")) as subscriber:
        await subscriber.flush()


async def _claim(mill: Mill) -> None:
    await mill.claim("till-1")


async def _register(mill: Mill) -> None:
    more = {"name": "note", "type": ["null", "string"], "default": None}
    await mill.schemas.register("typed", {**SCHEMA, "fields": [*SCHEMA["fields"], more]})


async def _edit(mill: Mill) -> None:
    await mill.edit_topic("orders", max_age="1h")


async def _purge(mill: Mill) -> None:
    await (await mill.topic("orders")).admin.purge(Purge(key="a"))


async def _delete(mill: Mill) -> None:
    await mill.delete_topic("typed")


async def _seek(mill: Mill) -> None:
    await (await mill.topic("orders")).subscriptions.seek("audit", Start.NEW)


async def _delete_subscription(mill: Mill) -> None:
    await (await mill.topic("orders")).subscriptions.delete("audit")


Deed = Callable[[Mill], Awaitable[None]]

LOOKING: dict[str, Deed] = {
    "look": _look,
    "list": _list,
    "read": _read,
    "verify": _verify,
    "get": _get,
    "hear": _hear,
}
WORKING: dict[str, Deed] = {
    "publish": _publish,
    "publish atomic": _publish_atomic,
    "write": _write,
    "put": _put,
    "create": _create,
    "subscribe": _subscribe,
    "steal": _steal,
    "join": _join,
    "say": _say,
    "serve": _serve,
    "share": _share,
    "claim": _claim,
    "register": _register,
    "seek": _seek,
    "delete subscription": _delete_subscription,
}
RULING: dict[str, Deed] = {"edit": _edit, "purge": _purge, "delete": _delete}
DEEDS = {**LOOKING, **WORKING, **RULING}

MAY: dict[Role, set[str]] = {
    Role.ADMIN: set(DEEDS),
    Role.APP: set(LOOKING) | set(WORKING),
    Role.READER: set(LOOKING),
    Role.TRUSTED: set(LOOKING) | set(WORKING),
}
# Refused without an error for the caller: messages are delivered at most once.
UNHEARD = {"say", "serve"}
# Needs nothing of other accounts, so it is allowed in every account.
OWN = {"hear", "create", "say", "serve", "share", "claim"}


async def _state(broker: Broker) -> object:
    """Everything that could have changed."""
    async with as_user(broker, Role.ADMIN) as admin:
        topics = sorted(
            (i.name, i.settings, [p.last_offset for p in i.partitions])
            for i in await admin.topics()
        )
        subscriptions = [s.name for s in await (await admin.topic("orders")).subscriptions.list()]
        return str(topics), subscriptions, await admin.schemas.find("typed")


async def _is_not_heard(broker: Broker, mill: Mill, deed: str) -> None:
    async with as_user(broker, Role.ADMIN) as admin, admin.subscribe(">") as all_:
        await all_.flush()
        await DEEDS[deed](mill)
        await admin.publish("marker")
        async for message in all_:
            if message.subject == "marker":
                return
            assert not message.subject.startswith(("news", "$SRV"))


@pytest.mark.parametrize("deed", list(DEEDS))
@pytest.mark.parametrize("role", list(Role))
async def test_a_role_can_do_what_it_may_and_nothing_else(
    broker: Broker, role: Role, deed: str
) -> None:
    async with as_user(broker, role) as mill:
        if deed in MAY[role]:
            await DEEDS[deed](mill)
            return
        before = await _state(broker)
        if deed in UNHEARD:
            await _is_not_heard(broker, mill, deed)
        else:
            with pytest.raises((PermissionDenied, NothingTaken)):
                await DEEDS[deed](mill)
    assert await _state(broker) == before


@pytest.mark.parametrize("deed", list(DEEDS))
async def test_a_tenant_cannot_reach_another_tenants_data(broker: Broker, deed: str) -> None:
    before = await _state(broker)
    async with as_user(broker, Role.ADMIN, "acme") as stranger:
        if deed in OWN:
            await DEEDS[deed](stranger)
        else:
            with pytest.raises((MillstreamError, AssertionError)):
                await DEEDS[deed](stranger)
        for info in await stranger.topics():
            await stranger.delete_topic(info.name)
    assert await _state(broker) == before


@pytest.mark.parametrize(
    "who",
    [
        {},
        {"user": "app", "password": "guess"},
        {"user": "admin", "password": ""},
        {"user": "anonymous", "password": "anonymous"},
        {"user": "nobody", "password": "x"},
        {"user": "app' OR '1'='1", "password": "x"},
        {"token": "x"},
        {"user": "system", "password": "system"},
    ],
)
async def test_an_unknown_user_cannot_connect(broker: Broker, who: dict[str, Any]) -> None:
    with pytest.raises(AuthenticationFailed):
        await millstream.connect(broker.url, **PATIENT, **who)


async def test_a_role_in_one_account_has_no_rights_in_another(broker: Broker) -> None:
    main, acme = broker.credentials(Role.ADMIN), broker.credentials(Role.ADMIN, "acme")
    assert main.password.reveal() != acme.password.reveal()
    with pytest.raises(AuthenticationFailed):
        await millstream.connect(broker.url, user=acme.user, password=main.password, **PATIENT)
