"""Reply subjects: the server answers to any of them, and no answer may change anything.

Every call that a bounded user may make is made with every reply subject that would do harm.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import nats.errors
import nats.js.errors
import pytest

import millstream
from millstream import NewEvent
from millstream.broker import (
    Broker,
    Credentials,
    LeafRemote,
    LeafSettings,
    Permissions,
    Role,
    User,
)
from millstream.errors import PermissionDenied
from millstream.settings import Secret
from millstream.testing import running_broker, running_cluster
from tests.integration.broker.clients import PATIENCE, answered, client

Call = tuple[str, bytes, dict[str, str] | None]

MONEY = {"name": "money", "subjects": ["money.>"], "allow_direct": True, "max_msgs": 1}
ORDERS = {
    "name": "orders",
    "subjects": ["orders.>"],
    "allow_direct": True,
    "allow_atomic": True,
}
EVIL_CONSUMER = {"stream_name": "money", "config": {"durable_name": "evil"}}
# Stored events are bodies of the attacker's choice.
BODIES: list[dict[str, Any]] = [MONEY, {"seq": 1}, EVIL_CONSUMER, {"filter": "money.>"}]
NOWHERE = json.dumps({"seq": 10_000}).encode()  # its answer has no body
STORE_BUSY = 10049  # the server could not create the files of a stream
ROOTS = ("$JS.API", "$JS.hub.API")

REPLIES = [
    *(
        f"{root}.{call}"
        for root in ROOTS
        for call in (
            "STREAM.DELETE.money",
            "STREAM.PURGE.money",
            "STREAM.UPDATE.money",
            "STREAM.MSG.DELETE.money",
            "STREAM.CREATE.money",
            "CONSUMER.DELETE.money.payer",
            "CONSUMER.CREATE.money",
            "CONSUMER.CREATE.money.evil",
            "CONSUMER.DURABLE.CREATE.money.evil",
            "CONSUMER.PAUSE.money.payer",
            "CONSUMER.RESET.money.payer",
            "CONSUMER.MSG.NEXT.money.payer",
        )
    ),
    "money.x",
    "$KV.stock.apples",
    "_INBOX.victim.1",
    "$SYS.REQ.SERVER.PING",
    "$SYS.REQ.SERVER.RELOAD",
]
RESERVED = ["$JS.ACK.money.payer.1.1.1.1.0", "_R_.victim.1"]  # the server itself refuses these

USERS = (
    User("boss", Secret("b"), Role.ADMIN),
    User("eyes", Secret("e"), Role.READER),
    User("auditor", Secret("a"), Role.READER, subscriptions=(("orders", "audit"),)),
    User("till", Secret("t"), topics=("orders",), subscriptions=(("orders", "audit"),)),
    # Not bounded: it has the subjects of a reader, but in the account itself.
    User("loose", Secret("l"), permissions=Permissions(publish=("$JS.API.DIRECT.GET.>",))),
)


def as_user(name: str) -> Credentials:
    return Credentials(name, Secret(name[0]), "app", "main")


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with running_broker(users=USERS, domain="hub", auth=True) as running:
        yield running


@dataclass
class Victims:
    """What an attack could change, and what it could reach."""

    admin: Any
    heard: list[str]
    own: str = ""  # topic that the attacker may publish to

    async def state(self) -> object:
        jetstream = self.admin.jetstream()
        streams = sorted(
            (
                str(info.config),
                info.config.name != self.own and (info.state.last_seq, info.state.messages),
            )
            for info in await jetstream.streams_info()
        )
        consumers = [str(c.config) for c in await jetstream.consumers_info("money")]
        (payer,) = await jetstream.consumers_info("money")
        apples = await (await jetstream.key_value("stock")).get("apples")
        return streams, consumers, payer.delivered.consumer_seq, apples.value, self.heard


async def created(jetstream: Any, **config: Any) -> None:
    """Create a stream; the server may still be removing the files of the last one of its name."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            await jetstream.add_stream(**config)
            return
        except nats.js.errors.ServerError as error:
            if error.err_code != STORE_BUSY or time.monotonic() > end:
                raise
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def victims(url: str) -> AsyncIterator[Victims]:
    async with client(url, as_user("boss")) as admin:
        jetstream = admin.jetstream()
        for info in await jetstream.streams_info():
            await jetstream.delete_stream(info.config.name)
        await created(jetstream, name="money", subjects=["money.>"], allow_direct=True)
        await admin.request(
            "$JS.API.STREAM.CREATE.orders",
            json.dumps(ORDERS).encode(),
            timeout=PATIENCE,
        )
        for _ in range(3):
            await jetstream.publish("money.x", b"{}")
        for body in BODIES:
            await jetstream.publish("orders.x", json.dumps(body).encode())
        await jetstream.publish("orders.empty", b"")
        await jetstream.add_consumer("money", durable_name="payer", ack_policy="explicit")
        await jetstream.add_consumer("orders", durable_name="audit", ack_policy="explicit")
        await (await jetstream.create_key_value(bucket="stock")).put("apples", b"5")
        heard: list[str] = []

        async def hear(message: Any) -> None:
            heard.append(message.subject)

        for subject in ("_INBOX.victim.>", "$KV.>", "money.>", "_R_.victim.>"):
            await admin.subscribe(subject, cb=hear)
        await admin.flush()
        yield Victims(admin, heard)


