"""A partition of the gateway when things break: crashes, takeovers, retention, hostile neighbours.

No sockets of clients: what is shown here is shown faster than in `tests/faults`, which kills whole
processes.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import millstream
from millstream.broker import Broker
from millstream.errors import RequestTimeout
from millstream.events.packs.encode import EncodedPack, encode
from millstream.events.packs.envelope import COLUMN_TYPES, envelope
from millstream.events.packs.packing import Packing
from millstream.gateways.kafka import partition_writer
from millstream.gateways.kafka.checkpoints import OFFSETS_TABLE, PartitionCheckpoints
from millstream.gateways.kafka.partition_log import PartitionLog
from millstream.gateways.kafka.protocol import ErrorCode
from millstream.messaging.publishing.target import PackTarget
from millstream.mill import Mill
from millstream.testing import running_broker
from millstream.wire.message import OutgoingMessage
from tests.integration.gateways.partition_kit import (
    AGAIN,
    Client,
    Current,
    at_work,
    broker,
    check,
    impatient,
    kill,
    mill,
    name,
    open_log,
    progress,
    read_all,
    send,
    start,
    url,
)

__all__ = ["broker", "mill", "name", "url"]

pytestmark = pytest.mark.timeout(120)  # what is broken here hangs


# -- crashes ------------------------------------------------------------------------------------


async def test_a_broker_that_is_killed_with_appends_in_flight_stores_each_once(
    broker: Broker,
) -> None:
    async with impatient(broker) as mill:
        await mill.create_topic("t")
        current = Current(mill, "t")
        clients = [Client(number) for number in range(1, 6)]
        async with at_work(clients, current, 3):
            for _ in range(3):
                await progress(clients, 100)
                await asyncio.to_thread(broker.kill)
                await asyncio.to_thread(broker.start)
            await progress(clients, 100)
        log = await current()
        check(await read_all(log), clients)
        cold = await open_log(mill, "t")
        check(await read_all(cold), clients)
        await cold.close()
        await log.close()


async def test_close_answers_everything_and_ends_when_the_broker_is_gone(broker: Broker) -> None:
    async with impatient(broker) as mill:
        await mill.create_topic("t")
        log = await open_log(mill, "t")
        await send(log, "a", producer=(1, 0, 0))
        await asyncio.to_thread(broker.kill)
        waiting = [await start(log, f"{n}", producer=(1, 0, n)) for n in range(1, 20)]
        await asyncio.sleep(0)
        closing = asyncio.create_task(log.close())
        # The server never comes back; what it was asked counts as unknown after a while.
        pending: list[asyncio.Future[Any]] = [closing, *waiting]
        await asyncio.wait(pending, timeout=50)
        assert closing.done()
        assert all(one.done() for one in waiting)
        assert {one.result().error for one in waiting} <= AGAIN
        closing.result()
        assert not log.offsets._tasks or all(task.done() for task in log.offsets._tasks)
        await asyncio.to_thread(broker.start)


async def test_another_gateway_takes_over_in_the_midst_of_appends(mill: Mill, name: str) -> None:
    logs = [await open_log(mill, name)]

    async def current() -> PartitionLog:
        return logs[-1]

    clients = [Client(number) for number in range(1, 9)]
    async with at_work(clients, current, 2):
        for _ in range(6):
            await progress(clients, 60)
            logs.append(await open_log(mill, name))
    check(await read_all(logs[-1]), clients)
    for log in logs:
        await log.close()


async def test_a_stop_with_appends_in_flight_answers_all_and_doubles_none(
    mill: Mill, name: str
) -> None:
    answered: dict[str, int] = {}
    for life in range(5):
        log = await open_log(mill, name)
        waiting = {f"{life}:{n}": await start(log, f"{life}:{n}") for n in range(100)}
        await asyncio.sleep(0.004 * life)
        await log.close()
        assert all(one.done() for one in waiting.values())
        for value, one in waiting.items():
            assert one.result().error in {ErrorCode.none, *AGAIN}
            if one.result().error is ErrorCode.none:
                answered[value] = one.result().base_offset
    log = await open_log(mill, name)
    found = await read_all(log)
    assert len(set(found.values())) == len(found)
    assert answered.items() <= {value: offset for offset, value in found.items()}.items()
    await log.close()


async def test_an_error_that_nobody_expected_leaves_no_batch_without_an_answer(
    mill: Mill, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await open_log(mill, name)
    await send(log, "a", producer=(1, 0, 0))

    def broken(*_: Any, **__: Any) -> Any:
        raise pa.ArrowInvalid("unexpected")

    with monkeypatch.context() as patch:
        patch.setattr(partition_writer, "_joined", broken)
        async with asyncio.timeout(60):
            answer = await send(log, "b", producer=(1, 0, 1))
        assert answer.error is ErrorCode.kafka_storage_error
    async with asyncio.timeout(60):
        assert (await send(log, "b", producer=(1, 0, 1))).base_offset == 1
    await log.close()


async def test_what_looks_small_and_is_not_is_stored_as_several_packs(
    mill: Mill, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When batches are joined, those without keys and times get columns of null."""
    absent = [None] * 89_999
    sparse = envelope(
        pa.array([b"v"] * 90_000),
        key=pa.array([b"k", *absent]),
        timestamp=pa.array([1, *absent], COLUMN_TYPES["timestamp"]),
        headers=pa.array([[("a", b"1")], *absent], COLUMN_TYPES["headers"]),
    )
    wide = pa.struct([(f"c{number}", pa.int64()) for number in range(1000)])
    await check_packs(mill, name, sparse, monkeypatch)
    await check_packs(mill, name, envelope(pa.nulls(400, wide)), monkeypatch)


