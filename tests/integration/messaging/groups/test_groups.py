"""Ordered groups on a real broker: order by key, sharing, parking, positions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace

import pyarrow as pa
import pytest

from millstream.errors import ConfigError, DataLoss, GroupBusy, GroupNotFound
from millstream.events.event import Partition
from millstream.events.packs import pack
from millstream.events.start import Start
from millstream.messaging.groups.group import Group, GroupEvent
from millstream.wire.aio.connection import Connection
from millstream.wire.message import OutgoingMessage
from millstream.wire.protocol import encode_headers, unique_token
from tests.integration.messaging.groups.group_kit import (
    QUICK,
    Kit,
    Recorder,
    check_order,
    declare_dead,
    numbered,
    until,
    until_position,
    until_settled,
)


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
async def kit(connection: Connection, stack: AsyncExitStack) -> Kit:
    """A topic of eight partitions."""
    kit = Kit(connection, 8, stack)
    await kit.declare()
    return kit


@pytest.fixture
async def single(connection: Connection, stack: AsyncExitStack) -> Kit:
    """A topic of one partition."""
    kit = Kit(connection, 1, stack)
    await kit.declare()
    return kit


async def test_each_key_is_handled_in_order_and_one_event_at_a_time(kit: Kit) -> None:
    await kit.publish(numbered(keys=40, each=25))
    record = Recorder(seconds=0.001)
    await kit.member(record)
    await until(lambda: len(record.runs) == 1000)
    check_order(record.runs, 40, 25)


async def test_different_keys_of_one_partition_are_handled_at_the_same_time(single: Kit) -> None:
    await single.publish(numbered(keys=3, each=1))
    record = Recorder()
    record.gate = {"k0": asyncio.Event(), "k1": asyncio.Event()}
    await single.member(record)
    await until(lambda: record.numbers("k2") == [0])
    assert len(record.runs) == 1, "the other two wait in their handlers"
    for gate in record.gate.values():
        gate.set()


async def test_no_more_handlers_run_in_parallel_than_the_settings_allow(kit: Kit) -> None:
    await kit.publish(numbered(keys=30, each=2))
    running, most, done = 0, 0, 0
    full = asyncio.Event()  # the limit is reached: another one would be too many

    async def handler(_: GroupEvent) -> None:
        nonlocal running, most, done
        running += 1
        most = max(most, running)
        if running == 3:
            full.set()
        await full.wait()
        await asyncio.sleep(0.002)
        running -= 1
        done += 1

    await kit.member(handler, replace(QUICK, concurrency=3))
    await until(lambda: done == 60)
    assert most == 3


async def test_members_share_the_partitions_as_they_come_and_go(kit: Kit) -> None:
    """1, then 5, then 2 members while events flow: order kept, nothing lost or repeated."""
    record = Recorder(seconds=0.0005)
    members = [await kit.member(record)]
    published = asyncio.create_task(feed(kit, keys=40, each=60))
    await until(lambda: members[0].partitions == tuple(range(8)))
    members += [await kit.member(record) for _ in range(4)]
    await until_settled(members, [1, 1, 2, 2, 2])
    kept = members[1].partitions, members[2].partitions
    await asyncio.gather(*(member.stop() for member in (members[0], *members[3:])))
    await until_settled(members[1:3], [4, 4])
    assert set(kept[0]) <= set(members[1].partitions)
    assert set(kept[1]) <= set(members[2].partitions)
    await published
    await until(lambda: len(record.runs) >= 40 * 60)
    check_order(record.runs, 40, 60)


async def feed(kit: Kit, keys: int, each: int) -> None:
    for number in range(each):
        await kit.publish((f"k{key}", number) for key in range(keys))
        await asyncio.sleep(0.005)


async def test_only_the_partitions_that_move_pause(kit: Kit) -> None:
    """A handler that takes long holds up the move of its partition, and nothing else."""
    keys = {kit.partition_of(f"k{n}"): f"k{n}" for n in range(200)}  # one key a partition
    record = Recorder()
    record.gate = {keys[7]: asyncio.Event()}
    first = await kit.member(record)
    await kit.publish((key, 0) for key in keys.values())
    await until(lambda: len(record.runs) == 7 and keys[7] in record.started)
    second = await kit.member(record)
    await until(lambda: len(second.partitions) == 3)
    waits = "7 is to move and waits for its handler"
    await until(lambda: first.partitions == (0, 1, 2, 3, 7), what=waits)
    await kit.publish((key, 1) for key in keys.values())
    await until(lambda: len(record.runs) == 14)
    assert {run.key for run in record.runs} == set(keys.values()) - {keys[7]}
    unmoved = {run.epoch for run in record.runs if run.key in {keys[p] for p in range(4)}}
    assert unmoved == {1}, "they were never given up"
    record.open_gate(keys[7])
    await until(lambda: record.numbers(keys[7]) == [0, 1])
    assert [run.epoch for run in record.runs if run.key == keys[7]] == [1, 2]
    check_order(record.runs, 8, 2)


async def test_a_member_beyond_the_number_of_partitions_waits_for_its_turn(single: Kit) -> None:
    record = Recorder()
    first = await single.member(record)
    await until(lambda: first.partitions == (0,))
    second = await single.member(record)
    await single.publish(numbered(keys=2, each=3))
    await until(lambda: len(record.runs) == 6)
    assert not second.partitions
    await first.stop()
    await until(lambda: second.partitions == (0,), QUICK.lease / 2, "before the lease is over")


async def test_several_groups_each_get_every_event(single: Kit) -> None:
    await single.publish(numbered(keys=2, each=5))
    one, two = Recorder(), Recorder()
    await single.member(one, name="one")
    await single.member(two, name="two")
    await until(lambda: len(one.runs) == len(two.runs) == 10)
    assert await single.admin.names() == ["one", "two"]


# -- packs and foreign streams ------------------------------------------------------------


async def put(kit: Kit, subject: bytes, payload: bytes, headers: Mapping[str, str]) -> None:
    """Store a message; it has an id because it is sent again when its ack is late."""
    block = encode_headers({**headers, "Nats-Msg-Id": unique_token()})
    await kit.publisher.publish(OutgoingMessage(subject, block, payload), 20.0, lambda ack: ack)


async def publish_pack(kit: Kit, keys: list[str], first: int) -> None:
    values = pa.array([str(first + n).encode() for n in range(len(keys))], pa.binary())
    encoded = pack.encode(pack.envelope(values, key=pa.array(keys)))
    await put(kit, b"orders._pack.w", bytes(encoded.payload), encoded.headers)


async def test_events_of_packs_are_handled_in_order_and_the_position_is_inside(single: Kit) -> None:
    for first in range(0, 30, 10):
        await publish_pack(single, ["a", "b"] * 5, first)
    await single.publish([("a", 30), ("b", 31)])
    record = Recorder()
    record.gate = {"a": asyncio.Event()}
    group = await single.member(record, replace(QUICK, concurrency=2))
    await until(lambda: len(record.numbers("b")) == 16)
    stop = asyncio.create_task(group.stop())
    await until(lambda: group.settings is not None and group._stopping.is_set())
    record.open_gate("a")
    await stop
    info = await single.admin.info("billing")
    assert info.partitions[0].position == (1, 2), "the second event of `a`"
    await single.member(record)
    await until(lambda: len(record.done) == 32)
    assert record.numbers("a") == list(range(0, 32, 2))
    assert record.numbers("b") == list(range(1, 32, 2))


async def test_a_poison_event_of_a_pack_is_dead_lettered_on_its_own(single: Kit) -> None:
    await publish_pack(single, ["a", "b", "c", "b"], 0)
    record = Recorder()
    record.poison = {"b"}
    await single.member(record)
    await until_position(single, (2, 0))
    assert [run.key for run in record.done] == ["a", "c"]
    dead = await single.dead_letters()
    assert [(event.key, event.value) for event in dead] == [("b", b"1"), ("b", b"3")]


async def test_an_invalid_pack_becomes_one_dead_letter(single: Kit) -> None:
    await put(single, b"orders._pack.w", b"no pack", {"Mill-Pack": "1", "Mill-Count": "1"})
    await single.publish([("a", 0)])
    record = Recorder()
    await single.member(record)
    await until(lambda: record.numbers("a") == [0])
    await until_position(single, (3, 0))
    found = await single.jetstream.get_message("orders-billing-dead", {"seq": 1})
    assert found is not None
    assert found.payload == b"no pack"


async def test_a_stream_of_others_is_ordered_by_subject(
    connection: Connection, stack: AsyncExitStack
) -> None:
    kit = Kit(connection, 1, stack)
    await kit.jetstream.create_stream({"name": "FOREIGN", "subjects": ["sensor.*"]})
    kit.partitions = [Partition("FOREIGN", "FOREIGN", 0, None)]
    for number in range(6):
        await put(kit, b"sensor.%d" % (number % 2), b"%d" % number, {})
    gate, seen = asyncio.Event(), []

    async def handler(event: GroupEvent) -> None:
        if event.subject == "sensor.0":
            await gate.wait()
        seen.append(int(event.value))

    await kit.member(handler)
    await until(lambda: seen == [1, 3, 5])
    gate.set()
    await until(lambda: seen == [1, 3, 5, 0, 2, 4])


# -- handlers, start, life ----------------------------------------------------------------


async def test_a_plain_function_runs_in_threads_and_each_key_keeps_its_order(kit: Kit) -> None:
    await kit.publish(numbered(keys=8, each=10))
    lock, seen, threads = threading.Lock(), [], set()
    meeting = threading.Barrier(4)  # of the first events of four keys

    def handler(event: GroupEvent) -> None:
        if event.value == b"0":
            meeting.wait(20)
        with lock:
            threads.add(threading.current_thread().name)
            seen.append((event.key, int(event.value)))

    await kit.member(handler, replace(QUICK, concurrency=4))
    await until(lambda: len(seen) == 80)
    for key in range(8):
        assert [number for name, number in seen if name == f"k{key}"] == list(range(10))
    assert len(threads) == 4


async def test_a_group_starts_where_its_settings_say_and_later_where_it_was(single: Kit) -> None:
    await single.publish([("a", number) for number in range(4)])
    new, third = Recorder(), Recorder()
    fresh = await single.member(new, replace(QUICK, start=Start.NEW), name="fresh")
    await single.member(third, replace(QUICK, start=Start.at_offset(3)), name="third")
    await single.publish([("a", 4)])
    await until(lambda: new.numbers("a") == [4])
    await until(lambda: third.numbers("a") == [2, 3, 4])
    await fresh.stop()
    await single.publish([("a", 5)])
    await single.member(new, replace(QUICK, start=Start.NEW), name="fresh")
    await until(lambda: new.numbers("a") == [4, 5])


async def test_a_handler_may_stop_its_own_member(single: Kit) -> None:
    seen: list[int] = []
    group = Group(single.jetstream, single.publisher, "orders", single.partitions, "billing", QUICK)

    async def handler(event: GroupEvent) -> None:
        seen.append(int(event.value))
        if event.value == b"1":
            await group.stop()

    await single.publish([("a", number) for number in range(4)])
    async with group:
        await asyncio.wait_for(group.run(handler), 20)
    assert seen == [0, 1]
    assert (await single.admin.info("billing")).partitions[0].position == (3, 0)


async def test_a_member_runs_once_at_a_time(single: Kit) -> None:
    record = Recorder()
    group = await single.member(record)
    await until(lambda: group.partitions == (0,))
    with pytest.raises(ConfigError, match="is already running"):
        await group.run(record)


async def test_a_cancelled_member_releases_its_partitions_immediately(
    single: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.messaging.groups.member.LAST_SECONDS", QUICK.lease)
    record = Recorder()
    record.gate = {"a": asyncio.Event()}
    group = Group(single.jetstream, single.publisher, "orders", single.partitions, "billing", QUICK)
    await group.open()
    await single.publish([("a", 0), ("b", 0)])
    task = asyncio.create_task(group.run(record))
    await until(lambda: record.numbers("b") == [0])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [run.key for run in record.runs] == ["b", "a"]
    assert record.runs[1].end is None, "its handler was cancelled"
    record.gate.clear()
    other = await single.member(record)
    await until(lambda: other.partitions == (0,), QUICK.lease / 2, "before the lease is over")
    await until(lambda: record.numbers("a") == [0])
    assert record.numbers("b") == [0], "it was written down"


async def test_a_member_declared_dead_stops_and_joins_again(single: Kit) -> None:
    """Its clock does not matter: its record is ended, so its renewal is refused."""
    record = Recorder()
    record.gate = {"a": asyncio.Event()}
    group = await single.member(record, replace(QUICK, lease=6.0))  # it renews every second
    await single.publish([("a", 0)])
    await until(lambda: "a" in record.started)
    before = group.member_id
    await declare_dead(group)
    await until(lambda: group.member_id != before)
    await until(lambda: bool(record.runs))
    assert (record.runs[0].epoch, record.runs[0].end) == (1, None), "its handler was cancelled"
    record.open_gate("a")  # the new member's handler may wait there already
    await until(lambda: record.numbers("a") == [0])
    assert [run.epoch for run in record.done] == [2]


async def test_a_log_that_was_replaced_is_noticed(single: Kit) -> None:
    record = Recorder()
    await single.publish([("a", number) for number in range(3)])
    group = await single.member(record)
    await until_position(single, (4, 0))
    await group.stop()
    await single.jetstream.delete_stream("orders")
    await single.declare()
    await single.publish([("a", number) for number in range(9)])
    again = Group(single.jetstream, single.publisher, "orders", single.partitions, "billing", QUICK)
    with pytest.raises(DataLoss, match="no longer has the message 3"):
        await asyncio.wait_for(again.run(record), 20)
    await single.admin.seek("billing", Start.ALL)
    await single.member(record)
    await until(lambda: record.numbers("a") == [0, 1, 2, *range(9)])


async def test_events_removed_before_they_were_handled_are_reported(
    single: Kit, caplog: pytest.LogCaptureFixture
) -> None:
    record = Recorder()
    group = await single.member(record)
    await until(lambda: group.partitions == (0,))
    await group.stop()
    await single.publish([("a", number) for number in range(5)])
    await single.jetstream.purge_stream("orders", {"seq": 4})
    await single.member(record)
    await until(lambda: record.numbers("a") == [3, 4])
    assert "offsets 1 to 3 of orders were removed" in caplog.text


# -- looking and moving -------------------------------------------------------------------


async def test_info_shows_members_owners_positions_and_lag(kit: Kit) -> None:
    record = Recorder()
    record.gate = {"slow": asyncio.Event()}
    group = await kit.member(record)
    await until(lambda: len(group.partitions) == 8)
    await kit.publish([("slow", 0), ("slow", 1)])
    partition = kit.partition_of("slow")
    await asyncio.sleep(0.3)
    info = await group.info()
    (member,) = info.members
    assert member.id == group.member_id
    assert member.partitions == group.partitions == tuple(range(8))
    assert {part.owner for part in info.partitions} == {member.id}
    lags = {part.partition: part.lag.messages for part in info.partitions}
    assert lags == {n: 2 if n == partition else 0 for n in range(8)}
    assert info.lag.messages == 2
    assert 0.2 < info.lag.seconds < 60
    record.open_gate("slow")
    await until(lambda: len(record.done) == 2)
    assert group.handled >= 1


async def test_a_group_is_moved_only_while_no_member_runs(single: Kit) -> None:
    record = Recorder()
    await single.publish([("a", number) for number in range(3)])
    group = await single.member(record)
    await until(lambda: record.numbers("a") == [0, 1, 2])
    alive = asyncio.create_task(show_life(group))
    with pytest.raises(GroupBusy, match="Stop them first"):
        await single.admin.seek("billing", Start.ALL)
    with pytest.raises(GroupBusy):
        await single.admin.delete("billing")
    alive.cancel()
    await group.stop()
    await single.admin.seek("billing", Start.at_offset(2))
    again = await single.member(record)
    await until(lambda: record.numbers("a") == [0, 1, 2, 1, 2])
    await again.stop()
    await single.admin.delete("billing")
    assert await single.admin.names() == []


async def show_life(group: Group) -> None:
    """As a member does automatically, but without the wait."""
    while group._member is not None:
        await group._member._renew()
        await asyncio.sleep(0.05)


async def test_a_group_that_does_not_exist_is_named(single: Kit) -> None:
    with pytest.raises(GroupNotFound, match="topic 'orders' has no group 'nobody'"):
        await single.admin.info("nobody")
