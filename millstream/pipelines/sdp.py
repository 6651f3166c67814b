"""Projects of Spark Declarative Pipelines, run continuously: their decorators and SQL, our runner.

A folder with `spark-pipeline.yml`, as `spark-pipelines run` takes it. Streaming tables become
topics, temporary views stay views, sinks stay sinks, and a materialized view over a stream becomes
a folder of Parquet files that is replaced whenever its result changes. Not supported: AutoCDC,
materialized views over materialized views, and names of several parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from millstream.errors import PipelineInvalid
from millstream.pipelines.declare import SNAPSHOT, Flow, Output, Pipeline, View, check_name
from millstream.pipelines.reads import read
from millstream.pipelines.spec import read_spec
from millstream.pipelines.sql import Statement, query_of, read_sql

if TYPE_CHECKING:
    from pyspark.errors import AnalysisException
    from pyspark.sql import DataFrame

__all__ = ["ActiveSession", "declare_sql", "declaring", "spec_files"]

# Each try finds one missing table or view, so a function is called at most this many times.
READS_MAX: Final = 100


def spec_files(folder: Path, spec: Path) -> list[Path]:
    """The project's Python and SQL files, in the order of their names."""
    found = {path for pattern in read_spec(spec).patterns for path in folder.glob(pattern)}
    files = sorted(path for path in found if path.is_file() and path.suffix in (".py", ".sql"))
    if not files:
        raise PipelineInvalid(f"{spec}: its libraries match no .py or .sql file")
    return files


class ActiveSession:
    """`spark` in the project's files: the session that is active when a function is called."""

    def __getattr__(self, name: str) -> Any:
        from pyspark.sql import SparkSession

        return getattr(SparkSession.active(), name)


# -- Python ---------------------------------------------------------------------------------


@contextmanager
def declaring(pipeline: Pipeline) -> Iterator[None]:
    """While this is open, the decorators of `pyspark.pipelines` declare into this pipeline."""
    from pyspark.pipelines.graph_element_registry import graph_element_registration_context

    with graph_element_registration_context(_registry(pipeline)):
        yield


def _registry(pipeline: Pipeline) -> Any:
    """Spark's registry of declarations, filling our pipeline."""
    from pyspark.pipelines import flow as spark_flow
    from pyspark.pipelines import output as spark_output
    from pyspark.pipelines.graph_element_registry import GraphElementRegistry

    class ElementRegistry(GraphElementRegistry):
        def __init__(self) -> None:
            self.views: set[str] = set()

        def register_output(self, output: spark_output.Output) -> None:
            where = _where(output.source_code_location)
            if isinstance(output, spark_output.TemporaryView):
                self.views.add(output.name)
            elif isinstance(output, spark_output.Sink):
                options = {key: str(value) for key, value in output.options.items()}
                sink = Output(
                    _one(output.name), "sink", format=output.format, options=options, where=where
                )
                pipeline.add_output(sink)
            elif isinstance(output, spark_output.MaterializedView):
                pipeline.add_output(_view_files(output.name, where))
            else:
                pipeline.add_output(Output(_one(output.name), "topic", where=where))

        def register_flow(self, flow: spark_flow.Flow) -> None:
            where = _where(flow.source_code_location)
            function = _with_tables(pipeline, flow.func)
            if flow.target in self.views:
                pipeline.add_view(View(_one(flow.target), function, where))
            else:
                _add_flow(pipeline, _one(flow.name), _one(flow.target), function, where)

        def register_auto_cdc_flow(self, flow: spark_flow.AutoCdcFlow) -> None:
            raise PipelineInvalid(
                f"create_auto_cdc_flow for '{flow.target}' is not supported: keep the latest row "
                f"of each key in a table, @table(key=...) of millstream.pipelines"
            )

        def register_sql(self, sql_text: str, file_path: Path) -> None:
            declare_sql(pipeline, sql_text, file_path)

    return ElementRegistry()


def _where(location: Any) -> str:
    return f"{Path(str(location.filename)).name}:{location.line_number}"


def _one(name: str) -> str:
    if "." in name:
        raise PipelineInvalid(f"the name '{name}' has several parts; use one without dots")
    return check_name("table", name)


def _view_files(name: str, where: str) -> Output:
    options = {"path": f"data/{_one(name)}"}
    return Output(name, "files", format=SNAPSHOT, options=options, where=where)


def _add_flow(
    pipeline: Pipeline, name: str, target: str, function: Callable[[], DataFrame], where: str
) -> None:
    output = pipeline.outputs.get(target)
    is_view = output is not None and output.format == SNAPSHOT
    pipeline.add_flow(Flow(name, target, function, "complete" if is_view else "append", where))


def _with_tables(pipeline: Pipeline, function: Callable[[], DataFrame]) -> Callable[[], DataFrame]:
    """The function; tables and views of the pipeline that it reads become temporary views."""

    def call() -> DataFrame:
        from pyspark.errors import AnalysisException
        from pyspark.sql import SparkSession

        catalog = SparkSession.active().catalog
        for name in (*pipeline.views, *pipeline.outputs):
            catalog.dropTempView(name)  # so that every read of it is noticed
        for _ in range(READS_MAX):
            try:
                return function()
            except AnalysisException as error:
                name = _missing_table(error)
                if name not in pipeline.views and name not in pipeline.outputs:
                    raise
                read(name).createOrReplaceTempView(f"`{name}`")
        raise PipelineInvalid(f"a function reads more than {READS_MAX} tables")

    return call


def _missing_table(error: AnalysisException) -> str:
    """The table that a query names and Spark does not have; "" for another error."""
    if error.getCondition() != "TABLE_OR_VIEW_NOT_FOUND":
        return ""
    quoted = (error.getMessageParameters() or {}).get("relationName", "")
    return quoted.removeprefix("`").removesuffix("`")


# -- SQL ------------------------------------------------------------------------------------


def declare_sql(
    pipeline: Pipeline,
    text: str,
    path: Path,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Add what the statements of an SQL file declare; `settings` are the project's for Spark."""
    for statement in read_sql(text, path, settings):
        name, where = statement.name, statement.where
        if statement.kind == "temporary view":
            pipeline.add_view(View(name, _rows(pipeline, statement), where))
            continue
        if statement.kind == "streaming table":
            pipeline.add_output(Output(name, "topic", where=where))
        elif statement.kind == "materialized view":
            pipeline.add_output(_view_files(name, where))
        if statement.has_query:
            _add_flow(pipeline, name, statement.target, _rows(pipeline, statement), where)


def _rows(pipeline: Pipeline, statement: Statement) -> Callable[[], DataFrame]:
    return _with_tables(pipeline, lambda: query_of(statement))
