"""Which copies of a message a member has had. Pure.

A message whose lease ends is delivered again, and the member that was too slow may get that copy:
after a pause (a closed laptop, a stopped process) it has the old ones still to read. A copy of what
was settled here is of no use, a copy of what is being handled has to wait for the outcome, and a
copy that never reached the application is no attempt to handle the event.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from millstream.wire.api import AckAddress, parse_ack_address

__all__ = ["Copies"]

# Messages remembered as settled, and of which copies were dropped: as many as a member may have in
# hand, roughly. One that is forgotten is only handed out once more.
SETTLED_MAX: Final = 4096
DROPPED_MAX: Final = 10_000

Key = tuple[str, int]  # stream and sequence


class _Settled:
    """Messages settled during one span of time; parsed only when someone asks."""

    def __init__(self) -> None:
        self.replies: deque[bytes] = deque(maxlen=SETTLED_MAX)
        self._known: dict[Key, AckAddress] = {}

    def find(self, key: Key) -> AckAddress | None:
        while self.replies:
            address = parse_ack_address(self.replies.popleft())
            self._known[address.stream, address.sequence] = address
        while len(self._known) > SETTLED_MAX:
            del self._known[next(iter(self._known))]
        return self._known.get(key)


class Copies:
    """What one member remembers of the messages it had."""

    def __init__(self) -> None:
        self._old, self._new = _Settled(), _Settled()
        self.settled = self._new.replies.append  # called with the ack address
        self._dropped: dict[Key, int] = {}
        self._handling: set[Key] = set()

    def forget_old(self) -> None:
        """Forget what was settled before the last call. To be called while the process runs.

        Not by the clock: what was settled just before a pause is still known after it.
        """
        self._old, self._new = self._new, _Settled()
        self.settled = self._new.replies.append

    def is_settled(self, copy: AckAddress) -> bool:
        """Whether this copy is a later one of a message that was acked or given up here.

        After a seek the server counts from 1 again: such a delivery is wanted.
        """
        key = copy.stream, copy.sequence
        before = self._new.find(key) or self._old.find(key)
        return (
            before is not None
            and copy.delivered > before.delivered
            and copy.consumer_sequence > before.consumer_sequence
        )

    # -- what is being handled ------------------------------------------------------------

    def handling(self, message: AckAddress) -> None:
        self._handling.add((message.stream, message.sequence))

    def handled(self, message: AckAddress) -> None:
        self._handling.discard((message.stream, message.sequence))

    def is_handled_now(self, copy: AckAddress) -> bool:
        return (copy.stream, copy.sequence) in self._handling

    # -- what the application never saw ---------------------------------------------------

    def dropped(self, copy: AckAddress) -> None:
        """A copy that was not handed out: no attempt."""
        key = copy.stream, copy.sequence
        self._dropped[key] = self._dropped.pop(key, 0) + 1
        if len(self._dropped) > DROPPED_MAX:
            del self._dropped[next(iter(self._dropped))]

    def attempt(self, copy: AckAddress) -> int:
        """Which attempt it is to handle the message, as far as this member knows."""
        dropped = self._dropped.get((copy.stream, copy.sequence), 0)
        return max(1, copy.delivered - dropped)
