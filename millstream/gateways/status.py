"""What a running gateway says about itself, to whoever asks on the broker.

It is a service of the broker with two endpoints: `_gateway.NAME.status`, and `_gateways.status`,
which all gateways answer. No topic has such subjects, because no topic's name begins with '_'.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from millstream.closing import AsyncClosing
from millstream.errors import GatewayNotRunning, NoResponders, RequestTimeout
from millstream.version import __version__

if TYPE_CHECKING:
    from millstream.messaging import Message
    from millstream.mill import Mill

__all__ = ["Answering", "GatewayStatus", "ask_all", "ask_status"]

_log = logging.getLogger("millstream.gateways")

_ASK_SECONDS: Final = 5.0  # for an answer: a gateway is busy for milliseconds at a time
_STOP_SECONDS: Final = 1.0
_ALL: Final = "_gateways.status"


@dataclass(frozen=True, slots=True)
class GatewayStatus:
    """One gateway, as it is at this moment."""

    name: str
    protocol: str
    state: str  # "starting" or "listening"
    address: str  # host:port that it listens on
    advertised: str  # host:port that clients are sent to
    tls: bool
    login: bool  # whether clients must log in
    host: str  # name of the machine
    pid: int
    started: str  # when this process began, ISO 8601 in UTC
    version: str = __version__
    books: dict[str, Any] = field(default_factory=dict)  # counters; see `Books`
    details: dict[str, Any] = field(default_factory=dict)  # the protocol's own part

    def to_json(self) -> dict[str, Any]:
        """As plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> GatewayStatus:
        """From what `to_json` returned, perhaps in another version: unknown fields are left out."""
        return cls(**{name: data[name] for name in cls.__dataclass_fields__ if name in data})


class Answering(AsyncClosing):
    """Answers for a running gateway while `async with` lasts."""

    def __init__(self, mill: Mill, name: str, status: Callable[[], GatewayStatus]) -> None:
        self._mill = mill
        self._service = mill.service(
            f"gateway-{name}", __version__, description=f"gateway '{name}'"
        )

        def tell(_message: Message) -> str:
            return json.dumps(status().to_json())

        self._service.endpoint(_subject(name), name="status")(tell)
        # Without a queue group: each gateway answers.
        self._service.endpoint(_ALL, name="all", queue="")(tell)

    async def _enter(self) -> None:
        await self._service.start()

    async def _leave(self, error: BaseException | None) -> None:
        if self._mill.connected:  # else nobody asks, and the end must not wait for the broker
            await self._service.stop(_STOP_SECONDS)


async def ask_status(mill: Mill, name: str) -> GatewayStatus:
    """What a running gateway says about itself; GatewayNotRunning if none answers."""
    try:
        answer = await mill.request(_subject(name), timeout=_ASK_SECONDS)
    except NoResponders as error:
        raise GatewayNotRunning(name) from error
    return GatewayStatus.from_json(answer.json())


async def ask_all(mill: Mill) -> list[GatewayStatus]:
    """What all running gateways say about themselves, sorted by name."""
    try:
        answers = await mill.gather(_ALL, timeout=_ASK_SECONDS)
    except (NoResponders, RequestTimeout):
        return []
    found = []
    for answer in answers:
        try:
            found.append(GatewayStatus.from_json(json.loads(answer.data)))
        except (ValueError, TypeError, AttributeError) as error:
            _log.warning("a gateway answered with something else: %s", error)
    return sorted(found, key=lambda one: one.name)


def _subject(name: str) -> str:
    return f"_gateway.{name}.status"
