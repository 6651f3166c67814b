"""A listener with a toy protocol, and its clients, for tests."""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from millstream.gateways import listener as listener_module
from millstream.gateways.listener import Listener, Transport
from millstream.gateways.overload import Books, Closed
from millstream.gateways.settings import GatewaySettings
from tests.certificates import make_certificate

__all__ = [
    "KIB",
    "MIB",
    "PATIENCE",
    "Client",
    "Toy",
    "certificate",
    "client_of",
    "closed_as",
    "crowd_here",
    "framed",
    "later",
    "listening",
    "quick",
    "tls_of",
    "trusting",
    "until",
]

PATIENCE = 120.0  # seconds, for what takes milliseconds on a machine that is not busy
KIB, MIB = 1024, 1024 * 1024


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the connections often."""
    monkeypatch.setattr(listener_module, "TICK", 0.02)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("tls"))


class Toy:
    """A protocol for tests: it answers each request with its bytes, at once or when asked to."""

    def __init__(self) -> None:
        self.at_once = True
        self.waiting: list[tuple[Transport, bytes]] = []  # in the order of arrival
        self.transports: list[Transport] = []
        self.lost: list[str] = []
        self.max_frame: int | None = None
        self.fail = ""

    def make(self, transport: Transport) -> ToyConnection:
        if self.fail == "make":
            raise RuntimeError("not this one")
        self.transports.append(transport)
        if self.max_frame is not None:
            transport.max_frame = self.max_frame
        return ToyConnection(self, transport)

    def answer(self, number: int = 1) -> None:
        for transport, data in self.waiting[:number]:
            answer(transport, data)
        del self.waiting[:number]


def answer(transport: Transport, data: bytes) -> None:
    transport.send(struct.pack(">i", len(data)), data, frees=len(data))


class ToyConnection:
    def __init__(self, toy: Toy, transport: Transport) -> None:
        self.toy, self.transport = toy, transport

    def frame(self, data: bytes) -> None:
        if data == b"fail":
            raise RuntimeError("a request that fails")
        if data == b"bye":
            self.transport.send(framed(b"goes first"), frees=len(data))
            self.transport.close("asked to")
        elif self.toy.at_once:
            answer(self.transport, data)
        else:
            self.toy.waiting.append((self.transport, data))

    def lost(self, reason: str) -> None:
        self.toy.lost.append(reason)


@asynccontextmanager
async def listening(toy: Toy, **values: Any) -> AsyncIterator[Listener]:
    settings = await asyncio.to_thread(lambda: GatewaySettings(**values))
    one = Listener(settings, toy.make, Books())
    await one.start()
    try:
        yield one
    finally:
        await one.stop(0)


class Client:
    """One client; what it has not read stays in its socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, *requests: bytes) -> None:
        self.writer.write(b"".join(map(framed, requests)))

    async def read(self) -> bytes:
        """The next answer; `b""` when the connection is closed."""
        try:
            (size,) = struct.unpack(">i", await self.reader.readexactly(4))
            return await self.reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            return b""

    def pause(self) -> None:
        """Read nothing more from the socket."""
        transport: Any = self.writer.transport
        transport.pause_reading()

    async def ask(self, request: bytes) -> bytes:
        self.send(request)
        return await self.read()


def framed(data: bytes) -> bytes:
    return struct.pack(">i", len(data)) + data


@asynccontextmanager
async def client_of(one: Listener, tls: ssl.SSLContext | None = None) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", one.port, ssl=tls, limit=64 * KIB)
    try:
        yield Client(reader, writer)
    finally:
        writer.transport.abort()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            if condition():
                return
            await asyncio.sleep(0.005)


async def closed_as(one: Listener, why: Closed, number: int = 1) -> None:
    await until(lambda: one.books.closed[why] == number)
    assert not one.connections
    assert one._shared.budget.used == 0
    assert one.books.in_flight == 0


def tls_of(certificate: Path) -> dict[str, Any]:
    return {"tls_cert": certificate, "tls_key": certificate.with_suffix(".key")}


async def trusting(certificate: Path) -> ssl.SSLContext:
    return await asyncio.to_thread(lambda: ssl.create_default_context(cafile=str(certificate)))


async def later(one: Listener, seconds: float, condition: Callable[[], object]) -> None:
    """Let time pass for the listener, as often as it takes."""

    def passed() -> object:
        if not condition():
            one._shared.now += seconds
            return False
        return True

    await until(passed)


@asynccontextmanager
async def crowd_here(one: Listener, number: int) -> AsyncIterator[list[Client]]:
    """Some clients of this process."""
    clients = []
    for _ in range(number):
        clients.append(
            Client(*await asyncio.open_connection("127.0.0.1", one.port, limit=64 * KIB))
        )
    try:
        yield clients
    finally:
        for client in clients:
            client.writer.transport.abort()
