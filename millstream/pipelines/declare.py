"""The decorators of a pipeline project: what it reads, computes and writes. No pyspark here.

    from millstream import pipelines as mp

    @mp.view
    def paid():
        return mp.read("orders").where("paid")

    @mp.table(key="customer")
    def spending():
        return mp.read("paid").groupBy("customer").sum("amount")

A function returns a DataFrame and is called when the pipeline runs. Names are unique.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, overload

from millstream.errors import ConfigError, PipelineInvalid
from millstream.nearest import proposed_name
from millstream.settings import Secret

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = [
    "Flow",
    "Output",
    "Pipeline",
    "files",
    "flow",
    "loading",
    "sink",
    "table",
    "topic",
    "view",
]

Kind = Literal["topic", "table", "files", "sink", "postgres"]
Mode = Literal["append", "update", "complete"]
Function = TypeVar("Function", bound="Callable[[], Any]")

SNAPSHOT: Final = "snapshot"  # format of files that each new result replaces

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_MODES: Final = ("append", "update", "complete")


@dataclass(frozen=True, slots=True)
class Output:
    """Where rows go: a topic, a table, a folder of files, a Spark sink, or PostgreSQL."""

    name: str
    kind: Kind
    key: tuple[str, ...] = ()  # columns that form the key of an event
    timestamp: str | None = None  # column with the event's time
    delete_when: str | None = None  # for a table, also of PostgreSQL: rows that delete their key
    partitions: int | None = None  # for a topic that the pipeline creates
    format: str = ""  # for files and sinks
    options: Mapping[str, str] = field(default_factory=dict)  # for files, sinks and PostgreSQL
    secret: Secret | None = None  # for PostgreSQL: its address, if it is declared
    where: str = ""  # file and line of the declaration


@dataclass(frozen=True, slots=True)
class Flow:
    """A function whose rows go to an output, continuously: one streaming query."""

    name: str
    target: str
    function: Callable[[], DataFrame]
    mode: Mode
    where: str = ""


@dataclass(frozen=True, slots=True)
class View:
    """A function whose rows other functions read by name; nothing is stored."""

    name: str
    function: Callable[[], DataFrame]
    where: str = ""


class Pipeline:
    """What one project declares. Names of views and outputs are unique, and so are flow names."""

    def __init__(self, name: str = "pipeline") -> None:
        self.name = check_name("pipeline", name)
        self.views: dict[str, View] = {}
        self.outputs: dict[str, Output] = {}
        self.flows: dict[str, Flow] = {}

    def declarations(self) -> tuple[dict[str, Any], ...]:
        """What is declared so far, for `restore`."""
        return dict(self.views), dict(self.outputs), dict(self.flows)

    def restore(self, before: tuple[dict[str, Any], ...]) -> None:
        """Forget what was declared since `before`."""
        self.views, self.outputs, self.flows = map(dict, before)

    # -- adding ---------------------------------------------------------------------------

    def add_view(self, view: View) -> None:
        """Declare a view."""
        self._check_new(view.name, view.where)
        self.views[view.name] = view

    def add_output(self, output: Output) -> None:
        """Declare an output."""
        self._check_new(output.name, output.where)
        self.outputs[output.name] = output

    def add_flow(self, flow: Flow) -> None:
        """Declare a flow; its output may be declared later."""
        if flow.name in self.flows:
            raise PipelineInvalid(
                f"the flow '{flow.name}' is declared twice: {self.flows[flow.name].where} and "
                f"{flow.where}. Name one of them with name=..."
            )
        self.flows[flow.name] = flow

    def _check_new(self, name: str, where: str) -> None:
        other: Output | View | None = self.outputs.get(name) or self.views.get(name)
        if other is not None:
            raise PipelineInvalid(
                f"the name '{name}' is declared twice: {other.where} and {where}. "
                f"Name one of them with name=..."
            )

    def check(self) -> None:
        """Refuse flows without an output and outputs without a flow."""
        for flow in self.flows.values():
            if flow.target not in self.outputs:
                raise PipelineInvalid(
                    f"the flow '{flow.name}' ({flow.where}) goes to '{flow.target}', which "
                    f"{self._unknown(flow.target)}"
                )
        fed = {flow.target for flow in self.flows.values()}
        for output in self.outputs.values():
            if output.name not in fed:
                raise PipelineInvalid(
                    f"nothing writes to '{output.name}' ({output.where}); add a function with "
                    f'@flow("{output.name}")'
                )
        if not self.flows:
            raise PipelineInvalid(
                f"the pipeline '{self.name}' declares no flow: decorate a function with @topic, "
                f"@table, @files, @postgres or @flow"
            )

    def _unknown(self, name: str) -> str:
        if name in self.views:
            return "is a view; a flow goes to a topic, a table, files, PostgreSQL or a sink"
        known = ", ".join(sorted(self.outputs)) or "none"
        return f"is not declared. Outputs are: {known}"

    def flows_to(self, target: str) -> list[Flow]:
        """The flows that write to an output."""
        return [flow for flow in self.flows.values() if flow.target == target]


# -- the pipeline that is being loaded --------------------------------------------------------

_loading: ContextVar[Pipeline | None] = ContextVar("millstream_pipeline", default=None)


@contextmanager
def loading(pipeline: Pipeline) -> Iterator[Pipeline]:
    """While this is open, the decorators declare into this pipeline."""
    token = _loading.set(pipeline)
    try:
        yield pipeline
    finally:
        _loading.reset(token)


def _pipeline() -> Pipeline:
    found = _loading.get()
    if found is None:
        raise ConfigError(
            "there is no pipeline to declare this in: use the decorators in the files of a "
            "project, which 'millstream pipeline run' loads, or in `with loading(Pipeline(name)):`"
        )
    return found


def check_name(what: str, name: str) -> str:
    """A name that is valid for topics, query names and folders."""
    if not _NAME.fullmatch(name):
        proposed = proposed_name(name, 64)
        such = f", such as '{proposed}'" if proposed and _NAME.fullmatch(proposed) else ""
        raise PipelineInvalid(
            f"{what} name {name!r:.80}: use up to 64 letters, digits, '_' and '-', a letter first"
            f"{such}"
        )
    return name


def place_of(function: Callable[..., Any]) -> str:
    """The file and line of a function."""
    code = getattr(function, "__code__", None)
    return "?" if code is None else f"{Path(code.co_filename).name}:{code.co_firstlineno}"


def checked_function(function: Callable[[], Any], name: str | None, mode: str = "append") -> str:
    """The name of a function that returns rows; refused if it has parameters."""
    if not callable(function):
        raise PipelineInvalid(f"decorate a function that returns a DataFrame, not {function!r}")
    chosen = check_name("function", name or str(getattr(function, "__name__", "")))
    if inspect.signature(function).parameters:
        raise PipelineInvalid(
            f"the function '{chosen}' ({place_of(function)}) has parameters; let it read what it "
            f'needs by name: read("...")'
        )
    if mode not in _MODES:
        raise PipelineInvalid(f"'{chosen}': mode {mode!r}; choose append, update or complete")
    return chosen


def columns_of_key(key: str | Sequence[str]) -> tuple[str, ...]:
    """The columns of a key, which may be one name."""
    return (key,) if isinstance(key, str) else tuple(key)


def declare_flow(function: Function, output: Output, mode: str) -> Function:
    """Declare an output and the flow of the same name that goes there."""
    pipeline = _pipeline()
    pipeline.add_output(output)
    pipeline.add_flow(Flow(output.name, output.name, function, _mode(mode), output.where))
    return function


def _mode(mode: str) -> Mode:
    return "complete" if mode == "complete" else "update" if mode == "update" else "append"


# -- outputs --------------------------------------------------------------------------------


@overload
def topic(function: Function) -> Function: ...


@overload
def topic(
    *,
    name: str | None = None,
    key: str | Sequence[str] = (),
    timestamp: str | None = None,
    partitions: int | None = None,
    mode: str = "append",
) -> Callable[[Function], Function]: ...


def topic(
    function: Function | None = None,
    *,
    name: str | None = None,
    key: str | Sequence[str] = (),
    timestamp: str | None = None,
    partitions: int | None = None,
    mode: str = "append",
) -> Function | Callable[[Function], Function]:
    """Rows become events of a topic, exactly once; the topic's schema has the rows' columns.

    `key` names the columns that form the key, `timestamp` the one with the event's time. Rows
    with the columns of an event (`value`, optionally `key`, `headers`, ...) are written as is.
    """

    def declare(function: Function) -> Function:
        chosen = checked_function(function, name, mode)
        output = Output(
            name=chosen,
            kind="topic",
            key=columns_of_key(key),
            timestamp=timestamp,
            partitions=partitions,
            where=place_of(function),
        )
        return declare_flow(function, output, mode)

    return declare if function is None else declare(function)


def table(
    *,
    key: str | Sequence[str],
    name: str | None = None,
    delete_when: str | None = None,
    partitions: int | None = None,
    mode: str = "update",
) -> Callable[[Function], Function]:
    """Rows become the latest value of their key in a table, whose schema has the rows' columns.

    A row that matches `delete_when` (an SQL condition, or the name of a column, which is then not
    stored; by default the column `_deleted`, if there is one) deletes its key.
    """

    def declare(function: Function) -> Function:
        chosen = checked_function(function, name, mode)
        output = Output(
            name=chosen,
            kind="table",
            key=columns_of_key(key),
            delete_when=delete_when,
            partitions=partitions,
            where=place_of(function),
        )
        return declare_flow(function, output, mode)

    if not key:
        raise PipelineInvalid("a table needs a key: @table(key='customer')")
    return declare


@overload
def files(function: Function) -> Function: ...


@overload
def files(
    *,
    path: str | None = None,
    name: str | None = None,
    format: str = "parquet",
    partition_by: Iterable[str] = (),
    options: Mapping[str, Any] | None = None,
) -> Callable[[Function], Function]: ...


def files(
    function: Function | None = None,
    *,
    path: str | None = None,
    name: str | None = None,
    format: str = "parquet",
    partition_by: Iterable[str] = (),
    options: Mapping[str, Any] | None = None,
) -> Function | Callable[[Function], Function]:
    """Rows become files in a folder (default: Parquet), each row once.

    The folder is `path`, relative to the project (default: `data/<name>`).
    """

    def declare(function: Function) -> Function:
        chosen = checked_function(function, name)
        given = {key: str(value) for key, value in (options or {}).items()}
        by = [partition_by] if isinstance(partition_by, str) else list(partition_by)
        output = Output(
            name=chosen,
            kind="files",
            format=format,
            options={**given, "path": path or f"data/{chosen}"},
            key=tuple(by),
            where=place_of(function),
        )
        return declare_flow(function, output, "append")

    return declare if function is None else declare(function)


def sink(name: str, format: str, **options: Any) -> None:
    """Declare a Spark sink: `console`, `jdbc`, `noop`, or any format that has one.

    Functions write to it with `@flow(name)`.
    """
    caller = inspect.currentframe()
    caller = caller.f_back if caller is not None else None
    where = "?" if caller is None else f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"
    given = {key: str(value) for key, value in options.items()}
    check_name("sink", name)
    _pipeline().add_output(Output(name, "sink", format=format, options=given, where=where))


def flow(
    target: str, *, name: str | None = None, mode: str | None = None
) -> Callable[[Function], Function]:
    """The function's rows go to an output that is declared elsewhere; flows may share it."""

    def declare(function: Function) -> Function:
        pipeline = _pipeline()
        chosen = checked_function(function, name, mode or "append")
        output = pipeline.outputs.get(target)
        keyed = output is not None and output.kind in ("table", "postgres") and output.key
        usual = "update" if keyed else "append"
        pipeline.add_flow(Flow(chosen, target, function, _mode(mode or usual), place_of(function)))
        return function

    return declare


@overload
def view(function: Function) -> Function: ...


@overload
def view(
    *,
    name: str | None = None,
) -> Callable[[Function], Function]: ...


def view(
    function: Function | None = None, *, name: str | None = None
) -> Function | Callable[[Function], Function]:
    """The function's rows can be read by name; nothing is stored."""

    def declare(function: Function) -> Function:
        chosen = checked_function(function, name)
        _pipeline().add_view(View(chosen, function, place_of(function)))
        return function

    return declare if function is None else declare(function)
