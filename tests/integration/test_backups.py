"""Backup and restore: taken while everything is used, restored elsewhere, compared with it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import millstream
from millstream.backups import manifest as manifests
from millstream.backups import taking
from millstream.backups.restoring import RestoredStream, Restoring, restore
from millstream.backups.taking import back_up
from millstream.broker import Broker, Cluster
from millstream.deadline import Deadline
from millstream.errors import BackupError, ConfigError
from millstream.messaging import GroupEvent, SubscriptionSettings, Topic
from millstream.messaging.groups.store import groups_of
from millstream.mill import Mill
from millstream.testing import AccountPool
from millstream.wire.aio.snapshots import StreamCopy


def quiet(_stream: str, _done: int, _total: int) -> None:
    """No progress bar."""


@dataclass
class Order:
    item: str
    price: int


@pytest.fixture
async def mill(millstream_url: str) -> AsyncIterator[Mill]:
    async with millstream.connect(millstream_url) as mill:
        yield mill


@pytest.fixture
async def other(millstream_accounts: AccountPool) -> AsyncIterator[Mill]:
    """An empty account, to restore into."""
    async with millstream.connect(millstream_accounts.url()) as mill:
        yield mill


async def take(mill: Mill, folder: Path, *topics: str) -> manifests.Manifest:
    return await back_up(mill, folder, topics, quiet)


async def bring_back(mill: Mill, folder: Path, *topics: str) -> dict[str, RestoredStream]:
    _, streams = await restore(mill, folder, topics, quiet)
    return {one.stream: one for one in streams}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def eventually(condition: Callable[[], Awaitable[bool]], seconds: float = 60) -> None:
    deadline = Deadline(seconds)
    while not await condition():
        assert not deadline.passed, f"not within {seconds:g} s"
        await asyncio.sleep(0.02)


async def has(topic: Topic, messages: int) -> bool:
    return (await topic.info()).messages == messages


async def contents(topic: Topic) -> list[tuple[Any, ...]]:
    return [
        (e.partition, e.offset, e.index, e.key, e.value, e.timestamp, e.id, dict(e.headers))
        async for e in topic.read()
    ]


async def handle(topic: Topic, name: str, count: int) -> None:
    """Ack the first events of a subscription."""
    one_at_a_time = SubscriptionSettings(max_in_flight=1)
    async with topic.subscribe(name, one_at_a_time) as subscription:
        async for delivery in subscription:
            await delivery.ack_sync()
            count -= 1
            if not count:
                return


async def done_up_to(mill: Mill, topic: str, name: str) -> int:
    """The offset up to which a subscription has acked everything."""
    return (await mill.jetstream.consumer_info(topic, name)).ack_floor.stream_seq


async def test_everything_of_an_account_is_restored_as_it_was(
    mill: Mill, other: Mill, tmp_path: Path
) -> None:
    orders = await mill.create_topic("orders", schema=Order, partitions=2)
    for n in range(40):
        await orders.publish(Order(f"i{n}", n), key=f"k{n % 5}", headers={"n": str(n)})
    async with orders.writer("w") as writer:
        for n in range(1, 101):
            await writer.write(Order("packed", n), key="p", position=n)
    table = await mill.create_table("prices")
    for n in range(30):
        await table.put(f"k{n % 10}", f"v{n}".encode())
    plain = await mill.create_topic("plain", max_age="1h")
    for n in range(20):
        await plain.publish(b"%d" % n)
    await handle(plain, "billing", 8)
    queue = await mill.create_topic("jobs", retention="work_queue")
    for n in range(10):
        await queue.publish(b"%d" % n)
    await handle(queue, "worker", 4)
    handled = asyncio.Event()

    async def done(_event: object) -> None:
        handled.set()

    async with plain.group("g") as group:
        running = asyncio.create_task(group.run(done))
        await asyncio.wait_for(handled.wait(), 30)
        await group.stop()
        await running

    made = await take(mill, tmp_path / "b")
    assert made.whole
    assert made.account.startswith("test-")
    assert names_in(tmp_path) == ["b"]
    restored = await bring_back(other, tmp_path / "b")

    assert all(one.compared for one in restored.values()), restored
    for name in ("orders", "plain", "prices"):
        assert await contents(await other.topic(name)) == await contents(await mill.topic(name))
    theirs = await other.topic("orders", Order)
    assert (await anext(aiter(theirs.read()))).value.item.startswith(("i", "packed"))
    assert (await (await other.table("prices")).get("k3")) == await table.get("k3")
    for topic, name in (("plain", "billing"), ("jobs", "worker")):
        assert await done_up_to(other, topic, name) == await done_up_to(mill, topic, name) > 0
    assert await groups_of(other.jetstream, "plain") == ["g"]
    info = await (await other.topic("plain")).info()
    assert info.settings == (await plain.info()).settings

    # Offsets go on, and a writer continues behind its fence.
    there = await other.topic("plain")
    assert (await there.publish(b"new")).offset == 21
    async with theirs.writer("w") as writer:
        assert writer.position == 100
        await writer.write(Order("packed", 100), key="p", position=100)  # left out
        await writer.write(Order("packed", 101), key="p", position=101)
    verified = [report async for report in theirs.admin.verify()][-1]
    assert verified.sound
    assert verified.events == 141


async def test_a_key_that_changes_while_its_table_is_copied_is_not_lost(
    mill: Mill, other: Mill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server drops the old value, and its copy ends before the new one: both would be gone."""
    table = await mill.create_table("state")
    values = {f"k{n}": os.urandom(100_000) for n in range(150)}
    await asyncio.gather(*(table.put(key, value) for key, value in values.items()))
    begin = StreamCopy.begin

    async def held_up(copy: StreamCopy, consumers: bool = True) -> Any:
        found = await begin(copy, consumers)
        # Nothing is acked yet, so the server has read a few megabytes and waits.
        await asyncio.gather(*(table.put(key, b"new") for key in values))
        return found

    monkeypatch.setattr(StreamCopy, "begin", held_up)
    made = await take(mill, tmp_path / "b")
    monkeypatch.undo()
    (stream,) = made.streams
    assert stream.at_least == 0, "the server has dropped all old values meanwhile"
    assert stream.added == 150
    await bring_back(other, tmp_path / "b")
    there = await other.table("state")
    found = {key: await there.get(key) for key in values}
    assert found == {key: await table.get(key) for key in values}
    assert {entry.value for entry in found.values() if entry} == {b"new"}


