"""Defects that the fault program has found, each as a test that failed before the fix."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

import millstream
from millstream.broker import Role, User
from millstream.errors import (
    DataLoss,
    FencedOut,
    PermissionDenied,
    Unconfirmed,
    WrongSequence,
)
from millstream.events.event import PlainEvent, PublishOptions
from millstream.events.fence import FenceState, judge_refusal, read_state, state_headers
from millstream.events.fence_writer import Answer, Request
from millstream.events.packs.pack import empty
from millstream.messaging.publishing.fenced_lane import FencedLane
from millstream.messaging.reading import replay as reading
from millstream.settings import ConnectionSettings, Reconnect, Secret
from millstream.testing import running_broker
from millstream.wire.aio import publisher
from millstream.wire.aio.pull_consumer import Prefetch, PullConsumer, Signal
from millstream.wire.api import ErrorCode, Refusal, error_from
from millstream.wire.protocol import encode_headers
from tests.faults.proxy import DeafProxy, Proxy
from tests.faults.supervisor import until
from tests.integration.messaging.topic_kit import eventually

T = TypeVar("T")


def test_a_writer_does_not_mistake_anothers_claim_of_the_same_epoch_for_its_own() -> None:
    """writers, seed 1: two claimants believed they owned one fence, and lost each other's packs."""
    last = FenceState(sequence=7, epoch=3, number=9, position=100)
    mine, theirs = last.claimed("me"), last.claimed("they")
    stored = read_state(8, encode_headers(state_headers("w", theirs)))
    with pytest.raises(FencedOut):
        judge_refusal("w", mine, stored)
    assert judge_refusal("w", theirs, stored) == theirs.stored_at(8)


def test_a_log_that_became_shorter_is_still_data_loss() -> None:
    mine = FenceState(sequence=7, epoch=3, number=9, owner="me").next(50)
    older = FenceState(sequence=5, epoch=3, number=8, owner="me")
    with pytest.raises(DataLoss):
        judge_refusal("w", mine, older)


async def test_of_many_writers_that_open_together_only_the_last_claimant_stores(
    millstream_url: str,
) -> None:
    """writers, seed 1, with a real broker: every writer but one is fenced out, no unit is lost."""
    async with millstream.connect(millstream_url) as mill:
        topic = await mill.create_topic("orders")
        target = topic._target()
        lanes = [
            FencedLane(target.jetstream, target.publisher, "orders", "orders._pack.w", "w")
            for _ in range(6)
        ]
        await asyncio.gather(*(lane.claim() for lane in lanes))
        results = await asyncio.gather(
            *(lane.store([empty()], number) for number, lane in enumerate(lanes, 1)),
            return_exceptions=True,
        )
        stored = [result for result in results if not isinstance(result, BaseException)]
        assert len(stored) == 1
        assert all(isinstance(r, FencedOut) for r in results if r is not stored[0])
        assert await lanes[0].look() == stored[0]


async def test_a_claim_follows_what_the_old_writer_stores_in_the_meantime(
    millstream_url: str,
) -> None:
    """writers, seed 1: the old writer's unit between read and claim was reported as data loss."""
    async with millstream.connect(millstream_url) as mill:
        topic = await mill.create_topic("orders")
        target = topic._target()

        def lane() -> FencedLane:
            return FencedLane(target.jetstream, target.publisher, "orders", "orders._pack.w", "w")

        old, new = lane(), lane()
        await old.claim()
        stale = await target.jetstream.get_message("orders", {"last_by_subj": "orders._pack.w"})
        await old.store([empty()], 41)
        answers = [stale]
        ask = new._ask

        async def stale_once(request: Request) -> Answer:
            return answers.pop() if answers else await ask(request)

        new._ask = stale_once  # type: ignore[method-assign]
        state = await new.claim()
        assert state.position == 41
        with pytest.raises(FencedOut):
            await old.store([empty()], 42)


def _flip(folder: Path, text: bytes) -> None:
    (block,) = folder.rglob("streams/log/msgs/*.blk")
    damaged = bytearray(block.read_bytes())
    damaged[damaged.rindex(text)] ^= 1
    block.write_bytes(damaged)


async def _read_into(seen: list[bytes], topic: millstream.Topic) -> None:
    async for event in topic.read():
        seen.append(event.value)


