"""For tests of a partition of the gateway: a broker, an open log, and clients that produce."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import millstream
from millstream.broker import Broker, BrokerSettings
from millstream.errors import MillstreamError
from millstream.gateways.kafka.batch_cache import BatchCache
from millstream.gateways.kafka.checkpoints import Checkpoints
from millstream.gateways.kafka.partition_log import Appended, PartitionLog
from millstream.gateways.kafka.protocol import ErrorCode
from millstream.gateways.kafka.records import split_batches
from millstream.gateways.overload import Books
from millstream.mill import Mill
from millstream.settings import Reconnect
from millstream.testing import running_broker
from tests.faults.supervisor import until
from tests.unit.gateways.kafka_batches import MemoryRecords, Row, batch_of, head_of

__all__ = [
    "AGAIN",
    "TIME",
    "Client",
    "Current",
    "at_work",
    "broker",
    "check",
    "impatient",
    "kill",
    "mill",
    "name",
    "open_log",
    "progress",
    "read_all",
    "send",
    "start",
    "url",
]

_names = itertools.count()
TIME = 1_700_000_000_000

PATIENCE = 60.0
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


async def open_log(mill: Mill, name: str, cache: int = 0) -> PartitionLog:
    async def record(_: str) -> None:
        return

    topic = await mill.topic(name, bytes)
    parts = (Checkpoints(mill), None, BatchCache(cache), Books())
    log = PartitionLog(topic, 0, *parts, record_partitioner=record)
    await log.open()
    return log


async def start(
    log: PartitionLog, *values: str, producer: tuple[int, int, int] = (-1, -1, -1), codec: int = 0
) -> asyncio.Future[Appended]:
    """Hand a batch over; it is stored later."""
    raw = batch_of([Row(b"k", value.encode(), TIME) for value in values], codec, producer)
    return await log.append(split_batches(raw, 1 << 26)[0])


async def send(
    log: PartitionLog, *values: str, producer: tuple[int, int, int] = (-1, -1, -1)
) -> Appended:
    return await (await start(log, *values, producer=producer))


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
        data = b"".join(await log.read(offset, 1 << 20))
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


async def progress(clients: list[Client], count: int) -> None:
    """Return when so many more events are stored."""
    wanted = sum(len(client.stored) for client in clients) + count
    await until(lambda: sum(len(client.stored) for client in clients) >= wanted, PATIENCE, 0.005)


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


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    broker = Broker(BrokerSettings(data=tmp_path / "data"))
    broker.start()
    yield broker
    broker.stop(grace=5.0)


def impatient(broker: Broker) -> Any:
    return millstream.connect(
        broker.url,
        reconnect=Reconnect(wait_max=0.2),
        ping_interval=2.0,
        request_timeout=2.0,
    )


@asynccontextmanager
async def at_work(
    clients: Sequence[Client], current: Callable[[], Awaitable[PartitionLog]], size: int
) -> AsyncIterator[None]:
    """The clients send batches of this size, one after the other, until the block ends."""
    ended = False

    async def work(client: Client) -> None:
        for first in itertools.count(0, size):
            if ended:
                return
            await client.send(current, first, size)

    async with asyncio.TaskGroup() as tasks:
        for client in clients:
            tasks.create_task(work(client))
        yield
        ended = True
