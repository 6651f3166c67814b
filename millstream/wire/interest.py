"""Holding events of an interest topic for a reader that keeps its own position; no sockets.

An interest stream drops a message as soon as no consumer wants it. A reader by position (an ordered
group, a process, a Spark query) has no consumer that stays, so it keeps a *hold*: a durable
consumer that is never read from. It wants everything from its start on, and its start follows the
position that the reader has stored:

1. The hold exists before the reader's first position is chosen: nothing falls in between.
2. It is moved after a position is stored, never before. A hold that is behind keeps more than
   needed, which is harmless: the server may forget a move when it is killed.
3. Moving it is a reset of the consumer: the server then drops what is before its new start.
4. A reader that returns to an earlier position moves its hold first: what others still keep stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from millstream.errors import ConfigError, SubscriptionConflict
from millstream.wire.api import ConsumerConfig, ConsumerInfo, ErrorCode

__all__ = ["HOLD_KEY", "Hold", "MoveHold", "needs_hold"]

HOLD_KEY: Final = "millstream.hold"  # in a consumer's metadata: the reader it holds events for


def needs_hold(config: Mapping[str, Any], reader: str) -> bool:
    """Whether a reader by position needs a hold on a stream; a work queue is refused.

    A work queue gives each message to one consumer and removes it at the ack, so a position in it
    means nothing: what others took is gone, and what this reader handled would stay.
    """
    retention = config.get("retention", "limits")
    if retention == "workqueue":
        raise ConfigError(
            f"{reader}: '{config['name']}' is a work queue, which removes each event when one "
            f"subscription has acked it; there is no position to continue from. Take its events "
            f"with topic.subscribe(...), or use a topic with retention limits or interest"
        )
    return bool(retention == "interest")


class MoveHold(msgspec.Struct, frozen=True):
    """A request that moves a hold."""

    verb: str
    body: dict[str, int]


class Hold:
    """The hold of one reader on one stream: its consumer, and where it starts."""

    def __init__(self, stream: str, kind: str, name: str) -> None:
        self.stream = stream
        self.name = f"hold-{kind}-{name}"  # of the consumer
        self.reader = f"{kind} '{name}'"
        self.start = 0  # it keeps everything from this sequence on; 0: unknown

    def config(self) -> ConsumerConfig:
        """The consumer to create; `all` may be moved to any sequence."""
        return ConsumerConfig(
            name=self.name,
            durable_name=self.name,
            description=f"Millstream: keeps events for {self.reader} until they are handled",
            deliver_policy="all",
            ack_policy="all",
            metadata={HOLD_KEY: self.reader},
        )

    def found(self, info: ConsumerInfo) -> None:
        """The server has the consumer; raises if it is somebody else's subscription."""
        if HOLD_KEY not in info.config.metadata:
            raise SubscriptionConflict(
                0,
                ErrorCode.CONSUMER_EXISTS,
                f"'{self.stream}' has a subscription '{self.name}' of another kind; "
                f"{self.reader} needs that name to keep its events",
                "Delete the subscription, or choose another name",
            )
        self.start = info.ack_floor.stream_seq + 1

    def move(self, position: int) -> MoveHold | None:
        """The request after everything before `position` is handled; None: nothing to release."""
        return None if position <= max(self.start, 1) else self._to(position)

    def move_back(self, position: int) -> MoveHold | None:
        """The request before the reader returns to `position`; None: that is held already."""
        return None if position >= self.start else self._to(position)

    def _to(self, position: int) -> MoveHold:
        return MoveHold(f"CONSUMER.RESET.{self.stream}.{self.name}", {"seq": position})

    def moved(self, position: int) -> None:
        """The server has moved it."""
        self.start = position

    def gone(self) -> str:
        """What to say when the consumer is missing though the reader has been here before."""
        return (
            f"the consumer '{self.name}' on '{self.stream}' that keeps events for {self.reader} "
            f"is missing: it was deleted, or the topic became an interest topic later. Events "
            f"stored meanwhile that no other subscription wanted are lost"
        )
