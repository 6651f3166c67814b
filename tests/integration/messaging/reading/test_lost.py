"""A loss that the broker found stops every reader of what is lost, until it is accepted.

The damage is real: one byte of a block file of a broker that was killed. Without `closed` starts
and notes, readers that continued from a position before the cut read on without a word, and those
after it met new events under the lost offsets.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import millstream
from millstream import NewEvent, Start
from millstream.broker import Broker, Role
from millstream.errors import DataLoss, PermissionDenied, RequestTimeout
from millstream.messaging.groups.settings import GroupSettings
from millstream.messaging.process import ProcessSettings
from millstream.messaging.subscriptions.settings import SubscriptionSettings
from millstream.testing import running_broker, running_cluster
from millstream.wire.aio import atomic
from millstream.wire.api import PubAck
from tests.integration.messaging.topic_kit import eventually

COUNT, READ, KEPT = 40, 10, 20  # events stored, those that readers took, those left by the damage
LOST = f"'log', partition 0: the offsets {KEPT + 1} to {COUNT} are lost"


def blocks_of(data: Path, stream: str = "log") -> list[Path]:
    found = data.rglob(f"streams/{stream}/msgs/*.blk")
    return sorted(found, key=lambda path: int(path.stem))


def damage(data: Path, stream: str = "log") -> None:
    """Change one byte in the value of the first event that is lost."""
    (block,) = blocks_of(data, stream)
    content = bytearray(block.read_bytes())
    content[content.index(b"value %d;" % (KEPT + 1)) + 2] ^= 4
    block.write_bytes(content)
    # Written by a clean stop; with it, the server does not look at the records before it.
    block.with_name("index.db").unlink(missing_ok=True)


async def crash(broker: Broker, *streams: str) -> None:
    """Kill the broker, damage the logs of these streams, start it again."""
    await asyncio.to_thread(broker.kill)
    for stream in streams:
        damage(broker.data, stream)
    await asyncio.to_thread(broker.start)


def events(first: int = 1, last: int = COUNT) -> list[NewEvent]:
    return [NewEvent(b"value %d;" % n, f"k{n % 5}") for n in range(first, last + 1)]


@contextlib.asynccontextmanager
async def filled(count: int = COUNT) -> AsyncIterator[tuple[Broker, Any]]:
    async with running_broker() as broker, millstream.connect(broker.url) as mill:
        topic = await mill.create_topic("log")
        await topic.publish_many(events(last=count))
        yield broker, mill


async def take(reader: Any, count: int) -> list[bytes]:
    return [(await anext(reader)).data for _ in range(count)]


NEW, NEWEST = b"value 41;", b"value 40;"


async def test_readers_stop_at_what_is_lost_until_it_is_accepted() -> None:
    async with filled() as (broker, mill):
        topic = await mill.topic("log")
        ahead = topic.read(follow=True)
        await take(ahead, COUNT)
        await crash(broker, "log")
        topic = await mill.topic("log")
        receipt = await topic.publish(b"value 41;", "k1")
        assert receipt.offset == COUNT + 1, "no new event has a lost offset"
        assert await take(ahead, 1) == [NEW], "it had read all that is lost"
        for start in (Start.ALL, Start.at_offset(5), Start.at_offset(KEPT + 1), Start.LAST_PER_KEY):
            with pytest.raises(DataLoss, match=LOST):
                [event async for event in topic.read(start=start)]
            with pytest.raises(DataLoss, match=LOST):
                [batch async for batch in topic.batches(start=start)]
        with pytest.raises(DataLoss, match=LOST):
            [event async for event in topic.latest()]
        before = [event.data async for event in topic.read(end=KEPT + 1)]
        assert len(before) == KEPT, "nothing of this range is lost"
        for start in (Start.at_offset(COUNT + 1), Start.LAST):
            assert [event.data async for event in topic.read(start=start)] == [NEW]
        over = [event.data async for event in topic.read(fail_on_data_loss=False)]
        assert over == [*before, NEW]

        (accepted,) = await topic.admin.accept_loss(by="ann")
        assert accepted[0] == 0
        assert (accepted[1].first, accepted[1].last) == (KEPT + 1, COUNT)
        assert await topic.admin.accept_loss() == [], "it is accepted"
        (lost,) = (await topic.info()).partitions[0].lost
        assert (lost.first, lost.last, lost.accepted_by) == (KEPT + 1, COUNT, "ann")
        assert [event.data async for event in topic.read()] == over
        assert [e.data async for e in topic.read(start=Start.at_offset(READ + 1))] == over[READ:]
        health = await asyncio.to_thread(broker.health)
        assert [loss.lost for loss in health.losses] == [(KEPT + 1, COUNT)]
        await crash(broker)
        health = await asyncio.to_thread(broker.health)
        assert "ann" in str(health.losses[0].accepted), "and stays so over a crash"


@pytest.mark.parametrize("role", [Role.ADMIN, Role.READER])
async def test_a_reader_that_is_connected_stops_at_what_is_lost(role: Role) -> None:
    """What it had received is handed out; these events are too large to be received ahead."""
    async with running_broker(auth=True) as broker:
        padding = bytes(1024 * 1024)
        async with connected(broker, Role.ADMIN) as mill:
            topic = await mill.create_topic("log")
            await topic.publish_many([NewEvent(new.value + padding) for new in events()])
        async with connected(broker, role) as mill:
            reader = (await mill.topic("log")).read(follow=True)
            await take(reader, 2)
            await asyncio.to_thread(broker.kill)
            last = blocks_of(broker.data)[-1]
            content = bytearray(last.read_bytes())
            content[content.index(b"value %d;" % COUNT) + 2] ^= 4
            last.write_bytes(content)
            await asyncio.to_thread(broker.start)
            with pytest.raises(DataLoss, match=f"the offsets {COUNT} to {COUNT} are lost"):
                await take(reader, COUNT)


async def test_subscriptions_stop_at_what_is_lost_until_it_is_accepted() -> None:
    async with filled() as (broker, mill):
        topic = await mill.topic("log")
        for name, count in (("behind", READ), ("ahead", COUNT)):
            soon = SubscriptionSettings(ack_wait=2)  # what was fetched is free again after a crash
            async with topic.subscribe(name, soon) as subscription:
                for delivery in await pull(subscription, count):
                    await delivery.ack_sync()
        await asyncio.to_thread(broker.restart)  # acks are on disk when it has stopped
        going_on = SubscriptionSettings(fail_on_data_loss=False)
        await topic.subscriptions.create("going-on", going_on)
        # A member that is connected notices it when it reconnects.
        few = SubscriptionSettings(max_in_flight=2, ack_wait=60)
        async with topic.subscribe("small", few) as member:
            held = await pull(member, 2)
            await crash(broker, "log")
            topic = await mill.topic("log")
            for delivery in held:
                delivery.ack()
            with pytest.raises(DataLoss, match=LOST):
                await pull(member, COUNT)
        await topic.publish(NEW, "k1")
        async with topic.subscribe("ahead") as subscription:
            # The server has moved it back to the end of what is left, where it looks like others.
            with pytest.raises(DataLoss, match=LOST):
                await subscription.pull()
        async with topic.subscribe("late", SubscriptionSettings(start=Start.NEW)) as subscription:
            await topic.publish(b"later", "k1")
            assert [d.data for d in await pull(subscription, 1)] == [b"later"]
        async with topic.subscribe("going-on") as subscription:
            assert len(await pull(subscription, KEPT + 2)) == KEPT + 2
        assert (await topic.subscriptions.info("going-on")).settings == going_on
        async with topic.subscribe("behind") as subscription:
            with pytest.raises(DataLoss, match=LOST):
                await subscription.pull()
            await topic.admin.accept_loss()
            left = await pull(subscription, KEPT - READ + 2)
            assert {NEW, b"later"} <= {delivery.data for delivery in left}
        async with topic.subscribe("ahead") as subscription:
            assert [d.data for d in await pull(subscription, 2)] == [NEW, b"later"]


async def pull(subscription: Any, count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        found += await subscription.pull(count - len(found), timeout=60)
    return found


async def test_groups_and_processes_stop_at_what_is_lost_until_it_is_accepted() -> None:
    async with filled(READ) as (broker, mill):
        topic, copy = await mill.topic("log"), await mill.create_topic("copy")
        await handle_some(topic, READ)
        settings = ProcessSettings("copying")
        await topic.process(copy, lambda event: event.data, settings).run(once=True)
        await topic.publish_many(events(first=READ + 1))
        await crash(broker, "log")
        topic, copy = await mill.topic("log"), await mill.topic("copy")
        await topic.publish(NEW, "k1")
        with pytest.raises(DataLoss, match=LOST):
            await handle_some(topic, COUNT)
        with pytest.raises(DataLoss, match=LOST):
            await topic.process(copy, lambda event: event.data, settings).run(once=True)
        over = GroupSettings(fail_on_data_loss=False, concurrency=1)
        assert len(await handle_some(topic, KEPT + 1, over, "other")) == KEPT + 1

        await topic.admin.accept_loss()
        assert NEW in await handle_some(topic, KEPT - READ + 1)
        await topic.process(copy, lambda event: event.data, settings).run(once=True)
        assert NEW in [event.value async for event in copy.read()]


async def handle_some(
    topic: Any, count: int, settings: GroupSettings | None = None, name: str = "group"
) -> list[bytes]:
    """Handle this many events as the only member of a group, then leave."""
    seen: list[bytes] = []
    settings = settings or GroupSettings(concurrency=1)
    async with topic.group(name, settings) as group:

        async def handler(event: Any) -> None:
            seen.append(event.data)
            if len(seen) == count:
                await group.stop()

        await group.run(handler)
    return seen


@pytest.mark.parametrize("role", [Role.APP, Role.READER])
async def test_clients_without_rights_see_a_loss_and_only_admins_accept_it(role: Role) -> None:
    async with running_broker(auth=True) as broker:
        async with connected(broker, Role.ADMIN) as mill:
            await (await mill.create_topic("log")).publish_many(events())
        async with connected(broker, role) as mill:
            await crash(broker, "log")
            topic = await mill.topic("log")
            with pytest.raises(DataLoss, match=LOST):
                [event async for event in topic.read()]
            with pytest.raises(PermissionDenied):
                await topic.admin.accept_loss()
        async with connected(broker, Role.ADMIN) as mill:
            assert len(await (await mill.topic("log")).admin.accept_loss()) == 1
        async with connected(broker, role) as mill:
            topic = await mill.topic("log")
            assert len([event async for event in topic.read()]) == KEPT


def connected(broker: Broker, role: Role) -> Any:
    user = broker.credentials(role)
    return millstream.connect(broker.url, user=user.user, password=user.password)


async def test_topics_of_every_kind_keep_their_settings_and_what_is_left() -> None:
    """The end of a log is moved with messages, which must neither stay nor push others out."""
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "full": {"max_messages": COUNT, "discard": "new"},
        "queue": {"retention": "workqueue"},
        "interest": {"retention": "interest"},
        "table": {"history": 1},
        "aged": {"max_age": 3600.0},
    }
    async with running_broker() as broker, millstream.connect(broker.url) as mill:
        before = {}
        for name, settings in kinds.items():
            topic = await mill.create_topic(name, **settings)
            if name == "interest":
                await topic.subscriptions.create("keeps")
            stored = [NewEvent(new.value, f"k{n}") for n, new in enumerate(events())]
            await topic.publish_many(stored)
            before[name] = (await topic.info()).partitions[0]
        await crash(broker, *kinds)
        for name in kinds:
            after = (await (await mill.topic(name)).info()).partitions[0]
            expected = {**before[name].config}
            found = {**after.config}
            noted = dict(found.pop("metadata"))
            assert noted.pop("millstream.lost")
            assert (found, noted) == (expected, expected.pop("metadata")), name
            assert (after.messages, after.last_offset) == (KEPT, COUNT), name


async def test_a_hole_in_the_middle_of_a_log_is_a_loss() -> None:
    async with running_broker() as broker, millstream.connect(broker.url) as mill:
        topic = await mill.create_topic("log")
        value = bytes(100_000)
        await topic.publish_many([NewEvent(b"value %d;" % n + value) for n in range(1, 201)])
        await asyncio.to_thread(broker.kill)
        first, second, *_ = blocks_of(broker.data)
        content = bytearray(first.read_bytes())
        content[content.index(b"value 20;") + 2] ^= 4
        first.write_bytes(content)
        head = second.read_bytes()[:12]
        await asyncio.to_thread(broker.start)
        topic = await mill.topic("log")
        part = (await topic.info()).partitions[0]
        assert part.last_offset == 200
        (lost,) = part.lost
        assert (lost.first, lost.last) == (20, int.from_bytes(head[4:], "little") - 1)
        with pytest.raises(DataLoss, match=f"the offsets 20 to {lost.last} are lost"):
            [event async for event in topic.read()]
        after = topic.read(start=Start.at_offset(lost.last + 1))
        assert len([event async for event in after]) == 200 - lost.last


async def test_a_batch_whose_answer_was_lost_is_found_after_a_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its writer looks for it among what is new, and reads no lost event."""
    async with filled() as (broker, mill):
        await crash(broker, "log")
        topic = await mill.topic("log")
        real = atomic._attempt

        async def unanswered(*about: Any) -> PubAck:
            await real(*about)
            raise RequestTimeout("log", 1.0)

        monkeypatch.setattr(atomic, "_attempt", unanswered)
        receipts = await topic.publish_atomic([b"1", b"2"])
        assert [receipt.offset for receipt in receipts] == [COUNT + 1, COUNT + 2]


