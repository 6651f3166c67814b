"""A fence of a writer whose units are sent before the acks of those before them.

Without that a writer waits for the server after every unit. Why it is safe is in `events/fence.py`:
a unit that is sent ahead is stored only directly after the one it follows. So if another client
writes to the same partition in between, it is refused, and sent again when its turn has come.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from millstream.errors import Unconfirmed
from millstream.events.fence import FenceState, chain_headers, judge_refusal
from millstream.events.fence_writer import Outcome
from millstream.events.packs.pack import EncodedPack
from millstream.events.positions import Position
from millstream.guarded import guarded_topic
from millstream.messaging.publishing.fenced_lane import FencedLane
from millstream.messaging.publishing.target import PackTarget
from millstream.wire.message import OutgoingMessage

__all__ = ["AheadLane"]

# So many units in a row must be stored side by side before one is sent ahead: where others write to
# the partition too, most of those would be sent in vain.
SIDE_BY_SIDE_MIN: Final = 4


@dataclass(frozen=True, slots=True, eq=False)
class _Unit:
    """A unit under way, and the state that the fence is expected to have after it."""

    expected: FenceState
    alone: bool  # nothing can follow it before its ack: it has no id, or several messages
    done: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class AheadLane(FencedLane):
    """Stores units in the order of the calls of `store`, which need not wait for each other."""

    def __init__(
        self, target: PackTarget, stream: str, subject: str, writer: str, max_in_flight: int
    ) -> None:
        super().__init__(target.jetstream, target.publisher, stream, subject, writer, target.acks)
        # A guard publishes again in its own order; on several nodes the server compares with what
        # is applied, and not with what is under way.
        one_server = target.replicas == 1 and guarded_topic(subject.encode()) is None
        self._max_in_flight = max_in_flight if one_server else 1
        self._under_way: deque[_Unit] = deque()
        self._side_by_side = 0  # the last so many units were stored without anything in between

    @property
    def depth(self) -> int:
        """How many units may be under way."""
        if self._side_by_side < SIDE_BY_SIDE_MIN or any(unit.alone for unit in self._under_way):
            return 1
        return min(self._max_in_flight, self._side_by_side - SIDE_BY_SIDE_MIN + 2)

    async def store(
        self,
        packs: Sequence[EncodedPack],
        position: Position,
        note: str | None = None,
        noted: Position | None = None,
        beside: Sequence[OutgoingMessage] = (),
    ) -> FenceState:
        """Store packs, all or none, and with them the position, after the units of earlier calls.

        Fails, like all calls after it, if one of those failed.
        """
        alone = bool(beside) or len(packs) > 1 or self._max_in_flight == 1
        while self._under_way and (alone or self._under_way[-1].alone):
            await asyncio.shield(self._under_way[-1].done)
        before = self._under_way[-1] if self._under_way else None
        wanted = (self.state if before is None else before.expected).next(position, note, noted)
        unit = _Unit(wanted.stored_at(wanted.sequence + 1), alone)
        self._under_way.append(unit)
        try:
            if alone:
                await super().store(packs, position, note, noted, beside)
            else:
                await self._store_in_turn(unit, wanted, packs, before)
        except BaseException as error:
            self._side_by_side = 0
            cause = error if isinstance(error, Exception) else Unconfirmed("its task was cancelled")
            unit.done.set_exception(cause)
            unit.done.exception()  # seen: it is raised here, too
            raise
        else:
            unit.done.set_result(None)
        finally:
            self._under_way.remove(unit)
        return self.state

    async def _store_in_turn(
        self, unit: _Unit, wanted: FenceState, packs: Sequence[EncodedPack], before: _Unit | None
    ) -> None:
        acks, fence = self._acks, self._fence
        if acks is not None:
            await acks.check()
        follows, turn = (None, None) if before is None else (before.expected, before.done)
        steps = fence.offer(wanted, packs, (), chain_headers(wanted, follows))
        offer = await self._run(steps, turn)
        if before is not None and not offer.is_stored and offer.state == fence.state:
            # Refused for what it expected of the units before it: they are stored, elsewhere.
            wanted = wanted.stored_at(fence.state.sequence)
            offer = await self._run(fence.offer(wanted, packs, (), chain_headers(wanted, None)))
        as_expected = offer.outcome is Outcome.STORED and offer.state == unit.expected
        self._side_by_side = self._side_by_side + 1 if as_expected else 0
        if not offer.is_stored:
            self._judge(unit, wanted, offer.state)
        if acks is not None:
            await acks.check()  # the server may be another one by now

    def _judge(self, unit: _Unit, wanted: FenceState, found: FenceState) -> None:
        """Find out what a refusal means; raises the error if the unit is not stored."""
        later = found.number > wanted.number and any(
            found == other.expected.stored_at(found.sequence) for other in self._under_way
        )
        if later:
            # Its own ack was lost. A unit that follows it is stored, so it is stored itself, and
            # that at the sequence which the other one has named.
            self._fence.state = unit.expected
        else:
            self._fence.state = judge_refusal(self._fence.writer, wanted, found)
