"""Events whose classes change: by schema rules, by functions, old and new programs side by side."""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass
from typing import Any

import msgspec
import pydantic
import pytest

from millstream import NEW, Mill
from millstream.errors import (
    ConfigError,
    Incompatible,
    NoUpcaster,
    SchemaError,
    TopicNotFound,
    Undecodable,
    UnknownEvent,
)


def paid_v1() -> type:
    @dataclass(frozen=True)
    class Paid:
        amount: int

    return Paid


def paid_v2() -> type:
    @dataclass(frozen=True)
    class Paid:
        amount: int
        currency: str = "EUR"

    return Paid


def paid_v3() -> type:
    @dataclass(frozen=True)
    class Paid:
        cents: int
        currency: str

    return Paid


def paid_v4() -> type:
    @dataclass(frozen=True)
    class Paid:
        currency: str = "EUR"

    return Paid


def total(state: int, event: Any) -> int:
    cents = getattr(event, "cents", None)
    return state + int(event.amount * 100 if cents is None else cents)


async def test_old_events_are_read_as_the_newest_version(mill: Mill) -> None:
    one, two = paid_v1(), paid_v2()
    old = await mill.event_store("pay", events=[one], fold=total, initial=0)
    await old.append("a1", [one(1)], NEW)
    new = await mill.event_store("pay", events=[two], fold=total, initial=0)
    await new.append("a1", [two(2, "USD")], 1)
    found = [(e.schema_version, e.data) async for e in new.events("a1")]
    assert found == [(1, two(1, "EUR")), (2, two(2, "USD"))]
    # The program of before goes on, and finds the new version in the registry.
    await old.append("a1", [one(3)])
    assert [e.data async for e in old.events("a1")] == [one(1), one(2), one(3)]
    assert (await new.load("a1")).state == 600


async def test_a_function_leads_from_one_version_to_the_next(mill: Mill) -> None:
    one, two, three = paid_v1(), paid_v2(), paid_v3()
    for cls, args in ((one, (1,)), (two, (2, "USD"))):
        store = await mill.event_store("pay", events=[cls])
        await store.append("a1", [cls(*args)])
    with pytest.raises(NoUpcaster) as refused:
        await mill.event_store("pay", events=[three])
    assert (refused.value.event, refused.value.version) == ("Paid", 2)

    def to_cents(old: dict[str, Any]) -> dict[str, Any]:
        return {"cents": old["amount"] * 100, "currency": old["currency"]}

    upcasters = {("Paid", 2): to_cents}
    store = await mill.event_store(
        "pay", events=[three], upcasters=upcasters, fold=total, initial=0
    )
    await store.append("a1", [three(7, "CHF")])
    found = [(e.schema_version, e.data) async for e in store.events("a1")]
    assert found == [(1, three(100, "EUR")), (2, three(200, "USD")), (3, three(7, "CHF"))]
    assert (await store.load("a1")).state == 307
    with pytest.raises(SchemaError, match=r"version 2 of event 'Paid'.*upcasters"):
        await mill.event_store("pay", events=[three])


async def test_a_function_with_a_wrong_result_is_named(mill: Mill) -> None:
    two, three = paid_v2(), paid_v3()
    store = await mill.event_store("pay", events=[two])
    await store.append("a1", [two(1)])
    store = await mill.event_store("pay", events=[three], upcasters={("Paid", 1): lambda old: old})
    with pytest.raises(ValueError, match="cents"):
        _ = [event async for event in store.events("a1")]
    with pytest.raises(ConfigError, match="no event is"):
        await mill.event_store("pay", events=[three], upcasters={("Payed", 1): dict})


async def test_the_compatibility_of_a_store_can_be_changed(mill: Mill) -> None:
    await mill.event_store("pay", events=[paid_v2()])
    with pytest.raises(Incompatible, match="FULL"):  # an old program could not read it
        await mill.event_store("pay", events=[paid_v4()], compatibility="FULL")
    with pytest.raises(Incompatible):  # it stays
        await mill.event_store("pay", events=[paid_v4()])
    store = await mill.event_store("pay", events=[paid_v4()], compatibility="BACKWARD")
    assert store.types.events["Paid"].current.version == 2


class Renamed(msgspec.Struct, frozen=True):
    name: str


class Moved(pydantic.BaseModel):
    street: str
    number: int | None = None