async def test_a_mirror_copies_what_it_lost_again_and_is_healthy() -> None:
    async with filled() as (broker, mill):
        copy = await mill.create_topic("copy", mirror="log")

        async def copied() -> int:
            return int((await copy.info()).partitions[0].messages)

        await eventually(copied, COUNT)
        await crash(broker, "copy")
        await eventually(copied, COUNT)
        copy = await mill.topic("copy")
        assert len([event async for event in copy.read()]) == COUNT
        health = await asyncio.to_thread(broker.health)
        assert [(loss.stream, loss.open) for loss in health.losses] == [("copy", False)]
        assert "a mirror copies them from its origin again" in health.losses[0].text
        assert health.ok, "and nobody can accept a loss of a mirror"


async def test_a_stream_without_acks_does_not_delay_the_start() -> None:
    """The broker waited for the ack of a message that moves the end of the log."""
    async with running_broker() as broker, millstream.connect(broker.url) as mill:
        topic = await mill.create_topic("log")
        await topic.publish_many(events())
        config = (await topic.info()).partitions[0].config
        await mill.jetstream.update_stream({**config, "no_ack": True})
        await crash(broker, "log")
        part = (await (await mill.topic("log")).info()).partitions[0]
        assert part.last_offset == COUNT
        assert part.config["no_ack"]
        assert "do not know of its loss" not in broker.log.read_text()


def wait_for_newest(folder: Path) -> None:
    deadline = time.monotonic() + 60
    while not any(NEWEST in path.read_bytes() for path in blocks_of(folder)):
        assert time.monotonic() < deadline, "the node never got all events"
        time.sleep(0.02)


@pytest.mark.long
async def test_what_the_peers_of_a_node_repair_is_not_lost() -> None:
    async with (
        running_cluster(3) as cluster,
        millstream.connect(cluster.url, connect_timeout=60.0, request_timeout=60.0) as mill,
    ):
        topic = await mill.create_topic("log", replicas=3)
        await topic.publish_many(events())
        node = next(iter(cluster.nodes))
        folder = cluster.data / "nodes" / node
        await asyncio.to_thread(wait_for_newest, folder)  # a replica may be behind
        await asyncio.to_thread(cluster.kill, node)
        damage(folder)
        await asyncio.to_thread(cluster.restart, node)
        topic = await mill.topic("log")
        assert len([event async for event in topic.read()]) == COUNT
        assert (await topic.info()).partitions[0].lost == ()
        health = await asyncio.to_thread(cluster.health)
        assert health.losses == ()
