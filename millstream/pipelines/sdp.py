"""Projects of Spark Declarative Pipelines, run continuously: their decorators and SQL, our runner.

A folder with `spark-pipeline.yml`, as `spark-pipelines run` takes it. Streaming tables become
topics, temporary views stay views, sinks stay sinks, and a materialized view over a stream becomes
a folder of Parquet files that is replaced whenever its result changes. What is not promised:
AutoCDC, materialized views over materialized views, and several parts in a name.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from millstream.errors import ConfigError, MillstreamError, MissingExtra, PipelineInvalid
from millstream.pipelines.declare import Flow, Kind, Output, Pipeline, View, check_name, read
from millstream.pipelines.project import Project
from millstream.pipelines.queries import SNAPSHOT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["load_spec", "open_spec"]

# One table or view is found missing at each try, so a function is tried at most this often.
READS_MAX: Final = 100
_FIELDS: Final = frozenset(
    {"name", "storage", "catalog", "database", "schema", "configuration", "libraries"}
)
_MISSING: Final = re.compile(r"TABLE_OR_VIEW_NOT_FOUND\].*?`([^`]+)`(?!\.)", re.DOTALL)
_CREATE: Final = re.compile(
    r"CREATE\s+(?:OR\s+(?:REFRESH|REPLACE)\s+)?(?:PRIVATE\s+)?"
    r"(?P<kind>STREAMING\s+TABLE|MATERIALIZED\s+VIEW|TEMPORARY\s+VIEW|FLOW)\s+"
    r"(?:IF\s+NOT\s+EXISTS\s+)?`?(?P<name>[\w.]+)`?\s*(?P<rest>.*)",
    re.IGNORECASE | re.DOTALL,
)
_AS: Final = re.compile(
    r"(?:^|.*?\s)AS\s+(?P<query>(?:SELECT|WITH|FROM|INSERT)\b.*)", re.IGNORECASE | re.DOTALL
)
_INSERT: Final = re.compile(
    r"INSERT\s+INTO\s+(?:ONCE\s+)?`?(?P<target>\w+)`?\s+(?:BY\s+NAME\s+)?(?P<query>.*)",
    re.IGNORECASE | re.DOTALL,
)

_PIECES: Final = re.compile(
    r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|`[^`]*`|--[^\n]*|/\*.*?\*/|.", re.DOTALL
)


def open_spec(project: Project) -> Project:
    """The project with what its spark-pipeline.yml says; unknown settings are refused."""
    spec = _read(project)
    unknown = sorted(set(spec) - _FIELDS)
    if unknown:
        raise ConfigError(f"{project.spec}: there is no setting '{unknown[0]}'")
    name = str(spec.get("name", project.name))
    conf = spec.get("configuration") or {}
    if not isinstance(conf, Mapping):
        raise ConfigError(f"{project.spec}: configuration is a table of Spark's settings")
    settings = {str(key): str(value) for key, value in conf.items()}
    return replace(
        project,
        name=check_name("pipeline", re.sub(r"[^A-Za-z0-9_-]+", "-", name)),
        spark={**settings, **project.spark},
    )


def _read(project: Project) -> Mapping[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise MissingExtra("spark", "pyyaml") from error
    if project.spec is None:
        raise ConfigError(f"{project.folder} has no spark-pipeline.yml")
    try:
        found = yaml.safe_load(project.spec.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {project.spec}: {error}") from error
    if not isinstance(found, Mapping):
        raise ConfigError(f"{project.spec} is not a table of settings")
    return found


def load_spec(project: Project) -> Pipeline:
    """What the project's Python and SQL files declare."""
    from pyspark.pipelines.graph_element_registry import graph_element_registration_context

    pipeline = Pipeline(project.name)
    registry = _registry(pipeline)
    with graph_element_registration_context(registry):
        for path in _files(project):
            if path.suffix == ".sql":
                _register_sql(pipeline, path.read_text(encoding="utf-8"), path)
            else:
                _run(path)
    pipeline.check()
    return pipeline


def _files(project: Project) -> Iterator[Path]:
    found: set[Path] = set()
    for entry in _read(project).get("libraries") or []:
        try:
            pattern = str(entry["glob"]["include"])
        except (TypeError, KeyError) as error:
            raise ConfigError(
                f"{project.spec}: an entry of libraries is written - glob: {{include: ...}}"
            ) from error
        if pattern.endswith("/**"):
            pattern += "/*"
        found.update(project.folder.glob(pattern))
    kinds = (".py", ".sql")
    files = sorted(p for p in found if p.is_file() and p.suffix in kinds)
    if not files:
        raise PipelineInvalid(f"{project.spec}: its libraries match no .py or .sql file")
    return iter(files)


class _Session:
    """`spark` in the project's files: the session that runs when a function is called."""

    def __getattr__(self, name: str) -> Any:
        from pyspark.sql import SparkSession

        return getattr(SparkSession.active(), name)


