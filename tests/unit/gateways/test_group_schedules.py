"""Members that come, go, ask and die at any time: their group always recovers."""

from __future__ import annotations

import random

import pytest

from millstream.gateways.kafka.group_members import GroupBounds, GroupState, Joined
from millstream.gateways.kafka.protocol import ErrorCode
from tests.unit.gateways.group_sim import Sim


class Person:
    """A client: it knows what it was answered, and does what clients do, at any time."""

    def __init__(self, sim: Sim, instance: str | None, chance: random.Random) -> None:
        self.sim, self.instance, self.chance = sim, instance, chance
        self.member_id = ""
        self.joining: int | None = None
        self.syncing: int | None = None
        self.joined: Joined | None = None
        self.share: tuple[int, bytes] | None = None  # of a generation

    def step(self) -> None:
        self.hear()
        if self.joining is not None or self.syncing is not None:
            if self.chance.random() < 0.05:  # its connection is lost
                self.sim.gone((self.joining or 0) if self.syncing is None else self.syncing)
                self.joining = self.syncing = self.joined = self.share = None
        elif self.joined is None:
            needs = self.instance is None and self.chance.random() < 0.7
            self.joining = self.sim.join(self.member_id, instance=self.instance, requires_id=needs)
        elif self.share is None:
            shares = {one.member_id: one.member_id.encode() for one in self.joined.members}
            self.syncing = self.sim.sync(self.joined, shares, instance=self.instance)
        elif self.chance.random() < 0.1:
            self.sim.leave(self.member_id, self.instance)
            self.member_id, self.joined, self.share = "", None, None
        elif self.sim.beat(self.joined, self.instance) is not ErrorCode.none:
            self.joined = self.share = None
            if self.chance.random() < 0.5:
                self.member_id = ""  # it was started again

    def hear(self) -> None:
        if self.joining is not None and self.joining in self.sim.answers:
            found = self.sim.joined(self.joining)
            self.joining = None
            self.member_id = found.member_id
            if found.error is ErrorCode.none:
                self.joined = found
            elif found.error is not ErrorCode.member_id_required:
                self.member_id = ""
        if self.syncing is not None and self.syncing in self.sim.answers:
            synced = self.sim.synced(self.syncing)
            self.syncing = None
            if synced.error is ErrorCode.none and self.joined is not None:
                self.share = (self.joined.generation, synced.assignment)
            else:
                self.joined = None


def check(sim: Sim, seen: dict[int, str]) -> None:
    """What holds at any time."""
    group = sim.group
    members = list(group.members)
    assert (group.state is GroupState.EMPTY) <= (not members)
    if group.state in (GroupState.STABLE, GroupState.COMPLETING):
        assert members
        assert group.leader in {member.id for member in members}
        # One generation has one leader, also after another process continued.
        assert group.leader is not None
    if group.state is GroupState.STABLE:
        known = seen.setdefault(group.generation, ",".join(sorted(m.id for m in members)))
        statics = [member for member in members if member.instance is not None]
        assert statics or known == ",".join(sorted(m.id for m in members))
    assert all(member.join is None for member in members) or group.state in (
        GroupState.PREPARING,
        GroupState.COMPLETING,
    )
    ends = [member.deadline for member in members if not member.waits]
    assert group.due <= min([*ends, *group.members.pending.values()], default=float("inf"))


@pytest.mark.parametrize("seed", range(60))
def test_any_schedule_ends_with_a_stable_group(seed: int) -> None:
    chance = random.Random(seed)
    delay = chance.choice([0.0, 0.5])
    sim = Sim(GroupBounds(initial_delay=delay))
    people = [
        Person(sim, f"s{number}" if chance.random() < 0.4 else None, chance)
        for number in range(chance.randint(1, 5))
    ]
    seen: dict[int, str] = {}
    generation = 0
    for _ in range(300):
        sim.keeps = chance.random() < 0.8
        while sim.keeps and sim.stores:
            bad = chance.random() < 0.1
            sim.keep(ErrorCode.coordinator_not_available if bad else ErrorCode.none)
        chance.choice(people).step()
        if chance.random() < 0.3:
            sim.wait(chance.choice([0.1, 1.0, 4.0]))
        check(sim, seen)
        assert sim.group.generation >= generation
        generation = sim.group.generation
    calm = random.Random()
    calm.random = lambda: 0.6  # type: ignore[method-assign]
    sim.keeps = True
    for _ in range(500):
        while sim.stores:
            sim.keep()
        for person in people:
            person.chance = calm
            person.step()
        sim.wait(0.4)
        check(sim, seen)
        shares = [one.share for one in people]
        if all(shares) and len({one[0] for one in shares if one is not None}) == 1:
            break
    assert sim.group.state is GroupState.STABLE
    assert len(sim.group.members) == len(people)
    assert len({one.share for one in people}) == len(people)  # nothing is assigned twice
