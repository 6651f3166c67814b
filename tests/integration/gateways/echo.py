"""A toy protocol for tests of what all gateways share: requests are answered with themselves.

As a program it is `millstream` with that protocol, or what the broker runs for its gateway:
`echo.py cli ARGUMENTS`, `echo.py kept DATA NODE PROTOCOL`. Its name is `kafka`, so that a broker
runs it for `up --kafka`.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from millstream.declared import Declaration, Form, declared
from millstream.errors import GatewayError
from millstream.gateways import protocols
from millstream.gateways.access import Logins
from millstream.gateways.overload import Books
from millstream.gateways.protocols import ProtocolEntry
from millstream.gateways.settings import GatewaySettings
from millstream.gateways.transport import FrameHandler, Transport
from millstream.mill import Mill

__all__ = ["ECHO", "Client", "EchoGateway", "EchoSettings", "use_echo"]

LATER: Final = b"later"  # answered when the gateway is asked to stop: a request in progress
FAIL: Final = b"fail"  # the gateway cannot go on


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoSettings(GatewaySettings):
    """Settings of the toy."""

    name: str = declared("kafka", Declaration("Name."))
    greeting: str = declared("", Declaration("Put before every answer."))
    start_fails: bool = declared(False, Declaration("Fail to start.", Form.SWITCH))


class Echo:
    """One connection."""

    def __init__(self, gateway: EchoGateway, transport: Transport) -> None:
        self._gateway, self._transport = gateway, transport

    def frame(self, data: bytes) -> None:
        if data == FAIL:
            self._gateway.failed.set_exception(GatewayError("asked to fail"))
        if data in (FAIL, LATER):
            self._gateway.waiting.append(lambda: self._answer(data))
            self._gateway.asked.set()
        else:
            self._answer(data)

    def _answer(self, data: bytes) -> None:
        answer = self._gateway.greeting + data
        self._transport.send(len(answer).to_bytes(4), answer, frees=len(data))

    def lost(self, reason: str) -> None:
        self._gateway.events.append("lost")


class EchoGateway:
    """The toy gateway; its attributes say what was done with it."""

    made: EchoGateway  # the last one

    def __init__(self, mill: Mill, settings: EchoSettings, logins: Logins, books: Books) -> None:
        EchoGateway.made = self
        self.mill, self.settings, self.logins, self.books = mill, settings, logins, books
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.greeting = settings.greeting.encode()
        self.events: list[str] = []
        self.waiting: list[Callable[[], None]] = []
        self.asked = asyncio.Event()
        self.port = 0

    def make_handler(self, transport: Transport) -> FrameHandler:
        return Echo(self, transport)

    async def start(self, port: int) -> None:
        self.port = port
        self.events.append("start")
        if self.settings.start_fails:
            raise GatewayError("the toy does not start")

    async def stop(self) -> None:
        self.events.append("stop")

    def status(self) -> dict[str, Any]:
        return {"waiting": len(self.waiting), "topics": {"open": 0}}


ECHO: Final = ProtocolEntry(
    name="kafka",
    title="Echo",
    settings=lambda: EchoSettings,
    gateway=lambda: EchoGateway,
)


class Client:
    """A blocking client."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=60)

    def send(self, data: bytes) -> None:
        self._socket.sendall(len(data).to_bytes(4) + data)

    def answer(self) -> bytes:
        """The next answer; empty when the connection is closed."""
        head = self._read(4)
        return self._read(int.from_bytes(head)) if head else b""

    def ask(self, data: bytes) -> bytes:
        self.send(data)
        return self.answer()

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self._socket.recv(size - len(data))
            if not part:
                return b""
            data += part
        return data

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def use_echo() -> None:
    """Let this process know the toy instead of Kafka."""
    protocols.PROTOCOLS["kafka"] = ECHO


def main() -> None:
    use_echo()
    kind = sys.argv.pop(1)
    if kind == "kept":
        from millstream.cli.commands.gateways import main as kept

        kept()
    else:
        from millstream.cli.main import main as cli

        cli()


if __name__ == "__main__":
    main()
