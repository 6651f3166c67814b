"""A gateway from start to end: its name, its order of steps, its status, its failures."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import millstream
from millstream import Mill
from millstream.broker import Broker
from millstream.errors import (
    ConfigError,
    ConnectionClosed,
    GatewayBusy,
    GatewayError,
    GatewayNotRunning,
    IdentityLost,
    MissingExtra,
    PortTaken,
)
from millstream.gateways.protocols import find_protocol
from millstream.gateways.running import serve_gateway
from millstream.gateways.status import GatewayStatus, ask_all, ask_status
from millstream.settings import ConnectionSettings, Reconnect
from tests.integration.gateways import echo
from tests.integration.gateways.echo import ECHO, FAIL, LATER, EchoGateway, EchoSettings

PATIENCE = 60.0
QUICK = Reconnect(wait=0.02, wait_max=0.1, give_up_after=60)


class Running:
    """A gateway in a task of the test."""

    def __init__(self, url: str, settings: EchoSettings, reconnect: Reconnect = QUICK) -> None:
        self.stop = asyncio.Event()
        self.listening: asyncio.Future[GatewayStatus] = asyncio.get_running_loop().create_future()
        connection = ConnectionSettings(urls=(url,), reconnect=reconnect)
        self.task = asyncio.create_task(
            serve_gateway(ECHO, settings, connection, self.stop, self.listening.set_result)
        )

    async def ready(self) -> GatewayStatus:
        """Its status when it listens; raises why it does not."""
        both: set[asyncio.Future[Any]] = {self.listening, self.task}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not self.listening.done():
            self.task.result()
        self.gateway = EchoGateway.made
        return await self.listening

    async def ended(self) -> None:
        """Return when it has ended; raises what it ended with."""
        async with asyncio.timeout(PATIENCE):
            await self.task


@asynccontextmanager
async def running(url: str, **settings: Any) -> AsyncIterator[Running]:
    one = Running(url, EchoSettings(**{"port": 0, "auth": False, **settings}))
    try:
        await one.ready()
        yield one
    finally:
        one.stop.set()
        await asyncio.gather(one.task, return_exceptions=True)


class Asking:
    """A client in the loop of the test."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(len(data).to_bytes(4) + data)

    async def answer(self) -> bytes:
        async with asyncio.timeout(PATIENCE):
            size = int.from_bytes(await self.reader.readexactly(4))
            return await self.reader.readexactly(size)

    async def ask(self, data: bytes) -> bytes:
        self.send(data)
        return await self.answer()


@asynccontextmanager
async def client_of(address: str) -> AsyncIterator[Asking]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Asking(reader, writer)
    finally:
        writer.close()


async def until(found: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await found():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@pytest.fixture
async def mill(millstream_url: str) -> AsyncIterator[Mill]:
    async with millstream.connect(millstream_url) as connected:
        yield connected


# -- start and end ------------------------------------------------------------------------


async def test_a_gateway_serves_answers_for_itself_and_stops(
    mill: Mill, millstream_url: str
) -> None:
    async with running(millstream_url, advertise="mill.example:1234", greeting="hi ") as one:
        said = await one.ready()
        assert said.address == f"127.0.0.1:{one.gateway.port}"
        async with client_of(said.address) as client:
            assert await client.ask(b"you") == b"hi you"
            status = await ask_status(mill, "kafka")
        assert (status.name, status.protocol, status.state) == ("kafka", "kafka", "listening")
        assert (status.address, status.advertised) == (said.address, "mill.example:1234")
        assert (status.host, status.pid) == (socket.gethostname(), os.getpid())
        assert (status.tls, status.login) == (False, False)
        assert status.books["requests"] == 1
        assert status.books["connections"]["open"] == 1
        assert status.details == {"waiting": 0, "topics": {"open": 0}}
        assert GatewayStatus.from_json({**status.to_json(), "later": 1}) == status
        assert [found.name for found in await ask_all(mill)] == ["kafka"]
        one.stop.set()
        await one.ended()
        assert one.gateway.events == ["start", "lost", "stop"]
    assert await ask_all(mill) == []
    with pytest.raises(GatewayNotRunning, match="'kafka' is not running"):
        await ask_status(mill, "kafka")


async def test_connections_are_accepted_when_the_protocol_has_started(millstream_url: str) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def start(self: EchoGateway, port: int) -> None:
        begun.set()
        self.port = port
        await go_on.wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EchoGateway, "start", start)
        one = Running(millstream_url, EchoSettings(port=0, auth=False))
        await begun.wait()
        port = EchoGateway.made.port
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        async with millstream.connect(millstream_url) as mill:
            assert (await ask_status(mill, "kafka")).state == "starting"
        go_on.set()
        assert (await one.ready()).address == f"127.0.0.1:{port}"
    one.stop.set()
    await one.ended()