def _reading(root: str, stream: str) -> list[Call]:
    last = json.dumps({"multi_last": [f"{stream}.>"]}).encode()
    each = [json.dumps({"seq": number}).encode() for number in range(1, len(BODIES) + 1)]
    range_ = json.dumps({"seq": 1, "batch": 10}).encode()
    return [
        (f"{root}.STREAM.INFO.{stream}", b"", None),
        *((f"{root}.STREAM.MSG.GET.{stream}", body, None) for body in (*each, NOWHERE)),
        *((f"{root}.DIRECT.GET.{stream}", body, None) for body in (*each, NOWHERE, last, range_)),
        (f"{root}.DIRECT.GET.{stream}", b"", None),
        (f"{root}.DIRECT.GET.{stream}.{stream}.x", b"", None),
        (f"{root}.DIRECT.GET.{stream}.{stream}.empty", b"", None),
        (f"{root}.CONSUMER.NAMES.{stream}", b"", None),
        (f"{root}.CONSUMER.LIST.{stream}", b"", None),
        (f"{root}.CONSUMER.INFO.{stream}.audit", b"", None),
    ]


def _pulling(root: str) -> list[Call]:
    pull = f"{root}.CONSUMER.MSG.NEXT.orders.audit"
    return [
        (pull, b'{"batch": 10, "no_wait": true}', None),
        (pull, b'{"batch": 1, "expires": 1000000}', None),
        *(("$JS.ACK.orders.audit.1.1.1.1.0", body, None) for body in (b"+ACK", b"+NXT", b"-NAK")),
    ]


def calls_of(user: str) -> list[Call]:
    """Every call the user may make."""
    calls: list[Call] = []
    for root in ROOTS:
        calls.append((f"{root}.INFO", b"", None))
        if user == "till":
            calls += _reading(root, "orders")
        else:
            calls += [(f"{root}.STREAM.NAMES", b"", None), (f"{root}.STREAM.LIST", b"", None)]
            calls += _reading(root, "orders") + _reading(root, "money")
        if user != "eyes":
            calls += _pulling(root)
    calls.append(("$SYS.REQ.USER.INFO", b"", None))
    if user == "till":
        batch = {"Nats-Batch-Id": "b1", "Nats-Batch-Sequence": "1"}
        calls += [("orders.x", b"", None), ("orders.x", b"{}", batch)]
    return calls


