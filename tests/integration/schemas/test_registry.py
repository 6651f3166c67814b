"""The registry on a real broker: stable ids, refused changes, concurrent registrations."""

from __future__ import annotations

import asyncio
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

import millstream
from millstream import Cluster, Mill
from millstream.errors import (
    ConfigError,
    DataLoss,
    Incompatible,
    SchemaError,
    SchemaNotFound,
    TopicConflict,
    TopicNotFound,
    Unmappable,
)
from millstream.schemas import Mode, declare, parse_proto, types
from millstream.schemas.registry.records import TABLE, TopicSchemas, Version
from tests.integration.schemas.orders import Order, OrderWithNote, OrderWithWeight, version


async def test_a_version_has_a_permanent_number_and_id(mill: Mill) -> None:
    await mill.create_topic("orders", schema=Order)
    first = (await mill.schemas.topic("orders")).latest
    second = await mill.schemas.evolve("orders", version(OrderWithNote))
    again = await mill.schemas.register("orders", Order)
    assert (first.version, second.version) == (1, 2)
    assert again == first
    assert first.id != second.id
    assert (await mill.schemas.schema(second.id)).record.fields[-1].name == "note"


async def test_the_same_schema_has_one_id_in_every_topic(mill: Mill) -> None:
    await mill.create_topic("orders", schema=Order)
    await mill.create_topic("archive", schema=Order)
    found = await mill.schemas.topics()
    assert [record.topic for record in found] == ["archive", "orders"]
    assert found[0].latest.id == found[1].latest.id


async def test_a_breaking_change_is_refused_with_the_field_and_the_rule(mill: Mill) -> None:
    await mill.create_topic("orders", schema=Order)
    with pytest.raises(Incompatible, match=r"field 'weight'.*no_default") as caught:
        await mill.schemas.evolve("orders", version(OrderWithWeight))
    problem = caught.value.problems[0]
    assert (problem.field, problem.rule, problem.direction) == ("weight", "no_default", "backward")
    assert len((await mill.schemas.topic("orders")).versions) == 1


async def test_create_topic_registers_the_next_version_or_reports_why_not(mill: Mill) -> None:
    await mill.create_topic("orders", schema=Order)
    await mill.create_topic("orders", schema=version(OrderWithNote))
    assert len((await mill.schemas.topic("orders")).versions) == 2
    with pytest.raises(Incompatible, match="weight"):
        await mill.create_topic("orders", schema=version(OrderWithWeight))


async def test_a_check_reports_the_same_as_a_registration_and_writes_nothing(mill: Mill) -> None:
    await mill.create_topic("orders", schema=Order)
    assert await mill.schemas.check("orders", version(OrderWithNote)) == []
    problems = await mill.schemas.check("orders", version(OrderWithWeight))
    assert [problem.field for problem in problems] == ["weight"]
    assert await mill.schemas.check("orders", version(OrderWithWeight), "FORWARD") == []
    assert await mill.schemas.check("unknown", Order) == []
    assert len((await mill.schemas.topic("orders")).versions) == 1


async def test_the_compatibility_mode_can_be_chosen_and_changed(mill: Mill) -> None:
    await mill.create_topic("orders", schema=Order, compatibility="FORWARD")
    await mill.schemas.register("orders", version(OrderWithWeight))
    with pytest.raises(SchemaError, match="has the mode FORWARD, not FULL"):
        await mill.create_topic("orders", schema=Order, compatibility="FULL")
    assert (await mill.schemas.set_mode("orders", "none")).mode is Mode.NONE
    last = await mill.schemas.evolve("orders", version(OrderWithNote), mode="BACKWARD_TRANSITIVE")
    assert last.version == 3
    assert (await mill.schemas.topic("orders")).mode is Mode.BACKWARD_TRANSITIVE


