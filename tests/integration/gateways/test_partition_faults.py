"""A partition of the gateway when things break: crashes, takeovers, retention, hostile neighbours.

No sockets of clients: what is shown here is shown faster than in `tests/faults`, which kills whole
processes.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import millstream
from millstream.broker import Broker, BrokerSettings
from millstream.errors import MillstreamError, RequestTimeout
from millstream.gateways.kafka import partition_writer
from millstream.gateways.kafka.batch_cache import BatchCache
from millstream.gateways.kafka.checkpoints import OFFSETS_TABLE, Checkpoints, PartitionCheckpoints
from millstream.gateways.kafka.partition_log import Appended, OutOfRange, PartitionLog
from millstream.gateways.kafka.protocol import ErrorCode
from millstream.gateways.kafka.records import split_batches
from millstream.gateways.overload import Books
from millstream.mill import Mill
from millstream.settings import Reconnect
from millstream.testing import running_broker
from tests.unit.gateways.kafka_batches import MemoryRecords, Row, batch_of, head_of

_names = itertools.count()
TIME = 1_700_000_000_000
PATIENCE = 15.0  # of a test; nothing here waits that long unless it is broken
AGAIN = {ErrorCode.kafka_storage_error, ErrorCode.not_leader_or_follower}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_broker() as broker:
        yield broker.url


@pytest.fixture
async def mill(url: str) -> AsyncIterator[Mill]:
    async with millstream.connect(url) as mill:
        yield mill


@pytest.fixture
async def name(mill: Mill) -> str:
    name = f"f{next(_names)}"
    await mill.create_topic(name)
    return name


@pytest.fixture(autouse=True)
async def patience() -> AsyncIterator[None]:
    async with asyncio.timeout(PATIENCE):
        yield


async def open_log(mill: Mill, name: str, cache: int = 0) -> PartitionLog:
    async def record(_: str) -> None:
        return

    topic = await mill.topic(name, bytes)
    log = PartitionLog(topic, 0, Checkpoints(mill), None, BatchCache(cache), Books(), record)
    await log.open()
    return log


def send(
    log: PartitionLog, *values: str, producer: tuple[int, int, int] = (-1, -1, -1), codec: int = 0
) -> asyncio.Future[Appended]:
    raw = batch_of([Row(b"k", value.encode(), TIME) for value in values], codec, producer)
    return log.append(split_batches(raw, 1 << 26)[0])


async def kill(log: PartitionLog) -> None:
    """End it as kill -9 of the gateway does: without a checkpoint."""
    if log._writer is not None and log._writer._task is not None:
        log._writer._task.cancel()
    await log.offsets._stop()


async def read_all(log: PartitionLog) -> dict[int, str]:
    await log.look_at_head()
    found: dict[int, str] = {}
    offset = log.start_offset
    while offset < log.end_offset:
        data = await log.read(offset, 1 << 20)
        assert data, f"nothing at {offset}, the end is {log.end_offset}"
        at, last = 0, offset - 1
        while at < len(data):
            head = head_of(data[at:])
            size = head["length"] + 12
            if head["count"]:
                for batch in MemoryRecords(data[at : at + size]):
                    for record in batch:
                        if record.offset >= offset:
                            assert record.offset not in found
                            found[record.offset] = record.value.decode()
            last = head["base_offset"] + head["last_delta"]
            at += size
        assert last >= offset
        offset = last + 1
    return found


class Client:
    """An idempotent producer of one partition: sends again until it is told where it is stored."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.stored: dict[str, int] = {}  # value -> offset
        self.again = 0

    async def send(self, current: Any, first: int, size: int) -> None:
        values = [f"{self.number}:{n}" for n in range(first, first + size)]
        while True:
            log = await current()
            answer = await send(log, *values, producer=(self.number, 0, first))
            if answer.error is ErrorCode.none:
                break
            assert answer.error in AGAIN, answer
            self.again += 1
            await asyncio.sleep(0.02)
        for row, value in enumerate(values):
            self.stored[value] = answer.base_offset + row


def check(found: dict[int, str], clients: list[Client]) -> None:
    """Everything once, where the answers said, in the order of each producer."""
    values = list(found.values())
    assert len(set(values)) == len(values)
    where = {value: offset for offset, value in found.items()}
    for client in clients:
        assert client.stored.items() <= where.items()
        own = [int(v.split(":")[1]) for v in values if v.startswith(f"{client.number}:")]
        assert own == sorted(own)


class Current:
    """The open log of a partition; opened again when it has failed, as the catalog does."""

    def __init__(self, mill: Mill, name: str) -> None:
        self._mill, self._name = mill, name
        self._log: PartitionLog | None = None
        self._lock = asyncio.Lock()
        self.opened = 0

    async def __call__(self) -> PartitionLog:
        async with self._lock:
            while self._log is None or self._log.failed:
                if self._log is not None:
                    await self._log.close()
                try:
                    self._log = await open_log(self._mill, self._name)
                    self.opened += 1
                except MillstreamError:
                    await asyncio.sleep(0.05)
            return self._log


