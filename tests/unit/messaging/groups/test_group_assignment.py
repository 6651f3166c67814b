"""Shares of partitions and signs of life: pure decisions of a group."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.deadline import lease_clock
from millstream.messaging.groups.assignment import Lease, Liveness, assign

MEMBERS = st.lists(st.sampled_from("abcdefgh"), min_size=1, unique=True)
OWNERS = st.dictionaries(st.integers(0, 15), st.sampled_from("abcdefghxyz"))


@given(count=st.integers(0, 16), members=MEMBERS, owners=OWNERS)
def test_every_partition_has_one_member_and_shares_differ_by_one_at_most(
    count: int, members: list[str], owners: dict[int, str]
) -> None:
    wanted = assign(range(count), members, owners)
    assert list(wanted) == list(range(count))
    sizes = [Counter(wanted.values())[member] for member in members]
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= 1


@given(count=st.integers(0, 16), members=MEMBERS, owners=OWNERS)
def test_a_member_gives_up_only_what_is_above_its_share(
    count: int, members: list[str], owners: dict[int, str]
) -> None:
    owners = {number: owner for number, owner in owners.items() if number < count}
    wanted = assign(range(count), members, owners)
    for member in members:
        had = {number for number, owner in owners.items() if owner == member}
        has = {number for number, owner in wanted.items() if owner == member}
        assert has <= had or had <= has, "it both gave and got"


@given(count=st.integers(0, 16), members=MEMBERS, owners=OWNERS)
def test_a_balanced_group_stays_as_it_is_for_every_member(
    count: int, members: list[str], owners: dict[int, str]
) -> None:
    wanted = assign(range(count), members, owners)
    assert assign(range(count), list(reversed(members)), wanted) == wanted


def test_one_more_member_moves_no_more_than_its_share() -> None:
    before = assign(range(12), list("abc"), {})
    after = assign(range(12), list("abcd"), before)
    moved = [number for number in before if before[number] != after[number]]
    assert len(moved) == 3
    assert {after[number] for number in moved} == {"d"}


def test_an_empty_group_has_no_assignments() -> None:
    assert assign(range(4), [], {0: "a"}) == {}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_lease_lasts_two_thirds_from_when_its_renewal_was_sent() -> None:
    clock = Clock()
    lease = Lease(9.0, clock)
    assert [lease.valid] == [False]
    sent = clock.now
    clock.now += 2
    lease.renewed(sent)
    assert lease.left() == 4.0
    clock.now += 3.9
    assert [lease.valid] == [True]
    clock.now += 0.1
    assert [lease.valid] == [False]
    assert lease.left() == 0.0


def test_an_older_renewal_that_arrives_late_does_not_shorten_the_lease() -> None:
    clock = Clock()
    lease = Lease(9.0, clock)
    lease.renewed(100.0)
    lease.renewed(99.0)
    assert lease.left() == 6.0


def test_the_lease_clock_keeps_counting() -> None:
    assert lease_clock() <= lease_clock()


def looks(liveness: Liveness, times: list[float], revision: int = 7, lease: float = 4.0) -> None:
    for time in times:
        liveness.look({"a": (revision, lease)}, time)


def test_a_member_is_dead_when_its_record_did_not_change_for_its_lease() -> None:
    liveness = Liveness()
    looks(liveness, [0.0, 1.0, 2.0, 3.0, 3.9])
    assert liveness.dead() == []
    looks(liveness, [4.0])
    assert liveness.dead() == [("a", 7)]


def test_a_renewed_record_is_a_sign_of_life() -> None:
    liveness = Liveness()
    looks(liveness, [0.0, 1.0, 2.0, 3.0])
    looks(liveness, [4.0, 5.0, 6.0, 7.0], revision=8)
    assert liveness.dead() == []


def test_a_member_that_could_not_read_for_a_while_counts_from_scratch() -> None:
    liveness = Liveness()
    looks(liveness, [0.0, 1.0, 9.0])
    assert liveness.dead() == []
    looks(liveness, [10.0, 11.0, 12.0, 13.0])
    assert liveness.dead() == [("a", 7)]


def test_a_member_that_left_is_forgotten() -> None:
    liveness = Liveness()
    looks(liveness, [0.0, 2.0])
    liveness.look({}, 3.0)
    looks(liveness, [4.0])
    assert liveness.dead() == []


@pytest.mark.parametrize("lease", [1.0, 30.0])
def test_each_member_is_judged_by_its_own_lease(lease: float) -> None:
    liveness = Liveness()
    time = 0.0
    while time < lease:
        looks(liveness, [time], lease=lease)
        assert liveness.dead() == []
        time += lease / 4
    looks(liveness, [lease], lease=lease)
    assert liveness.dead() == [("a", 7)]