async def test_reading_a_damaged_end_of_a_log_ends_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """flipped-byte, seed 1: the broker counted a last message it could not read; reads hung."""
    monkeypatch.setattr(reading, "QUIET_SECONDS", 0.2)
    async with running_broker(data=tmp_path) as broker:
        async with millstream.connect(broker.url) as mill:
            topic = await mill.create_topic("log")
            for number in range(20):
                await topic.publish(b"value %d" % number)
        await asyncio.to_thread(broker.stop)
        await asyncio.to_thread(_flip, tmp_path, b"value 19")
        await asyncio.to_thread(broker.start)
        async with millstream.connect(broker.url) as mill, asyncio.timeout(60):
            topic = await mill.topic("log")
            seen: list[bytes] = []
            with pytest.raises(DataLoss, match="verify log"):
                await _read_into(seen, topic)
            assert seen == [b"value %d" % number for number in range(19)]
            reports = [report async for report in topic.admin.verify()]
            assert [flaw.kind for flaw in reports[-1].flaws] == ["hole"]


async def test_a_refused_delete_of_a_topic_keeps_its_schema() -> None:
    """security matrix: app-delete removed the schema's versions, then was refused the topic."""
    users = (User("boss", Secret("b"), Role.ADMIN), User("app", Secret("a"), Role.APP))
    async with (
        running_broker(users=users) as broker,
        millstream.connect(broker.url, user="boss", password="b") as boss,
        millstream.connect(broker.url, user="app", password="a") as app,
    ):
        schema = {"type": "record", "name": "N", "fields": [{"name": "n", "type": "long"}]}
        topic = await boss.create_topic("typed", schema=schema)
        with pytest.raises(PermissionDenied):
            await app.delete_topic("typed")
        await topic.publish({"n": 1})
        again = await boss.topic("typed")
        assert [event.value async for event in again.read()] == [{"n": 1}]


def test_a_password_in_an_address_is_not_in_the_repr_of_settings() -> None:
    """secrets: ConnectionSettings showed the addresses as they were given."""
    text = repr(ConnectionSettings(urls=("nats://ann:hush@host:4222", "nats://plain:1")))
    assert "hush" not in text
    assert "***@host:4222" in text
    assert "nats://plain:1" in text


@pytest.mark.parametrize(
    "header",
    [
        b"Mill-Time: soon",
        b"Mill-Time: " + b"9" * 5000,
        b"Mill-Time: 999999999999999999999",
        b"Mill-Key: \xf8\xff",
        b"Nats-Msg-Id: \xf8\xff",
    ],
)
async def test_a_foreign_clients_header_does_not_stop_readers_of_a_topic(
    millstream_url: str, header: bytes
) -> None:
    """decoder fuzzing: any NATS client could make `timestamp` or `key` raise in every reader."""
    async with millstream.connect(millstream_url) as mill:
        topic = await mill.create_topic("orders")
        await topic.publish(b"before")
        connection = mill.connection
        block = b"NATS/1.0\r\n" + header + b"\r\n\r\n"
        connection.publish(b"orders.x", b"poison", headers=block)
        await topic.publish(b"after")
        seen = [event async for event in topic.read()]
        assert [event.value for event in seen] == [b"before", b"poison", b"after"]
        poison = seen[1]
        assert isinstance(poison, PlainEvent)
        assert poison.timestamp_ns == poison.stored_ns
        assert repr(poison)
        assert isinstance(poison.key, str)
        async with topic.subscribe("s") as subscription:
            assert len(await subscription.pull(10, timeout=30)) >= 1


@pytest.mark.parametrize("replaced", [0, 1, 2])
async def test_a_write_that_was_stored_and_replaced_is_not_reported_as_refused(
    tmp_path: Path, replaced: int
) -> None:
    """tables, seed 1: its ack was lost with the broker, which then no longer knew its id."""
    with running_broker(data=tmp_path) as broker:
        port = int(broker.url.rpartition(":")[2])
        reconnect = Reconnect(wait=0.02, wait_max=0.1)
        async with DeafProxy("127.0.0.1", port) as proxy, millstream.connect(broker.url) as other:
            table = await other.create_table("t", duplicate_window="100ms")
            first = await table.put("k", b"first")
            url = f"nats://127.0.0.1:{proxy.port}"
            async with millstream.connect(url, reconnect=reconnect) as mill:
                mine = await mill.table("t")
                proxy.hears.clear()
                writing = asyncio.create_task(mine.put("k", b"mine", revision=first))
                await eventually(lambda: value(table), b"mine")
                for number in range(replaced):
                    await table.put("k", b"%d" % number, revision=await table.revision("k"))
                await asyncio.to_thread(broker.kill)
                await asyncio.sleep(0.2)  # longer than the duplicate window
                await asyncio.to_thread(broker.start)
                proxy.cut()
                proxy.hears.set()
                if replaced:
                    with pytest.raises(Unconfirmed, match="replaced since"):
                        await writing
                    assert await value(table) == b"%d" % (replaced - 1)
                else:
                    assert await writing == await table.revision("k") > first


