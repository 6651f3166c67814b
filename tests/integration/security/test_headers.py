"""Headers with power: what an app publishes with them must not change what others have stored.

Published raw with nats-py, as a client that ignores every rule of the SDK would.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import nats
import pytest
from nats.aio.client import Client as Peer

import millstream
from millstream import Mill, NewEvent
from millstream.broker import Broker, Role
from millstream.errors import ConfigError
from millstream.settings import ConnectionSettings
from millstream.spark.sink.staging import STREAM, ensure_staging
from millstream.testing import running_broker
from tests.integration.messaging.topic_kit import eventually

STORED = {"a": b"1", "b": b"2", "c": b"3"}
# Each is tried with and without a body, on the subject of a key of its own.
REFUSED: dict[str, dict[str, str]] = {
    "roll-up of everything": {"Nats-Rollup": "all"},
    "roll-up of a key": {"Nats-Rollup": "sub"},
    "a KV client's purge": {"KV-Operation": "PURGE", "Nats-Rollup": "sub"},
    "schedule": {"Nats-Schedule": "@at 2020-01-01T00:00:00Z", "Nats-Schedule-Target": "{t}.a"},
    "schedule for ever": {"Nats-Schedule": "@every 1s", "Nats-Schedule-Target": "{t}.a"},
    "schedule of what is stored": {
        "Nats-Schedule": "@at 2020-01-01T00:00:00Z",
        "Nats-Schedule-Target": "{t}.a",
        "Nats-Schedule-Source": "{t}.b",
    },
    "schedule with a roll-up": {
        "Nats-Schedule": "@at 2020-01-01T00:00:00Z",
        "Nats-Schedule-Target": "{t}.a",
        "Nats-Schedule-Rollup": "sub",
    },
    "end of a schedule": {"Nats-Schedule-Next": "purge", "Nats-Scheduler": "{t}.a"},
    "counter": {"Nats-Incr": "+5"},
    "origin of a copy": {"Nats-Stream-Source": "other 1 > > other.a"},
    "time to live that is none": {"Nats-TTL": "-5s"},
    "wrong expectation": {"Nats-Expected-Last-Sequence": "999"},
    "wrong expectation of an id": {"Nats-Expected-Last-Msg-Id": "unknown"},
    "wrong expectation of a key": {"Nats-Expected-Last-Subject-Sequence": "999"},
    "expectation of another stream": {"Nats-Expected-Stream": "other"},
}
# Stored as one more event of the key `mine`, which is all that they do.
HARMLESS: dict[str, dict[str, str]] = {
    "time to live": {"Nats-TTL": "1s"},
    "time to live for ever": {"Nats-TTL": "never"},
    "marker": {"Nats-Marker-Reason": "MaxAge"},
    "marker of a purge": {"Nats-Marker-Reason": "Purge"},
    "KV delete": {"KV-Operation": "DEL"},
    "KV purge without a roll-up": {"KV-Operation": "PURGE"},
    "right expectation": {"Nats-Expected-Last-Subject-Sequence": "0"},
    "expectation of all": {
        "Nats-Expected-Last-Subject-Sequence": "3",
        "Nats-Expected-Last-Subject-Sequence-Subject": "{t}.>",
    },
    "an id": {"Nats-Msg-Id": "mine"},
}
TOPICS = ("orders", "stock")  # a topic and a table


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with running_broker(auth=True) as running:
        yield running


@asynccontextmanager
async def as_admin(broker: Broker) -> AsyncIterator[Mill]:
    who = broker.credentials(Role.ADMIN)
    async with millstream.connect(
        broker.url,
        user=who.user,
        password=who.password,
        connect_timeout=30.0,
        request_timeout=30.0,
    ) as mill:
        yield mill


@pytest.fixture
async def admin(broker: Broker) -> AsyncIterator[Mill]:
    """The admin's connection, to a topic and a table with what others have stored."""
    async with as_admin(broker) as mill:
        for info in await mill.topics():
            await mill.delete_topic(info.name)
        topic = await mill.create_topic("orders")
        await topic.publish_many(
            [NewEvent(value, key, id=f"theirs-{key}") for key, value in STORED.items()]
        )
        await (await mill.create_table("stock")).put_many(dict(STORED))
        yield mill


@pytest.fixture
async def app(broker: Broker) -> AsyncIterator[Peer]:
    who = broker.credentials(Role.APP)
    peer = await nats.connect(broker.url, user=who.user, password=who.password.reveal())
    yield peer
    await peer.close()


async def put(app: Peer, subject: str, body: bytes, headers: dict[str, str]) -> dict[str, Any]:
    """What the server answers to a publish."""
    reply = await app.request(subject, body, timeout=30, headers=headers)
    return dict(json.loads(reply.data))


async def stored(mill: Mill, topic: str) -> dict[str, bytes]:
    """What others stored there, as far as it is still there."""
    opened = await mill.topic(topic)
    found = [event async for event in opened.read()]
    return {event.key: event.value for event in found if event.key in STORED}


