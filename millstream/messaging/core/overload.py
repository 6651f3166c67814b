"""What a subscriber does when messages arrive faster than they are read, and its counters.

For every subscriber, at any time: received = delivered + dropped + pending (`Counters`). Messages
that were published and not received are in flight: in the server, the network or the socket. After
`flush` of the publisher and then of the subscriber there are none (between servers of a cluster,
once the route has passed them on), unless the connection was lost in between. `interruptions`
counts those losses, because core messages in flight are then lost and cannot be counted. So without
interruptions: published = delivered + dropped + pending.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from millstream.errors import ConfigError
from millstream.messaging.core.message import Message
from millstream.settings import hold_seconds

__all__ = ["Counters", "Overload", "SubscriberSettings"]

# The server cuts off a client that reads nothing for 10 s (its write_deadline), and messages in
# flight are then lost uncounted; blocking has to end before.
BLOCK_SECONDS_MAX: Final = 9.0
CONCURRENCY_MAX: Final = 10_000  # each is a task; more is probably a mistake


class Overload(StrEnum):
    """What a subscriber does with a message when its buffer is full.

    `drop_new`: the message is dropped. `drop_old`: the oldest pending messages are dropped.
    `block`: the subscriber, on a connection of its own, stops reading until it is half empty. A
    `PacedPublisher` then waits, end to end. Other senders are only slowed down by TCP and the
    server: it buffers 64 MB for the subscriber, slows the sender down from three quarters of
    that, and cuts the subscriber off beyond it. After `block_seconds` with a full buffer,
    messages are dropped and counted until the subscriber is half empty again.
    """

    DROP_NEW = "drop_new"
    DROP_OLD = "drop_old"
    BLOCK = "block"


@dataclass(frozen=True, slots=True)
class SubscriberSettings:
    """How messages are shared, buffered and handled."""

    queue: str = ""  # members of one queue group share the messages; "": each gets all
    overload: Overload = Overload.DROP_NEW
    messages_max: int = 65_536  # pending messages
    bytes_max: int = 64 * 1024 * 1024  # pending bytes, payload and headers; one message always fits
    block_seconds: float = 5.0  # how long `block` waits before it drops messages
    concurrency: int = 1  # handlers that run at the same time; 1 keeps the order
    on_drop: Callable[[Message], None] | None = None  # gets each dropped message; must be quick

    def __post_init__(self) -> None:
        hold_seconds(self, "block_seconds")
        if self.overload not in list(Overload):
            known = ", ".join(Overload)
            raise ConfigError(f"overload {self.overload!r}: choose one of {known}")
        if self.messages_max < 1 or self.bytes_max < 1:
            raise ConfigError(
                f"a subscriber must be able to buffer a message: messages_max {self.messages_max}, "
                f"bytes_max {self.bytes_max} must be 1 or more"
            )
        if not 0 < self.block_seconds <= BLOCK_SECONDS_MAX:
            raise ConfigError(
                f"block_seconds {self.block_seconds!r}: use more than 0 and at most "
                f"{BLOCK_SECONDS_MAX:g}, because the server cuts off a client that blocks for 10 s"
            )
        if not 1 <= self.concurrency <= CONCURRENCY_MAX:
            raise ConfigError(f"concurrency {self.concurrency}: use 1 to {CONCURRENCY_MAX:,}")
        if self.queue and any(ch.isspace() or ch in "\0*>" for ch in self.queue):
            raise ConfigError(f"queue {self.queue!r}: no spaces and no wildcards")


@dataclass(frozen=True, slots=True)
class Counters:
    """What happened to the messages of one subscriber so far."""

    received: int  # read from the connection
    delivered: int  # handed to the application
    dropped: int  # the buffer was full, or pending when the subscriber was closed
    pending: int  # waiting to be delivered
    pending_bytes: int
    failed: int  # delivered, and the handler raised
    interruptions: int  # lost connections; messages in flight were lost uncounted
    blocked_seconds: float  # how long reading was stopped (`block`)
