"""Topics: made, described, altered, deleted; and what is refused."""

from __future__ import annotations

from typing import Any

from tests.integration.gateways.kafka_contract.behaviours import (
    behaviour,
    eventually,
    failure,
    made,
    new_name,
    read_all,
    sample,
    tried,
)
from tests.integration.gateways.kafka_contract.face import Client


@behaviour
def a_topic_is_made_listed_and_deleted(client: Client) -> Any:
    admin, topic = client.admin(), new_name()
    admin.create(topic, 3)
    seen = {
        "listed": eventually(lambda: topic in admin.topics()),
        "partitions": admin.partitions(topic),
        "made twice": failure(lambda: admin.create(topic, 3)),
    }
    admin.delete(topic)
    seen["gone"] = eventually(lambda: topic not in admin.topics())
    seen["deleted twice"] = failure(lambda: admin.delete(topic))
    return seen


@behaviour
def a_topic_made_again_begins_at_zero(client: Client) -> Any:
    admin, topic = client.admin(), made(client)
    client.produce(topic, sample(5))
    admin.delete(topic)
    eventually(lambda: topic not in admin.topics())
    eventually(lambda: failure(lambda: admin.create(topic)) is None)
    eventually(lambda: tried(lambda: admin.partitions(topic)) == 1)
    client.produce(topic, sample(2))
    return {
        "ends": client.ends(topic, 0),
        "offsets": [one.offset for one in read_all(client, topic, 2)],
    }


@behaviour
def names_with_dots_and_underscores_are_kept(client: Client) -> Any:
    admin, end = client.admin(), new_name()
    names = [f"orders.v1.{end}", f"_private_{end}", f"a-b_c.d-{end}", f"Upper.Case-{end}"]
    seen = []
    for name in names:
        admin.create(name)
        eventually(lambda wanted=name: wanted in admin.topics())  # type: ignore[misc]
        place = client.produce(name, sample(1))[0]
        seen.append([place.offset, len(read_all(client, name, 1))])
    return seen


@behaviour
def names_that_differ_in_dots_only_are_refused(client: Client) -> Any:
    admin, end = client.admin(), new_name()
    admin.create(f"a.b-{end}")
    return failure(lambda: admin.create(f"a_b-{end}"))


@behaviour
def bad_topics_are_refused(client: Client) -> Any:
    admin = client.admin()
    return {
        "a space": failure(lambda: admin.create("a b")),
        "a slash": failure(lambda: admin.create("a/b")),
        "two dots": failure(lambda: admin.create("..")),
        "too long": failure(lambda: admin.create("x" * 250)),
        "no partition": failure(lambda: admin.create(new_name(), 0)),
        "more copies than brokers": failure(lambda: admin.create(new_name(), 1, 3)),
        "an unknown setting": failure(lambda: admin.create(new_name(), no_such_thing="1")),
        "a bad value": failure(lambda: admin.create(new_name(), retention_ms="soon")),
    }


@behaviour
def the_longest_name_is_allowed(client: Client) -> Any:
    admin = client.admin()
    name = new_name("x" * 236)  # 249 in all
    admin.create(name)
    return [len(name), eventually(lambda: name in admin.topics())]


@behaviour
def settings_of_a_topic_are_described(client: Client) -> Any:
    topic = made(client, retention_ms="86400000", max_message_bytes="500000")
    found = client.admin().configs(topic)
    names = (
        *("cleanup.policy", "compression.type", "max.message.bytes", "retention.ms"),
        *("retention.bytes", "message.timestamp.type", "min.insync.replicas"),
    )
    return {name: found.get(name) for name in names}


@behaviour
def settings_of_a_topic_are_changed(client: Client) -> Any:
    admin, topic = client.admin(), made(client)
    admin.alter(topic, {"retention.ms": "3600000", "max.message.bytes": "200000"})

    def seen(wanted: str) -> bool:
        return eventually(lambda: admin.configs(topic).get("retention.ms") == wanted)

    changed = seen("3600000")
    limit = admin.configs(topic).get("max.message.bytes")
    admin.alter(topic, {"retention.ms": None, "max.message.bytes": "200000"})
    return {
        "changed": changed,
        "limit": limit,
        "default again": seen("604800000"),
        "limit kept": admin.configs(topic).get("max.message.bytes"),
        "unknown": failure(lambda: admin.alter(topic, {"no.such.thing": "1"})),
        "bad value": failure(lambda: admin.alter(topic, {"retention.ms": "soon"})),
        "no topic": failure(lambda: admin.alter(new_name(), {"retention.ms": "1000"})),
    }


@behaviour
def a_topic_gets_more_partitions_and_never_fewer(client: Client) -> Any:
    admin, topic = client.admin(), made(client, 2)
    admin.grow(topic, 4)
    return {
        "grown": eventually(lambda: admin.partitions(topic) == 4),
        "fewer": failure(lambda: admin.grow(topic, 3)),
        "as many": failure(lambda: admin.grow(topic, 4)),
        "no topic": failure(lambda: admin.grow(new_name(), 3)),
    }


@behaviour
def the_cluster_has_a_broker(client: Client) -> Any:
    return client.admin().brokers()
