"""No connection leaves its socket open, however it ends: `asyncio.run` right after the close."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

import millstream
from millstream.broker import ServerTls
from millstream.settings import Tls
from millstream.testing import running_broker
from tests.certificates import make_certificate
from tests.integration.messaging.cut_proxy import proxy
from tests.integration.messaging.topic_kit import eventually

# Steps of the event loop after which a call is cancelled: from its first line to after its end.
STEPS = range(0, 60, 3)

Options = dict[str, Any]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("certificate")).parent


@pytest.fixture(scope="module", params=["plain", "tls", "tls first"])
def options(request: pytest.FixtureRequest) -> Iterator[Options]:
    """How to connect to a broker of each kind."""
    if request.param == "plain":
        with running_broker() as broker:
            yield {"url": broker.url}
        return
    folder: Path = request.getfixturevalue("certificate")
    first = request.param == "tls first"
    tls = ServerTls(folder / "server.pem", folder / "server.key", handshake_first=first)
    with running_broker(tls=tls) as broker:
        trust = Tls(ca=str(folder / "server.pem"), handshake_first=first)
        yield {"url": broker.url, "tls": trust}


def unclosed(work: Callable[[], Coroutine[Any, Any, None]]) -> list[str]:
    """What a program that does this, and nothing afterwards, has left open."""
    gc.collect()  # what others left is not ours
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(work())
        gc.collect()
    return [str(one.message) for one in caught if one.category is ResourceWarning]


async def cancel(work: Awaitable[object], steps: int) -> None:
    """Start it and cancel it after this many event loop steps, a few milliseconds at most."""
    task = asyncio.ensure_future(work)
    for _ in range(steps):
        await asyncio.sleep(0 if steps % 2 else 0.0001)
    task.cancel()
    await asyncio.wait([task])


async def connect_and_close(options: Options) -> None:
    async with millstream.connect(**options) as mill:
        await mill.flush()


def test_a_program_may_end_right_after_the_close(options: Options) -> None:
    assert unclosed(lambda: connect_and_close(options)) == []


@pytest.mark.parametrize("steps", STEPS)
def test_a_cancelled_connect_leaves_nothing_open(options: Options, steps: int) -> None:
    assert unclosed(lambda: cancel(connect_and_close(options), steps)) == []


@pytest.mark.parametrize("steps", STEPS)
def test_a_close_while_reconnecting_leaves_nothing_open(options: Options, steps: int) -> None:
    async def work() -> None:
        async with proxy(options["url"]) as (cuts, url):
            mill = await millstream.connect(**{**options, "url": url})
            cuts.cut()
            for _ in range(steps):
                await asyncio.sleep(0 if steps % 2 else 0.0001)
            await mill.close()

    assert unclosed(work) == []


@pytest.mark.parametrize("steps", range(1, 7))
def test_a_cancelled_close_leaves_nothing_open(options: Options, steps: int) -> None:
    async def work() -> None:
        mill = await millstream.connect(**options)
        await cancel(mill.close(), steps)

    assert unclosed(work) == []


@pytest.mark.parametrize("end", ["close", "drain"])
def test_a_close_cancelled_while_it_waits_for_acks_leaves_nothing_open(
    options: Options, end: str
) -> None:
    async def work() -> None:
        async with proxy(options["url"]) as (silence, url):
            mill = await millstream.connect(**{**options, "url": url})
            topic = await mill.create_topic("acks")
            silence.freeze()
            sending = asyncio.ensure_future(topic.publish(b"x"))
            await asyncio.sleep(0)
            ending = asyncio.ensure_future(mill.close() if end == "close" else mill.drain())
            await asyncio.wait([ending], timeout=0.05)
            assert not ending.done()
            ending.cancel()
            await asyncio.wait([ending, sending])
            assert ending.cancelled()
            assert not mill.connected
            assert sending.exception() is not None

    assert unclosed(work) == []


def test_a_server_that_does_not_answer_delays_a_close_only_briefly(options: Options) -> None:
    async def work() -> None:
        async with proxy(options["url"]) as (silence, url):
            mill = await millstream.connect(**{**options, "url": url})
            silence.freeze()
            async with asyncio.timeout(30):
                await mill.close(timeout=0.1)

    assert unclosed(work) == []


def test_a_failing_callback_leaves_nothing_open(options: Options) -> None:
    def fail() -> None:
        raise RuntimeError("on purpose")

    async def work() -> None:
        async with proxy(options["url"]) as (cuts, url):
            mill = await millstream.connect(**{**options, "url": url})
            closed = asyncio.Event()
            mill.connection.on_closed.append(closed.set)
            mill.connection.on_connected.append(fail)
            cuts.cut()
            async with asyncio.timeout(30):
                await closed.wait()
            await eventually(cuts.count_open, 0)  # the client closed the failed connection's socket

    assert unclosed(work) == []


def test_messages_that_the_socket_did_not_take_yet_are_sent_before_the_close(
    options: Options,
) -> None:
    count, payload = 48, b"x" * 1_000_000

    async def send() -> None:
        async with millstream.connect(**options) as mill:
            await mill.create_topic("late")
            for _ in range(count):
                await mill.publish("late.x", payload)

    async def stored() -> None:
        async with millstream.connect(**options) as mill:

            async def messages() -> int:
                return sum(info.messages for info in await mill.topics() if info.name == "late")

            await eventually(messages, count)

    assert unclosed(send) == []
    assert unclosed(stored) == []