async def test_events_may_be_structs_models_and_have_other_names(mill: Mill) -> None:
    store = await mill.event_store("people", events={"renamed": Renamed, "moved": Moved})
    await store.append("p1", [Renamed("ann"), Moved(street="High Street")], NEW)
    found = [(e.name, e.data) async for e in store.events("p1")]
    assert found == [("renamed", Renamed("ann")), ("moved", Moved(street="High Street"))]


def closed_v1() -> type:
    @dataclass(frozen=True)
    class Closed:
        pass

    return Closed


def closed_v2() -> type:
    @dataclass(frozen=True)
    class Closed:
        why: str = "unknown"

    return Closed


async def test_an_event_needs_no_fields(mill: Mill) -> None:
    one, two = closed_v1(), closed_v2()
    store = await mill.event_store("people", events=[one])
    await store.append("p1", [one()], NEW)
    assert [e.data async for e in store.events("p1")] == [one()]
    stored = await store.topic.last("p1")
    assert stored is not None
    assert stored.value == b'{"Closed":{}}'
    assert [e.data async for e in (await mill.event_store("people")).events("p1")] == [{}]
    store = await mill.event_store("people", events=[two])
    await store.append("p1", [two("age")])
    assert [e.data async for e in store.events("p1")] == [two("unknown"), two("age")]
    again = await mill.event_store("people", events=[one])
    assert [e.data async for e in again.events("p1")] == [one(), one()]


async def test_without_classes_events_are_dicts(mill: Mill) -> None:
    store = await mill.event_store("people", events=[Renamed])
    await store.append("p1", [Renamed("ann")], NEW)
    reader = await mill.event_store("people")
    assert [e.data async for e in reader.events("p1")] == [{"name": "ann"}]
    with pytest.raises(UnknownEvent):
        await reader.append("p1", [Renamed("ben")])
    with pytest.raises(ConfigError, match="without a class of states"):
        await reader.load("p1")


async def test_a_type_of_event_that_another_program_adds_is_found(mill: Mill) -> None:
    first = await mill.event_store("people", events=[Renamed])
    second = await mill.event_store("people", events=[Renamed, Moved])
    await second.append("p1", [Moved(street="High Street", number=1)])
    assert [e.data async for e in first.events("p1")] == [{"street": "High Street", "number": 1}]


async def test_what_is_no_store_is_refused(mill: Mill) -> None:
    await mill.create_topic("orders")
    with pytest.raises(ConfigError, match="not an event store"):
        await mill.event_store("orders", events=[Renamed])
    with pytest.raises(TopicNotFound):
        await mill.event_store("nothing")
    with pytest.raises(ConfigError, match="no method apply"):
        await mill.event_store("people", Renamed, events=[Moved])


async def test_a_deleted_store_leaves_nothing_behind(mill: Mill) -> None:
    await mill.event_store("pay", events=[paid_v3()])
    await mill.delete_topic("pay")
    again = await mill.event_store("pay", events=[paid_v1()])  # another class, no history
    assert again.types.events["Paid"].current.version == 1


async def test_a_store_with_partitions_keeps_the_order_of_each_aggregate(mill: Mill) -> None:
    store = await mill.event_store("people", events=[Renamed], partitions=3)
    for number in range(30):
        await store.append(f"p{number % 7}", [Renamed(str(number))])
    reopened = await mill.event_store("people", events=[Renamed])
    assert reopened.topic.partitions == 3
    for person in range(7):
        names = [int(e.data.name) async for e in reopened.events(f"p{person}")]
        assert names == list(range(person, 30, 7))
    with pytest.raises(ConfigError, match="one partition"):
        await reopened.query("p.*")


@pytest.mark.parametrize(
    "values",
    [
        {"max_bytes": 5000},
        {"max_bytes": 5000, "discard": "old"},
        {"max_age": "7d"},
        {"max_messages": 3},
        {"history": 1},
        {"retention": "workqueue"},
    ],
)
async def test_a_store_that_would_forget_events_is_refused(
    mill: Mill, values: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"keeps every event|needs discard='new'"):
        await mill.event_store("people", events=[Renamed], **values)
    assert await mill.topics() == []


@pytest.mark.parametrize("values", [{"history": 1}, {"max_age": "1h", "packs": False}])
async def test_a_topic_that_forgets_is_not_taken_for_a_store(
    mill: Mill, values: dict[str, Any]
) -> None:
    await mill.create_topic("people", **values)
    with pytest.raises(ConfigError, match="is a topic and not an event store"):
        await mill.event_store("people", events=[Renamed])