async def attack(attacker: Any, user: str) -> None:
    """Make every call with every reply; return when the server has handled them all."""
    for reply in REPLIES:
        for subject, body, headers in calls_of(user):
            await attacker.publish(subject, body, reply=reply, headers=headers)
        await attacker.flush()
    # A call is handled after the same call before it.
    answers = await attacker.subscribe("answers")
    for subject, body, headers in calls_of(user):
        if not subject.startswith("$JS.ACK") and not headers:
            await attacker.publish(subject, body, reply="answers")
            await answers.next_msg(PATIENCE)


@pytest.mark.parametrize("user", ["eyes", "auditor", "till"])
async def test_no_answer_to_a_bounded_user_changes_anything(broker: Broker, user: str) -> None:
    async with victims(broker.url) as targets, client(broker.url, as_user(user)) as attacker:
        targets.own = "orders" if user == "till" else ""
        before = await targets.state()
        await attack(attacker, user)
        assert attacker.seen == []  # every call was allowed
        assert await targets.state() == before
        for reply in RESERVED:
            await attacker.publish("$JS.API.DIRECT.GET.orders", NOWHERE, reply=reply)
        await attacker.flush()
        assert await targets.state() == before


async def test_the_attack_works_for_a_user_of_the_account_itself(broker: Broker) -> None:
    """Without a boundary the same calls do harm: the test above tests something."""
    async with victims(broker.url) as targets, client(broker.url, as_user("loose")) as attacker:
        for reply in ("$JS.API.STREAM.PURGE.money", "_INBOX.victim.1", "money.x"):
            await attacker.publish("$JS.API.DIRECT.GET.orders", NOWHERE, reply=reply)
        await attacker.flush()

        async def done() -> None:
            info = await targets.admin.jetstream().stream_info("money")
            if info.state.first_seq == 1 or len(targets.heard) < 2:
                raise TimeoutError

        await answered(done)


async def test_one_bounded_user_does_not_hear_the_answers_of_another(broker: Broker) -> None:
    async with (
        victims(broker.url),
        client(broker.url, as_user("eyes")) as one,
        client(broker.url, as_user("auditor")) as other,
    ):
        heard: list[Any] = []

        async def hear(message: Any) -> None:
            heard.append(message)

        await other.subscribe("_INBOX.>", cb=hear)
        await other.flush()
        assert (await one.jetstream().get_msg("orders", 1, direct=True)).data
        answer = await other.request("$JS.API.STREAM.NAMES", b"", timeout=PATIENCE)
        assert all(message.reply == "" for message in heard)
        assert [message.data for message in heard if message.subject != answer.subject] == []


async def test_a_bounded_app_publishes_to_and_reads_its_topics_only(broker: Broker) -> None:
    async with victims(broker.url) as targets, client(broker.url, as_user("till")) as till:
        jetstream = till.jetstream()
        heard = await till.subscribe("orders.>")
        await till.flush()
        assert (await jetstream.publish("orders.x", b"sold")).seq == len(BODIES) + 2
        assert (await heard.next_msg(PATIENCE)).data == b"sold"
        await targets.admin.publish("orders.y", b"theirs")
        assert (await heard.next_msg(PATIENCE)).data == b"theirs"  # its own came once
        assert (await jetstream.get_msg("orders", 1, direct=True)).data
        subscription = await jetstream.pull_subscribe_bind("audit", "orders")
        for message in await subscription.fetch(3, timeout=PATIENCE):
            await message.ack_sync(timeout=PATIENCE)
        targets.own = "orders"
        before, refused = await targets.state(), len(till.seen)
        denied = [
            "money.x",
            "news",
            "$KV.stock.apples",
            "$JS.API.STREAM.INFO.money",
            "$JS.API.STREAM.NAMES",
            "$JS.API.DIRECT.GET.money",
            "$JS.API.STREAM.CREATE.mine",
            "$JS.API.STREAM.PURGE.orders",
            "$JS.API.CONSUMER.CREATE.orders.mine",
            "$JS.API.CONSUMER.MSG.NEXT.orders.other",
            "$JS.hub.API.STREAM.PURGE.orders",
        ]
        for subject in denied:
            await till.publish(subject, b"")
        await till.flush()
        assert len(till.seen) - refused == len(denied)
        assert await targets.state() == before


