"""A partition as Kafka's clients see it, on a real broker, without a socket."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator

import pytest

import millstream
from millstream.gateways.kafka.batch_cache import BatchCache
from millstream.gateways.kafka.checkpoints import Checkpoints
from millstream.gateways.kafka.partition_log import Appended, OutOfRange, PartitionLog
from millstream.gateways.kafka.protocol import ErrorCode
from millstream.gateways.kafka.records import split_batches
from millstream.gateways.overload import Books
from millstream.mill import Mill
from millstream.testing import running_broker
from tests.unit.gateways.kafka_batches import MemoryRecords, Row, batch_of, head_of

_names = itertools.count()
TIME = 1_700_000_000_000


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
    name = f"t{next(_names)}"
    await mill.create_topic(name)
    return name


async def open_log(mill: Mill, name: str, cache: int = 1 << 20, number: int = 0) -> PartitionLog:
    async def record(_: str) -> None:
        return

    topic = await mill.topic(name, bytes)
    parts = (Checkpoints(mill), None, BatchCache(cache), Books())
    log = PartitionLog(topic, number, *parts, record_partitioner=record)
    await log.open()
    return log


async def append(
    log: PartitionLog, *values: str, producer: tuple[int, int, int] = (-1, -1, -1)
) -> Appended:
    raw = batch_of([Row(b"k", value.encode(), TIME) for value in values], 0, producer)
    return await (await log.append(split_batches(raw, 1 << 20)[0]))


def values_of(data: bytes) -> dict[int, bytes]:
    """The records by their offsets; also checks that batches tell of growing offsets."""
    found: dict[int, bytes] = {}
    at = 0
    while at < len(data):
        head = head_of(data[at:])
        size = head["length"] + 12
        if head["count"]:
            for batch in MemoryRecords(data[at : at + size]):
                for record in batch:
                    assert record.offset not in found
                    found[record.offset] = record.value
        at += size
    return found


async def read_all(
    log: PartitionLog, start: int | None = None, size: int = 1 << 20
) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    offset = log.start_offset if start is None else start
    while offset < log.end_offset:
        data = await log.read(offset, size)
        assert data, f"nothing at {offset}, the end is {log.end_offset}"
        found |= {at: value for at, value in values_of(data).items() if at >= offset}
        last = offset
        at = 0
        while at < len(data):
            head = head_of(data[at:])
            last = head["base_offset"] + head["last_delta"]
            at += head["length"] + 12
        assert last >= offset
        offset = last + 1
    return found


async def test_what_is_appended_is_read_by_everybody(mill: Mill, name: str) -> None:
    log = await open_log(mill, name)
    first = await append(log, "a", "b")
    second = await append(log, "c")
    assert (first.base_offset, second.base_offset) == (0, 2)
    assert await read_all(log) == {0: b"a", 1: b"b", 2: b"c"}
    topic = await mill.topic(name)
    events = [(event.key, event.value) async for event in topic.read()]
    assert events == [("k", b"a"), ("k", b"b"), ("k", b"c")]
    await log.close()


async def test_many_at_once_are_stored_in_order_in_few_packs(mill: Mill, name: str) -> None:
    log = await open_log(mill, name)
    answers = await asyncio.gather(*(append(log, f"{n}", f"{n}+") for n in range(200)))
    assert [one.base_offset for one in answers] == list(range(0, 400, 2))
    info = await (await mill.topic(name)).info()
    assert info.messages < 150
    wanted = [text.encode() for n in range(200) for text in (f"{n}", f"{n}+")]
    assert list((await read_all(log)).values()) == wanted
    cold = await open_log(mill, name)
    assert list((await read_all(cold)).values()) == wanted
    await cold.close()
    await log.close()


async def test_events_of_the_sdk_have_offsets_among_them(mill: Mill, name: str) -> None:
    log = await open_log(mill, name, cache=0)
    topic = await mill.topic(name)
    await append(log, "1", "2")
    await topic.publish(b"3", "key")
    async with topic.producer() as producer:
        for text in ("4", "5", "6"):
            await producer.send(text.encode(), "key")
    answer = await append(log, "7")
    assert answer.base_offset == 6
    await append(log, "8")
    found = await read_all(log)
    assert list(found.values()) == [str(n).encode() for n in range(1, 9)]
    assert list(found) == list(range(8))
    assert await read_all(log, size=1) == found
    await log.close()


async def test_a_copy_of_a_batch_is_answered_and_not_stored(mill: Mill, name: str) -> None:
    log = await open_log(mill, name)
    first = await append(log, "a", "b", producer=(7, 0, 0))
    again = await append(log, "a", "b", producer=(7, 0, 0))
    assert first == again
    both = await asyncio.gather(
        append(log, "c", producer=(7, 0, 2)), append(log, "c", producer=(7, 0, 2))
    )
    assert both[0] == both[1]
    gap = await append(log, "e", producer=(7, 0, 9))
    assert gap.error is ErrorCode.out_of_order_sequence_number
    assert log.end_offset == 3
    # A gateway that starts anew knows it too: from its checkpoint, and from the packs after it.
    for clean in (True, False):
        if clean:
            await log.close()
        log = await open_log(mill, name)
        assert (await append(log, "c", producer=(7, 0, 2))).base_offset == 2
        assert log.end_offset == 3
    await log.close()


async def test_an_older_gateway_stores_nothing_more(mill: Mill, name: str) -> None:
    old = await open_log(mill, name)
    assert (await append(old, "a")).base_offset == 0
    new = await open_log(mill, name)
    assert (await append(new, "b")).base_offset == 1
    answer = await append(old, "c")
    assert answer.error is ErrorCode.not_leader_or_follower
    assert old.failed
    assert list((await read_all(new)).values()) == [b"a", b"b"]
    await old.close()
    await new.close()


async def test_offsets_go_on_where_retention_removed_the_head(mill: Mill, name: str) -> None:
    log = await open_log(mill, name)
    for n in range(4):
        await append(log, *(f"{n}.{m}" for m in range(100)))
    await log.close()
    jetstream = mill.jetstream
    last = (await jetstream.stream_info(name)).state.last_seq
    await jetstream.purge_stream(name, {"seq": last})  # all but the last pack
    log = await open_log(mill, name)
    assert (log.start_offset, log.end_offset) == (300, 400)
    assert (await append(log, "next")).base_offset == 400
    with pytest.raises(OutOfRange):
        await log.read(299, 1000)
    await log.close()


async def test_offsets_never_repeat_when_counts_were_lost_unseen(mill: Mill, name: str) -> None:
    log = await open_log(mill, name)
    await append(log, *"abc")
    handed_out = log.end_offset
    await log.offsets._stop()  # it ends without a checkpoint, as if killed
    await mill.jetstream.purge_stream(name)
    log = await open_log(mill, name)
    assert log.start_offset == log.end_offset >= handed_out
    answer = await append(log, "d")
    assert answer.base_offset >= handed_out
    await log.close()


async def test_a_gap_at_the_end_is_found(mill: Mill, name: str) -> None:
    topic = await mill.topic(name)
    for text in ("a", "b", "c", "d"):
        await topic.publish(text.encode(), "key")
    await mill.jetstream.delete_message(name, 3)
    await mill.jetstream.delete_message(name, 4)
    log = await open_log(mill, name)
    assert log.end_offset == 4
    assert await read_all(log) == {0: b"a", 1: b"b"}
    data = await log.read(3, 1000)
    assert head_of(data)["count"] == 0
    await log.close()


async def test_offsets_by_time_are_those_of_events(mill: Mill, name: str) -> None:
    log = await open_log(mill, name)
    for start in (1000, 5000, 3000):
        rows = [Row(b"k", b"v", start + n) for n in range(10)]
        await (await log.append(split_batches(batch_of(rows), 1 << 20)[0]))
    topic = await mill.topic(name)
    async with topic.producer() as producer:
        await producer.send(b"v", "k", timestamp=9_000_000_000)  # nanoseconds
    await log.offsets.known((await topic.info()).partitions[0].last_offset)
    assert await log.offset_at(0) == (0, 1000)
    assert await log.offset_at(1005) == (5, 1005)
    assert await log.offset_at(3000) == (10, 5000)
    assert await log.offset_at(5010) == (30, 9000)
    assert await log.max_time() == (30, 9000)
    assert await log.offset_at(9001) is None
    await log.close()


async def test_records_before_an_offset_are_deleted(mill: Mill, name: str) -> None:
    log = await open_log(mill, name)
    await append(log, "a", "b")
    await append(log, "c", "d")
    assert await log.delete_before(3) == 3
    with pytest.raises(OutOfRange):
        await log.read(2, 1000)
    await log.close()
    log = await open_log(mill, name)
    assert (log.start_offset, log.end_offset) == (3, 4)
    assert await log.delete_before(4) == 4
    assert (await append(log, "e")).base_offset == 4
    await log.close()


async def test_a_large_batch_is_stored_as_a_whole(mill: Mill, name: str) -> None:
    log = await open_log(mill, name)
    texts = [f"{n:05}" * 4000 for n in range(1000)]  # 20 MB
    raw = batch_of([Row(None, text.encode(), TIME) for text in texts], 4, (3, 0, 0))
    answer = await (await log.append(split_batches(raw, 1 << 24)[0]))
    assert answer.base_offset == 0
    assert log.end_offset == 1000
    again = await (await log.append(split_batches(raw, 1 << 24)[0]))
    assert again == answer
    found = await read_all(log)
    assert [value.decode() for value in found.values()] == texts
    await log.close()