async def test_a_pack_that_is_too_large_by_its_schema_is_split(
    mill: Mill, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its columns are less than half of what fits."""
    named = pa.struct([(f"{number:0700}", pa.int64()) for number in range(1000)])
    await check_packs(mill, name, envelope(pa.nulls(50, named)), monkeypatch)


async def check_packs(
    mill: Mill, name: str, columns: pa.RecordBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows are in several packs, as a broker with messages of 1 MiB takes them."""
    largest = 1024 * 1024

    def uncompressed(
        _: PackTarget, piece: pa.RecordBatch, packing: Packing, schema_id: str | None
    ) -> EncodedPack:
        """As after a pack that was not worth compressing."""
        return encode(piece, schema_id=schema_id)

    log = await open_log(mill, name)
    await send(log, "a")
    assert log._writer is not None
    with monkeypatch.context() as patch:
        patch.setattr(PackTarget, "encode_version", uncompressed)
        room = mill.connection.info.max_payload - largest
        patch.setattr(partition_writer, "HEADERS_ROOM", room)
        packs = log._writer._packed(columns, None)
    assert len(packs) > 1
    assert sum(pack.count for pack in packs) == columns.num_rows
    assert max(pack.payload.size for pack in packs) <= largest
    await log.close()


# -- two gateways -------------------------------------------------------------------------------


async def test_an_older_gateway_that_stops_does_not_give_back_what_another_hands_out(
    mill: Mill, name: str
) -> None:
    old = await open_log(mill, name)
    await send(old, "a")
    await old.offsets.save()
    new = await open_log(mill, name)
    # The older one is away and learns nothing; then it stops in order.
    old.offsets._tasks[0].cancel()
    end = (await send(new, *(f"b{n}" for n in range(100)))).base_offset + 100
    assert new.end_offset == end
    await old.close()
    await kill(new)
    await mill.jetstream.purge_stream(name)
    log = await open_log(mill, name)
    assert (await send(log, "c")).base_offset >= end
    await log.close()


async def test_a_log_that_was_taken_over_does_not_take_its_fence_back(
    mill: Mill, name: str
) -> None:
    old = await open_log(mill, name)
    await send(old, "a")
    new = await open_log(mill, name)
    await send(new, "b")
    assert (await send(old, "c")).error is ErrorCode.not_leader_or_follower
    assert old.failed
    assert (await send(old, "d")).error is ErrorCode.not_leader_or_follower
    assert (await send(new, "e")).error is ErrorCode.none
    await old.close()
    await new.close()


# -- hostile neighbours -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["::", "1:2", "7:0:0:0:0;", "-", f"{10**30}:0:0:0:0", f"7:0:0:{10**30}:0", "7:0:0:0:-9999999"],
)
async def test_a_forged_header_stops_no_partition(mill: Mill, name: str, text: str) -> None:
    log = await open_log(mill, name)
    await send(log, "a", producer=(7, 0, 0))
    found = await mill.jetstream.get_message(name, {"last_by_subj": f"{name}.>"})
    assert found is not None
    headers = found.headers.replace(
        b"Mill-Kafka-Batches: 7:0:0:0:0", b"Mill-Kafka-Batches: " + text.encode()
    )
    assert text.encode() in headers
    lines = headers.split(b"\r\n")
    forged = b"\r\n".join(line for line in lines if not line.startswith(b"Nats-"))
    message = OutgoingMessage(found.subject.encode(), forged, found.payload)
    publisher = (await mill.topic(name)).handle.publisher
    await publisher.publish(message, 10.0, lambda ack: ack)
    async with asyncio.timeout(20):
        while (await send(log, "b")).error is not ErrorCode.none:
            if log.failed:
                await log.close()
                log = await open_log(mill, name)
    await log.offsets.save()
    await log.close()
    log = await open_log(mill, name)
    assert "b" in (await read_all(log)).values()
    await log.close()


