"""The calls of groups in every version, with a real broker behind them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

import millstream
from millstream import Mill
from millstream.gateways.kafka.coordinator import Coordinator
from millstream.gateways.kafka.group_members import GroupBounds
from millstream.gateways.kafka.group_store import GroupTable, TopicPartition
from millstream.gateways.kafka.protocol import VERSIONS, Api
from tests.integration.gateways.group_wire import NODE, FakeCatalog, Wire, access

LIMITS = GroupBounds(initial_delay=0.01)


def versions(api: Api) -> range:
    low, high = VERSIONS[api]
    return range(low, high + 1)


@pytest.fixture
async def mill(millstream_url: str) -> AsyncIterator[Mill]:
    async with millstream.connect(millstream_url, request_timeout=30) as mill:
        yield mill


@pytest.fixture
async def coordinator(mill: Mill) -> AsyncIterator[Coordinator]:
    coordinator = Coordinator(mill, LIMITS)
    await coordinator.start()
    yield coordinator
    await coordinator.stop()


@pytest.fixture
def catalog() -> FakeCatalog:
    return FakeCatalog(t=4, other=1)


@pytest.fixture
def wire(coordinator: Coordinator, catalog: FakeCatalog) -> Wire:
    return Wire(coordinator, catalog)


# -- FindCoordinator ----------------------------------------------------------------------


@pytest.mark.parametrize("version", versions(Api.FIND_COORDINATOR))
async def test_this_gateway_has_every_group_and_transaction(wire: Wire, version: int) -> None:
    for kind in (0, 1):
        keys = ("a", "b")
        asked = {"key": "a", "key_type": kind, "coordinator_keys": keys}
        found = await wire(Api.FIND_COORDINATOR, version, **asked)
        nodes = found.coordinators if version >= 4 else [found]
        assert {(one.node_id, one.host, one.port) for one in nodes} == {NODE}
        if version >= 4:
            assert [one.key for one in nodes] == ["a", "b"]
    if version >= 1:
        found = await wire(
            Api.FIND_COORDINATOR, version, key="a", key_type=2, coordinator_keys=("a",)
        )
        (one,) = found.coordinators if version >= 4 else [found]
        assert one.error_code.name == "invalid_request"


# -- members ------------------------------------------------------------------------------


@pytest.mark.parametrize("version", versions(Api.JOIN_GROUP))
async def test_members_join_sync_beat_and_leave_in_every_version(wire: Wire, version: int) -> None:
    wire.version = {
        Api.JOIN_GROUP: version,
        Api.SYNC_GROUP: min(version, 5),
        Api.HEARTBEAT: min(version, 4),
        Api.LEAVE_GROUP: min(version, 4),
    }
    joined = await wire.join()
    assert (joined.error_code.name, joined.generation_id) == ("none", 1)
    assert (joined.protocol_name, joined.leader) == ("range", joined.member_id)
    assert joined.member_id.startswith("client-")
    assert [one.member_id for one in joined.members] == [joined.member_id]
    synced = await wire.sync(joined)
    assert synced.assignment == f"for {joined.member_id}".encode()
    assert await wire.beat(joined) == "none"
    assert await wire.commit({("t", 0): 5}, joined) == {("t", 0): "none"}
    refused = await wire.join(member_id="nobody")
    assert refused.error_code.name == "unknown_member_id"
    gone = {"member_id": joined.member_id, "group_instance_id": None}
    left = await wire(
        Api.LEAVE_GROUP, group_id="g", member_id=joined.member_id, members=[gone, gone]
    )
    assert left.error_code.name == "none"
    if wire.version[Api.LEAVE_GROUP] >= 3:
        assert [one.error_code.name for one in left.members] == ["none", "unknown_member_id"]
    assert await wire.beat(joined) == "unknown_member_id"


async def test_two_members_that_start_together_share_one_generation(wire: Wire) -> None:
    found = await asyncio.gather(wire.join(), wire.join())
    assert [one.generation_id for one in found] == [1, 1]
    assert sorted(len(one.members) for one in found) == [0, 2]
    synced = await asyncio.gather(*map(wire.sync, found))
    assert [one.assignment for one in synced] == [f"for {o.member_id}".encode() for o in found]


async def test_a_static_member_is_named_to_the_leader(wire: Wire) -> None:
    joined = await wire.member(group_instance_id="s1")
    assert [one.group_instance_id for one in joined.members] == ["s1"]
    assert joined.member_id.startswith("s1-")
    back = await wire.join(group_instance_id="s1")
    assert (back.generation_id, back.members) == (1, ())
    old = await wire(
        Api.HEARTBEAT,
        group_id="g",
        generation_id=1,
        member_id=joined.member_id,
        group_instance_id="s1",
    )
    assert old.error_code.name == "fenced_instance_id"
    synced = await wire.sync(back, group_instance_id="s1")
    assert synced.assignment == f"for {joined.member_id}".encode()


async def test_a_client_whose_connection_is_lost_does_not_stay(
    wire: Wire, coordinator: Coordinator
) -> None:
    wire.version = {Api.JOIN_GROUP: 2}  # it does not know its id until it is answered
    joining = asyncio.ensure_future(wire.join())
    await asyncio.sleep(0)
    group = coordinator.find("g")
    assert group is not None
    assert group.members
    joining.cancel()
    await asyncio.wait([joining])
    assert not group.members
    while len(coordinator):  # noqa: ASYNC110 -- nothing says when it is forgotten
        await asyncio.sleep(0.01)


async def test_members_and_groups_are_limited(mill: Mill, catalog: FakeCatalog) -> None:
    coordinator = Coordinator(mill, GroupBounds(initial_delay=0, max_groups=1))
    await coordinator.start()
    wire = Wire(coordinator, catalog)
    await wire.member("one")
    assert (await wire.join("two")).error_code.name == "policy_violation"
    assert await wire.commit({("t", 0): 1}, group="two") == {("t", 0): "policy_violation"}
    assert (await wire.join("")).error_code.name == "invalid_group_id"
    assert (await wire.join("x" * 513)).error_code.name == "invalid_group_id"
    await coordinator.stop()


# -- offsets ------------------------------------------------------------------------------


@pytest.mark.parametrize("version", versions(Api.OFFSET_COMMIT))
async def test_offsets_are_committed_in_every_version(wire: Wire, version: int) -> None:
    wire.version = {Api.OFFSET_COMMIT: version}
    asked = {("t", 0): 5, ("t", 4): 1, ("nothing", 0): 1, ("t", 1): -5}
    assert await wire.commit(asked) == {
        ("t", 0): "none",
        ("t", 4): "unknown_topic_or_partition",
        ("nothing", 0): "unknown_topic_or_partition",
        ("t", 1): "invalid_commit_offset_size",
    }
    assert await wire.fetch(("t", 0), ("t", 1)) == {("t", 0): 5, ("t", 1): -1}


@pytest.mark.parametrize("version", versions(Api.OFFSET_FETCH))
async def test_offsets_are_fetched_in_every_version(wire: Wire, version: int) -> None:
    await wire.commit({("t", 0): 5, ("t", 2): 7, ("other", 0): 9})
    found = await wire.fetch(("t", 0), ("t", 1), ("nothing", 0), version=version)
    assert found == {("t", 0): 5, ("t", 1): -1, ("nothing", 0): -1}
    assert await wire.fetch(("t", 0), group="nobody", version=version) == {("t", 0): -1}
    if version >= 2:
        everything = await wire.fetch(version=version)
        assert everything == {("t", 0): 5, ("t", 2): 7, ("other", 0): 9}
        assert await wire.fetch(group="nobody", version=version) == {}


async def test_what_a_client_keeps_with_an_offset_is_kept(wire: Wire) -> None:
    await wire.commit({("t", 0): 5})
    asked = {"group_id": "g", "topics": [{"name": "t", "partition_indexes": (0,)}]}
    found = await wire(Api.OFFSET_FETCH, groups=[asked])
    (part,) = found.groups[0].topics[0].partitions
    assert (part.committed_offset, part.committed_leader_epoch, part.metadata) == (5, 3, "note 5")
    long = {"partition_index": 0, "committed_offset": 1, "committed_metadata": "é" * 2049}
    answer = await wire(
        Api.OFFSET_COMMIT,
        group_id="g",
        member_id="",
        topics=[{"name": "t", "partitions": [long]}],
    )
    assert answer.topics[0].partitions[0].error_code.name == "offset_metadata_too_large"


async def test_an_answered_commit_is_stored(wire: Wire, mill: Mill) -> None:
    await wire.commit({("t", 0): 5})
    store = GroupTable(mill)
    await store.start()
    assert (await store.load("g")).offsets[TopicPartition("t", 0)].offset == 5


async def test_offsets_of_a_topic_that_was_made_again_do_not_count(
    wire: Wire, catalog: FakeCatalog
) -> None:
    await wire.commit({("t", 0): 5})
    catalog.make("t", 1)
    assert await wire.fetch(("t", 0)) == {("t", 0): -1}
    assert await wire.fetch() == {}
    await wire.commit({("t", 0): 2})
    assert await wire.fetch() == {("t", 0): 2}


async def test_while_the_broker_is_silent_clients_are_to_ask_again(
    wire: Wire, catalog: FakeCatalog
) -> None:
    await wire.commit({("t", 0): 5})
    catalog.broken = True
    assert await wire.commit({("t", 0): 6}) == {("t", 0): "coordinator_not_available"}
    assert await wire.fetch(("t", 0)) == {("t", 0): "unstable_offset_commit"}
    assert await wire.fetch(("t", 0), version=3) == {("t", 0): "coordinator_load_in_progress"}
    catalog.broken = False
    assert await wire.fetch(("t", 0)) == {("t", 0): 5}


async def test_only_members_commit_while_a_group_has_some(wire: Wire) -> None:
    joined = await wire.member()
    assert await wire.commit({("t", 0): 1}) == {("t", 0): "unknown_member_id"}
    assert await wire.commit({("t", 0): 1}, joined) == {("t", 0): "none"}
    assert await wire.commit({("t", 0): 1}, joined, "new") == {("t", 0): "illegal_generation"}


@pytest.mark.parametrize("version", versions(Api.OFFSET_DELETE))
async def test_offsets_of_topics_that_nobody_reads_are_deleted(
    wire: Wire, catalog: FakeCatalog, version: int
) -> None:
    joined = await wire.member()
    await wire.commit({("t", 0): 1, ("other", 0): 2}, joined)
    parts = [{"partition_index": 0}, {"partition_index": 9}]
    topics = [{"name": name, "partitions": parts} for name in ("t", "other")]
    found = await wire(Api.OFFSET_DELETE, version, group_id="g", topics=topics)
    assert found.error_code.name == "none"
    assert [[one.error_code.name for one in topic.partitions] for topic in found.topics] == [
        ["group_subscribed_to_topic", "unknown_topic_or_partition"],
        ["none", "unknown_topic_or_partition"],
    ]
    assert await wire.fetch() == {("t", 0): 1}
    del catalog.topics["t"]
    await wire(Api.LEAVE_GROUP, group_id="g", members=[{"member_id": joined.member_id}])
    await wire(Api.OFFSET_DELETE, version, group_id="g", topics=topics)
    catalog.make("t", 1)
    assert await wire.fetch() == {}
    found = await wire(Api.OFFSET_DELETE, version, group_id="nobody", topics=topics)
    assert found.error_code.name == "group_id_not_found"


# -- tools --------------------------------------------------------------------------------


@pytest.mark.parametrize("version", versions(Api.DESCRIBE_GROUPS))
async def test_groups_are_described_in_every_version(wire: Wire, version: int) -> None:
    joined = await wire.member()
    found = await wire(
        Api.DESCRIBE_GROUPS,
        version,
        groups=("g", "nobody"),
        include_authorized_operations=True,
    )
    one, nobody = found.groups
    assert (one.group_state, one.protocol_type, one.protocol_data) == (
        "Stable",
        "consumer",
        "range",
    )
    (member,) = one.members
    assert (member.member_id, member.client_id, member.client_host) == (
        joined.member_id,
        "client",
        "/10.0.0.1",
    )
    assert member.member_assignment == f"for {joined.member_id}".encode()
    assert member.member_metadata.endswith(b"t\0\0\0\0")
    assert (nobody.group_state, nobody.error_code.name) == ("Dead", "none")
    if version >= 3:
        assert one.authorized_operations == 0b101001000


@pytest.mark.parametrize("version", versions(Api.LIST_GROUPS))
async def test_groups_are_listed_in_every_version(wire: Wire, version: int) -> None:
    await wire.member()
    await wire.commit({("t", 0): 1}, group="simple")
    found = await wire(Api.LIST_GROUPS, version)
    assert {(one.group_id, one.protocol_type) for one in found.groups} == {
        ("g", "consumer"),
        ("simple", ""),
    }
    if version >= 4:
        found = await wire(Api.LIST_GROUPS, version, states_filter=("stable",))
        assert [(one.group_id, one.group_state) for one in found.groups] == [("g", "Stable")]


@pytest.mark.parametrize("version", versions(Api.DELETE_GROUPS))
async def test_groups_without_members_are_deleted(wire: Wire, version: int, mill: Mill) -> None:
    joined = await wire.member()
    await wire.commit({("t", 0): 1}, joined)
    await wire.commit({("t", 0): 1}, group="simple")

    async def deleted(*names: str) -> list[str]:
        found = await wire(Api.DELETE_GROUPS, version, groups_names=names)
        return [one.error_code.name for one in found.results]

    assert await deleted("g", "simple", "simple") == [
        "non_empty_group",
        "none",
        "group_id_not_found",
    ]
    await wire(Api.LEAVE_GROUP, group_id="g", members=[{"member_id": joined.member_id}])
    assert await deleted("g") == ["none"]
    assert not (await wire(Api.LIST_GROUPS)).groups
    store = GroupTable(mill)
    await store.start()
    assert await store.load_all() == {}
    again = await wire.member()
    assert again.generation_id == 1
    assert await wire.fetch(("t", 0)) == {("t", 0): -1}


# -- rights -------------------------------------------------------------------------------


async def test_a_user_without_the_right_to_a_group_is_refused_everything(
    coordinator: Coordinator, catalog: FakeCatalog, wire: Wire
) -> None:
    await wire.commit({("t", 0): 1})
    bounded = Wire(coordinator, catalog, access("ann", ("$JS.API.STREAM.INFO.t",)))
    refused = "group_authorization_failed"
    found = await bounded(Api.FIND_COORDINATOR, coordinator_keys=("g", "ann.g"))
    assert [one.error_code.name for one in found.coordinators] == [refused, "none"]
    joined = await bounded.join()
    assert joined.error_code.name == refused
    assert (await bounded.sync(joined)).error_code.name == refused
    assert await bounded.beat(joined) == refused
    left = await bounded(Api.LEAVE_GROUP, group_id="g", members=[{"member_id": "m"}])
    assert left.error_code.name == refused
    assert await bounded.commit({("t", 0): 1}) == {("t", 0): refused}
    assert await bounded.fetch(("t", 0), version=1) == {("t", 0): refused}
    found = await bounded(Api.OFFSET_FETCH, groups=[{"group_id": "g", "topics": None}])
    assert found.groups[0].error_code.name == refused
    found = await bounded(Api.OFFSET_DELETE, group_id="g", topics=())
    assert found.error_code.name == refused
    found = await bounded(Api.DESCRIBE_GROUPS, groups=("g",), include_authorized_operations=True)
    assert (found.groups[0].error_code.name, found.groups[0].members) == (refused, ())
    assert not (await bounded(Api.LIST_GROUPS)).groups
    found = await bounded(Api.DELETE_GROUPS, groups_names=("g",))
    assert found.results[0].error_code.name == refused
    assert await wire.fetch() == {("t", 0): 1}


async def test_a_user_commits_and_sees_offsets_of_topics_that_it_may_read(
    coordinator: Coordinator, catalog: FakeCatalog, wire: Wire
) -> None:
    await wire.commit({("t", 0): 1, ("other", 0): 2}, group="ann.g")
    read = tuple(f"$JS.API.{call}.t" for call in ("STREAM.INFO", "DIRECT.GET"))
    bounded = Wire(coordinator, catalog, access("ann", read))
    refused = "topic_authorization_failed"
    both = {("t", 0): 3, ("other", 0): 4}
    assert await bounded.commit(both, group="ann.g") == {("t", 0): "none", ("other", 0): refused}
    assert await bounded.fetch(*both, group="ann.g") == {("t", 0): 3, ("other", 0): refused}
    assert await bounded.fetch(group="ann.g") == {("t", 0): 3}