# -- crashes ------------------------------------------------------------------------------------


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    broker = Broker(BrokerSettings(data=tmp_path / "data"))
    broker.start()
    yield broker
    broker.stop(grace=5.0)


def impatient(broker: Broker) -> Any:
    return millstream.connect(
        broker.url,
        reconnect=Reconnect(wait_min=0.02, wait_max=0.2),
        ping_interval=2.0,
        request_timeout=2.0,
    )


async def test_a_broker_that_is_killed_with_appends_in_flight_stores_each_once(
    broker: Broker,
) -> None:
    async with impatient(broker) as mill:
        await mill.create_topic("t")
        current = Current(mill, "t")
        clients = [Client(number) for number in range(1, 6)]
        working = True

        async def work(client: Client) -> None:
            for first in itertools.count(0, 3):
                if not working:
                    return
                await client.send(current, first, 3)

        async with asyncio.TaskGroup() as tasks:
            for client in clients:
                tasks.create_task(work(client))
            for _ in range(3):
                before = sum(len(client.stored) for client in clients)
                while sum(len(client.stored) for client in clients) < before + 100:
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(broker.kill)
                await asyncio.to_thread(broker.start)
            before = sum(len(client.stored) for client in clients)
            while sum(len(client.stored) for client in clients) < before + 100:
                await asyncio.sleep(0.01)
            working = False
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
        waiting = [send(log, f"{n}", producer=(1, 0, n)) for n in range(1, 20)]
        await asyncio.sleep(0)
        closing = asyncio.create_task(log.close())
        # The server never comes back; what it was asked counts as unknown after a while.
        await asyncio.wait([closing, *waiting], timeout=50)
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
    working = True

    async def work(client: Client) -> None:
        for first in itertools.count(0, 2):
            if not working:
                return
            await client.send(current, first, 2)

    async with asyncio.TaskGroup() as tasks:
        for client in clients:
            tasks.create_task(work(client))
        for _ in range(6):
            before = sum(len(client.stored) for client in clients)
            while sum(len(client.stored) for client in clients) < before + 60:
                await asyncio.sleep(0.005)
            logs.append(await open_log(mill, name))
        working = False
    check(await read_all(logs[-1]), clients)
    for log in logs:
        await log.close()


async def test_a_stop_with_appends_in_flight_answers_all_and_doubles_none(
    mill: Mill, name: str
) -> None:
    answered: dict[str, int] = {}
    for life in range(5):
        log = await open_log(mill, name)
        waiting = {f"{life}:{n}": send(log, f"{life}:{n}") for n in range(100)}
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
        patch.setattr(partition_writer, "encode", broken)
        async with asyncio.timeout(10):
            answer = await send(log, "b", producer=(1, 0, 1))
        assert answer.error is ErrorCode.kafka_storage_error
    async with asyncio.timeout(10):
        assert (await send(log, "b", producer=(1, 0, 1))).base_offset == 1
    await log.close()


# -- retention ----------------------------------------------------------------------------------


async def test_appends_go_on_while_everything_is_purged(mill: Mill, name: str) -> None:
    current = Current(mill, name)
    clients = [Client(number) for number in range(1, 6)]
    working = True

    async def work(client: Client) -> None:
        for first in itertools.count(0, 3):
            if not working:
                return
            await client.send(current, first, 3)

    async with asyncio.TaskGroup() as tasks:
        for client in clients:
            tasks.create_task(work(client))
        for _ in range(8):
            before = sum(len(client.stored) for client in clients)
            while sum(len(client.stored) for client in clients) < before + 60:
                await asyncio.sleep(0.005)
            await mill.jetstream.purge_stream(name)
        working = False
    offsets = [offset for client in clients for offset in client.stored.values()]
    assert len(set(offsets)) == len(offsets)
    for client in clients:
        own = list(client.stored.values())
        assert own == sorted(own)
    log = await current()
    await log.close()


async def test_a_producer_goes_on_when_what_it_sent_is_gone_uncounted(
    mill: Mill, name: str
) -> None:
    log = await open_log(mill, name)
    assert (await send(log, "a", producer=(7, 0, 0))).base_offset == 0
    await log.offsets.save()
    assert (await send(log, "b", "c", producer=(7, 0, 1))).base_offset == 1
    await kill(log)
    await mill.jetstream.purge_stream(name)
    log = await open_log(mill, name)
    end = log.end_offset
    copy = await send(log, "a", producer=(7, 0, 0))
    assert (copy.error, copy.base_offset) == (ErrorCode.none, 0)
    answer = await send(log, "d", producer=(7, 0, 3))
    assert answer.error is ErrorCode.none, answer
    assert answer.base_offset >= end > 2
    gap = await send(log, "f", producer=(7, 0, 5))
    assert gap.error is ErrorCode.out_of_order_sequence_number
    await log.close()


