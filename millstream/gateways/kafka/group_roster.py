"""Who is in a group: its members, names of static ones, and ids that were given out. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from millstream.gateways.kafka.group_members import (
    CONSUMER,
    Caller,
    ConsumerMember,
    GroupBounds,
    JoinAsk,
    JoinedMember,
    StoredMember,
    common_protocols,
    join_refusal,
    same_topics,
    subscription_of,
    voted_protocol,
)
from millstream.gateways.kafka.protocol import ErrorCode

__all__ = ["Roster"]


class Roster:
    """The members of a group, in the order in which they came."""

    def __init__(self, limits: GroupBounds, records: list[StoredMember], now: float) -> None:
        self.pending: dict[str, float] = {}  # ids given to clients that are to join with them
        self._limits = limits
        self._members = {one.id: ConsumerMember.restored(one, now) for one in records}
        self._statics = {m.instance: m.id for m in self if m.instance is not None}

    def __iter__(self) -> Iterator[ConsumerMember]:
        """All members; they may be removed meanwhile."""
        return iter(list(self._members.values()))

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, member_id: str) -> ConsumerMember:
        return self._members[member_id]

    def commits(self, member_id: str, change: int, now: float) -> None:
        """A commit of a member is being stored (1), or that has ended (-1).

        A client sends nothing else meanwhile: a broker that is away must not cost it its session.
        """
        member = self._members.get(member_id)
        if member is not None:
            member.commits = max(0, member.commits + change)
            member.deadline = now + member.session

    def static(self, instance: str) -> ConsumerMember | None:
        """The static member of this name."""
        return self._members.get(self._statics.get(instance, ""))

    # -- what it is -----------------------------------------------------------------------

    @property
    def rebalance_seconds(self) -> float:
        """How long members may take to join again."""
        return max((member.rebalance for member in self._members.values()), default=0.0)

    @property
    def all_joined(self) -> bool:
        """Whether all members wait for the next generation, and nobody is about to join."""
        return not self.pending and all(one.join is not None for one in self._members.values())

    def vote(self) -> str:
        """The protocol that the members choose."""
        return voted_protocol(list(self._members.values()))

    def seen(self, protocol: str | None) -> tuple[JoinedMember, ...]:
        """The members, as the leader sees them."""
        return tuple(
            JoinedMember(one.id, one.instance, one.metadata(protocol))
            for one in self._members.values()
        )

    def records(self, assignments: Mapping[str, bytes] | None) -> list[StoredMember]:
        """The members, to be stored; with other assignments than they have, if given."""
        return [
            one.record(one.assignment if assignments is None else assignments.get(one.id, b""))
            for one in self._members.values()
        ]

    def subscribed(self) -> frozenset[str] | None:
        """The topics that members read; None: that cannot be known."""
        topics: frozenset[str] = frozenset()
        for member in self._members.values():
            for protocol in member.protocols:
                found = subscription_of(protocol.metadata)
                if found is None:
                    return None
                topics |= found
        return topics

    # -- what is refused ------------------------------------------------------------------

    def unknown(self, who: Caller) -> ErrorCode:
        """Why a caller is no member; `none` if it is one."""
        if who.instance is not None:
            known = self._statics.get(who.instance)
            if known is None:
                return ErrorCode.unknown_member_id
            if known != who.member_id:
                return ErrorCode.fenced_instance_id
        known_id = who.member_id in self._members
        return ErrorCode.none if known_id else ErrorCode.unknown_member_id

    def join_refusal(self, ask: JoinAsk, protocol_type: str) -> ErrorCode:
        """Why a client cannot join; `none` if it can."""
        error = join_refusal(ask, self._limits)
        if error is not ErrorCode.none:
            return error
        if not self._has_room(ask):
            return ErrorCode.group_max_size_reached
        if self._members:
            names = {protocol.name for protocol in ask.protocols}
            common = common_protocols(self._members.values())
            if ask.protocol_type != protocol_type or not names & common:
                return ErrorCode.inconsistent_group_protocol
        if not ask.member_id or (ask.member_id in self.pending and ask.instance is None):
            return ErrorCode.none
        return self.unknown(Caller(ask.member_id, -1, ask.instance))

    def _has_room(self, ask: JoinAsk) -> bool:
        known = self._members.get(ask.member_id or self._statics.get(ask.instance or "", ""))
        size = sum(one.size for one in self._members.values() if one is not known)
        if size + sum(len(one.metadata) for one in ask.protocols) > self._limits.max_group_bytes:
            return False
        if known is not None:
            return True
        expected = len(self.pending) - (ask.member_id in self.pending)
        return len(self._members) + expected < self._limits.max_members

    # -- who comes and goes ---------------------------------------------------------------

    def add(self, member: ConsumerMember) -> None:
        """A new member."""
        self._members[member.id] = member
        if member.instance is not None:
            self._statics[member.instance] = member.id

    def replace(self, old: ConsumerMember, new: ConsumerMember) -> None:
        """A static member has another id; its position in the order stays."""
        order = [new if one is old else one for one in self._members.values()]
        self._members = {one.id: one for one in order}
        if new.instance is not None:
            self._statics[new.instance] = new.id

    def may_stay(
        self, old: ConsumerMember, new: ConsumerMember, kind: str, protocol: str | None
    ) -> bool:
        """Whether the others need not know that a static member was replaced."""
        if self.vote() != protocol:
            return False
        return kind != CONSUMER or same_topics(old.protocols, new.protocols)

    def remove(self, member: ConsumerMember) -> None:
        """It is no member any more."""
        del self._members[member.id]
        if member.instance is not None:
            del self._statics[member.instance]

    def shift(self, seconds: float) -> None:
        """All have this much more time."""
        for member in self._members.values():
            member.deadline += seconds
        for member_id in self.pending:
            self.pending[member_id] += seconds