@pytest.mark.parametrize("user", ["eyes", "till"])
async def test_the_trace_of_a_message_goes_nowhere_else(broker: Broker, user: str) -> None:
    """The server publishes what it did with a message to the subject in a header of it."""
    async with victims(broker.url) as targets, client(broker.url, as_user(user)) as attacker:
        targets.own = "orders" if user == "till" else ""
        before = await targets.state()
        calls = [call for call in calls_of(user) if not call[0].startswith("$JS.ACK")]
        for target in ("money.x", "_INBOX.victim.1", "$JS.API.STREAM.PURGE.money"):
            for only in ({}, {"Nats-Trace-Only": "true"}):
                for subject, body, headers in calls:
                    traced = {**(headers or {}), "Nats-Trace-Dest": target, **only}
                    await attacker.publish(subject, body, reply="answers", headers=traced)
        await attacker.flush()
        await attack(attacker, user)  # handled after the others
        assert await targets.state() == before
        assert any("money.x" in error for error in attacker.seen)


@pytest.mark.parametrize("user", ["auditor", "till"])
async def test_an_ack_reaches_no_consumer_but_the_own_one(broker: Broker, user: str) -> None:
    """An ack with the body +NXT is a pull."""
    async with victims(broker.url) as targets, client(broker.url, as_user(user)) as attacker:
        before = await targets.state()
        taken = await attacker.subscribe("taken")
        # A message of money/payer, delivered "orders" times; as acks are written with a domain.
        theirs = "$JS.ACK.money.payer.orders.audit.1.1.1"
        for body in (b"+NXT", b"+ACK", b"+TERM"):
            await attacker.publish(theirs, body, reply="taken")
        await attacker.publish("$JS.ACK.orders.audit.money.payer.1.1.1.1.0", b"+NXT", "taken")
        await attacker.flush()
        assert len(attacker.seen) == 4
        own = "$JS.ACK.orders.audit.1.1.1.1.0"
        await attacker.publish(own, b"+NXT", reply="taken")  # handled after the others
        assert (await taken.next_msg(PATIENCE)).subject.startswith("orders.")
        assert await targets.state() == before


async def test_a_bounded_app_joins_no_queue_group(broker: Broker) -> None:
    """A group gives each message to one member: it would take messages from the others."""
    async with victims(broker.url) as targets, client(broker.url, as_user("till")) as till:
        heard = await till.subscribe("orders.>")
        for subject in ("orders.>", "orders.x", "ingress.orders.>"):
            await till.subscribe(subject, queue="workers")
        await till.flush()
        assert len(till.seen) == 3
        workers = await targets.admin.subscribe("orders.x", queue="workers")
        await targets.admin.flush()
        for _ in range(20):
            await targets.admin.publish("orders.x", b"1")
        for _ in range(20):
            await workers.next_msg(PATIENCE)
            await heard.next_msg(PATIENCE)


async def test_a_bounded_app_that_listens_is_not_taken_for_a_guard(broker: Broker) -> None:
    async with victims(broker.url) as targets, client(broker.url, as_user("till")) as till:
        await till.subscribe("ingress.>")
        await till.subscribe(">")
        await till.flush()
        with pytest.raises(nats.errors.NoRespondersError):
            await targets.admin.request("ingress.orders.x", b"1", timeout=PATIENCE)


