"""Which leaders move so that every node leads as many partitions as the others."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from millstream.messaging.topics.placement import leader_moves, without_placement
from millstream.wire.api import ClusterInfo, PeerInfo, StreamInfo

NODES = ["n1", "n2", "n3"]


def stream(number: int, leader: str, current: bool = True) -> StreamInfo:
    others = [PeerInfo(name, current) for name in NODES if name != leader]
    return StreamInfo(config={"name": f"t-{number}"}, cluster=ClusterInfo("c", leader, others))


@given(st.lists(st.sampled_from(NODES), min_size=1, max_size=20))
def test_after_the_moves_no_node_leads_more_than_one_above_another(leaders: list[str]) -> None:
    moves = leader_moves([stream(*pair) for pair in enumerate(leaders)])
    after = Counter(dict.fromkeys(NODES, 0))
    after.update(moves.get(f"t-{number}", leader) for number, leader in enumerate(leaders))
    assert max(after.values()) - min(after.values()) <= 1
    before = Counter(dict.fromkeys(NODES, 0)) + Counter(leaders)
    kept = sum(min(before[node], after[node]) for node in NODES)
    assert len(moves) == len(leaders) - kept  # none moves in vain


def test_a_leader_does_not_move_to_a_replica_that_is_behind() -> None:
    assert leader_moves([stream(number, "n1", current=False) for number in range(3)]) == {}


def test_streams_without_replicas_or_without_a_leader_stay() -> None:
    alone = StreamInfo(config={"name": "a"}, cluster=ClusterInfo("c", "n1"))
    assert leader_moves([alone, StreamInfo(config={"name": "b"}), stream(3, "")]) == {}


def test_only_our_own_placement_is_taken_out_of_a_configuration() -> None:
    ours, theirs = "!millstream-node:n1", "ssd"
    config = {"name": "a", "placement": {"tags": [ours]}}
    assert without_placement(config) == {"name": "a"}
    both = {"name": "a", "placement": {"cluster": "east", "tags": [theirs, ours]}}
    expected = {"name": "a", "placement": {"cluster": "east", "tags": [theirs]}}
    assert without_placement(both) == expected
    assert without_placement(expected) == expected
