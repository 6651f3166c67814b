"""One group of consumers of the classic protocol, as a state machine. Pure.

A group is given what its members ask, and the time; it never waits. What is to be done is taken
from it as data (`take`): answers to requests that wait, and records to store. Members hear of a
generation, of their assignments and of a new id of a static member only after `stored` said that
the record is kept: another process that continues with the record knows all that any member knows.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Final, NamedTuple

from millstream.gateways.kafka.group_members import (
    Caller,
    ConsumerMember,
    Effect,
    GroupAnswer,
    GroupBounds,
    GroupState,
    JoinAsk,
    Joined,
    Store,
    StoredGroup,
    SyncAsk,
    Synced,
)
from millstream.gateways.kafka.group_roster import Roster
from millstream.gateways.kafka.protocol import ErrorCode

__all__ = ["ConsumerGroup"]

_GENERATION_MAX: Final = 2**31 - 1


class _Assigned(NamedTuple):
    """Assignments that the leader sent and that are being stored."""

    number: int
    assignments: Mapping[str, bytes]


class ConsumerGroup:
    """The members of a group, its generation, and who gets what."""

    def __init__(self, limits: GroupBounds, record: StoredGroup | None = None, now: float = 0.0):
        record = record or StoredGroup()
        self.limits = limits
        self.state = GroupState.EMPTY
        self.generation = record.generation
        self.protocol_type = record.protocol_type
        self.protocol = record.protocol
        self.leader = record.leader
        self.members = Roster(limits, record.members, now)
        self.due = math.inf  # `tick` has nothing to do before
        self._join_end = math.inf  # when a join that not all have answered goes on without them
        self._initial_left: float | None = None  # how much longer a first join may still take
        self._grew = False  # whether a member came while the first join waited
        self._sync_end = math.inf
        self._number = 0
        self._opening: int | None = None  # the record of a generation that is being stored
        self._assigned: _Assigned | None = None
        self._replaced: dict[int, GroupAnswer] = {}  # of static members that came back
        self._effects: list[Effect] = []
        if self.members:
            self._continue(record.stable, now)

    def _continue(self, stable: bool, now: float) -> None:
        """Go on where another process was."""
        self.state = GroupState.STABLE if stable else GroupState.COMPLETING
        if not stable:
            self._sync_end = self._by(now + self.members.rebalance_seconds)
        for member in self.members:
            member.must_sync = not stable
            self._by(member.deadline)

    # -- what it is -----------------------------------------------------------------------

    @property
    def is_unused(self) -> bool:
        """Whether it has no members, nobody was given an id, and it never had a generation."""
        empty = self.state is GroupState.EMPTY and not self.members.pending
        return empty and self.generation == 0

    def take(self) -> list[Effect]:
        """What is to be done now, in this order; each is given once."""
        effects, self._effects = self._effects, []
        return effects

    # -- joining --------------------------------------------------------------------------

    def join(self, ask: JoinAsk, token: Hashable, now: float) -> None:
        """A client joins or joins again; it is answered when all members have, or refused."""
        if self.state is GroupState.DEAD:
            error = ErrorCode.coordinator_not_available
        else:
            error = self.members.join_refusal(ask, self.protocol_type)
        if error is not ErrorCode.none:
            keeps = error is not ErrorCode.group_max_size_reached
            self._answer(token, Joined(error, ask.member_id if keeps else ""))
            return
        if not ask.member_id:
            self._join_new(ask, token, now)
        elif ask.member_id in self.members.pending:
            del self.members.pending[ask.member_id]
            self._add(ask.member_id, ask, token, now)
        else:
            self._join_again(self.members[ask.member_id], ask, token, now)

    def _join_new(self, ask: JoinAsk, token: Hashable, now: float) -> None:
        if ask.instance is not None:
            known = self.members.static(ask.instance)
            if known is None:
                self._add(ask.new_id, ask, token, now)
            else:
                self._replace(known, ask, token, now)
        elif ask.requires_id:
            # A client that dies before it knows its id would stay a member until it timed out.
            self.members.pending[ask.new_id] = self._by(now + ask.session)
            self._answer(token, Joined(ErrorCode.member_id_required, ask.new_id))
        else:
            self._add(ask.new_id, ask, token, now)

    def _add(self, member_id: str, ask: JoinAsk, token: Hashable, now: float) -> None:
        if not self.members:
            self.protocol_type = ask.protocol_type
        member = ConsumerMember.made(member_id, ask, now)
        member.join = token
        self.members.add(member)
        self._grew = True
        self._rebalance(now)

    def _join_again(
        self, member: ConsumerMember, ask: JoinAsk, token: Hashable, now: float
    ) -> None:
        same = member.protocols == ask.protocols
        if self._opening is not None and same:
            self._wait_for_join(member, token)
            return
        stays = self.state is GroupState.COMPLETING or (
            # The leader joins again when it has seen something that the group has to know.
            self.state is GroupState.STABLE and member.id != self.leader
        )
        if same and stays:  # its answer was lost
            member.deadline = self._by(now + member.session)
            self._answer(token, self._joined(member))
            return
        member.take(ask)
        self._wait_for_join(member, token)
        self._rebalance(now)

    def _wait_for_join(self, member: ConsumerMember, token: Hashable) -> None:
        if member.join is not None:
            self._answer(member.join, Joined(ErrorCode.rebalance_in_progress, member.id))
        member.join = token

    def _replace(self, old: ConsumerMember, ask: JoinAsk, token: Hashable, now: float) -> None:
        """A static member was started again: it takes the old one's position under a new id."""
        self._refuse(old, ErrorCode.fenced_instance_id)
        member = ConsumerMember.made(ask.new_id, ask, now)
        member.assignment, member.must_sync = old.assignment, old.must_sync
        self._by(member.deadline)
        self.members.replace(old, member)
        leader_before = self.leader
        if self.leader == old.id:
            self.leader = member.id
        stays = self.members.may_stay(old, member, self.protocol_type, self.protocol)
        if self.state is GroupState.STABLE and stays:
            # Unless it can be asked to assign nothing, it must not think that it is the leader.
            leads = ask.may_skip and self.leader == member.id
            joined = self._joined(member)._replace(
                leader=(self.leader if ask.may_skip else leader_before) or "",
                members=self.members.seen(self.protocol) if leads else (),
                skip=leads,
            )
            self._replaced[self._store(stable=True)] = GroupAnswer(token, joined)
            return
        member.join = token
        self._rebalance(now)

    # -- a new generation -----------------------------------------------------------------

    def _rebalance(self, now: float) -> None:
        """Let all members join again, or go on if all have."""
        if self.state in (GroupState.STABLE, GroupState.COMPLETING, GroupState.EMPTY):
            self._end_generation(ErrorCode.rebalance_in_progress, now)
            first = self.state is GroupState.EMPTY
            self.state = GroupState.PREPARING
            seconds = self.members.rebalance_seconds
            if first and self.limits.initial_delay > 0:
                delay = min(self.limits.initial_delay, seconds)
                self._initial_left, self._grew = seconds - delay, False
                self._join_end = self._by(now + delay)
                return
            self._join_end = self._by(now + seconds)
        self._complete_if_all_joined(now)

    def _end_generation(self, error: ErrorCode, now: float) -> None:
        """Nothing of the generation that was under way counts any more."""
        self._opening, self._assigned, self._sync_end = None, None, math.inf
        completing = self.state is GroupState.COMPLETING
        for member in self.members:
            member.must_sync = False
            if completing:
                member.assignment = b""
            if member.sync is not None:
                self._answer(member.sync, Synced(error))
                member.sync = None
                member.deadline = self._by(now + member.session)

    def _complete_if_all_joined(self, now: float) -> None:
        if self.state is not GroupState.PREPARING or self._initial_left is not None:
            return
        if self.members.all_joined:
            self._complete_join(now)

    def _complete_join(self, now: float) -> None:
        """Begin a generation with those that joined; static members need not have."""
        self._join_end, self._initial_left = math.inf, None
        for member in self.members:
            if member.join is None and member.instance is None:
                self._forget(member)
        joined = [member for member in self.members if member.join is not None]
        if self.members and not joined:
            # Static members only, all of them away: until they come back or time out.
            self._join_end = self._by(now + self.members.rebalance_seconds)
            return
        if not self.members:
            self.state, self.protocol, self.leader = GroupState.EMPTY, None, None
            if self.generation:  # else nobody knows of it
                self._next_generation()
                self._store(stable=False)
            return
        self._next_generation()
        self.state = GroupState.COMPLETING
        if all(member.id != self.leader for member in joined):
            self.leader = joined[0].id
        self.protocol = self.members.vote()
        for member in joined:
            member.must_sync = True
        self._opening = self._store(stable=False)

    def _next_generation(self) -> None:
        self.generation = self.generation % _GENERATION_MAX + 1

    def _opened(self, now: float) -> None:
        """The generation is stored: its members may know of it."""
        self._opening = None
        self._sync_end = self._by(now + self.members.rebalance_seconds)
        for member in self.members:
            if member.join is not None:
                self._answer(member.join, self._joined(member))
                member.join, member.knows_id = None, True
                member.deadline = self._by(now + member.session)

    def _joined(self, member: ConsumerMember) -> Joined:
        leads = member.id == self.leader
        return Joined(
            ErrorCode.none,
            member.id,
            self.generation,
            self.protocol_type,
            self.protocol,
            self.leader or "",
            self.members.seen(self.protocol) if leads else (),
        )

    # -- assignments ----------------------------------------------------------------------

    def sync(self, ask: SyncAsk, token: Hashable, now: float) -> None:
        """A member asks for its assignment; answered when the leader's are stored, or refused."""
        error = self._sync_refusal(ask)
        if error is not ErrorCode.none:
            self._answer(token, Synced(error))
            return
        member = self.members[ask.who.member_id]
        member.deadline = self._by(now + member.session)
        member.must_sync = False
        if self.state is GroupState.STABLE:
            self._answer(token, self._synced(member))
            return
        if member.sync is not None:
            self._answer(member.sync, Synced(ErrorCode.rebalance_in_progress))
        member.sync = token
        if member.id == self.leader and self._assigned is None:
            size = sum(map(len, ask.assignments.values()))
            if size > self.limits.max_group_bytes:
                member.sync = None
                self._answer(token, Synced(ErrorCode.message_too_large))
                return
            number = self._store(stable=True, assignments=ask.assignments)
            self._assigned = _Assigned(number, ask.assignments)

    def _sync_refusal(self, ask: SyncAsk) -> ErrorCode:
        error = self._call_refusal(ask.who)
        if error is not ErrorCode.none:
            return error
        if ask.protocol_type not in (None, self.protocol_type):
            return ErrorCode.inconsistent_group_protocol
        if ask.protocol is not None and self.protocol not in (None, ask.protocol):
            return ErrorCode.inconsistent_group_protocol
        preparing = self.state is GroupState.PREPARING
        return ErrorCode.rebalance_in_progress if preparing else ErrorCode.none

    def _synced(self, member: ConsumerMember) -> Synced:
        return Synced(ErrorCode.none, self.protocol_type, self.protocol, member.assignment)

    def _settle(self, assignments: Mapping[str, bytes], now: float) -> None:
        """The assignments are stored: members get them."""
        self._assigned = None
        self.state = GroupState.STABLE
        for member in self.members:
            member.assignment = assignments.get(member.id, b"")
            if member.sync is not None:
                self._answer(member.sync, self._synced(member))
                member.sync = None
                member.deadline = self._by(now + member.session)

    # -- other calls of members -----------------------------------------------------------

    def _call_refusal(self, who: Caller) -> ErrorCode:
        if self.state is GroupState.DEAD:
            return ErrorCode.coordinator_not_available
        error = self.members.unknown(who)
        if error is not ErrorCode.none:
            return error
        if self._opening is not None:  # nobody can know the generation yet
            return ErrorCode.rebalance_in_progress
        same = who.generation == self.generation
        return ErrorCode.none if same else ErrorCode.illegal_generation

    def heartbeat(self, who: Caller, now: float) -> ErrorCode:
        """A member is alive; it learns if it has to join again."""
        error = self._call_refusal(who)
        if error is not ErrorCode.none:
            return error
        member = self.members[who.member_id]
        member.deadline = self._by(now + member.session)
        if self.state is GroupState.PREPARING:
            return ErrorCode.rebalance_in_progress
        return ErrorCode.none

    def commit_refusal(self, who: Caller, now: float) -> ErrorCode:
        """Why offsets are not accepted from a caller; `none` if they are."""
        if self.state is GroupState.DEAD:
            return ErrorCode.coordinator_not_available
        if who.generation < 0 and self.state is GroupState.EMPTY:
            return ErrorCode.none  # an admin, or a consumer that manages its partitions itself
        error = self._call_refusal(who)
        if error is not ErrorCode.none:
            return error
        member = self.members[who.member_id]
        member.deadline = self._by(now + member.session)
        if self.state is GroupState.COMPLETING:
            return ErrorCode.rebalance_in_progress
        return ErrorCode.none

    def committing(self, who: Caller, change: int, now: float) -> None:
        """A commit that was accepted is being stored (1), or that has ended (-1)."""
        self.members.commits(who.member_id, change, now)
        self.due = min(self.due, now)  # the next `tick` finds out when it is due

    def leave(self, member_id: str, instance: str | None, now: float) -> ErrorCode:
        """A member leaves, or an admin removes a static one by its name."""
        if self.state is GroupState.DEAD:
            return ErrorCode.coordinator_not_available
        if instance is not None and not member_id:
            known = self.members.static(instance)
            member_id = "" if known is None else known.id
        if self.members.pending.pop(member_id, None) is not None:
            self._complete_if_all_joined(now)
            return ErrorCode.none
        error = self.members.unknown(Caller(member_id, -1, instance))
        if error is ErrorCode.none:
            self._remove([self.members[member_id]], now)
        return error

    # -- what happens ---------------------------------------------------------------------

    def gone(self, token: Hashable, now: float) -> None:
        """The connection of a request that waited is lost."""
        for member in self.members:
            if token in (member.join, member.sync):
                member.join = None if member.join == token else member.join
                member.sync = None if member.sync == token else member.sync
                member.deadline = self._by(now + member.session)
                if not member.knows_id and member.instance is None:
                    self._remove([member], now)
                return

    def stored(self, number: int, error: ErrorCode, now: float) -> None:
        """A record that was to be stored is, or `error` says what its members are answered."""
        if self.state is GroupState.DEAD:
            return
        failed = error is not ErrorCode.none
        replaced = self._replaced.pop(number, None)
        if replaced is not None:
            self._answer(replaced.token, Joined(error, "") if failed else replaced.result)
        elif number == self._opening:
            if not failed:
                self._opened(now)
                return
            for member in self.members:
                if member.join is not None:
                    self._answer(member.join, Joined(error, member.id))
                    member.join, member.knows_id = None, True
                    member.deadline = self._by(now + member.session)
            self._rebalance(now)
        elif self._assigned is not None and number == self._assigned.number:
            if not failed:
                self._settle(self._assigned.assignments, now)
                return
            self._end_generation(error, now)
            self._rebalance(now)

    def tick(self, now: float) -> None:
        """Do what is due: members and joins time out."""
        pending = self.members.pending
        for member_id in [one for one, end in pending.items() if end <= now]:
            del pending[member_id]
        silent = [one for one in self.members if one.deadline <= now and not one.waits]
        self._remove(silent, now)
        if self._join_end <= now:
            if self._initial_left and (self._grew or pending):
                delay = min(self.limits.initial_delay, self._initial_left)
                self._initial_left, self._grew = self._initial_left - delay, False
                self._join_end = now + delay
            else:
                self._complete_join(now)
        if self._sync_end <= now:
            self._sync_end = math.inf
            self._remove([one for one in self.members if one.must_sync], now)
        self._complete_if_all_joined(now)
        ends = (member.deadline for member in self.members if not member.waits)
        self.due = min(self._join_end, self._sync_end, *pending.values(), *ends)

    def shift(self, seconds: float) -> None:
        """This process was paused: nobody is blamed for that time."""
        self.members.shift(seconds)
        self._join_end += seconds
        self._sync_end += seconds
        self.due += seconds

    def close(self, error: ErrorCode) -> None:
        """Answer all that wait: the group is deleted, or another process has it."""
        self.state, self.due = GroupState.DEAD, math.inf
        for member in self.members:
            self._refuse(member, error)
        for replaced in self._replaced.values():
            self._answer(replaced.token, Joined(error, ""))
        self._replaced.clear()

    def reopen(self) -> None:
        """It could not be deleted."""
        self.state, self.due = GroupState.EMPTY, 0.0

    # -- parts ----------------------------------------------------------------------------

    def _remove(self, members: list[ConsumerMember], now: float) -> None:
        for member in members:
            self._refuse(member, ErrorCode.unknown_member_id)
            self._forget(member)
        if members:
            self._rebalance(now)

    def _forget(self, member: ConsumerMember) -> None:
        self.members.remove(member)
        if self.leader == member.id:
            self.leader = None

    def _refuse(self, member: ConsumerMember, error: ErrorCode) -> None:
        if member.join is not None:
            self._answer(member.join, Joined(error, ""))
        if member.sync is not None:
            self._answer(member.sync, Synced(error))
        member.join = member.sync = None

    def _answer(self, token: Hashable, result: Joined | Synced) -> None:
        self._effects.append(GroupAnswer(token, result))

    def _store(self, *, stable: bool, assignments: Mapping[str, bytes] | None = None) -> int:
        self._number += 1
        record = StoredGroup(
            self.generation,
            self.protocol_type,
            self.protocol,
            self.leader,
            stable,
            self.members.records(assignments),
        )
        self._effects.append(Store(self._number, record))
        return self._number

    def _by(self, end: float) -> float:
        self.due = min(self.due, end)
        return end