async def test_a_gateway_that_is_starting_can_be_stopped(millstream_url: str) -> None:
    begun = asyncio.Event()

    async def start(_self: EchoGateway, _port: int) -> None:
        begun.set()
        await asyncio.Event().wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EchoGateway, "start", start)
        one = Running(millstream_url, EchoSettings(port=0, auth=False))
        await begun.wait()
        one.stop.set()
        await one.ended()
    assert EchoGateway.made.events == ["stop"]


async def test_requests_in_progress_are_answered_before_the_end(millstream_url: str) -> None:
    async with running(millstream_url, stop_grace=PATIENCE) as one:
        said = await one.ready()
        async with client_of(said.address) as client:
            client.send(LATER)
            await one.gateway.asked.wait()
            one.stop.set()

            async def refused() -> bool:
                try:
                    async with client_of(said.address):
                        return False
                except OSError:
                    return True

            await until(refused)
            assert not one.task.done()
            one.gateway.waiting[0]()
            assert await client.answer() == LATER
        await one.ended()
        assert (one.gateway.events[0], one.gateway.events[-1]) == ("start", "stop")


# -- its name -----------------------------------------------------------------------------


async def test_only_one_of_a_name_runs(mill: Mill, millstream_url: str) -> None:
    async with running(millstream_url) as one:
        second = Running(millstream_url, EchoSettings(port=0, auth=False))
        with pytest.raises(GatewayBusy, match=f"'kafka' runs already: .*process {os.getpid()}"):
            await second.ready()
        async with running(millstream_url, name="other"):
            assert [found.name for found in await ask_all(mill)] == ["kafka", "other"]
        one.stop.set()
        await one.ended()
        async with running(millstream_url) as third:
            assert (await third.ready()).name == "kafka"


async def test_a_gateway_whose_name_was_taken_over_ends(mill: Mill, millstream_url: str) -> None:
    async with running(millstream_url) as one:
        stored = await mill.jetstream.get_message(
            "MILL_CLIENTS", {"last_by_subj": "$MILL.CLIENT.*"}
        )
        assert stored is not None
        claim, subject = json.loads(stored.payload), stored.subject
        # As another claimant does that got no answer, because this one was cut off for a while.
        await mill.publish_acked(subject, json.dumps({**claim, "instance": "another"}).encode())
        await mill.publish(f"{subject.replace('CLIENT', 'PROBE')}.{claim['instance']}", b"")
        with pytest.raises(IdentityLost, match="was taken over"):
            await one.ended()
        assert one.gateway.events == ["start", "stop"]


# -- failures -----------------------------------------------------------------------------


async def test_a_gateway_that_fails_ends_with_the_reason(millstream_url: str) -> None:
    async with running(millstream_url, stop_grace=PATIENCE) as one:
        said = await one.ready()
        async with client_of(said.address) as client:
            client.send(FAIL)
            with pytest.raises(GatewayError, match="asked to fail"):
                await one.ended()
            assert await client.reader.read() == b""  # nobody waits for an answer any more
        assert one.gateway.events == ["start", "lost", "stop"]


async def test_a_gateway_that_does_not_start_frees_its_port_and_name(millstream_url: str) -> None:
    settings = EchoSettings(port=0, auth=False, start_fails=True)
    with pytest.raises(GatewayError, match="does not start"):
        await Running(millstream_url, settings).ready()
    failed = EchoGateway.made
    assert failed.events == ["start", "stop"]
    async with running(millstream_url, port=failed.port):
        pass


