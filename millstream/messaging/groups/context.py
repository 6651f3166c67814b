"""What the partitions of one member of a group share."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from millstream.events.event import Event, place_of
from millstream.failure_log import FailureLog
from millstream.messaging.dead_letters.store import DeadLetterStore
from millstream.messaging.groups.assignment import Lease
from millstream.messaging.groups.settings import GroupSettings
from millstream.messaging.groups.store import GroupStore
from millstream.messaging.groups.workers import GroupCall, KeyQueue, Workers
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.aio.pull_consumer import Signal

__all__ = ["MemberContext"]

_log = logging.getLogger("millstream.messaging")


@dataclass(slots=True)
class MemberContext:
    """What the partitions of one member share."""

    jetstream: JetStream
    store: GroupStore
    dead_letters: DeadLetterStore
    settings: GroupSettings
    lease: Lease
    workers: Workers
    signal: Signal  # set when there may be something to read
    call: GroupCall
    careful: asyncio.Lock  # held while an event is handed out alone
    handled: int = 0
    failures: FailureLog = field(default_factory=lambda: FailureLog(_log))

    def log_failure(self, queue: KeyQueue, event: Event, last: bool) -> None:
        """Warn of an attempt to handle the first event of a key that failed."""
        if last:
            then = f"it becomes a dead letter in '{self.dead_letters.topic}'"
        else:
            then = f"the next attempt is due in {self.settings.delay_after(queue.failures):g} s"
        self.failures.warn(
            queue.cause,
            "group '%s': the handler failed on %s, attempt %d of %d; %s",
            *(self.store.group, place_of(event), queue.failures, self.settings.max_attempts, then),
        )

    def log_given_up(self, event: Event, reason: str) -> None:
        """Warn of an event that became a dead letter without an attempt to handle it."""
        self.failures.warn(
            None,
            "group '%s': %s became a dead letter in '%s': %s",
            *(self.store.group, place_of(event), self.dead_letters.topic, reason),
        )
