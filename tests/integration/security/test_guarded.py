"""The own subjects of a guarded topic: every role tries to write there, past the guard."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import millstream
from millstream import Mill, NewEvent, Topic
from millstream.broker import Broker, Credentials, LeafRemote, LeafSettings, Role, User
from millstream.deadline import Deadline
from millstream.errors import NoResponders, PermissionDenied, RequestTimeout, SchemaError
from millstream.settings import SCHEMAS_TOPIC, Secret
from millstream.testing import running_broker
from tests.integration.broker.clients import PATIENCE, client, publish_guarded

SCHEMA: dict[str, Any] = {
    "type": "record",
    "name": "Order",
    "fields": [{"name": "n", "type": "long"}],
}
GOOD, BAD = b'{"n": 1}', b"not an order"
SUBJECT = "_guarded.orders.ada"
PATIENT: dict[str, Any] = {"connect_timeout": 30.0, "request_timeout": 30.0}
TILL = Credentials("till", Secret("t"), "app", "main")
BATCH = {"Nats-Batch-Id": "b1", "Nats-Batch-Sequence": "1", "Nats-Batch-Commit": "1"}
# Every way to write a message: the headers that the server acts on.
WAYS: dict[str, dict[str, str]] = {
    "plain": {},
    "with an id": {"Nats-Msg-Id": "x1"},
    "as a batch": BATCH,
    "rolling up": {"Nats-Rollup": "sub"},
    "as a pack": {"Mill-Pack": "1"},
    "expecting": {"Nats-Expected-Last-Subject-Sequence": "0"},
    "scheduled": {"Nats-Schedule": "@at 2030-01-01T00:00:00Z", "Nats-Schedule-Target": SUBJECT},
}


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    till = User(TILL.user, TILL.password, topics=("orders",))
    with running_broker(auth=True, users=(till,)) as running:
        yield running


@asynccontextmanager
async def as_user(broker: Broker, role: Role) -> AsyncIterator[Mill]:
    who = broker.credentials(role)
    async with millstream.connect(
        broker.url, user=who.user, password=who.password, **PATIENT
    ) as mill:
        yield mill


@pytest.fixture(autouse=True)
async def orders(broker: Broker) -> None:
    async with as_user(broker, Role.ADMIN) as admin:
        for info in await admin.topics():
            if info.name != SCHEMAS_TOPIC:
                await admin.delete_topic(info.name)
        await admin.create_topic("orders", schema=SCHEMA, guarded=True)


async def stored(broker: Broker) -> int:
    async with as_user(broker, Role.ADMIN) as admin:
        return (await (await admin.topic("orders")).info()).messages


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("role", [Role.APP, Role.READER])
async def test_nobody_writes_past_the_guard(broker: Broker, role: Role, way: str) -> None:
    async with client(broker.url, broker.credentials(role)) as connection:
        for body in (GOOD, BAD):
            await connection.publish(SUBJECT, body, headers=WAYS[way] or None)
            await connection.publish(SUBJECT, body, "_INBOX.x", headers=WAYS[way] or None)
        await connection.flush()
        denied = [error for error in connection.seen if "permissions violation" in error.lower()]
        assert denied
    assert await stored(broker) == 0


async def test_the_sdk_of_an_app_cannot_write_past_the_guard_either(broker: Broker) -> None:
    from millstream.wire.aio.publisher import StreamPublisher
    from millstream.wire.message import OutgoingMessage

    async with as_user(broker, Role.APP) as mill:
        past = StreamPublisher(mill.connection, guarded=False)
        with pytest.raises(PermissionDenied, match=SUBJECT):
            await past.publish(OutgoingMessage(SUBJECT.encode(), b"", GOOD), 30, lambda ack: ack)
    assert await stored(broker) == 0


@pytest.mark.parametrize("role", [Role.TRUSTED, Role.ADMIN])
async def test_a_trusted_user_writes_past_the_guard(broker: Broker, role: Role) -> None:
    async with client(broker.url, broker.credentials(role)) as connection:
        await connection.jetstream().publish(SUBJECT, GOOD)
    assert await stored(broker) == 1


async def test_an_app_publishes_through_the_guard_and_reads_as_before(broker: Broker) -> None:
    who = broker.credentials("guard")
    async with (
        as_user(broker, Role.APP) as mill,
        millstream.connect(broker.url, user=who.user, password=who.password, **PATIENT) as guarding,
        guarding.guard("orders"),
    ):
        topic = await mill.topic("orders")
        await topic.publish({"n": 1}, "ada")
        await topic.publish_atomic([NewEvent({"n": 2}, "ada"), NewEvent({"n": 3}, "ada")])
        async with topic.writer("w") as writer:
            await writer.write({"n": 4}, "ada", position=1)
        with pytest.raises(SchemaError):
            await topic.publish({"n": "one"}, "ada")
        assert [event.value["n"] async for event in topic.read()] == [1, 2, 3, 4]
        async with topic.subscribe("audit") as subscription:
            assert len(await subscription.pull(10, timeout=30)) == 4


async def test_an_app_beyond_a_leaf_node_publishes_through_the_guard_too() -> None:
    leaf = LeafSettings(port=0)
    with running_broker(name="hub", domain="hub", auth=True, leaf=leaf) as hub:
        port = json.loads((hub.data / "nodes/n1/plan.json").read_text())["ports"]["leaf"]
        login = hub.credentials("leaf")
        remote = LeafRemote(f"nats-leaf://127.0.0.1:{port}", login.user, login.password)
        async with as_user(hub, Role.APP) as mill:
            topic = await mill.create_topic("orders", schema=SCHEMA, guarded=True)
            await publish_guarded(topic, {"n": 1})
        linked = LeafSettings(remotes=(remote,))
        with running_broker(domain="edge", auth=True, leaf=linked) as edge:
            who = edge.credentials(Role.APP)
            async with client(edge.url, who) as connection:
                await connection.publish(SUBJECT, BAD)
                await connection.flush()
                assert "permissions violation" in connection.seen[0].lower()
            user: dict[str, Any] = {"user": who.user, "password": who.password}
            async with millstream.connect(edge.url, domain="hub", **user, **PATIENT) as mill:
                topic = await topic_of(mill, "orders")
                await publish_guarded(topic, {"n": 2})
                await topic.publish_atomic([NewEvent({"n": 3}, "a"), NewEvent({"n": 4}, "a")])
                assert [event.value["n"] async for event in topic.read()] == [1, 2, 3, 4]


async def test_a_bounded_app_publishes_to_a_guarded_topic(broker: Broker) -> None:
    async with as_user(broker, Role.ADMIN) as admin:
        await publish_guarded(await admin.topic("orders"), {"n": 1})
    async with (
        millstream.connect(broker.url, user="till", password="t", **PATIENT) as mill,
        client(broker.url, TILL) as plain,
    ):
        topic = await mill.topic("orders")
        await topic.publish({"n": 2}, "ada")
        await topic.publish_atomic([NewEvent({"n": 3}, "ada"), NewEvent({"n": 4}, "ada")])
        for subject in ("ingress.orders", "ingress.orders.ada"):
            answer = await plain.jetstream().publish(subject, GOOD, headers={"X": "y"})
            assert answer.stream == "orders"
            stored_ = await plain.jetstream().get_msg("orders", answer.seq)
            assert "Nats-Request-Info" not in stored_.headers  # who published it
        assert [event.value["n"] async for event in topic.read()] == [1, 2, 3, 4, 1, 1]
        await plain.publish(SUBJECT, GOOD)
        await plain.flush()
        assert "permissions violation" in plain.seen[0].lower()


async def test_a_schedule_is_no_way_past_the_guard(broker: Broker) -> None:
    async with as_user(broker, Role.ADMIN) as admin:
        topic = await admin.create_topic("later", schema=SCHEMA, guarded=True, schedules=True)
        await publish_guarded(topic, {"n": 1})
        async with client(broker.url, broker.credentials(Role.APP)) as app:
            at = {"Nats-Schedule": "@at 2100-01-01T00:00:00Z"}
            for own, target in (("ada", "_x"), ("_x", "ada"), ("ada", "ada")):
                headers = {**at, "Nats-Schedule-Target": f"_guarded.later.{target}"}
                for more in ({"Mill-Schema": "1"}, {"Mill-Pack": "1"}):
                    answer = await app.request(
                        *(f"ingress.later._as.{own}", BAD),
                        timeout=PATIENCE,
                        headers={**headers, **more},
                    )
                    assert json.loads(answer.data)["error"]["code"] == 400
        assert [event.value["n"] async for event in topic.read()] == [1]


async def test_headers_without_an_end_are_refused(broker: Broker) -> None:
    async with as_user(broker, Role.ADMIN) as admin:
        topic = await admin.topic("orders")
        await publish_guarded(topic, {"n": 1})
        async with as_user(broker, Role.APP) as app:
            for block in (b"NATS/1.0\r\nMill-Schema: 1", b"NATS/1.0\r\nMill-Schema: 1\r\n\r\n{"):
                _, answer = await app.connection.request("ingress.orders._as.ada", GOOD, block)
                error = json.loads(answer)["error"]
                assert (error["code"], "damaged" in error["description"]) == (400, True)
        assert [event.value["n"] async for event in topic.read()] == [1]


async def test_the_answers_of_a_guard_are_no_events(broker: Broker) -> None:
    async with as_user(broker, Role.ADMIN) as admin:
        topic = await admin.topic("orders")
        await publish_guarded(topic, {"n": 1})
        async with client(broker.url, broker.credentials(Role.APP)) as app:
            for entrance in ("ingress.orders.ada", "ingress.orders._batch"):
                await app.publish(entrance, BAD, reply=SUBJECT)
                await app.publish(entrance, GOOD, reply="$JS.API.STREAM.PURGE.orders")
                await app.request(entrance, GOOD, timeout=PATIENCE)  # handled after the others
        assert [event.value["n"] async for event in topic.read()] == [1, 1]


async def topic_of(mill: Mill, name: str) -> Topic:
    """A topic beyond a leaf node, once the node is connected."""
    deadline = Deadline(PATIENCE)
    while True:
        try:
            return await mill.topic(name)
        except (NoResponders, RequestTimeout):
            assert not deadline.passed
