"""A partition as Kafka's clients see it, on a real broker, without a socket."""

from __future__ import annotations

import asyncio

import pytest

from millstream.gateways.kafka.partition_log import OutOfRange, PartitionLog
from millstream.gateways.kafka.protocol import ErrorCode
from millstream.gateways.kafka.records import split_batches
from millstream.mill import Mill
from tests.integration.gateways.partition_kit import TIME, mill, name, open_log, send, url
from tests.unit.gateways.kafka_batches import MemoryRecords, Row, batch_of, head_of

__all__ = ["mill", "name", "url"]  # fixtures

CACHED = 1 << 20


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
        data = b"".join(await log.read(offset, size))
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
    log = await open_log(mill, name, CACHED)
    first = await send(log, "a", "b")
    second = await send(log, "c")
    assert (first.base_offset, second.base_offset) == (0, 2)
    assert await read_all(log) == {0: b"a", 1: b"b", 2: b"c"}
    topic = await mill.topic(name)
    events = [(event.key, event.value) async for event in topic.read()]
    assert events == [("k", b"a"), ("k", b"b"), ("k", b"c")]
    await log.close()


async def test_many_at_once_are_stored_in_order_in_few_packs(mill: Mill, name: str) -> None:
    log = await open_log(mill, name, CACHED)
    answers = await asyncio.gather(*(send(log, f"{n}", f"{n}+") for n in range(200)))
    assert [one.base_offset for one in answers] == list(range(0, 400, 2))
    info = await (await mill.topic(name)).info()
    assert info.messages < 150
    wanted = [text.encode() for n in range(200) for text in (f"{n}", f"{n}+")]
    assert list((await read_all(log)).values()) == wanted
    cold = await open_log(mill, name, CACHED)
    assert list((await read_all(cold)).values()) == wanted
    await cold.close()
    await log.close()


async def test_events_of_the_sdk_have_offsets_among_them(mill: Mill, name: str) -> None:
    log = await open_log(mill, name)
    topic = await mill.topic(name)
    await send(log, "1", "2")
    await topic.publish(b"3", "key")
    async with topic.producer() as producer:
        for text in ("4", "5", "6"):
            await producer.send(text.encode(), "key")
    answer = await send(log, "7")
    assert answer.base_offset == 6
    await send(log, "8")
    found = await read_all(log)
    assert list(found.values()) == [str(n).encode() for n in range(1, 9)]
    assert list(found) == list(range(8))
    assert await read_all(log, size=1) == found
    await log.close()


async def test_a_copy_of_a_batch_is_answered_and_not_stored(mill: Mill, name: str) -> None:
    log = await open_log(mill, name, CACHED)
    first = await send(log, "a", "b", producer=(7, 0, 0))
    again = await send(log, "a", "b", producer=(7, 0, 0))
    assert first == again
    both = await asyncio.gather(
        send(log, "c", producer=(7, 0, 2)), send(log, "c", producer=(7, 0, 2))
    )
    assert both[0] == both[1]
    gap = await send(log, "e", producer=(7, 0, 9))
    assert gap.error is ErrorCode.out_of_order_sequence_number
    assert log.end_offset == 3
    # A gateway that starts anew knows it too: from its checkpoint, and from the packs after it.
    for clean in (True, False):
        if clean:
            await log.close()
        log = await open_log(mill, name, CACHED)
        assert (await send(log, "c", producer=(7, 0, 2))).base_offset == 2
        assert log.end_offset == 3
    await log.close()


async def test_an_older_gateway_stores_nothing_more(mill: Mill, name: str) -> None:
    old = await open_log(mill, name, CACHED)
    assert (await send(old, "a")).base_offset == 0
    new = await open_log(mill, name, CACHED)
    assert (await send(new, "b")).base_offset == 1
    answer = await send(old, "c")
    assert answer.error is ErrorCode.not_leader_or_follower
    assert old.failed
    assert list((await read_all(new)).values()) == [b"a", b"b"]
    await old.close()
    await new.close()


async def test_offsets_go_on_where_retention_removed_the_head(mill: Mill, name: str) -> None:
    log = await open_log(mill, name, CACHED)
    for n in range(4):
        await send(log, *(f"{n}.{m}" for m in range(100)))
    await log.close()
    jetstream = mill.jetstream
    last = (await jetstream.stream_info(name)).state.last_seq
    await jetstream.purge_stream(name, {"seq": last})  # all but the last pack
    log = await open_log(mill, name, CACHED)
    assert (log.start_offset, log.end_offset) == (300, 400)
    assert (await send(log, "next")).base_offset == 400
    with pytest.raises(OutOfRange):
        await log.read(299, 1000)
    await log.close()


async def test_offsets_never_repeat_when_counts_were_lost_unseen(mill: Mill, name: str) -> None:
    log = await open_log(mill, name, CACHED)
    await send(log, *"abc")
    handed_out = log.end_offset
    await log.offsets._stop()  # it ends without a checkpoint, as if killed
    await mill.jetstream.purge_stream(name)
    log = await open_log(mill, name, CACHED)
    assert log.start_offset == log.end_offset >= handed_out
    answer = await send(log, "d")
    assert answer.base_offset >= handed_out
    await log.close()


async def test_a_gap_at_the_end_is_found(mill: Mill, name: str) -> None:
    topic = await mill.topic(name)
    for text in ("a", "b", "c", "d"):
        await topic.publish(text.encode(), "key")
    await mill.jetstream.delete_message(name, 3)
    await mill.jetstream.delete_message(name, 4)
    log = await open_log(mill, name, CACHED)
    assert log.end_offset == 4
    assert await read_all(log) == {0: b"a", 1: b"b"}
    data = b"".join(await log.read(3, 1000))
    assert head_of(data)["count"] == 0
    await log.close()


async def test_offsets_by_time_are_those_of_events(mill: Mill, name: str) -> None:
    log = await open_log(mill, name, CACHED)
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
    log = await open_log(mill, name, CACHED)
    await send(log, "a", "b")
    await send(log, "c", "d")
    assert await log.delete_before(3) == 3
    with pytest.raises(OutOfRange):
        await log.read(2, 1000)
    await log.close()
    log = await open_log(mill, name, CACHED)
    assert (log.start_offset, log.end_offset) == (3, 4)
    assert await log.delete_before(4) == 4
    assert (await send(log, "e")).base_offset == 4
    await log.close()


async def test_a_large_batch_is_stored_as_a_whole(mill: Mill, name: str) -> None:
    log = await open_log(mill, name, CACHED)
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