async def test_a_producer_that_was_silent_meanwhile_goes_on_after_more_restarts(
    mill: Mill, name: str
) -> None:
    log = await open_log(mill, name)
    await send(log, "a", producer=(7, 0, 0))
    await log.offsets.save()
    await send(log, "b", producer=(7, 0, 1))
    await kill(log)
    await mill.jetstream.purge_stream(name)
    for _ in range(2):
        log = await open_log(mill, name)
        await send(log, "other")
        await log.close()
    log = await open_log(mill, name)
    answer = await send(log, "c", producer=(7, 0, 2))
    assert answer.error is ErrorCode.none, answer
    await log.close()


async def test_who_waits_for_a_message_that_is_removed_is_woken(mill: Mill, name: str) -> None:
    log = await open_log(mill, name)
    offsets = log.offsets
    offsets._tasks[0].cancel()  # the follower is slow
    topic = await mill.topic(name)
    for text in (b"1", b"2", b"3"):
        await topic.publish(text, "k")
    waiting = asyncio.create_task(offsets.known(3))
    woken = asyncio.Event()
    log.watch(woken.set)
    await asyncio.sleep(0)
    await mill.jetstream.purge_stream(name)
    await log.look_at_head()
    async with asyncio.timeout(10):
        await waiting
        await woken.wait()
    await log.close()


@pytest.mark.parametrize("how", ["purge", "delete"])
async def test_an_append_whose_pack_is_removed_before_it_is_counted_is_answered(
    mill: Mill, name: str, how: str
) -> None:
    log = await open_log(mill, name)
    await send(log, "a")
    offsets = log.offsets
    taken = offsets._consumer.take_now  # type: ignore[union-attr]
    offsets._consumer.take_now = lambda _: []  # type: ignore[union-attr, method-assign]
    topic = await mill.topic(name)
    await topic.publish(b"between", "k")
    answer = send(log, "b", producer=(7, 0, 0))
    while (last := (await mill.jetstream.stream_info(name)).state.last_seq) < 4:
        await asyncio.sleep(0.01)
    if how == "purge":
        await mill.jetstream.purge_stream(name)
    else:
        for sequence in range(1, last + 1):
            await mill.jetstream.delete_message(name, sequence)
    offsets._consumer._pull.take_now(10)  # type: ignore[union-attr]  # they never arrive
    offsets._consumer.take_now = taken  # type: ignore[union-attr, method-assign]
    async with asyncio.timeout(30):
        assert (await answer).error in {ErrorCode.none, *AGAIN}
    async with asyncio.timeout(30):
        assert (await send(log, "c")).error in {ErrorCode.none, *AGAIN}
    await log.close()


async def test_a_log_that_lost_everything_is_opened_again(tmp_path: Path) -> None:
    broker = Broker(BrokerSettings(data=tmp_path / "data"))
    broker.start()
    try:
        async with millstream.connect(broker.url) as mill:
            await mill.create_topic("t")
            topic = await mill.topic("t")
            for number in range(5):
                await topic.publish(b"%d" % number, "k")
            await mill.jetstream.purge_stream("t", {"seq": 4})
            log = await open_log(mill, "t")  # begins to count at sequence 4
            await send(log, "x", producer=(7, 0, 0))
            end = log.end_offset
            await log.close()
        broker.stop()
        for block in (tmp_path / "data").rglob("streams/t/msgs/*"):
            block.unlink()
        broker.start()
        async with millstream.connect(broker.url) as mill:
            assert (await mill.jetstream.stream_info("t")).state.last_seq < 6
            log = await open_log(mill, "t")
            assert log.start_offset == log.end_offset >= end
            assert log.leader_epoch == 1
            answer = await send(log, "y", producer=(7, 0, 1))
            assert answer.error is ErrorCode.none, answer
            assert answer.base_offset >= end
            with pytest.raises(OutOfRange):
                await log.read(0, 100)
            await log.close()
    finally:
        broker.stop()


# -- two gateways -------------------------------------------------------------------------------


async def test_an_older_gateway_that_stops_does_not_give_back_what_another_hands_out(
    mill: Mill, name: str
) -> None:
    old = await open_log(mill, name)
    await send(old, "a")
    await old.offsets.save()
    new = await open_log(mill, name)
    # The older one is away and learns nothing; then it stops in order.
    await old.offsets._consumer.end() if False else None  # type: ignore[func-returns-value]
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
    lines = [
        line
        for line in headers.split(b"\r\n")
        if not line.startswith((b"Nats-", b"NATS/")) and line
    ]
    pairs = {k.decode(): v.decode() for k, v in (line.split(b": ", 1) for line in lines)}
    assert "Mill-Kafka-Batches" in pairs
    await mill.jetstream.publish(found.subject, found.payload, headers=pairs)
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
                send(log, "a", producer=(1, 0, 0)),
                send(log, "b", producer=(2, 0, 0)),
                send(log, "x" * 1_500_000, producer=(3, 0, 0), codec=4),
                send(log, "c", producer=(1, 0, 1)),
                send(log, "d", producer=(2, 0, 1)),
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
        async with asyncio.timeout(10):
            while not log.failed:
                failed.clear()
                await failed.wait()
    await log.close()