async def test_a_transitive_mode_checks_every_version(mill: Mill) -> None:
    one = types.Record("r", (types.Field("a", types.Int(32)),))
    two = types.Record("r", (types.Field("b", types.Int(32), default=0),))
    three = types.Record("r", (types.Field("a", types.String(), default=""),))
    for name, mode in (("last", "BACKWARD"), ("all", "BACKWARD_TRANSITIVE")):
        await mill.create_topic(name, schema=one, compatibility=mode)
        await mill.schemas.evolve(name, two)
    assert (await mill.schemas.evolve("last", three)).version == 3
    with pytest.raises(Incompatible, match="field 'a'"):
        await mill.schemas.evolve("all", three)


async def test_what_does_not_exist_is_reported_plainly(mill: Mill) -> None:
    with pytest.raises(SchemaNotFound, match="topic 'orders' has no schema"):
        await mill.schemas.topic("orders")
    with pytest.raises(SchemaNotFound, match="id 7"):
        await mill.schemas.schema(7)
    with pytest.raises(TopicNotFound):
        await mill.schemas.register("orders", Order)
    await mill.create_topic("orders", schema=Order)
    with pytest.raises(SchemaNotFound, match="no schema version 2; it has 1 to 1"):
        await mill.schemas.version("orders", 2)
    with pytest.raises(SchemaNotFound, match="no schema with id 2"):
        await mill.schemas.schema(2)  # the topic's record exists
    assert await mill.schemas.topics() == [await mill.schemas.topic("orders")]


async def test_an_existing_topic_gets_a_schema_and_keeps_its_format(mill: Mill) -> None:
    topic = await mill.create_topic("orders")
    await topic.publish(b'{"a": 1}')
    record = types.Record("r", (types.Field("a", types.Int(32)),))
    await mill.schemas.register("orders", record)
    typed = await mill.topic("orders")
    assert [event.value async for event in typed.read()] == [{"a": 1}]
    with pytest.raises(SchemaError, match="encoded as json, not as avro"):
        await mill.schemas.register("orders", record, wire_format="avro")
    with pytest.raises(TopicConflict, match="wire_format"):
        await mill.create_topic("orders")
    with pytest.raises(TopicConflict, match="wire_format"):
        await mill.edit_topic("orders", wire_format="avro")


async def test_a_schema_the_wire_format_cannot_hold_creates_no_topic(mill: Mill) -> None:
    record = types.Record("r", (types.Field("a", types.Int(64, signed=False)),))
    with pytest.raises(Unmappable, match="field 'a'"):
        await mill.create_topic("orders", schema=record, wire_format="avro")
    with pytest.raises(TopicNotFound):
        await mill.topic("orders")
    with pytest.raises(ConfigError, match="compatibility needs a schema"):
        await mill.create_topic("orders", compatibility="FULL")


async def test_a_deleted_topic_takes_its_versions_with_it(mill: Mill) -> None:
    await mill.create_topic("orders", schema=Order)
    old = (await mill.schemas.topic("orders")).latest
    await mill.delete_topic("orders")
    assert await mill.schemas.find("orders") is None
    await mill.create_topic("orders", schema=OrderWithWeight)
    record = await mill.schemas.topic("orders")
    assert [v.version for v in record.versions] == [1]
    assert (await mill.schemas.schema(old.id)).record.name == "Order"  # ids are permanent


async def test_a_topic_whose_registry_is_gone_is_not_read_as_untyped(
    mill: Mill,
) -> None:
    await mill.create_topic("orders", schema=Order)
    await mill.jetstream.delete_stream(TABLE)
    with pytest.raises(SchemaNotFound, match="created with a schema, but the registry has none"):
        await mill.topic("orders")