def _run(path: Path) -> None:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise PipelineInvalid(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    module.__dict__["spark"] = _Session()
    try:
        spec.loader.exec_module(module)
    except MillstreamError:
        raise
    except Exception as error:
        kind = type(error).__name__
        raise PipelineInvalid(f"{path.name} does not load: {kind}: {error}") from error


# -- Python ---------------------------------------------------------------------------------


def _registry(pipeline: Pipeline) -> Any:
    """Spark's registry of declarations, filling our pipeline."""
    from pyspark.pipelines import flow as spark_flow
    from pyspark.pipelines import output as spark_output
    from pyspark.pipelines.graph_element_registry import GraphElementRegistry

    class Registry(GraphElementRegistry):
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
            _register_sql(pipeline, sql_text, file_path)

    return Registry()


def _where(location: Any) -> str:
    return f"{Path(str(location.filename)).name}:{location.line_number}"


def _one(name: str) -> str:
    if "." in name:
        raise PipelineInvalid(f"the name '{name}' has several parts; here it has one")
    return check_name("table", name)


def _view_files(name: str, where: str) -> Output:
    kind: Kind = "files"
    options = {"path": f"data/{_one(name)}"}
    return Output(name, kind, format=SNAPSHOT, options=options, where=where)


def _add_flow(
    pipeline: Pipeline, name: str, target: str, function: Callable[[], DataFrame], where: str
) -> None:
    output = pipeline.outputs.get(target)
    whole = output is not None and output.format == SNAPSHOT
    pipeline.add_flow(Flow(name, target, function, "complete" if whole else "append", where))


def _with_tables(pipeline: Pipeline, function: Callable[[], DataFrame]) -> Callable[[], DataFrame]:
    """The function, with what it reads by table name put in its way as views."""

    def call() -> DataFrame:
        from pyspark.errors import AnalysisException
        from pyspark.sql import SparkSession

        catalog = SparkSession.active().catalog
        for name in (*pipeline.views, *pipeline.outputs):
            catalog.dropTempView(name)  # so that every read of it is seen
        for _ in range(READS_MAX):
            try:
                return function()
            except AnalysisException as error:
                found = _MISSING.search(str(error))
                name = found[1] if found else ""
                if name not in pipeline.views and name not in pipeline.outputs:
                    raise
                read(name).createOrReplaceTempView(name)
        raise PipelineInvalid(f"a function reads more than {READS_MAX} tables")

    return call


# -- SQL ------------------------------------------------------------------------------------


def _register_sql(pipeline: Pipeline, text: str, path: Path) -> None:
    for statement in _statements(text):
        found = _CREATE.fullmatch(statement)
        if found is None:
            raise PipelineInvalid(
                f"{path.name}: only CREATE STREAMING TABLE, MATERIALIZED VIEW, TEMPORARY VIEW and "
                f"FLOW are taken, not: {statement[:80]}"
            )
        kind = " ".join(found["kind"].upper().split())
        _declare_sql(pipeline, kind, _one(found["name"]), found["rest"].strip(), path.name)


def _declare_sql(pipeline: Pipeline, kind: str, name: str, rest: str, where: str) -> None:
    found = _AS.fullmatch(rest)
    query = None if found is None else found["query"]
    if kind == "FLOW":
        insert = None if query is None else _INSERT.fullmatch(query)
        if insert is None:
            raise PipelineInvalid(f"{where}: CREATE FLOW {name} AS INSERT INTO ... BY NAME SELECT")
        _add_flow(pipeline, name, insert["target"], _query(pipeline, insert["query"]), where)
        return
    if kind == "TEMPORARY VIEW":
        if query is None:
            raise PipelineInvalid(f"{where}: the view '{name}' has no query")
        pipeline.add_view(View(name, _query(pipeline, query), where))
        return
    is_view = kind == "MATERIALIZED VIEW"
    pipeline.add_output(_view_files(name, where) if is_view else Output(name, "topic", where=where))
    if query is not None:
        _add_flow(pipeline, name, name, _query(pipeline, query), where)


def _query(pipeline: Pipeline, text: str) -> Callable[[], DataFrame]:
    def ask() -> DataFrame:
        from pyspark.sql import SparkSession

        return SparkSession.active().sql(text)

    return _with_tables(pipeline, ask)


def _statements(text: str) -> Iterator[str]:
    """The statements of a file; a semicolon or comment inside quotes is none.

    >>> list(_statements("SELECT ';' -- one\\n; SELECT 2;"))
    ["SELECT ';'", 'SELECT 2']
    """
    parts = _PIECES.findall(text)
    current: list[str] = []
    for part in parts:
        if part == ";":
            yield from _whole(current)
            current = []
        elif not part.startswith(("--", "/*")):
            current.append(part)
    yield from _whole(current)


def _whole(parts: list[str]) -> Iterator[str]:
    statement = "".join(parts).strip()
    if statement:
        yield statement
