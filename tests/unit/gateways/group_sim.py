"""A group with a clock of its own, and members that ask it something."""

from __future__ import annotations

import itertools
import struct
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from millstream.gateways.kafka.group import ConsumerGroup
from millstream.gateways.kafka.group_members import (
    CONSUMER,
    Caller,
    GroupAnswer,
    GroupBounds,
    GroupState,
    JoinAsk,
    Joined,
    Protocol,
    Store,
    StoredGroup,
    SyncAsk,
    Synced,
)
from millstream.gateways.kafka.protocol import ErrorCode

__all__ = ["QUICK", "RANGE", "REBALANCE", "SESSION", "Sim", "subscription"]

SESSION = 10.0
REBALANCE = 60.0
QUICK = GroupBounds(initial_delay=0)


def subscription(*topics: str, more: bytes = b"") -> bytes:
    """What a consumer says of itself."""
    names = [name.encode() for name in topics]
    parts = [struct.pack(">hi", 1, len(names))]
    parts += [struct.pack(">h", len(name)) + name for name in names]
    return b"".join(parts) + struct.pack(">i", len(more)) + more


RANGE = (Protocol("range", subscription("t")),)


class Sim:
    """A group, its time, and what it wanted done."""

    def __init__(self, limits: GroupBounds = QUICK, record: StoredGroup | None = None) -> None:
        self.now = 100.0
        self.group = ConsumerGroup(limits, record, self.now)
        self.answers: dict[Hashable, Any] = {}
        self.stores: deque[Store] = deque()
        self.keeps = True  # whether records are stored at once
        self.kept = record or StoredGroup()
        self._tokens = itertools.count()
        self._ids = itertools.count(1)

    def run(self) -> None:
        while effects := self.group.take():
            for effect in effects:
                if isinstance(effect, GroupAnswer):
                    assert effect.token not in self.answers, "a request is answered once"
                    self.answers[effect.token] = effect.result
                else:
                    self.stores.append(effect)
                    if self.keeps:
                        self.keep()

    def keep(self, error: ErrorCode = ErrorCode.none) -> None:
        """The first record that waits is stored, or is not."""
        store = self.stores.popleft()
        if error is ErrorCode.none:
            self.kept = store.record
        self.group.stored(store.number, error, self.now)
        self.run()

    def join(self, member_id: str = "", **changes: Any) -> int:
        token = next(self._tokens)
        ask = JoinAsk(
            member_id=member_id,
            new_id=f"m{next(self._ids)}",
            instance=None,
            client_id="client",
            client_host="/127.0.0.1",
            session=SESSION,
            rebalance=REBALANCE,
            protocol_type=CONSUMER,
            protocols=RANGE,
            requires_id=False,
        )
        self.group.join(ask._replace(**changes), token, self.now)
        self.run()
        return token

    def sync(self, joined: Joined, given: Mapping[str, bytes] | None = None, **who: Any) -> int:
        token = next(self._tokens)
        caller = Caller(joined.member_id, joined.generation)._replace(**who)
        self.group.sync(SyncAsk(caller, None, None, given or {}), token, self.now)
        self.run()
        return token

    def beat(self, joined: Joined, instance: str | None = None) -> ErrorCode:
        return self.group.heartbeat(Caller(joined.member_id, joined.generation, instance), self.now)

    def leave(self, member_id: str, instance: str | None = None) -> ErrorCode:
        error = self.group.leave(member_id, instance, self.now)
        self.run()
        return error

    def wait(self, seconds: float) -> None:
        """Time passes; what is due is done when it is."""
        end = self.now + seconds
        while self.group.due <= end:
            self.now = max(self.now, self.group.due)
            self.group.tick(self.now)
            self.run()
        self.now = end

    def gone(self, token: int) -> None:
        self.group.gone(token, self.now)
        self.run()

    def joined(self, token: int) -> Joined:
        found = self.answers[token]
        assert isinstance(found, Joined)
        return found

    def synced(self, token: int) -> Synced:
        found = self.answers[token]
        assert isinstance(found, Synced)
        return found

    def settle(self, tokens: Sequence[int]) -> list[Joined]:
        """All that joined sync; each gets an assignment that names it."""
        found = [self.joined(token) for token in tokens]
        assert {one.error for one in found} == {ErrorCode.none}
        leader = next(one for one in found if one.leader == one.member_id)
        shares = {one.member_id: f"for {one.member_id}".encode() for one in leader.members}
        waiting = [self.sync(one, shares if one is leader else None) for one in found]
        for one, token in zip(found, waiting, strict=True):
            assert self.synced(token).assignment == shares[one.member_id]
        assert self.group.state is GroupState.STABLE
        return found

    def formed(self, count: int) -> list[Joined]:
        """A stable group of so many members."""
        tokens = [self.join()]
        for _ in range(count - 1):
            before = [self.joined(token) for token in tokens]
            fresh = self.join()
            tokens = [*(self.join(one.member_id) for one in before), fresh]
        return self.settle(tokens)