async def test_an_id_that_names_another_schema_now_is_data_loss(mill: Mill) -> None:
    """A registry that was restored to an earlier state may assign an id twice."""
    await mill.create_topic("orders", schema=Order)
    await mill.jetstream.delete_stream(TABLE)
    await Mill(mill.connection).create_topic("others", schema=OrderWithNote)
    fresh = Mill(mill.connection).schemas
    id_ = (await fresh.topic("others")).latest.id
    stale = TopicSchemas(
        "orders", "json", Mode.BACKWARD, (Version(1, id_, declare(Order).fingerprint),)
    )
    with pytest.raises(DataLoss, match="not the schema that was registered"):
        await fresh.schemas_of(stale)


async def test_protobuf_fields_keep_their_numbers_across_versions(mill: Mill) -> None:
    first = types.Record(
        "r", (types.Field("a", types.Int(64)), types.Field("b", types.String(), default=""))
    )
    second = types.Record(
        "r",
        (
            types.Field("c", types.String(), default=""),
            types.Field("b", types.String(), default=""),
            types.Field("a", types.Int(64)),
        ),
    )
    topic = await mill.create_topic("t", schema=first, wire_format="protobuf")
    await topic.publish({"a": 7, "b": "x"})
    await mill.schemas.evolve("t", second)
    _, schema = await mill.schemas.version("t")
    assert {f.name: f.number for f in schema.record.fields} == {"c": 3, "b": 2, "a": 1}
    newer = await mill.topic("t")
    await newer.publish({"a": 8, "b": "y", "c": "z"})
    values = [event.value async for event in newer.read()]
    assert values == [{"c": "", "b": "x", "a": 7}, {"c": "z", "b": "y", "a": 8}]
    text = 'syntax = "proto3"; message r { int64 a = 1; string b = 2; string d = 3; }'
    with pytest.raises(Incompatible, match="number"):
        await mill.schemas.evolve("t", parse_proto(text))


# -- concurrency --------------------------------------------------------------------------


def _register(url: str, names: list[str]) -> list[tuple[str, int, int]]:
    """In its own process: register fields one after the other, each as a version."""

    async def work() -> list[tuple[str, int, int]]:
        got = []
        async with millstream.connect(url, request_timeout=30) as mill:
            for name in names:
                fields = (types.Field(name, types.Int(32), default=0),)
                version = await mill.schemas.register("orders", types.Record("r", fields))
                got.append((name, version.version, version.id))
        return got

    return asyncio.run(work())


async def test_many_processes_register_concurrently_and_agree(
    mill: Mill, millstream_url: str
) -> None:
    """Every schema gets one version and one id, the same for all processes that registered it."""
    await mill.create_topic("orders", schema=types.Record("r", (types.Field("z", types.Bool()),)))
    await mill.schemas.set_mode("orders", "NONE")
    names = [f"f{number}" for number in range(6)]
    orders = [names, names[::-1], names[3:] + names[:3]]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(orders), mp_context=context) as pool:
        loop = asyncio.get_running_loop()
        results = await asyncio.gather(
            *(loop.run_in_executor(pool, _register, millstream_url, mine) for mine in orders)
        )
    agreed = {found for result in results for found in result}
    assert len(agreed) == len(names)  # the same number and id for every process
    record = await mill.schemas.topic("orders")
    assert sorted(v.version for v in record.versions) == list(range(1, len(names) + 2))
    assert {(v.version, v.id) for v in record.versions[1:]} == {(v, i) for _, v, i in agreed}


async def test_topics_of_one_name_created_concurrently_have_one_schema(mill: Mill) -> None:
    others = [Mill(mill.connection) for _ in range(8)]
    await asyncio.gather(*(one.create_topic("orders", schema=Order) for one in others))
    assert len((await mill.schemas.topic("orders")).versions) == 1


async def test_in_a_cluster_the_registry_is_stored_on_three_nodes(
    millstream_cluster: Cluster,
) -> None:
    async with millstream.connect(millstream_cluster.url, request_timeout=30) as mill:
        await mill.create_topic("orders", schema=Order)
        assert (await mill.topic(TABLE)).settings.replicas == 3
        await mill.delete_topic("orders")
