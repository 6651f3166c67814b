"""The calls about topics and their settings, in every version, on a real broker."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import pytest

from millstream.gateways.kafka.protocol import Api, ErrorCode
from millstream.mill import Mill
from tests.integration.gateways.topic_wire import (
    CLUSTER,
    NODE,
    Defaults,
    Kafka,
    MakeKafka,
    as_user,
    kafka,
    make,
    mill,
    named,
    native,
    new_topic,
)

__all__ = ["kafka", "make", "mill", "native"]


# -- Metadata -----------------------------------------------------------------------------


@pytest.mark.parametrize("version", range(13))
async def test_metadata_in_every_version(kafka: Kafka, native: Mill, version: int) -> None:
    await native.create_topic("orders", partitions=2)
    body = await kafka.ask(Api.METADATA, version, topics=[named("orders")])
    (broker,) = body.brokers
    assert (broker.node_id, broker.host, broker.port) == (NODE, "mill.example.org", 9092)
    (topic,) = body.topics
    assert (topic.name, topic.error_code) == ("orders", ErrorCode.none)
    assert [one.partition_index for one in topic.partitions] == [0, 1]
    assert {(one.leader_id, one.replica_nodes, one.isr_nodes) for one in topic.partitions} == {
        (NODE, (NODE,), (NODE,))
    }
    everything: Any = [] if version == 0 else None
    assert [one.name for one in (await kafka.ask(Api.METADATA, version, topics=everything)).topics]
    if version >= 1:
        assert body.controller_id == NODE
        assert (await kafka.ask(Api.METADATA, version, topics=[])).topics == ()
    if version >= 2:
        assert body.cluster_id == CLUSTER

    if version >= 10:
        found = await kafka.catalog.find("orders")
        assert found is not None
        assert topic.topic_id == found.id
    if version >= 12:
        ids = [named(None, topic.topic_id), named(None, UUID(int=5))]
        known, unknown = (await kafka.ask(Api.METADATA, version, topics=ids)).topics
        assert (known.name, unknown.error_code) == ("orders", ErrorCode.unknown_topic_id)


async def test_a_topic_is_created_when_it_is_asked_for(make: MakeKafka, native: Mill) -> None:
    kafka = make()
    topics = await asyncio.gather(*(kafka.topic("new.one") for _ in range(10)))
    # The one that created it is answered as by Kafka, and asks again.
    unknown = [one for one in topics if one.error_code == ErrorCode.unknown_topic_or_partition]
    assert len(unknown) == 1
    topics = [one for one in topics if one is not unknown[0]] + [await kafka.topic("new.one")]
    assert {one.error_code for one in topics} == {ErrorCode.none}
    assert {len(one.partitions) for one in topics} == {2}
    assert (await native.topic("new_one")).settings.kafka_name == "new.one"
    missing = await kafka.topic("other", allow_auto_topic_creation=False)
    assert missing.error_code == ErrorCode.unknown_topic_or_partition
    assert await kafka.names() == ["new.one"]
    off = make(Defaults(auto_create=False))
    assert (await off.topic("other")).error_code == ErrorCode.unknown_topic_or_partition


async def test_what_cannot_be_created_is_said_so(kafka: Kafka, native: Mill) -> None:
    await native.create_topic("queue", retention="workqueue")
    await native.create_topic("a_b")
    for name in ("a b", "x" * 250, "mill-x", "kafka-state", "queue", "a.b"):
        assert (await kafka.topic(name)).error_code == ErrorCode.invalid_topic_exception, name


async def test_a_user_sees_what_it_may_read_or_write(kafka: Kafka, native: Mill) -> None:
    for name in ("mine", "hers", "ours"):
        await native.create_topic(name)
    kafka.access = as_user("mine.>", "$JS.API.STREAM.INFO.ours", "$JS.API.DIRECT.GET.ours")
    assert await kafka.names() == ["mine", "ours"]
    for name in ("hers", "none"):
        topic = await kafka.topic(name, allow_auto_topic_creation=False)
        assert topic.error_code == ErrorCode.topic_authorization_failed
    kafka.access = as_user("none.>")
    topic = await kafka.topic("none", allow_auto_topic_creation=False)
    assert topic.error_code == ErrorCode.unknown_topic_or_partition
    assert (await kafka.topic("none")).error_code == ErrorCode.topic_authorization_failed
    assert (await kafka.create("none")).error_code == ErrorCode.topic_authorization_failed
    kafka.access = as_user("$JS.API.STREAM.CREATE.*")
    assert (await kafka.create("none")).error_code == ErrorCode.none


async def test_operations_are_listed_when_they_are_asked_for(kafka: Kafka, native: Mill) -> None:
    await native.create_topic("orders")
    assert (await kafka.topic("orders")).topic_authorized_operations == -(2**31)
    asked = {"include_topic_authorized_operations": True}
    everything = (await kafka.topic("orders", **asked)).topic_authorized_operations
    kafka.access = as_user("orders.>")
    writing = (await kafka.topic("orders", **asked)).topic_authorized_operations
    bits = [{n for n in range(16) if value >> n & 1} for value in (everything, writing)]
    assert bits == [{3, 4, 6, 7, 8, 10, 11}, {4, 8, 10}]


@pytest.mark.parametrize("version", [0, 1])
async def test_the_cluster_is_the_gateway(kafka: Kafka, version: int) -> None:
    asked = {"include_cluster_authorized_operations": True}
    body = await kafka.ask(Api.DESCRIBE_CLUSTER, version, **asked)
    (broker,) = body.brokers
    assert (broker.broker_id, broker.host, broker.port) == (NODE, "mill.example.org", 9092)
    assert (body.error_code, body.controller_id) == (ErrorCode.none, NODE)
    assert body.cluster_authorized_operations >> 5 & 1
    if version:
        wrong = await kafka.ask(Api.DESCRIBE_CLUSTER, version, **asked, endpoint_type=2)
        assert wrong.error_code == ErrorCode.mismatched_endpoint_type


# -- CreateTopics -------------------------------------------------------------------------


@pytest.mark.parametrize("version", range(2, 8))
async def test_topics_are_created_in_every_version(
    kafka: Kafka, native: Mill, version: int
) -> None:
    configs = {"retention.ms": "86400000", "max.message.bytes": "500000"}
    new = [new_topic("orders.v1", 3, configs=configs), new_topic("_plain", -1, -1)]
    body = await kafka.ask(Api.CREATE_TOPICS, version, topics=new, validate_only=False)
    assert [one.error_code for one in body.topics] == [ErrorCode.none] * 2
    assert await kafka.names() == ["_plain", "orders.v1"]
    settings = (await native.topic("orders_v1")).settings
    assert settings.partitions == 3
    assert settings.max_age is not None
    assert settings.max_age.total_seconds() == 86400
    found = await kafka.catalog.find("orders.v1")
    assert found is not None
    assert found.max_message_bytes == 500_000
    assert (await native.topic("kafka_plain")).settings.partitions == 2
    if version >= 5:
        first = body.topics[0]
        assert (first.num_partitions, first.replication_factor) == (3, 1)
        assert {one.name: one.value for one in first.configs}["retention.ms"] == "86400000"
    if version >= 7:
        assert body.topics[0].topic_id == found.id


async def test_a_native_client_may_declare_the_same_topic(kafka: Kafka, native: Mill) -> None:
    await kafka.create("orders.v1", 2, configs={"max.message.bytes": "5000"})
    await native.create_topic("orders_v1", partitions=2, max_age="7d")


async def test_what_cannot_be_created_is_refused_with_a_reason(kafka: Kafka, native: Mill) -> None:
    await kafka.create("a.b")
    await native.create_topic("queue", retention="workqueue")
    await native.create_topic("parts", partitions=2)
    wrong = {
        "again": (await kafka.create("a.b"), ErrorCode.topic_already_exists),
        "dots": (await kafka.create("a_b"), ErrorCode.invalid_topic_exception),
        "hidden": (await kafka.create("queue"), ErrorCode.topic_already_exists),
        "stream": (await kafka.create("parts-0"), ErrorCode.invalid_topic_exception),
        "space": (await kafka.create("a b"), ErrorCode.invalid_topic_exception),
        "own": (await kafka.create("kafka-groups"), ErrorCode.invalid_topic_exception),
        "none": (await kafka.create("x", 0), ErrorCode.invalid_partitions),
        "many": (await kafka.create("x", 5000), ErrorCode.invalid_partitions),
        "copies": (await kafka.create("x", 1, 3), ErrorCode.invalid_replication_factor),
        "no copies": (await kafka.create("x", 1, 0), ErrorCode.invalid_replication_factor),
    }
    for config in ({"no.such": "1"}, {"retention.ms": "soon"}, {"cleanup.policy": "compact"}):
        answer = await kafka.create("x", configs=config)
        wrong[str(config)] = (answer, ErrorCode.invalid_config)
        assert next(iter(config)) in answer.error_message
    for what, (answer, code) in wrong.items():
        assert answer.error_code == code, what
        assert answer.error_message, what
    assert await kafka.catalog.find("x") is None


async def test_creating_can_be_tried(kafka: Kafka) -> None:
    assert (await kafka.create("orders", validate_only=True)).error_code == ErrorCode.none
    assert await kafka.names() == []
    three = await kafka.create("orders", 1, 3, validate_only=True)
    assert three.error_code == ErrorCode.invalid_replication_factor
    await kafka.create("orders")
    again = await kafka.create("orders", validate_only=True)
    assert again.error_code == ErrorCode.topic_already_exists


async def test_partitions_are_assigned_to_the_gateway_only(kafka: Kafka) -> None:
    def assigned(*brokers: int) -> list[dict[str, Any]]:
        return [
            {"partition_index": index, "broker_ids": (one,)} for index, one in enumerate(brokers)
        ]

    made = await kafka.create("orders", -1, -1, assignments=assigned(NODE, NODE))
    assert (made.error_code, made.num_partitions) == (ErrorCode.none, 2)
    wrong = await kafka.create("other", -1, -1, assignments=assigned(NODE, 1))
    assert wrong.error_code == ErrorCode.invalid_replica_assignment
    both = await kafka.create("other", 2, -1, assignments=assigned(NODE, NODE))
    assert both.error_code == ErrorCode.invalid_request


async def test_a_topic_named_twice_in_a_request_is_refused(kafka: Kafka) -> None:
    new = [new_topic("orders"), new_topic("orders"), new_topic("paid")]
    body = await kafka.ask(Api.CREATE_TOPICS, topics=new, validate_only=False)
    found = {one.name: one.error_code for one in body.topics}
    assert found == {"orders": ErrorCode.invalid_request, "paid": ErrorCode.none}


# -- DeleteTopics, CreatePartitions -------------------------------------------------------


async def test_a_deleted_topic_is_gone_and_its_partitions_closed(
    kafka: Kafka, native: Mill
) -> None:
    await kafka.create("a.b", 2)
    first = await kafka.catalog.find("a.b")
    await kafka.catalog.log("a.b", 0)
    await kafka.catalog.log("a.b", 1)
    assert await kafka.delete("a.b", "none") == [
        ErrorCode.none,
        ErrorCode.unknown_topic_or_partition,
    ]
    assert [log.closed for log in kafka.logs] == [1, 1]
    assert await kafka.names() == []
    assert await kafka.delete("a.b") == [ErrorCode.unknown_topic_or_partition]
    await kafka.create("a.b", 2)
    again = await kafka.catalog.find("a.b")
    assert first is not None
    assert again is not None
    assert again.id != first.id


async def test_a_user_without_the_right_cannot_delete_or_change_a_topic(
    kafka: Kafka, native: Mill
) -> None:
    await native.create_topic("orders")
    kafka.access = as_user("orders.>", "$JS.API.STREAM.INFO.orders", "$JS.API.DIRECT.GET.orders")
    forbidden = ErrorCode.topic_authorization_failed
    assert await kafka.delete("orders", "other") == [forbidden, forbidden]
    assert (await kafka.alter("orders", retention_ms="1000")).error_code == forbidden
    grown = [{"name": "orders", "count": 3, "assignments": None}]
    body = await kafka.ask(Api.CREATE_PARTITIONS, topics=grown, validate_only=False)
    assert body.results[0].error_code == forbidden
    assert (await kafka.configs("orders")).error_code == ErrorCode.none
    assert (await kafka.configs("other")).error_code == forbidden


@pytest.mark.parametrize("version", range(4))
async def test_a_topic_keeps_its_partitions(kafka: Kafka, version: int) -> None:
    await kafka.create("orders", 4)
    counts = {"orders": (3, 4, 8), "none": (3,)}
    for name, wanted in counts.items():
        for count in wanted:
            new = [{"name": name, "count": count, "assignments": None}]
            body = await kafka.ask(Api.CREATE_PARTITIONS, version, topics=new, validate_only=False)
            code = ErrorCode.invalid_partitions
            if name == "none":
                code = ErrorCode.unknown_topic_or_partition
            assert body.results[0].error_code == code
            assert body.results[0].error_message


# -- settings -----------------------------------------------------------------------------


@pytest.mark.parametrize("version", range(1, 5))
async def test_settings_are_described_in_every_version(kafka: Kafka, version: int) -> None:
    await kafka.create("orders", configs={"retention.ms": "86400000"})
    resources = [
        {"resource_type": 2, "resource_name": "orders", "configuration_keys": None},
        {"resource_type": 2, "resource_name": "orders", "configuration_keys": ["retention.ms"]},
        {"resource_type": 4, "resource_name": str(NODE), "configuration_keys": None},
        {"resource_type": 4, "resource_name": "", "configuration_keys": None},
        {"resource_type": 4, "resource_name": "99", "configuration_keys": None},
        {"resource_type": 2, "resource_name": "none", "configuration_keys": None},
        {"resource_type": 16, "resource_name": "x", "configuration_keys": None},
    ]
    body = await kafka.ask(Api.DESCRIBE_CONFIGS, version, resources=resources)
    topic, one, broker, default, wrong, missing, other = body.results
    values = {entry.name: entry.value for entry in topic.configs}
    assert values["retention.ms"] == "86400000"
    assert values["cleanup.policy"] == "delete"
    sources = {entry.name: entry.config_source for entry in topic.configs}
    assert (sources["retention.ms"], sources["retention.bytes"]) == (1, 5)
    assert [entry.name for entry in one.configs] == ["retention.ms"]
    assert "delete.topic.enable" in {entry.name for entry in broker.configs}
    assert all(entry.read_only for entry in broker.configs)
    assert (default.error_code, default.configs) == (ErrorCode.none, ())
    assert wrong.error_code == ErrorCode.invalid_request
    assert missing.error_code == ErrorCode.unknown_topic_or_partition
    assert other.error_code == ErrorCode.invalid_request


async def test_settings_are_changed_and_put_back(kafka: Kafka, native: Mill) -> None:
    await native.create_topic("orders", partitions=2, max_bytes="1MB", metadata={"owner": "ann"})
    done = await kafka.alter("orders", retention_ms="3600000", max_message_bytes="200000")
    assert done.error_code == ErrorCode.none
    values = await kafka.values("orders")
    assert (values["retention.ms"], values["max.message.bytes"]) == ("3600000", "200000")
    settings = (await native.topic("orders")).settings
    assert settings.max_bytes == 1024 * 1024
    assert settings.metadata == {"owner": "ann"}
    done = await kafka.alter("orders", retention_ms=None, max_message_bytes="200000")
    assert done.error_code == ErrorCode.none
    values = await kafka.values("orders")
    assert (values["retention.ms"], values["max.message.bytes"]) == ("604800000", "200000")


async def test_a_change_is_made_completely_or_not_at_all(kafka: Kafka) -> None:
    await kafka.create("orders")
    before = await kafka.values("orders")
    wrong = await kafka.alter("orders", retention_ms="5000", flush_ms="5")
    assert wrong.error_code == ErrorCode.invalid_config
    assert "flush.ms" in wrong.error_message
    tried = await kafka.alter("orders", check=True, retention_ms="5000")
    assert tried.error_code == ErrorCode.none
    assert await kafka.values("orders") == before
    for operation, code in ((2, ErrorCode.invalid_config), (3, ErrorCode.invalid_config)):
        entry = {"name": "cleanup.policy", "config_operation": operation, "value": "delete"}
        assert (await kafka.alter_with("orders", [entry], False)).error_code == code
    entry = {"name": "retention.ms", "config_operation": 0, "value": "5000"}
    twice = await kafka.alter_with("orders", [entry, entry], False)
    assert twice.error_code == ErrorCode.invalid_request
    empty = await kafka.alter_with("orders", [{**entry, "value": None}], False)
    assert empty.error_code == ErrorCode.invalid_request
    none = await kafka.alter("none", retention_ms="5000")
    assert none.error_code == ErrorCode.unknown_topic_or_partition
    assert await kafka.values("orders") == before


@pytest.mark.parametrize("version", range(3))
async def test_all_settings_are_replaced(kafka: Kafka, version: int) -> None:
    given = {"retention.bytes": "5000000", "segment.ms": "77"}
    await kafka.create("orders", configs=given)
    resources = [
        {
            "resource_type": kind,
            "resource_name": name,
            "configs": [{"name": "retention.ms", "value": "5000"}],
        }
        for kind, name in ((2, "orders"), (4, str(NODE)), (16, "x"))
    ]
    body = await kafka.ask(Api.ALTER_CONFIGS, version, resources=resources, validate_only=False)
    codes = [one.error_code for one in body.responses]
    assert codes == [ErrorCode.none, ErrorCode.invalid_request, ErrorCode.invalid_request]
    values = await kafka.values("orders")
    assert (values["retention.ms"], values["retention.bytes"]) == ("5000", "-1")
    assert values["segment.ms"] == "604800000"


@pytest.mark.parametrize("version", [0, 1])
async def test_settings_are_changed_in_every_version(kafka: Kafka, version: int) -> None:
    await kafka.create("orders")
    configs = [{"name": "segment.ms", "config_operation": 0, "value": "77"}]
    resource = {"resource_type": 2, "resource_name": "orders", "configs": configs}
    body = await kafka.ask(
        Api.INCREMENTAL_ALTER_CONFIGS, version, resources=[resource], validate_only=False
    )
    assert body.responses[0].error_code == ErrorCode.none
    assert (await kafka.values("orders"))["segment.ms"] == "77"
