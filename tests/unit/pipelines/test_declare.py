"""What the decorators of a pipeline declare, and what they refuse."""

from __future__ import annotations

from typing import Any, cast

import pytest

from millstream import pipelines as mp
from millstream.errors import ConfigError, PipelineInvalid
from millstream.pipelines import Pipeline, loading


@pytest.fixture
def pipeline() -> Any:
    with loading(Pipeline("p")) as found:
        yield found


def rows() -> Any:
    return None


def with_parameter(_: int) -> Any:
    return None


def test_each_decorator_declares_an_output_and_its_flow(pipeline: Pipeline) -> None:
    mp.topic(key="id", name="a")(rows)
    mp.table(key=["x", "y"], name="b", delete_when="gone")(rows)
    mp.files(name="c", partition_by="day")(rows)
    mp.view(name="v")(rows)
    pipeline.check()
    assert {n: o.kind for n, o in pipeline.outputs.items()} == {
        "a": "topic",
        "b": "table",
        "c": "files",
    }
    assert {n: f.mode for n, f in pipeline.flows.items()} == {
        "a": "append",
        "b": "update",
        "c": "append",
    }
    assert pipeline.outputs["b"].key == ("x", "y")
    assert pipeline.outputs["c"].options["path"] == "data/c"
    assert list(pipeline.views) == ["v"]


def test_a_decorator_works_with_and_without_brackets(pipeline: Pipeline) -> None:
    @mp.topic
    def plain() -> Any: ...

    @mp.topic()
    def called() -> Any: ...

    assert list(pipeline.outputs) == ["plain", "called"]
    assert pipeline.outputs["plain"].where.startswith("test_declare.py:")


def test_several_flows_write_to_one_output(pipeline: Pipeline) -> None:
    mp.sink("out", "console", truncate=False)
    mp.flow("out", name="one")(rows)
    mp.flow("out", name="two", mode="update")(rows)
    pipeline.check()
    assert [flow.name for flow in pipeline.flows_to("out")] == ["one", "two"]
    assert pipeline.outputs["out"].options == {"truncate": "False"}


def test_a_name_cannot_be_declared_twice(pipeline: Pipeline) -> None:
    mp.topic(name="a")(rows)
    with pytest.raises(PipelineInvalid, match="'a' is declared twice: test_declare"):
        mp.view(name="a")(rows)


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: mp.flow("nowhere", name="f")(rows), "goes to 'nowhere', which is not declared"),
        (lambda: mp.sink("s", "console"), "nothing writes to 's'"),
        (lambda: mp.view(name="v")(rows), "declares no flow"),
        (lambda: (mp.view(name="v")(rows), mp.flow("v", name="f")(rows)), "is a view"),
        (lambda: mp.topic(name="a b")(rows), "use up to 64 letters"),
        (lambda: mp.topic(name="a")(cast("Any", with_parameter)), "has parameters"),
        (lambda: mp.topic(name="a", mode="all")(rows), "choose append, update or complete"),
        (lambda: mp.table(key=())(rows), "a table needs a key"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    pipeline: Pipeline, declare: Any, message: str
) -> None:
    def whole() -> None:
        declare()
        pipeline.check()

    with pytest.raises(PipelineInvalid, match=message):
        whole()


def test_decorators_outside_a_project_are_refused_with_where_they_belong() -> None:
    with pytest.raises(ConfigError, match="millstream pipeline run"):
        mp.topic(rows)
    with pytest.raises(ConfigError, match="called when it runs"):
        mp.read("orders")
