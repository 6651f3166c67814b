"""A group of consumers as a state machine: who is answered what, and when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.gateways.kafka.group_members import (
    Caller,
    GroupBounds,
    GroupState,
    PauseWatch,
    Protocol,
    same_topics,
    subscription_of,
)
from millstream.gateways.kafka.protocol import ErrorCode
from tests.unit.gateways.group_sim import RANGE, REBALANCE, SESSION, Sim, subscription


@pytest.fixture
def sim() -> Sim:
    return Sim()


# -- joining ------------------------------------------------------------------------------


def test_the_first_member_leads_and_gets_what_it_assigned(sim: Sim) -> None:
    joined = sim.joined(sim.join())
    assert (joined.generation, joined.protocol, joined.leader) == (1, "range", joined.member_id)
    assert [one.member_id for one in joined.members] == [joined.member_id]
    synced = sim.synced(sim.sync(joined, {joined.member_id: b"all"}))
    assert (synced.error, synced.assignment) == (ErrorCode.none, b"all")
    assert sim.group.state is GroupState.STABLE


def test_a_second_member_makes_all_join_again(sim: Sim) -> None:
    (first,) = sim.formed(1)
    second = sim.join()
    assert second not in sim.answers
    assert sim.beat(first) is ErrorCode.rebalance_in_progress
    again = sim.join(first.member_id)
    one, two = sim.settle([again, second])
    assert (one.generation, two.generation) == (2, 2)
    assert [len(one.members), len(two.members)] == [2, 0]


def test_followers_wait_for_the_leaders_assignment(sim: Sim) -> None:
    tokens = [sim.join()]
    tokens = [sim.join(), sim.join(sim.joined(tokens[0]).member_id)]
    follower, leader = (sim.joined(token) for token in tokens)
    waiting = sim.sync(follower)
    assert waiting not in sim.answers
    sim.sync(leader, {follower.member_id: b"f"})
    assert sim.synced(waiting).assignment == b"f"


def test_a_member_of_a_newer_client_joins_with_the_id_that_it_was_given(sim: Sim) -> None:
    token = sim.join(requires_id=True)
    found = sim.joined(token)
    assert (found.error, found.member_id) == (ErrorCode.member_id_required, "m1")
    assert not sim.group.members
    assert sim.joined(sim.join("m1")).error is ErrorCode.none


def test_a_client_that_does_not_come_back_with_its_id_is_forgotten(sim: Sim) -> None:
    sim.join(requires_id=True)
    assert not sim.group.is_unused
    sim.wait(SESSION)
    assert sim.group.is_unused


def test_a_rebalance_waits_for_clients_that_were_given_an_id(sim: Sim) -> None:
    (first,) = sim.formed(1)
    pending = sim.joined(sim.join(requires_id=True)).member_id
    again = sim.join(first.member_id)  # the leader joins again
    assert again not in sim.answers
    second = sim.join(pending)
    sim.settle([again, second])


def test_members_that_start_together_are_together_from_the_first_generation() -> None:
    sim = Sim(GroupBounds(initial_delay=0.2))
    tokens = [sim.join()]
    sim.wait(0.15)
    tokens.append(sim.join())
    sim.wait(0.1)
    assert not sim.answers  # the second one extended the wait
    sim.wait(0.2)
    assert [one.generation for one in sim.settle(tokens)] == [1, 1]


def test_the_wait_for_the_first_members_ends(sim: Sim) -> None:
    sim = Sim(GroupBounds(initial_delay=0.2))
    tokens = []
    for _ in range(20):
        tokens.append(sim.join(rebalance=1.0))
        sim.wait(0.1)
    assert sim.joined(tokens[0]).generation == 1


def test_the_leader_can_make_all_join_again_and_others_cannot(sim: Sim) -> None:
    leader, follower = sim.formed(2)
    same = sim.joined(sim.join(follower.member_id))
    assert (same.error, same.generation) == (ErrorCode.none, follower.generation)
    assert sim.group.state is GroupState.STABLE
    sim.join(leader.member_id)
    assert sim.beat(follower) is ErrorCode.rebalance_in_progress


def test_a_follower_that_reads_other_topics_makes_all_join_again(sim: Sim) -> None:
    leader, follower = sim.formed(2)
    sim.join(follower.member_id, protocols=(Protocol("range", subscription("other")),))
    assert sim.beat(leader) is ErrorCode.rebalance_in_progress


def test_a_member_whose_join_was_not_answered_can_ask_again(sim: Sim) -> None:
    joined = sim.joined(sim.join())
    again = sim.joined(sim.join(joined.member_id))
    assert again == joined


def test_the_protocol_is_the_one_that_most_prefer_of_those_all_know(sim: Sim) -> None:
    sticky, ranged = Protocol("sticky", b"s"), Protocol("range", b"r")
    only = Protocol("only", b"o")
    first = sim.joined(sim.join(protocols=(only, sticky, ranged))).member_id
    second = sim.join(protocols=(ranged, sticky))
    third = sim.join(protocols=(sticky, ranged))
    tokens = [sim.join(first, protocols=(only, sticky, ranged)), second, third]
    found = sim.settle(tokens)
    assert {one.protocol for one in found} == {"sticky"}
    assert {one.metadata for one in found[0].members} == {b"s"}


def test_a_member_without_a_common_protocol_is_refused(sim: Sim) -> None:
    sim.formed(1)
    wrong = ErrorCode.inconsistent_group_protocol
    assert sim.joined(sim.join(protocols=(Protocol("other", b""),))).error is wrong
    assert sim.joined(sim.join(protocol_type="connect")).error is wrong
    assert sim.joined(sim.join(protocols=())).error is wrong
    assert sim.group.state is GroupState.STABLE


@pytest.mark.parametrize("seconds", [5.9, 1801.0])
def test_a_session_that_is_too_short_or_too_long_is_refused(sim: Sim, seconds: float) -> None:
    assert sim.joined(sim.join(session=seconds)).error is ErrorCode.invalid_session_timeout


def test_an_id_that_nobody_has_is_unknown(sim: Sim) -> None:
    sim.formed(1)
    assert sim.joined(sim.join("nobody")).error is ErrorCode.unknown_member_id


def test_a_group_has_no_more_members_and_bytes_than_allowed() -> None:
    full = ErrorCode.group_max_size_reached
    sim = Sim(GroupBounds(initial_delay=0, max_members=2))
    one, _ = sim.formed(2)
    assert sim.joined(sim.join()).error is full
    assert sim.joined(sim.join(requires_id=True)).error is full
    assert sim.group.state is GroupState.STABLE
    assert sim.beat(one) is ErrorCode.none
    sim = Sim(GroupBounds(initial_delay=0, max_group_bytes=1000))
    assert sim.joined(sim.join(protocols=(Protocol("range", b"x" * 1001),))).error is full
    assert sim.joined(sim.join(protocols=(Protocol("range", b"x" * 900),))).error is ErrorCode.none
    assert sim.joined(sim.join(protocols=(Protocol("range", b"x" * 200),))).error is full
    sim = Sim(GroupBounds(initial_delay=0, max_member_bytes=10))
    assert sim.joined(sim.join()).error is ErrorCode.invalid_request


def test_assignments_that_are_too_large_are_refused() -> None:
    sim = Sim(GroupBounds(initial_delay=0, max_group_bytes=100))
    joined = sim.joined(sim.join())
    synced = sim.synced(sim.sync(joined, {joined.member_id: b"x" * 101}))
    assert synced.error is ErrorCode.message_too_large


# -- leaving, dying -----------------------------------------------------------------------


def test_when_a_member_leaves_the_others_join_again(sim: Sim) -> None:
    one, two = sim.formed(2)
    assert sim.leave(two.member_id) is ErrorCode.none
    assert sim.leave(two.member_id) is ErrorCode.unknown_member_id
    assert sim.beat(one) is ErrorCode.rebalance_in_progress
    (joined,) = sim.settle([sim.join(one.member_id)])
    assert joined.generation == 3
    assert sim.leave(one.member_id) is ErrorCode.none
    assert sim.group.state is GroupState.EMPTY
    assert (sim.kept.members, sim.kept.generation) == ([], 4)


def test_a_member_that_is_silent_is_removed_after_its_session(sim: Sim) -> None:
    one, two = sim.formed(2)
    sim.wait(SESSION - 1)
    assert sim.beat(one) is ErrorCode.none
    sim.wait(1.5)
    assert sim.beat(one) is ErrorCode.rebalance_in_progress
    assert sim.beat(two) is ErrorCode.unknown_member_id
    (joined,) = sim.settle([sim.join(one.member_id)])
    assert [member.member_id for member in joined.members] == [one.member_id]


def test_a_member_whose_commit_is_being_stored_keeps_its_session(sim: Sim) -> None:
    (one,) = sim.formed(1)
    caller = Caller(one.member_id, one.generation, None)
    assert sim.group.commit_refusal(caller, sim.now) is ErrorCode.none
    sim.group.committing(caller, 1, sim.now)
    sim.wait(3 * SESSION)
    sim.group.committing(caller, -1, sim.now)
    sim.wait(SESSION - 1)
    assert sim.beat(one) is ErrorCode.none
    sim.wait(SESSION + 1)
    assert sim.beat(one) is ErrorCode.unknown_member_id


def test_members_that_do_not_join_again_in_time_are_removed(sim: Sim) -> None:
    one, two = sim.formed(2)
    third = sim.join()
    again = sim.join(one.member_id)
    for _ in range(int(REBALANCE)):
        sim.wait(1)
        sim.beat(two)  # it is alive, and busy
    sim.settle([again, third])
    assert sim.beat(two) is ErrorCode.unknown_member_id


def test_members_that_do_not_ask_for_their_assignment_are_removed(sim: Sim) -> None:
    one, two = sim.formed(2)
    tokens = [sim.join(one.member_id), sim.join(two.member_id)]
    leader, follower = (sim.joined(token) for token in tokens)
    sim.sync(leader, {})
    for _ in range(int(REBALANCE)):
        sim.wait(1)
        sim.beat(leader)
        sim.beat(follower)
    assert sim.beat(follower) is ErrorCode.unknown_member_id
    assert sim.beat(leader) is ErrorCode.rebalance_in_progress


def test_a_leader_that_dies_before_it_assigns_does_not_stop_the_group(sim: Sim) -> None:
    one, two = sim.formed(2)
    tokens = [sim.join(one.member_id), sim.join(two.member_id)]
    follower = sim.joined(tokens[1])
    waiting = sim.sync(follower)
    sim.wait(SESSION)
    assert sim.synced(waiting).error is ErrorCode.rebalance_in_progress
    (joined,) = sim.settle([sim.join(follower.member_id)])
    assert joined.leader == follower.member_id


def test_a_client_that_cannot_come_back_is_removed_with_its_connection(sim: Sim) -> None:
    (first,) = sim.formed(1)
    lost = sim.join()  # of an old version: it does not know its id
    sim.gone(lost)
    assert len(sim.group.members) == 1
    sim.settle([sim.join(first.member_id)])


def test_a_member_whose_connection_is_lost_may_join_again_for_a_session(sim: Sim) -> None:
    one, two = sim.formed(2)
    lost = sim.join(one.member_id)
    sim.gone(lost)
    again = sim.join(two.member_id)
    assert again not in sim.answers
    back = sim.join(one.member_id)
    sim.settle([back, again])
    sim.gone(sim.join(one.member_id))
    sim.join(two.member_id)
    sim.wait(SESSION)
    assert [member.id for member in sim.group.members] == [two.member_id]


def test_a_pause_of_the_process_removes_nobody(sim: Sim) -> None:
    one, two = sim.formed(2)
    watch = PauseWatch(2.0)
    watch.seen(sim.now)
    sim.now += 300
    gap = watch.seen(sim.now)
    assert gap == 300
    sim.group.shift(gap)
    sim.wait(SESSION - 1)
    assert [sim.beat(one), sim.beat(two)] == [ErrorCode.none, ErrorCode.none]


# -- static members -----------------------------------------------------------------------


def test_a_static_member_that_comes_back_changes_nothing_for_the_others(sim: Sim) -> None:
    tokens = [sim.join(instance="a")]
    tokens = [sim.join(instance="b"), sim.join(sim.joined(tokens[0]).member_id, instance="a")]
    two, one = sim.settle(tokens)
    back = sim.joined(sim.join(instance="b"))
    assert back.member_id not in ("", two.member_id)
    assert (back.generation, back.members) == (one.generation, ())
    assert sim.beat(one, "a") is ErrorCode.none
    synced = sim.synced(sim.sync(back, instance="b"))
    assert synced.assignment == f"for {two.member_id}".encode()
    assert sim.beat(two, "b") is ErrorCode.fenced_instance_id
    assert sim.beat(two) is ErrorCode.unknown_member_id
    assert sim.joined(sim.join(two.member_id, instance="b")).error is ErrorCode.fenced_instance_id


def test_a_static_leader_that_comes_back_is_not_asked_to_assign(sim: Sim) -> None:
    (leader,) = sim.settle([sim.join(instance="a")])
    back = sim.joined(sim.join(instance="a"))
    assert back.leader == leader.member_id != back.member_id
    assert not back.members
    newer = sim.joined(sim.join(instance="a", may_skip=True))
    assert newer.leader == newer.member_id
    assert newer.skip
    assert len(newer.members) == 1


def test_a_static_member_gets_its_new_id_once_that_is_stored(sim: Sim) -> None:
    sim.settle([sim.join(instance="a")])
    sim.keeps = False
    token = sim.join(instance="a")
    assert token not in sim.answers
    sim.keep()
    assert sim.joined(token).member_id == sim.kept.members[0].id
    token = sim.join(instance="a")
    sim.keep(ErrorCode.coordinator_not_available)
    assert sim.joined(token).error is ErrorCode.coordinator_not_available


def test_a_static_member_that_reads_other_topics_makes_all_join_again(sim: Sim) -> None:
    (one,) = sim.settle([sim.join(instance="a")])
    other = (Protocol("range", subscription("other")),)
    token = sim.join(instance="a", protocols=other)
    assert sim.joined(token).generation == one.generation + 1
    owned = (Protocol("range", subscription("other", more=b"what it has")),)
    same = sim.joined(sim.join(instance="a", protocols=owned))
    assert same.error is ErrorCode.none
    assert same_topics(other, owned)
    assert not same_topics(RANGE, owned)


def test_a_static_member_that_is_away_is_waited_for_until_its_session_ends(sim: Sim) -> None:
    tokens = [sim.join(instance="a")]
    tokens = [sim.join(instance="b"), sim.join(sim.joined(tokens[0]).member_id, instance="a")]
    two, one = sim.settle(tokens)
    again = sim.join(one.member_id, instance="a")  # the leader wants another generation
    assert again not in sim.answers
    sim.wait(SESSION)
    assert sim.joined(again).generation == one.generation + 1
    assert [member.instance for member in sim.group.members] == ["a"]
    assert sim.beat(two, "b") is ErrorCode.unknown_member_id


def test_an_admin_removes_a_static_member_by_its_name(sim: Sim) -> None:
    sim.settle([sim.join(instance="a")])
    assert sim.leave("", "b") is ErrorCode.unknown_member_id
    assert sim.leave("", "a") is ErrorCode.none
    assert sim.group.state is GroupState.EMPTY
    assert sim.leave("", None) is ErrorCode.unknown_member_id


# -- commits ------------------------------------------------------------------------------


def refusal(sim: Sim, member_id: str, generation: int, instance: str | None = None) -> ErrorCode:
    return sim.group.commit_refusal(Caller(member_id, generation, instance), sim.now)


def test_offsets_are_accepted_from_members_of_this_generation(sim: Sim) -> None:
    assert refusal(sim, "", -1) is ErrorCode.none
    (one,) = sim.formed(1)
    assert refusal(sim, one.member_id, one.generation) is ErrorCode.none
    assert refusal(sim, one.member_id, one.generation - 1) is ErrorCode.illegal_generation
    assert refusal(sim, "other", one.generation) is ErrorCode.unknown_member_id
    assert refusal(sim, "", -1) is ErrorCode.unknown_member_id
    sim.leave(one.member_id)
    assert refusal(sim, "", -1) is ErrorCode.none
    assert refusal(sim, one.member_id, one.generation) is ErrorCode.unknown_member_id


def test_offsets_are_accepted_before_a_member_joins_again_and_not_before_it_syncs(
    sim: Sim,
) -> None:
    (one,) = sim.formed(1)
    second = sim.join()
    assert refusal(sim, one.member_id, one.generation) is ErrorCode.none
    joined = sim.joined(sim.join(one.member_id))
    assert refusal(sim, one.member_id, joined.generation) is ErrorCode.rebalance_in_progress
    assert refusal(sim, one.member_id, one.generation) is ErrorCode.illegal_generation
    assert sim.joined(second).generation == joined.generation


def test_a_static_member_that_was_replaced_cannot_commit(sim: Sim) -> None:
    (one,) = sim.settle([sim.join(instance="a")])
    sim.join(instance="a")
    fenced = ErrorCode.fenced_instance_id
    assert refusal(sim, one.member_id, one.generation, "a") is fenced


# -- what is stored -----------------------------------------------------------------------


def test_members_hear_of_nothing_that_is_not_stored(sim: Sim) -> None:
    sim.keeps = False
    token = sim.join()
    assert token not in sim.answers
    sim.keep()
    joined = sim.joined(token)
    assert (sim.kept.generation, sim.kept.stable) == (joined.generation, False)
    token = sim.sync(joined, {joined.member_id: b"all"})
    assert token not in sim.answers
    sim.keep()
    assert sim.synced(token).assignment == b"all"
    assert (sim.kept.stable, sim.kept.members[0].assignment) == (True, b"all")


def test_what_cannot_be_stored_is_tried_again_by_the_members(sim: Sim) -> None:
    sim.keeps = False
    token = sim.join()
    sim.keep(ErrorCode.coordinator_not_available)
    refused = sim.joined(token)
    assert refused.error is ErrorCode.coordinator_not_available
    token = sim.join(refused.member_id)
    sim.keep()
    joined = sim.joined(token)
    token = sim.sync(joined, {joined.member_id: b"all"})
    sim.keep(ErrorCode.coordinator_not_available)
    assert sim.synced(token).error is ErrorCode.coordinator_not_available
    assert sim.beat(joined) is ErrorCode.rebalance_in_progress


def test_a_member_that_joins_while_a_generation_is_stored_is_in_the_next(sim: Sim) -> None:
    sim.keeps = False
    first = sim.join()
    second = sim.join()
    assert [one.record.generation for one in sim.stores] == [1, 2]
    sim.keep()
    assert not sim.answers
    sim.keep()
    assert {sim.joined(first).generation, sim.joined(second).generation} == {2}


def test_members_continue_with_another_process(sim: Sim) -> None:
    one, two = sim.formed(2)
    after = Sim(record=sim.kept)
    assert after.group.state is GroupState.STABLE
    assert [after.beat(one), after.beat(two)] == [ErrorCode.none, ErrorCode.none]
    assert after.synced(after.sync(two)).assignment == f"for {two.member_id}".encode()
    assert refusal(after, one.member_id, one.generation) is ErrorCode.none
    after.wait(SESSION)  # nobody is there after all
    assert not after.group.members
    assert not after.kept.members


def test_a_generation_that_waits_for_its_assignments_continues_with_another_process(
    sim: Sim,
) -> None:
    one, two = sim.formed(2)
    tokens = [sim.join(one.member_id), sim.join(two.member_id)]
    leader, follower = (sim.joined(token) for token in tokens)
    after = Sim(record=sim.kept)
    waiting = after.sync(follower)
    after.sync(leader, {follower.member_id: b"f"})
    assert after.synced(waiting).assignment == b"f"


def test_a_group_that_is_closed_answers_all_that_wait(sim: Sim) -> None:
    (first,) = sim.formed(1)
    token = sim.join()
    sim.group.close(ErrorCode.not_coordinator)
    sim.run()
    assert sim.joined(token).error is ErrorCode.not_coordinator
    unavailable = ErrorCode.coordinator_not_available
    assert sim.beat(first) is unavailable
    assert sim.joined(sim.join()).error is unavailable
    assert sim.leave(first.member_id) is unavailable
    assert refusal(sim, "", -1) is unavailable


# -- subscriptions ------------------------------------------------------------------------


def test_subscriptions_are_read(sim: Sim) -> None:
    assert subscription_of(subscription("a", "b", more=b"rest")) == frozenset("ab")
    assert subscription_of(subscription()) == frozenset()
    assert not sim.group.members.subscribed()
    sim.formed(1)
    assert sim.group.members.subscribed() == frozenset({"t"})
    sim.join(protocols=(Protocol("range", b"?"),))
    assert sim.group.members.subscribed() is None


@given(st.binary(max_size=40))
def test_any_metadata_is_read_or_is_not(data: bytes) -> None:
    found = subscription_of(data)
    assert found is None or all(isinstance(one, str) for one in found)
