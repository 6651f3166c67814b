"""Groups of consumers: who gets which partition, and where they go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tests.integration.gateways.kafka_contract.behaviours import (
    behaviour,
    eventually,
    failure,
    first_offset,
    made,
    new_name,
    read,
    sample,
    tried,
)
from tests.integration.gateways.kafka_contract.face import Client, Got, Member, Record, Settings


def _settled(members: Sequence[Member], wanted: Callable[[list[int]], bool]) -> bool:
    """All members poll until their shares are as wanted."""

    def look() -> bool:
        for member in members:
            member.poll(0.2)
        return wanted(sorted(len(member.assignment()) for member in members))

    return eventually(look)


def _produced(client: Client, topic: str, partitions: int, each: int) -> None:
    records = [
        Record(b"%d" % number, partition=number % partitions) for number in range(partitions * each)
    ]
    client.produce(topic, records)


@behaviour
def a_group_goes_on_where_it_committed(client: Client) -> Any:
    topic, group = made(client), new_name("g")
    client.produce(topic, sample(10))
    seen: dict[str, Any] = {}
    first = client.join(topic, Settings(group=group))
    seen["first"] = [one.offset for one in read(first, 10)]
    seen["before the commit"] = first.committed(0)
    first.commit({0: 4})
    seen["committed"] = first.committed(0)
    first.close()
    second = client.join(topic, Settings(group=group))
    seen["second"] = [one.offset for one in read(second, 6)]
    second.commit()
    seen["committed again"] = second.committed(0)
    second.close()
    client.produce(topic, sample(2))
    third = client.join(topic, Settings(group=group))
    seen["third"] = [one.offset for one in read(third, 2)]
    third.close()
    return seen


@behaviour
def two_members_share_the_partitions(client: Client) -> Any:
    topic, group = made(client, 4), new_name("g")
    _produced(client, topic, 4, 5)
    settings = Settings(group=group)
    one = client.join(topic, settings)
    alone = _settled([one], lambda shares: shares == [4])
    two = client.join(topic, settings)
    shared = _settled([one, two], lambda shares: shares == [2, 2])
    apart = sorted(one.assignment() + two.assignment())
    two.close()
    back = _settled([one], lambda shares: shares == [4])
    one.close()
    return {"alone": alone, "shared": shared, "apart": apart, "after one left": back}


@behaviour
def members_of_a_group_read_each_record_once(client: Client) -> Any:
    topic, group = made(client, 4), new_name("g")
    settings = Settings(group=group)
    members = [client.join(topic, settings) for _ in range(2)]
    _settled(members, lambda shares: shares == [2, 2])
    _produced(client, topic, 4, 25)
    found: list[Got] = []

    def look() -> bool:
        for member in members:
            found.extend(member.poll(0.2))
        return len(found) >= 100

    eventually(look)
    for member in members:
        found.extend(member.poll(0.5))
        member.close()
    places = sorted((one.partition, one.offset) for one in found)
    return places == [(p, o) for p in range(4) for o in range(25)]


@behaviour
def two_groups_do_not_disturb_each_other(client: Client) -> Any:
    topic = made(client)
    client.produce(topic, sample(6))
    seen = []
    for commit in (5, 2):
        member = client.join(topic, Settings(group=new_name("g")))
        seen.append([one.offset for one in read(member, 6)])
        member.commit({0: commit})
        seen.append([member.committed(0) or -1])
        member.close()
    return seen


@behaviour
def a_new_group_follows_the_reset_policy(client: Client) -> Any:
    topic = made(client)
    client.produce(topic, sample(5))
    seen: dict[str, Any] = {}
    for policy in ("earliest", "latest", "none"):
        member = client.join(topic, Settings(group=new_name("g"), reset=policy, wait_ms=300))
        if policy == "latest":
            _settled([member], lambda shares: shares == [1])
            member.poll(2.0)
            client.produce(topic, sample(1))
        seen[policy] = tried(partial(first_offset, member))
        member.close()
    return seen


@behaviour
def a_member_can_go_back_and_forth(client: Client) -> Any:
    topic = made(client)
    client.produce(topic, sample(20))
    member = client.join(topic, Settings(group=new_name("g")))
    seen = [[one.offset for one in read(member, 20)][-1:]]
    for offset in (3, 15, 0):
        member.seek(0, offset)
        seen.append([one.offset for one in read(member, 20 - offset)][:1])
        seen.append([member.position(0)])
    member.close()
    return seen


@behaviour
def a_static_member_gets_its_partitions_again(client: Client) -> Any:
    topic, group = made(client, 4), new_name("g")
    settings = [Settings(group=group, static_id=f"s{n}", session_ms=45_000) for n in (1, 2)]
    members = [client.join(topic, one) for one in settings]
    shared = _settled(members, lambda shares: shares == [2, 2])
    before = [member.assignment() for member in members]
    members[1].close()  # a static member does not leave
    members[1] = client.join(topic, settings[1])
    back = _settled(members, lambda shares: shares == [2, 2])
    after = [member.assignment() for member in members]
    for member in members:
        member.close()
    return {"shared": shared, "back": back, "same": before == after}


@behaviour
def a_group_grows_with_the_topic(client: Client) -> Any:
    topic, group = made(client, 2), new_name("g")
    member = client.join(topic, Settings(group=group))
    two = _settled([member], lambda shares: shares == [2])
    client.admin().grow(topic, 5)
    five = _settled([member], lambda shares: shares == [5])
    member.close()
    return [two, five]


@behaviour
def groups_are_listed_described_and_deleted(client: Client) -> Any:
    topic, group = made(client, 2), new_name("g")
    _produced(client, topic, 2, 10)
    admin = client.admin()
    member = client.join(topic, Settings(group=group))
    _settled([member], lambda shares: shares == [2])
    member.commit({0: 3, 1: 7})
    seen: dict[str, Any] = {
        "listed": group in admin.groups(),
        "with a member": list(admin.group_state(group)),
        "offsets": {str(n): at for n, at in sorted(admin.group_offsets(group, topic).items())},
    }
    member.close()
    eventually(lambda: admin.group_state(group)[1] == 0)
    seen["without"] = list(admin.group_state(group))
    try:
        seen["deleted"] = failure(lambda: admin.delete_group(group))
    except NotImplementedError:
        return seen
    seen["listed after"] = group in admin.groups()
    seen["deleted twice"] = failure(lambda: admin.delete_group(group))
    return seen


@behaviour
def offsets_of_a_group_are_set_by_an_admin(client: Client) -> Any:
    topic, group = made(client, 2), new_name("g")
    _produced(client, topic, 2, 10)
    admin = client.admin()
    try:
        admin.set_group_offsets(group, topic, {0: 8, 1: 9})
    except NotImplementedError:
        return "not offered by this client"
    member = client.join(topic, Settings(group=group))
    found = sorted([one.partition, one.offset] for one in read(member, 3))
    in_use = failure(lambda: admin.set_group_offsets(group, topic, {0: 0}))
    deleted = failure(lambda: admin.delete_group(group))
    member.close()
    return {"read": found, "set while in use": in_use, "deleted while in use": deleted}