@pytest.mark.parametrize("topic", TOPICS)
async def test_a_header_that_changes_what_others_stored_is_refused(
    admin: Mill, app: Peer, topic: str
) -> None:
    for what, given in REFUSED.items():
        headers = {name: text.format(t=topic) for name, text in given.items()}
        for body in (b"x", b""):
            answer = await put(app, f"{topic}.mine", body, headers)
            assert "error" in answer, (what, body, answer)
            assert await stored(admin, topic) == STORED, what
    state = (await admin.jetstream.stream_info(topic)).state
    assert (state.messages, state.last_seq) == (3, 3)  # nothing was stored, either


@pytest.mark.parametrize("topic", TOPICS)
@pytest.mark.parametrize("what", HARMLESS)
async def test_other_headers_concern_the_own_event_only(
    admin: Mill, app: Peer, topic: str, what: str
) -> None:
    headers = {name: text.format(t=topic) for name, text in HARMLESS[what].items()}
    answer = await put(app, f"{topic}.mine", b"x", headers)
    assert answer.get("seq") == 4, answer
    assert await stored(admin, topic) == STORED
    receipt = await (await admin.topic(topic)).publish(b"5", "later")
    assert (receipt.offset, receipt.duplicate) == (5, False)
    assert await stored(admin, topic) == STORED


@pytest.mark.parametrize("topic", TOPICS)
async def test_an_expiring_event_takes_nothing_with_it(admin: Mill, app: Peer, topic: str) -> None:
    await put(app, f"{topic}.mine", b"x", {"Nats-TTL": "1s"})
    opened = await admin.topic(topic)

    async def gone() -> bool:
        return await opened.last("mine") is None

    await eventually(gone, True)
    assert await stored(admin, topic) == STORED


@pytest.mark.parametrize("topic", TOPICS)
async def test_a_batch_that_is_never_ended_or_holds_a_rollup_changes_nothing(
    admin: Mill, app: Peer, topic: str
) -> None:
    batch = {"Nats-Batch-Id": "open", "Nats-Batch-Sequence": "1"}
    await app.request(f"{topic}.mine", b"x", timeout=30, headers=batch)
    wiping = {"Nats-Batch-Id": "wipe", "Nats-Batch-Sequence": "1", "Nats-Batch-Commit": "1"}
    answer = await put(app, f"{topic}.mine", b"x", {**wiping, "Nats-Rollup": "all"})
    assert "error" in answer
    opened = await admin.topic(topic)
    receipts = await opened.publish_atomic([NewEvent(b"4", "d"), NewEvent(b"5", "e")])
    assert [receipt.offset for receipt in receipts] == [4, 5]
    assert await stored(admin, topic) == STORED


async def test_an_id_that_was_used_before_hides_an_event_only_from_who_gives_it(
    admin: Mill, app: Peer
) -> None:
    """An id is stored once, whoever gives it; ids that the SDK makes cannot be guessed."""
    topic = await admin.topic("orders")
    answer = await put(app, "orders.mine", b"x", {"Nats-Msg-Id": "theirs-a"})
    assert (answer["seq"], answer["duplicate"]) == (1, True)
    await put(app, "orders.mine", b"x", {"Nats-Msg-Id": "order-8"})
    receipt = await topic.publish(b"8", "d", id="order-8")
    assert receipt.duplicate  # the producer is told
    assert not (await topic.publish(b"8", "d")).duplicate
    assert await stored(admin, "orders") == STORED


async def test_a_topic_with_schedules_is_closed_to_rollups_by_a_promoted_mirror(
    admin: Mill, app: Peer
) -> None:
    """As topics of earlier versions are; the server itself cannot switch schedules off."""
    old = await admin.create_topic("old", schedules=True)
    await old.publish_many([NewEvent(value, key) for key, value in STORED.items()])
    with pytest.raises(ConfigError, match="promote the mirror"):
        await admin.edit_topic("old", rollup=False)
    await admin.create_topic("new", mirror="old")

    async def copied() -> bool:
        return await stored(admin, "new") == STORED

    await eventually(copied, True)
    await admin.delete_topic("old")
    await admin.promote_topic("new")
    for which in ("sub", "all"):
        assert "error" in await put(app, "old.mine", b"x", {"Nats-Rollup": which})
    assert (await put(app, "old.mine", b"x", {}))["seq"] == 4
    assert await stored(admin, "new") == STORED


async def test_the_staging_stream_of_spark_cannot_be_wiped(
    broker: Broker, admin: Mill, app: Peer
) -> None:
    who = broker.credentials(Role.ADMIN)
    settings = ConnectionSettings(urls=(broker.url,), user=who.user, password=who.password)
    await asyncio.to_thread(ensure_staging, settings, 1)
    await put(app, f"{STREAM}.theirs.0.0.t", b"pack", {})
    for which in ("sub", "all"):
        answer = await put(app, f"{STREAM}.theirs.manifest", b"x", {"Nats-Rollup": which})
        assert "error" in answer
    assert (await admin.jetstream.stream_info(STREAM)).state.messages == 1