async def test_readers_never_skip_what_is_stored_after_a_restore(
    mill: Mill, other: Mill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events are stored and handled while others are copied: positions are those of the start."""
    empty = await mill.create_topic("b-empty")
    for name in ("a", "z"):
        topic = await mill.create_topic(name)
        await topic.publish_many([b"%d" % n for n in range(10)])
        await handle(topic, "reader", 3)
    begin = StreamCopy.begin

    async def busy(copy: StreamCopy, consumers: bool = True) -> Any:
        if copy._stream == "z":  # the others have been copied
            await empty.publish(b"first")
            for name in ("a", "z"):
                topic = await mill.topic(name)
                await topic.publish_many([b"later"] * 5)
                await handle(topic, "reader", 9)
        return await begin(copy, consumers)

    monkeypatch.setattr(StreamCopy, "begin", busy)
    made = await take(mill, tmp_path / "b")
    monkeypatch.undo()
    assert {one.name: (one.state.last_seq, one.end) for one in made.streams} == {
        "a": (10, 15),
        "b-empty": (0, 1),
        "z": (15, 15),
    }
    await bring_back(other, tmp_path / "b")
    for name in ("a", "z"):
        topic = await other.topic(name)
        assert await done_up_to(other, name, "reader") == 3
        # What was stored at 11 to 15 of 'a' is not in the backup, and those offsets stay unused.
        assert (await topic.publish(b"after")).offset == 16
    assert (await (await other.topic("b-empty")).publish(b"after")).offset == 2


async def test_a_restored_log_ends_at_the_same_offset_after_a_restart(
    mill: Mill, millstream_broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offsets that are only known to readers stay unused, and are not reported as lost."""
    a, b = await mill.create_topic("a"), await mill.create_topic("b")
    await a.publish(b"1")
    begin = StreamCopy.begin

    async def busy(copy: StreamCopy, consumers: bool = True) -> Any:
        if copy._stream == "b":
            await a.publish_many([b"later"] * 4)
        return await begin(copy, consumers)

    monkeypatch.setattr(StreamCopy, "begin", busy)
    await b.publish(b"1")
    await take(mill, tmp_path / "b")
    monkeypatch.undo()
    async with millstream.connect(millstream_broker.url) as there:
        assert (await bring_back(there, tmp_path / "b"))["a"].last_offset == 5
        created = (await there.jetstream.stream_info("a")).created
    # A checkpoint of Spark knows by it that this is another stream, and stops.
    assert created != (await mill.jetstream.stream_info("a")).created
    await asyncio.to_thread(millstream_broker.stop)
    await asyncio.to_thread(millstream_broker.start)
    assert (await asyncio.to_thread(millstream_broker.health)).losses == ()
    async with millstream.connect(millstream_broker.url) as there:
        assert (await (await there.topic("a")).publish(b"new")).offset == 6
        assert (await there.jetstream.stream_info("a")).created == created


async def test_producers_and_a_backup_do_not_disturb_each_other(
    mill: Mill, other: Mill, tmp_path: Path
) -> None:
    topic = await mill.create_topic("orders")
    stored: list[int] = []
    enough, stop = asyncio.Event(), asyncio.Event()

    async def produce() -> None:
        while not stop.is_set():
            receipt = await topic.publish(b"x" * 2000)
            stored.append(receipt.offset)
            if len(stored) == 200:
                enough.set()

    producing = asyncio.create_task(produce())
    await asyncio.wait_for(enough.wait(), 60)
    before = stored[-1]
    made = await take(mill, tmp_path / "b")
    stop.set()
    await producing
    restored = await bring_back(other, tmp_path / "b")
    assert restored["orders"].compared
    offsets = [e.offset async for e in (await other.topic("orders")).read()]
    assert offsets == list(range(1, made.streams[0].state.last_seq + 1))
    assert len(offsets) >= before


async def test_a_topic_is_restored_with_what_belongs_to_it(
    mill: Mill, other: Mill, tmp_path: Path
) -> None:
    orders = await mill.create_topic("orders", schema=Order)
    await mill.create_topic("unrelated", schema=Order)
    await orders.publish(Order("bad", 1))
    async with orders.subscribe("s") as subscription:
        async for delivery in subscription:
            delivery.terminate("not wanted")
            break
    made = await take(mill, tmp_path / "b", "orders")
    assert sorted(one.name for one in made.streams) == ["mill-schemas", "orders", "orders-s-dead"]

    # In the same broker, after the topic was deleted by accident: the schemas are still there.
    await mill.delete_topic("orders")
    await mill.delete_topic("orders-s-dead")
    assert set(await bring_back(mill, tmp_path / "b")) == {"orders", "orders-s-dead"}
    back = await mill.topic("orders", Order)
    assert [e.value async for e in back.read()] == [Order("bad", 1)]
    letters = await (await back.dead_letters("s")).list()
    assert [letter.cause for letter in letters] == ["not wanted"]

    # In an empty one they come along; in one with other schemas nothing is restored.
    assert "mill-schemas" in await bring_back(other, tmp_path / "b", "orders")
    assert [e.value async for e in (await other.topic("orders", Order)).read()] == [Order("bad", 1)]


async def test_a_group_goes_back_with_its_topic(mill: Mill, tmp_path: Path) -> None:
    """Else it would skip what is stored where it had been before the topic was deleted."""

    async def handle_all(topic: Topic, offset: int) -> None:
        seen = asyncio.Event()

        async def done(event: GroupEvent) -> None:
            if event.offset == offset:
                seen.set()

        async with topic.group("g") as group:
            running = asyncio.create_task(group.run(done))
            await asyncio.wait_for(seen.wait(), 30)
            await group.stop()
            await running

    topic = await mill.create_topic("orders")
    await topic.publish_many([b"1", b"2", b"3"])
    await handle_all(topic, 3)
    await take(mill, tmp_path / "b", "orders")
    await topic.publish_many([b"lost"] * 10)
    await handle_all(topic, 13)
    await mill.delete_topic("orders")
    await bring_back(mill, tmp_path / "b")
    topic = await mill.topic("orders")
    assert (await topic.publish(b"new")).offset == 4
    await handle_all(topic, 4)


@dataclass
class Weight:
    kilograms: float


async def test_other_schemas_of_the_same_number_are_refused(
    mill: Mill, other: Mill, tmp_path: Path
) -> None:
    await (await mill.create_topic("orders", schema=Order)).publish(Order("a", 1))
    await take(mill, tmp_path / "b", "orders")
    await other.create_topic("weights", schema=Weight)
    with pytest.raises(BackupError, match="other numbers in this broker"):
        await bring_back(other, tmp_path / "b")
    assert [info.name for info in await other.topics()] == ["mill-schemas", "weights"]


async def test_nothing_is_created_from_a_damaged_backup_or_over_something(
    mill: Mill, other: Mill, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        await (await mill.create_topic(name)).publish(b"x" * 1000)
    folder = tmp_path / "b"
    await take(mill, folder)
    with pytest.raises(ConfigError, match="not empty"):
        await take(mill, folder)
    with pytest.raises(BackupError, match=r"these streams exist: a, b\. A restore never replaces"):
        await bring_back(mill, folder)
    with pytest.raises(BackupError, match="no topic 'c'; it has a, b"):
        await bring_back(other, folder, "c")

    archive = folder / "b.archive"
    sound = archive.read_bytes()
    for damaged, reason in (
        (sound[:50] + bytes([sound[50] ^ 1]) + sound[51:], "checksum does not match"),
        (sound[:-20], "bytes instead of"),
    ):
        archive.write_bytes(damaged)
        with pytest.raises(BackupError, match=reason):
            await bring_back(other, folder)
    archive.unlink()
    with pytest.raises(BackupError, match="cannot be read"):
        await bring_back(other, folder)
    archive.write_bytes(sound)
    manifest = folder / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"whole": true', '"whole": false'))
    with pytest.raises(BackupError, match="was changed or is damaged"):
        await bring_back(other, folder)
    (folder / "manifest.sha256").unlink()
    with pytest.raises(BackupError, match="not a complete backup"):
        await bring_back(other, folder)
    assert await other.topics() == []


async def test_a_restore_that_fails_removes_what_it_created(
    mill: Mill, other: Mill, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        await (await mill.create_topic(name)).publish(b"x")
    await take(mill, tmp_path / "b")
    # Another stream has the subjects of 'b', which shows when 'a' has been restored.
    await other.jetstream.create_stream({"name": "else", "subjects": ["b.>"]})
    with pytest.raises(BackupError, match="subjects overlap"):
        await bring_back(other, tmp_path / "b")
    assert [info.name for info in await other.topics()] == ["else"]
    await other.jetstream.delete_stream("else")
    assert set(await bring_back(other, tmp_path / "b")) == {"a", "b"}


async def test_an_interrupted_backup_leaves_nothing(
    mill: Mill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await (await mill.create_topic("a")).publish(b"x")
    reached = asyncio.Event()

    async def stuck(*_: object) -> None:
        reached.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(taking._Backup, "_complete", stuck)
    work = asyncio.create_task(take(mill, tmp_path / "b"))
    await asyncio.wait_for(reached.wait(), 30)
    assert [name[:14] for name in names_in(tmp_path)] == [".b.unfinished-"]
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert names_in(tmp_path) == []


async def test_an_interrupted_restore_leaves_nothing(
    mill: Mill, other: Mill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await (await mill.create_topic("a")).publish(b"x")
    await take(mill, tmp_path / "b")
    reached = asyncio.Event()

    async def stuck(*_: object) -> None:
        reached.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Restoring, "_compare", stuck)
    work = asyncio.create_task(bring_back(other, tmp_path / "b"))
    await asyncio.wait_for(reached.wait(), 30)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert await other.topics() == []


async def test_what_is_older_than_its_topic_keeps_is_verified_before_it_expires(
    mill: Mill, other: Mill, tmp_path: Path
) -> None:
    topic = await mill.create_topic("short", max_age="1s")
    await topic.publish(b"x")
    await take(mill, tmp_path / "b")
    await eventually(lambda: has(topic, 0))
    assert (await bring_back(other, tmp_path / "b"))["short"].compared
    there = await other.topic("short")
    assert (await there.info()).settings.max_age == (await topic.info()).settings.max_age
    await eventually(lambda: has(there, 0))
    assert (await there.publish(b"y")).offset == 2


async def test_a_mirror_goes_on_after_its_origin(mill: Mill, other: Mill, tmp_path: Path) -> None:
    origin = await mill.create_topic("origin")
    copy = await mill.create_topic("copy", mirror="origin")
    await origin.publish_many([b"%d" % n for n in range(20)])
    await eventually(lambda: has(copy, 20))
    await take(mill, tmp_path / "b")
    await bring_back(other, tmp_path / "b")
    await (await other.topic("origin")).publish(b"new")
    there = await other.topic("copy")
    await eventually(lambda: has(there, 21))
    values = [e.value async for e in there.read()]
    assert values == [*(b"%d" % n for n in range(20)), b"new"]


@pytest.mark.long
async def test_a_backup_of_a_cluster_is_restored_on_one_node_and_on_a_cluster(
    millstream_cluster: Cluster, other: Mill, tmp_path: Path
) -> None:
    async with millstream.connect(millstream_cluster.url) as mill:
        topic = await mill.create_topic("backed-up", replicas=3)
        await topic.publish_many([b"%d" % n for n in range(50)])
        await handle(topic, "reader", 5)
        await take(mill, tmp_path / "b", "backed-up")
        alone = (await bring_back(other, tmp_path / "b"))["backed-up"]
        assert alone.compared
        assert alone.note == "1 replica instead of 3: it is one node"
        assert await done_up_to(other, "backed-up", "reader") == 5
        before = await contents(topic)
        assert await contents(await other.topic("backed-up")) == before

        await mill.delete_topic("backed-up")
        again = (await bring_back(mill, tmp_path / "b"))["backed-up"]
        assert (again.compared, again.note) == (True, "")
        back = await mill.topic("backed-up")
        assert (await back.info()).settings.replicas == 3
        assert await contents(back) == before
        assert await done_up_to(mill, "backed-up", "reader") == 5
        assert (await back.publish(b"new")).offset == 51
        await mill.delete_topic("backed-up")