async def test_a_write_that_never_arrived_is_reported_as_refused(millstream_url: str) -> None:
    """The retry finds that another write was stored instead: the outcome is known."""
    host, port = millstream_url.rpartition("@")[2].split(":")
    reconnect = Reconnect(wait=0.02, wait_max=0.1)
    async with DeafProxy(host, int(port)) as proxy, millstream.connect(millstream_url) as other:
        table = await other.create_table("t")
        first = await table.put("k", b"first")
        url = millstream_url.replace(f":{port}", f":{proxy.port}")
        async with millstream.connect(url, reconnect=reconnect) as mill:
            mine = await mill.table("t")
            proxy.holds = b"HPUB t."
            proxy.hears.clear()
            writing = asyncio.create_task(mine.put("k", b"mine", revision=first))
            await table.put("k", b"theirs", revision=first)
            await proxy.held.wait()
            proxy.cut()
            proxy.hears.set()
            with pytest.raises(WrongSequence) as refused:
                await writing
            assert refused.value.sent_again
        assert await value(table) == b"theirs"


def _without_a_leader(real: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """The same call, which fails three times at first because there is no leader."""
    refusals = [error_from(Refusal(503, ErrorCode.NO_LEADER, "unavailable")) for _ in range(3)]

    async def call(*arguments: Any, **named: Any) -> T:
        if refusals:
            raise refusals.pop()
        return await real(*arguments, **named)

    return call


async def test_a_reader_waits_longer_for_a_leader_than_for_one_answer(
    millstream_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster without a majority: readers ended when another node had to serve them."""
    host, port = millstream_url.rpartition("@")[2].split(":")
    async with Proxy(host, int(port)) as proxy, millstream.connect(millstream_url) as other:
        topic = await other.create_topic("t")
        url = millstream_url.replace(f":{port}", f":{proxy.port}")
        async with millstream.connect(url, reconnect=Reconnect(wait=0.02)) as mill:
            await topic.publish(b"1")
            seen = []
            async for event in (await mill.topic("t")).read(follow=True):
                seen.append(event.value)
                if len(seen) == 2:
                    break
                call = _without_a_leader(mill.jetstream.create_consumer)
                monkeypatch.setattr(mill.jetstream, "create_consumer", call)
                proxy.cut()
                await topic.publish(b"2")
            assert seen == [b"1", b"2"]


async def test_a_subscription_waits_longer_for_a_leader_than_for_one_answer(
    millstream_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for a durable subscription that checks whether it still exists."""
    async with millstream.connect(millstream_url) as mill:
        topic = await mill.create_topic("t")
        async with topic.subscribe("s"):
            pass
        lane = PullConsumer(mill.jetstream, "t", "s", Prefetch(), Signal())
        call = _without_a_leader(mill.jetstream.consumer_info)
        monkeypatch.setattr(mill.jetstream, "consumer_info", call)
        lane._check_exists()
        looking = lane._checking
        assert looking is not None
        await looking
        assert lane.take_now(1) == []
        await topic.publish(b"1")
        found: list[bytes] = []

        def arrived() -> bool:
            found.extend(message.payload for message in lane.take_now(1))
            return bool(found)

        assert await until(arrived)
        assert found == [b"1"]
        assert lane.stop() == []


async def test_a_publish_that_may_be_stored_does_not_raise_no_responders(
    millstream_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first ack was lost; then the topic had no leader, or was deleted."""
    monkeypatch.setattr(publisher, "RESEND_SECONDS", 0.2)
    host, port = millstream_url.rpartition("@")[2].split(":")
    async with DeafProxy(host, int(port)) as proxy, millstream.connect(millstream_url) as other:
        await other.create_topic("t")
        url = millstream_url.replace(f":{port}", f":{proxy.port}")
        async with millstream.connect(url) as mill:
            topic = await mill.topic("t")
            proxy.hears.clear()
            patience = PublishOptions(timeout=1.5)  # the cut is far shorter
            publishing = asyncio.create_task(topic.publish(b"x", options=patience))
            await proxy.held.wait()
            await other.delete_topic("t")
            proxy.cut()
            with pytest.raises(Unconfirmed):
                await publishing


async def test_closing_soon_after_a_reconnect_logs_no_error(
    millstream_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """import, seed 3: a query to the new server was cancelled, and asyncio logged it."""
    host, port = millstream_url.rpartition("@")[2].split(":")
    async with Proxy(host, int(port)) as proxy:
        url = millstream_url.replace(f":{port}", f":{proxy.port}")
        async with millstream.connect(url, reconnect=Reconnect(wait=0.02)) as mill:
            topic = await mill.create_topic("t", partitions=2)
            reconnected = asyncio.Event()
            mill.connection.on_connected.append(reconnected.set)
            proxy.cut()
            await reconnected.wait()
    del mill, topic
    gc.collect()
    assert "never retrieved" not in caplog.text


async def value(table: millstream.Table) -> object:
    entry = await table.get("k")
    return None if entry is None else entry.value