async def test_a_record_that_is_too_large_refuses_no_other(tmp_path: Path) -> None:
    limits = millstream.broker.Limits(max_payload=1024 * 1024)
    with running_broker(limits=limits) as broker:
        async with millstream.connect(broker.url) as mill:
            await mill.create_topic("t")
            log = await open_log(mill, "t")
            await send(log, "first")
            waiting = [
                await start(log, "a", producer=(1, 0, 0)),
                await start(log, "b", producer=(2, 0, 0)),
                await start(log, "x" * 1_500_000, producer=(3, 0, 0), codec=4),
                await start(log, "c", producer=(1, 0, 1)),
                await start(log, "d", producer=(2, 0, 1)),
            ]
            answers = await asyncio.gather(*waiting)
            assert [one.error for one in answers] == [
                *(ErrorCode.none, ErrorCode.none, ErrorCode.message_too_large),
                *(ErrorCode.none, ErrorCode.none),
            ]
            assert list((await read_all(log)).values()) == ["first", *"abcd"]
            await log.close()


# -- resources ----------------------------------------------------------------------------------


async def test_a_log_that_cannot_be_opened_leaves_nothing_behind(
    mill: Mill, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await (await mill.topic(name)).publish(b"1", "k")
    connection = mill.connection
    before = len(connection.on_disconnected), len(connection.on_connected)

    async def refused(*_: Any, **__: Any) -> None:
        raise RequestTimeout(OFFSETS_TABLE, 1.0)

    with monkeypatch.context() as patch:
        patch.setattr(PartitionCheckpoints, "save", refused)
        for _ in range(3):
            with pytest.raises(RequestTimeout):
                await open_log(mill, name)
    assert (len(connection.on_disconnected), len(connection.on_connected)) == before
    log = await open_log(mill, name)
    await log.close()


async def test_a_log_whose_keeper_fails_is_opened_again(
    mill: Mill, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of its tasks may end in silence: nobody would notice until offsets run out."""
    log = await open_log(mill, name)

    async def broken(*_: Any, **__: Any) -> None:
        raise OverflowError("unexpected")

    with monkeypatch.context() as patch:
        patch.setattr(PartitionCheckpoints, "save", broken)
        await (await mill.topic(name)).publish(b"1", "k")
        log.offsets._save_due.set()
        failed = asyncio.Event()
        log.watch(failed.set)
        async with asyncio.timeout(60):
            while not log.failed:
                failed.clear()
                await failed.wait()
    await log.close()