async def test_the_sdk_works_for_a_bounded_app(broker: Broker) -> None:
    async with millstream.connect(broker.url, user="boss", password="b") as admin:
        for info in await admin.topics():
            await admin.delete_topic(info.name)
        await admin.create_topic("orders")
        await admin.create_topic("money")
    async with millstream.connect(broker.url, user="till", password="t") as till:
        topic = await till.topic("orders")
        assert (await topic.publish(b"1", "a")).durability == "fsync"
        await topic.publish_many([NewEvent(b"2", "b"), NewEvent(b"3", "c")])
        await topic.publish_atomic([b"4", b"5"])
        async with topic.writer("till") as writer:
            await writer.write(b"6", position=1)
        assert [event.value async for event in topic.read()] == [b"%d" % n for n in range(1, 7)]
        with pytest.raises(PermissionDenied):
            await till.topic("money")
    async with client(broker.url, as_user("till")) as plain:  # "orders-0" is another topic's name
        for call in ("STREAM.MSG.GET", "DIRECT.GET"):
            await plain.publish(f"$JS.API.{call}.orders-0", b'{"seq": 1}', reply="answers")
        await plain.flush()
        assert len(plain.seen) == 2
    async with millstream.connect(broker.url, user="till", password="t") as till:
        with pytest.raises(PermissionDenied):
            await till.create_topic("mine")


async def test_a_reader_reads_the_topics_of_a_leaf_node_and_changes_none() -> None:
    with running_broker(name="hub", domain="hub", auth=True, leaf=LeafSettings(port=0)) as hub:
        port = json.loads((hub.data / "nodes/n1/plan.json").read_text())["ports"]["leaf"]
        login = hub.credentials("leaf")
        remote = LeafRemote(f"nats-leaf://127.0.0.1:{port}", login.user, login.password)
        with running_broker(domain="edge", leaf=LeafSettings(remotes=(remote,))) as edge:
            async with (
                client(edge.url) as admin,
                client(hub.url, hub.credentials(Role.READER)) as reader,
            ):
                jetstream = admin.jetstream()
                await jetstream.add_stream(name="r", subjects=["r.>"], allow_direct=True)
                await jetstream.publish("r.x", b"1")
                api = "$JS.edge.API"
                info = f"{api}.STREAM.INFO.r"
                answer = await answered(lambda: reader.request(info, b"", timeout=5))
                assert json.loads(answer.data)["state"]["messages"] == 1
                get = f"{api}.DIRECT.GET.r"
                assert (await reader.request(get, b'{"seq": 1}', timeout=PATIENCE)).data == b"1"
                for verb in ("PURGE", "DELETE"):
                    await reader.publish(get, NOWHERE, reply=f"{api}.STREAM.{verb}.r")
                assert (await reader.request(get, NOWHERE, timeout=PATIENCE)).headers
                assert (await jetstream.stream_info("r")).state.messages == 1


async def test_a_reader_works_on_every_node_of_a_cluster() -> None:
    with running_cluster(3, auth=True) as cluster:
        url = cluster.url.split(",")
        async with client(url[0], cluster.credentials(Role.ADMIN)) as admin:
            jetstream = admin.jetstream(timeout=PATIENCE)
            await answered(
                lambda: jetstream.add_stream(
                    name="orders", subjects=["orders.>"], num_replicas=3, allow_direct=True
                )
            )
            await jetstream.publish("orders.x", b"1")
            for node in url:
                async with client(node, cluster.credentials(Role.READER)) as reader:
                    live = await reader.subscribe("news")
                    await reader.flush()
                    read = reader.jetstream()
                    look = functools.partial(read.stream_info, "orders")
                    first = functools.partial(read.get_msg, "orders", 1, direct=True)
                    assert (await answered(look)).state.messages == 1
                    assert (await answered(first)).data == b"1"
                    while not live.pending_msgs:
                        await admin.publish("news", b"live")
                        await asyncio.sleep(0.02)
                    await reader.publish(
                        "$JS.API.DIRECT.GET.orders", NOWHERE, reply="$JS.API.STREAM.PURGE.orders"
                    )
                    await reader.flush()
                    await answered(first)
