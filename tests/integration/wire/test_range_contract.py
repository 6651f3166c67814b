"""Reading a range: the same scenarios for the asynchronous and the blocking reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import pytest

import millstream
from millstream.broker import Broker
from millstream.errors import ConfigError, TopicNotFound
from millstream.settings import ConnectionSettings, Reconnect
from millstream.wire import range_cursor
from millstream.wire.aio.connection import Connection
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.aio.ordered_consumer import OrderedConsumer
from millstream.wire.aio.publisher import StreamPublisher
from millstream.wire.aio.pull_consumer import Prefetch
from millstream.wire.api import parse_ack_address
from millstream.wire.message import OutgoingMessage, RawMessage
from millstream.wire.range_cursor import Range
from millstream.wire.sync.connection import BlockingConnection
from millstream.wire.sync.range import read_range
from millstream.wire.sync.window import Window
from tests.integration.wire.frame_proxy import FrameProxy, frame_proxy

COUNT = 1000
SOME = 100  # messages that a reader takes at a time
CREATE = b"$JS.API.CONSUMER.CREATE."

Hook = Callable[[], Awaitable[None]]
Found = list[tuple[int, bytes]]


class ReadRange(Protocol):
    """Reads a range of stream `s`; awaits the hook once, after the first messages."""

    async def __call__(self, url: str, what: Range, hook: Hook | None = None) -> Found: ...


def settings_of(url: str) -> ConnectionSettings:
    quick = Reconnect(wait=0.02, wait_max=0.1)
    # As long as a reader keeps trying at all: nothing may wait for one answer until it is over.
    return ConnectionSettings(urls=(url,), reconnect=quick, request_timeout=60.0)


def pairs(messages: list[RawMessage]) -> Found:
    return [(parse_ack_address(m.reply).sequence, m.payload) for m in messages]


async def read_aio(url: str, what: Range, hook: Hook | None = None) -> Found:
    connection = Connection(settings_of(url))
    await connection.open()
    found: Found = []
    reader = OrderedConsumer(JetStream(connection), "s", what, prefetch=Prefetch(messages=SOME))
    try:
        await reader.open()
        while not reader.done:
            taken = reader.take_now(SOME)
            found += pairs(taken)
            if taken and hook is not None:
                await hook()
                hook = None
            if not taken and not reader.done:
                await reader.signal.wait()
    finally:
        reader.close()
        await connection.close()
    return found


async def read_sync(url: str, what: Range, hook: Hook | None = None) -> Found:
    loop = asyncio.get_running_loop()
    assert what.end is not None
    start, end = what.start, what.end

    def read() -> Found:
        nonlocal hook
        found: Found = []
        with BlockingConnection(settings_of(url)) as connection:
            window = Window(messages=SOME)
            for messages in read_range(connection, "s", start, end, what.subjects, window):
                found += pairs(messages)
                if hook is not None:
                    asyncio.run_coroutine_threadsafe(call(hook), loop).result()
                    hook = None
        return found

    return await asyncio.to_thread(read)


async def call(hook: Hook) -> None:
    await hook()


@pytest.fixture(params=[read_aio, read_sync], ids=["aio", "sync"])
def read_all(request: pytest.FixtureRequest) -> ReadRange:
    reader: ReadRange = request.param
    return reader


@asynccontextmanager
async def filled(url: str, count: int = COUNT) -> AsyncIterator[tuple[FrameProxy, str]]:
    """A stream `s` of numbered messages on subjects s.0 to s.9, and a proxy before it."""
    async with millstream.connect(url) as mill:
        config = {"name": "s", "subjects": ["s.*"], "storage": "file"}
        await mill.jetstream.create_stream(config)
        publisher = StreamPublisher(mill.connection)
        for number in range(1, count + 1):
            await publisher.wait_for_space()
            message = OutgoingMessage(b"s.%d" % (number % 10), b"", b"%d" % number)
            last = publisher.publish(message, 60, lambda ack: ack.seq)
        assert await last == count
    async with frame_proxy(url) as (proxy, through):
        yield proxy, through


def numbers(*sequences: int) -> Found:
    return [(n, b"%d" % n) for n in sequences]


EVERYTHING = numbers(*range(1, COUNT + 1))


async def test_a_range_is_read_from_start_to_end(millstream_url: str, read_all: ReadRange) -> None:
    async with filled(millstream_url) as (_, url):
        assert await read_all(url, Range(1, COUNT + 1)) == EVERYTHING
        assert await read_all(url, Range(301, 450)) == numbers(*range(301, 450))
        assert await read_all(url, Range(5, 5)) == []
        chosen = await read_all(url, Range(1, COUNT + 1, subjects=("s.3", "s.7")))
        assert chosen == numbers(*(n for n in range(1, COUNT + 1) if n % 10 in (3, 7)))


async def test_deleted_sequences_are_left_out(millstream_url: str, read_all: ReadRange) -> None:
    async with filled(millstream_url, 20) as (_, url):
        async with millstream.connect(millstream_url) as mill:
            for sequence in (1, 7, 8, 19, 20):
                await mill.jetstream.delete_message("s", sequence)
        left = [n for n in range(1, 19) if n not in (1, 7, 8)]
        assert await read_all(url, Range(1, 21)) == numbers(*left)
        assert await read_all(url, Range(7, 9)) == []
        assert await read_all(url, Range(19, 21)) == []
        assert await read_all(url, Range(5, 9)) == numbers(5, 6)


async def test_a_cut_connection_is_not_noticed(millstream_url: str, read_all: ReadRange) -> None:
    async with filled(millstream_url) as (proxy, url):

        async def cut() -> None:
            proxy.cut()

        assert await read_all(url, Range(1, COUNT + 1), cut) == EVERYTHING
        assert proxy.connections >= 2


async def test_a_message_lost_in_transit_is_read_again(
    millstream_url: str, read_all: ReadRange
) -> None:
    """The delivery numbers jump; nothing else shows it. TCP loses nothing, but servers drop."""
    async with filled(millstream_url) as (proxy, url):
        lost: list[bytes] = []

        def lose_one(frame: bytes) -> bool:
            if not lost and b".1.350.350." in frame.split(b"\r\n", 1)[0]:
                lost.append(frame)
                return False
            return True

        proxy.to_client = lose_one
        assert await read_all(url, Range(1, COUNT + 1)) == EVERYTHING
        assert lost


async def test_a_restarted_broker_is_waited_for(
    millstream_broker: Broker, read_all: ReadRange
) -> None:
    async with filled(millstream_broker.url) as (_, url):

        async def restart() -> None:
            await asyncio.to_thread(millstream_broker.kill)
            await asyncio.to_thread(millstream_broker.restart)

        assert await read_all(url, Range(1, COUNT + 1), restart) == EVERYTHING


async def test_a_server_that_has_not_recovered_its_streams_is_waited_for(
    millstream_broker: Broker, read_all: ReadRange
) -> None:
    """It answers that there is no such stream; a moment later there is."""
    broker, refusals = millstream_broker, 0
    refused = asyncio.Event()

    def watch(frame: bytes) -> bool:
        nonlocal refusals
        refusals += b'"err_code":10059' in frame
        if refusals == 3:
            refused.set()
        return True

    def restart_without_the_stream() -> Path:
        broker.stop()
        (folder,) = broker.data.rglob("streams/s")
        folder.rename(broker.data / "hidden")
        broker.start()
        return folder

    def restart_with_the_stream(folder: Path) -> None:
        broker.stop()
        folder.parent.mkdir(parents=True, exist_ok=True)
        (broker.data / "hidden").rename(folder)
        broker.start()

    async def recover(folder: Path) -> None:
        await refused.wait()
        await asyncio.to_thread(restart_with_the_stream, folder)

    async with filled(broker.url) as (proxy, url), asyncio.TaskGroup() as tasks:
        proxy.to_client = watch

        async def restart() -> None:
            folder = await asyncio.to_thread(restart_without_the_stream)
            tasks.create_task(recover(folder))

        assert await read_all(url, Range(1, COUNT + 1), restart) == EVERYTHING
        assert refused.is_set()


async def test_a_stream_that_was_deleted_is_reported_in_the_end(
    millstream_url: str, read_all: ReadRange, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_cursor, "RECOVERY_SECONDS_MAX", 0.5)
    async with filled(millstream_url) as (proxy, url):

        async def delete() -> None:
            async with millstream.connect(millstream_url) as mill:
                await mill.jetstream.delete_stream("s")
            proxy.cut()

        with pytest.raises(TopicNotFound):
            await read_all(url, Range(1, COUNT + 1), delete)


async def test_a_consumer_on_a_dead_server_is_asked_for_under_another_name(
    millstream_url: str, read_all: ReadRange
) -> None:
    """A cluster may assign a consumer to a server that has just died: it never answers."""
    asked: list[bytes] = []

    def lose_the_first(frame: bytes) -> bool:
        at = frame.find(CREATE)
        if at < 0:
            return True
        asked.append(frame[at:].split(b" ", 1)[0])
        return asked[-1] != asked[0]

    async with filled(millstream_url) as (proxy, url):
        proxy.to_server = lose_the_first
        assert await read_all(url, Range(1, COUNT + 1)) == EVERYTHING
    assert len(set(asked)) == 2


async def test_a_consumer_whose_server_died_is_replaced(
    millstream_url: str, read_all: ReadRange
) -> None:
    """An unreplicated consumer goes with its server, without a message to its reader."""
    async with filled(millstream_url) as (proxy, url):

        async def delete_the_consumer() -> None:
            async with millstream.connect(millstream_url) as mill:
                (info,) = await mill.jetstream.consumers("s")
                # The reader gets no notice: that is lost as well.
                proxy.to_client = lambda frame: b"Consumer Deleted" not in frame
                await mill.jetstream.delete_consumer("s", info.name)

        assert await read_all(url, Range(1, COUNT + 1), delete_the_consumer) == EVERYTHING


async def test_readers_leave_no_consumer(millstream_url: str, read_all: ReadRange) -> None:
    async with filled(millstream_url) as (_, url), millstream.connect(millstream_url) as mill:

        async def stop() -> None:
            raise ConfigError("enough")

        await read_all(url, Range(1, COUNT + 1))
        with pytest.raises(ConfigError):
            await read_all(url, Range(1, COUNT + 1), stop)
        async with asyncio.timeout(60):
            # They are removed without waiting for an answer.
            while await mill.jetstream.consumers("s"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