async def test_a_port_that_is_taken_is_named(millstream_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortTaken, match=f"127.0.0.1:{port} is in use"):
            await Running(millstream_url, EchoSettings(port=port, auth=False)).ready()
    assert EchoGateway.made.events == []


async def test_a_gateway_ends_when_the_broker_is_gone_for_good() -> None:
    quick = replace(QUICK, give_up_after=0.2)
    with Broker() as broker:
        one = Running(broker.url, EchoSettings(port=0), quick)
        assert (await one.ready()).login is False
        await asyncio.to_thread(broker.stop)
        with pytest.raises(ConnectionClosed, match="gave up reconnecting"):
            await one.ended()
        assert one.gateway.events == ["start", "stop"]


async def test_a_gateway_outlives_a_restart_of_the_broker() -> None:
    with Broker() as broker:
        async with running(broker.url) as one:
            await asyncio.to_thread(broker.restart)
            async with millstream.connect(broker.url) as mill:

                async def answers() -> bool:
                    return bool(await ask_all(mill))

                await until(answers)
            async with client_of((await one.ready()).address) as client:
                assert await client.ask(b"again") == b"again"


async def test_a_missing_library_is_named_with_the_pip_command(millstream_url: str) -> None:
    lacking = replace(ECHO, extra="kafka", libraries=("json", "no_such_library"))
    with pytest.raises(MissingExtra, match=r"pip install 'millstream\[kafka\]'"):
        await serve_gateway(
            lacking,
            EchoSettings(port=0),
            ConnectionSettings(urls=(millstream_url,)),
            asyncio.Event(),
        )
    with pytest.raises(ConfigError, match="no gateway speaks 'amqp'; there is kafka"):
        find_protocol("amqp")


# -- in a process of its own --------------------------------------------------------------


class Child:
    """`millstream gateway run` with the toy."""

    def __init__(self, url: str, folder: Path, *options: str) -> None:
        command = [sys.executable, echo.__file__, "cli", "gateway", "run", "kafka", "--json"]
        command += ["--server", url, "--port", "0", "--no-auth", *options]
        self.log = (folder / "gateway.log").open("a+")
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )

    def listening(self) -> str:
        """What it prints when it listens; empty if it ends before."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)

    def words(self) -> str:
        self.log.seek(0)
        return self.log.read()


@pytest.fixture
def child(millstream_url: str, tmp_path: Path) -> Iterator[Callable[..., Child]]:
    made: list[Child] = []

    def start(*options: str) -> Child:
        made.append(Child(millstream_url, tmp_path, *options))
        return made[-1]

    yield start
    for one in made:
        with one.process, one.log:
            one.process.kill()


def test_sigterm_ends_a_gateway_after_its_answers(child: Callable[..., Child]) -> None:
    one = child("--stop-grace", "60s", "--greeting", "hi ")
    status = GatewayStatus.from_json(json.loads(one.listening()))
    with echo.Client(status.address) as client:
        assert client.ask(b"you") == b"hi you"
        assert one.end(signal.SIGTERM) == 0
        assert client.answer() == b""
    said = one.words()
    assert f"kafka gateway 'kafka' listens on {status.address}\n" in said
    assert "kafka gateway 'kafka' has stopped\n" in said
    assert "Traceback" not in said


def test_the_name_of_a_killed_gateway_is_free_again(child: Callable[..., Child]) -> None:
    first = child()
    assert first.listening()
    busy = child()
    assert not busy.listening()
    assert busy.process.wait(PATIENCE) == 1
    assert "error: a gateway 'kafka' runs already" in busy.words()
    first.end(signal.SIGKILL)
    again = child()
    assert again.listening()
    assert again.end(signal.SIGINT) == 0


def test_a_gateway_that_fails_exits_with_the_reason(child: Callable[..., Child]) -> None:
    one = child()
    status = GatewayStatus.from_json(json.loads(one.listening()))
    with echo.Client(status.address) as client:
        client.send(FAIL)
        assert one.process.wait(PATIENCE) == 1
    assert "error: asked to fail\n" in one.words()
