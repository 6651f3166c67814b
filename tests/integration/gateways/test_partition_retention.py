"""A partition of the gateway whose events are removed while it is used."""

from __future__ import annotations

import asyncio
import time

import pytest

from millstream.gateways.kafka.offset_index import OffsetIndex
from millstream.gateways.kafka.partition_log import OutOfRange
from millstream.gateways.kafka.producer_state import SentBatch
from millstream.gateways.kafka.protocol import ErrorCode
from millstream.mill import Mill
from millstream.wire.api import StreamInfo
from tests.faults.supervisor import until
from tests.integration.gateways.partition_kit import (
    AGAIN,
    Client,
    Current,
    at_work,
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

__all__ = ["mill", "name", "url"]

pytestmark = pytest.mark.timeout(120)  # what is broken here hangs


async def test_appends_go_on_while_everything_is_purged(mill: Mill, name: str) -> None:
    current = Current(mill, name)
    clients = [Client(number) for number in range(1, 6)]
    async with at_work(clients, current, 3):
        for _ in range(8):
            await progress(clients, 60)
            await mill.jetstream.purge_stream(name)
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
    async with asyncio.timeout(60):
        await waiting
        await woken.wait()
    await log.close()


async def test_the_head_is_looked_at_again_when_what_is_known_is_too_old(
    mill: Mill, name: str
) -> None:
    log = await open_log(mill, name)
    await send(log, "a", "b")
    await log.look_at_head()
    await mill.jetstream.purge_stream(name)
    await log.look_at_head(3600)  # the broker is not asked
    assert log.start_offset == 0
    await log.look_at_head()
    assert log.start_offset == 2
    await log.close()


async def test_the_age_of_the_head_counts_from_when_the_broker_was_asked(
    mill: Mill, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await open_log(mill, name)
    await send(log, "a", "b")
    ask, asked, answered = log._jetstream.stream_info, asyncio.Event(), asyncio.Event()

    async def slow(stream: str, timeout: float | None = None) -> StreamInfo:
        found = await ask(stream, timeout)
        asked.set()
        await answered.wait()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(log._jetstream, "stream_info", slow)
        looking = asyncio.create_task(log.look_at_head())
        await asked.wait()
        before = time.monotonic()
        await mill.jetstream.purge_stream(name)
        answered.set()
        await looking
    assert log.start_offset == 0
    await log.look_at_head(time.monotonic() - before)
    assert log.start_offset == 2
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

    async def stored(count: int) -> bool:
        return (await mill.jetstream.stream_info(name)).state.last_seq >= count

    answer = await start(log, "b", producer=(7, 0, 0))
    await until(lambda: stored(4))
    last = (await mill.jetstream.stream_info(name)).state.last_seq
    if how == "purge":
        await mill.jetstream.purge_stream(name)
    else:
        for sequence in range(1, last + 1):
            await mill.jetstream.delete_message(name, sequence)
    offsets._consumer._pull.take_now(10)  # type: ignore[union-attr]  # they never arrive
    offsets._consumer.take_now = taken  # type: ignore[union-attr, method-assign]
    async with asyncio.timeout(60):
        assert (await answer).error in {ErrorCode.none, *AGAIN}
    async with asyncio.timeout(60):
        assert (await send(log, "c")).error in {ErrorCode.none, *AGAIN}
    await log.close()


async def test_a_log_that_lost_everything_goes_on_with_offsets_that_nobody_had(
    mill: Mill, name: str
) -> None:
    log = await open_log(mill, name)
    await kill(log)
    # What a gateway would have saved of a log whose head was removed, before the broker lost it.
    log.offsets.index = OffsetIndex(100, 500)
    log.offsets.producers.stored(SentBatch(7, 0, 0, 0), 500)
    log.offsets.index.add_pack(3)
    await log.offsets.save()
    log = await open_log(mill, name)
    assert log.start_offset == log.end_offset > 503
    assert log.leader_epoch == 1
    answer = await send(log, "y", producer=(7, 0, 5))
    assert answer.error is ErrorCode.none, answer
    assert answer.base_offset > 503
    with pytest.raises(OutOfRange):
        await log.read(501, 100)
    await log.close()


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("restarts", [False, True])
async def test_what_is_left_keeps_its_offsets_when_others_are_gone_uncounted(
    mill: Mill, name: str, native: bool, restarts: bool
) -> None:
    log = await open_log(mill, name)
    topic = await mill.topic(name, bytes)
    await send(log, "first", producer=(7, 0, 0))
    await log.offsets.save()
    places: dict[str, int] = {"first": 0}
    for number in range(1, 9):
        texts = [f"{number}.{row}" for row in range(number)]
        sent = sum(range(number)) + 1
        if native:  # the gateway may or may not have counted it when it stores its pack
            await topic.publish(b"native", "k")
        answer = await send(log, *texts, producer=(7, 0, sent))
        places |= {text: answer.base_offset + row for row, text in enumerate(texts)}
        if restarts and number % 3 == 0:
            await kill(log)
            log = await open_log(mill, name)
    await log.offsets.known((await topic.info()).partitions[0].last_offset)
    before = await read_all(log)
    end = log.end_offset
    assert {text: offset for offset, text in before.items() if text != "native"} == places
    await kill(log)
    middle = log.offsets.index.sequence_of(places["6.0"])
    await mill.jetstream.purge_stream(name, {"seq": middle})
    for _ in range(2):
        log = await open_log(mill, name)
        after = await read_all(log)
        assert after == {offset: text for offset, text in before.items() if offset >= min(after)}
        assert (log.end_offset, min(after)) == (end, places["6.0"])
        copy = await send(log, *(f"8.{row}" for row in range(8)), producer=(7, 0, 29))
        assert copy.base_offset == places["8.0"]
        await kill(log)
    log = await open_log(mill, name)
    assert (await send(log, "next", producer=(7, 0, 37))).base_offset == end
    await log.close()


async def test_what_nobody_can_tell_the_offsets_of_gets_new_ones(mill: Mill, name: str) -> None:
    log = await open_log(mill, name)
    await send(log, "first")
    await log.offsets.save()
    end = (await send(log, *"abc")).base_offset + 3
    await kill(log)
    for text in (b"1", b"2"):
        await (await mill.topic(name)).publish(text, "k")
    await mill.jetstream.purge_stream(name, {"seq": 4})
    log = await open_log(mill, name)
    assert min(await read_all(log)) >= end
    await log.close()


async def test_what_follows_a_claim_that_is_gone_keeps_its_offset(mill: Mill, name: str) -> None:
    log = await open_log(mill, name)
    await send(log, "a")
    await log.offsets.save()
    await kill(log)
    log = await open_log(mill, name)
    assert (await send(log, "b")).base_offset == 1
    await kill(log)
    await mill.jetstream.purge_stream(name, {"seq": 4})  # the second claim and all before it
    log = await open_log(mill, name)
    assert await read_all(log) == {1: "b"}
    assert (await send(log, "c")).base_offset == 2
    await log.close()
