"""The protocols that gateways speak; the modules of one are loaded when it is used."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from millstream.errors import ConfigError, MissingExtra
from millstream.gateways.overload import Books
from millstream.gateways.settings import GatewaySettings
from millstream.gateways.transport import FrameHandler, Transport

if TYPE_CHECKING:
    from millstream.gateways.access import Logins
    from millstream.mill import Mill

__all__ = ["PROTOCOLS", "Gateway", "ProtocolEntry", "find_protocol"]


class Gateway(Protocol):
    """One running gateway: what a protocol adds to the frame."""

    # Set with an exception when it cannot go on: the process then ends, and its keeper starts it
    # again. Made by the gateway, of the running loop.
    failed: asyncio.Future[None]

    def make_handler(self, transport: Transport) -> FrameHandler:
        """What handles the requests of a new connection."""

    async def start(self, port: int) -> None:
        """Get ready; connections to this port are accepted when it returns."""

    async def stop(self) -> None:
        """End, after the last connection is closed; also after a `start` that failed."""

    def status(self) -> dict[str, Any]:
        """The protocol's part of `gateway status`, as plain data for JSON."""


MakeGateway = Callable[["Mill", Any, "Logins", Books], Gateway]  # Any: the protocol's settings


@dataclass(frozen=True, slots=True)
class ProtocolEntry:
    """Where the parts of a protocol are."""

    name: str  # as in `gateway run kafka`
    title: str  # for people
    settings: Callable[[], type[GatewaySettings]]  # needs none of the libraries
    gateway: Callable[[], MakeGateway]
    extra: str = ""  # of the package, which has its libraries
    libraries: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise MissingExtra, with the pip command, if a library is not installed."""
        for library in self.libraries:
            try:
                importlib.import_module(library)
            except ModuleNotFoundError as error:
                if error.name != library:
                    raise  # a fault of the library itself
                raise MissingExtra(self.extra, library) from None

    def make(self, mill: Mill, settings: GatewaySettings, logins: Logins, books: Books) -> Gateway:
        """A gateway, which is started and stopped by `serve_gateway`."""
        self.check()
        return self.gateway()(mill, settings, logins, books)


def find_protocol(name: str) -> ProtocolEntry:
    """The protocol of that name."""
    if name not in PROTOCOLS:
        raise ConfigError(f"no gateway speaks {name!r}; there is {', '.join(PROTOCOLS)}")
    return PROTOCOLS[name]


def _kafka_settings() -> type[GatewaySettings]:
    from millstream.gateways.kafka.settings import KafkaSettings

    return KafkaSettings


def _kafka_gateway() -> MakeGateway:
    from millstream.gateways.kafka.gateway import KafkaGateway

    return KafkaGateway


PROTOCOLS: Final[dict[str, ProtocolEntry]] = {
    "kafka": ProtocolEntry(
        name="kafka",
        title="Kafka",
        settings=_kafka_settings,
        gateway=_kafka_gateway,
        extra="kafka",
        libraries=("kio", "aiokafka", "cramjam", "numpy"),
    )
}
