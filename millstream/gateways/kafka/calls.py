"""What a handler of Kafka's calls gets: the request, and the connection it came on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from millstream.gateways.access import Access
    from millstream.gateways.kafka.protocol import Request

__all__ = ["Call", "Handler", "KafkaSession"]


def _not_connected(_reason: str) -> None:
    """There is no connection yet."""


def _no_bound() -> int:
    return 2**31 - 1


@dataclass(slots=True)
class KafkaSession:
    """One connection of a client. Until it is authenticated, `access` is None."""

    client_host: str
    access: Access | None = None
    user: str | None = None
    sasl: Any = field(default=None, repr=False)  # the exchange under way, of `sasl_calls`
    closing: str = ""  # set by a handler: why the connection is closed after its answer
    # Closes the connection at once, for a reason; set by the connection.
    close: Callable[[str], None] = field(default=_not_connected, repr=False)
    room: Callable[[], int] = field(default=_no_bound, repr=False)  # for answers; a hint
    produce_order: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)


class Call(NamedTuple):
    """One request of a session."""

    request: Request
    session: KafkaSession


# Answers with the fields of the response by name, those of all versions; None: no answer.
Handler = Callable[[Call], Awaitable[Mapping[str, Any] | None]]
