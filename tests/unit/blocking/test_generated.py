"""The generated files are what the asynchronous classes say, and doubts are not guessed away."""

from __future__ import annotations

import importlib
import inspect

import pytest

from tools.blocking_plan import PLANS, ClassPlan
from tools.blocking_types import EXISTING, Imports, Types, Undecided, twin_in
from tools.generate_blocking import TARGET, ClassWriter, generate


def test_the_files_are_up_to_date() -> None:
    for name, text in generate().items():
        found = (TARGET / name).read_text()
        assert found == text, f"{name} is stale: run python -m tools.generate_blocking"


@pytest.mark.parametrize("plan", EXISTING.values(), ids=lambda plan: plan.name)
def test_every_call_has_the_parameters_of_the_asynchronous_one(plan: ClassPlan) -> None:
    original = getattr(importlib.import_module(plan.home), plan.name)
    twin = getattr(importlib.import_module(f"millstream.blocking.generated.{plan.file}"), plan.name)
    compared = 0
    for name, value in inspect.getmembers(original, inspect.isfunction):
        if name.startswith("_") or (name in plan.skip and not hasattr(twin, name)):
            continue
        parameters = list(inspect.signature(value).parameters.values())
        found = list(inspect.signature(getattr(twin, name)).parameters.values())
        assert [(p.name, p.kind) for p in found] == [(p.name, p.kind) for p in parameters], name
        compared += 1
    assert compared or plan.name == "AggregateChange"  # it has only its block


@pytest.mark.parametrize("plan", EXISTING.values(), ids=lambda plan: plan.name)
def test_contexts_and_iterators_have_their_plain_form(plan: ClassPlan) -> None:
    original = getattr(importlib.import_module(plan.home), plan.name)
    twin = getattr(importlib.import_module(f"millstream.blocking.generated.{plan.file}"), plan.name)
    plain = {"__aenter__": "__enter__", "__aexit__": "__exit__", "__aiter__": "__iter__"}
    for asynchronous, name in plain.items():
        assert hasattr(original, asynchronous) == hasattr(twin, name), name
        assert not hasattr(twin, asynchronous)


def test_every_planned_class_exists() -> None:
    assert {plan.name for plan in PLANS} == set(EXISTING)


def test_an_attribute_that_no_plan_mentions_is_undecided() -> None:
    writer = ClassWriter(EXISTING["Topic"], Imports("topic"), {})
    writer.plan = ClassPlan(EXISTING["Topic"].home, "Topic", "topic")
    with pytest.raises(Undecided, match="partitions"):
        writer.write()


def test_an_asynchronous_class_without_a_plan_is_undecided() -> None:
    types = Types("millstream.messaging.topic", Imports("topic"), set())
    with pytest.raises(Undecided, match="JetStream"):
        types.text("JetStream | None")


@pytest.mark.parametrize(
    ("annotation", "found"),
    [
        ("Topic", ("one", "Topic")),
        ("Topic | None", ("optional", "Topic")),
        ("list[Topic]", ("list", "Topic")),
        ("AsyncIterator[Delivery]", ("iterator", "Delivery")),
        ("AsyncGenerator[Delivery, None]", ("iterator", "Delivery")),
        ("list[str]", None),
    ],
)
def test_blocking_classes_are_found_in_types(
    annotation: str, found: tuple[str, str] | None
) -> None:
    assert twin_in(annotation) == found


def test_a_blocking_class_inside_an_unknown_type_is_undecided() -> None:
    with pytest.raises(Undecided, match="Topic"):
        twin_in("dict[str, Topic]")


@pytest.mark.parametrize(
    ("annotation", "plain"),
    [
        ("AsyncIterator[int]", "Iterator[int]"),
        ("AsyncGenerator[int, None]", "Iterator[int]"),
        ("asyncio.Future[Receipt]", "Pending[Receipt]"),
        ("Receipt | None", "Receipt | None"),
        ("Handler | None", "Callable[[Delivery], object] | None"),
    ],
)
def test_types_become_their_plain_form(annotation: str, plain: str) -> None:
    types = Types("millstream.messaging.publishing.event_producer", Imports("producing"), set())
    assert types.text(annotation) == plain