@pytest.mark.parametrize(
    ("name", "value"), [("snapshot_every", "x"), ("snapshot_version", None), ("upcasters", [1])]
)
async def test_a_setting_of_another_type_is_refused(mill: Mill, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        await mill.event_store("people", events=[Renamed], **{name: value})


# -- versions of one event, side by side --------------------------------------------------------


def moved(**fields: Any) -> type:
    """A class of events with fields: types, or defaults whose types they have."""
    shape = [
        (name, one) if isinstance(one, type) else (name, type(one), field(default=one))
        for name, one in fields.items()
    ]
    return make_dataclass("Moved", shape)


async def test_versions_are_read_step_by_step(mill: Mill) -> None:
    """Version 3 cannot read version 1, but version 2, which can."""
    one, two, three = moved(a=int, b=0), moved(b=0), moved(b=0, a="")
    for event in (one(5, 6), two(1)):
        store = await mill.event_store("moves", events=[type(event)])
        await store.append("m", [event])
    store = await mill.event_store("moves", events=[three])
    assert [e.data async for e in store.events("m")] == [three(6, ""), three(1, "")]


@pytest.mark.parametrize("mode", ["BACKWARD", "NONE"])
async def test_a_refused_version_leaves_the_store_as_it_was(mill: Mill, mode: str) -> None:
    one, other = moved(a=int), moved(x=str)
    store = await mill.event_store("moves", events=[one], compatibility=mode)
    await store.append("m", [one(5)])
    with pytest.raises(SchemaError):  # no function leads from the old one to it
        await mill.event_store("moves", events=[other])
    plain = await mill.event_store("moves")
    assert len(plain.types.events["Moved"].schemas) == 1
    assert [e.data async for e in plain.events("m")] == [{"a": 5}]
    again = await mill.event_store("moves", events=[one])
    await again.append("m", [one(6)])
    assert [(e.schema_version, e.data) async for e in again.events("m")] == [
        (1, one(5)),
        (1, one(6)),
    ]


async def test_programs_with_an_older_and_a_newer_class_write_side_by_side(mill: Mill) -> None:
    one, two = moved(a=int), moved(a=int, b=7)
    first = await mill.event_store("moves", events=[one])
    await first.append("m", [one(1)])
    second = await mill.event_store("moves", events=[two])
    await second.append("m", [two(2, 3)])
    third = await mill.event_store("moves", events=[one])  # the older program is restarted
    await third.append("m", [one(4)])
    for older in (first, third):
        assert [e.data async for e in older.events("m")] == [one(1), one(2), one(4)]
    assert [e.data async for e in second.events("m")] == [two(1, 7), two(2, 3), two(4, 7)]


async def test_a_store_with_an_upcaster_is_read_without_it_by_tools_and_older_programs(
    mill: Mill,
) -> None:
    one, two = moved(a=int), moved(x=str)
    old = await mill.event_store("moves", events=[one])
    await old.append("m", [one(1)])
    upcasters = {("Moved", 1): lambda data: {"x": str(data["a"])}}
    await mill.event_store("moves", events=[two], upcasters=upcasters)
    await old.append("m", [one(3)])
    again = await mill.event_store("moves", events=[one])  # the older program is restarted
    for older in (old, again):
        assert [e.data async for e in older.events("m")] == [one(1), one(3)]
    new = await mill.event_store("moves", events=[two], upcasters=upcasters)
    await new.append("m", [two("2")])
    plain = await mill.event_store("moves")  # as the commands and Spark do
    found = [(e.schema_version, e.data) async for e in plain.events("m")]
    assert found == [(1, {"a": 1}), (1, {"a": 3}), (2, {"x": "2"})]


async def test_an_upcaster_that_returns_no_dict_is_named(mill: Mill) -> None:
    one, two = moved(a=int), moved(x=str)
    store = await mill.event_store("moves", events=[one])
    await store.append("m", [one(1)])
    upcasters: dict[tuple[str, int], Any] = {("Moved", 1): lambda data: None}
    store = await mill.event_store("moves", events=[two], upcasters=upcasters)
    with pytest.raises(Undecodable, match="Moved"):
        _ = [event async for event in store.events("m")]
