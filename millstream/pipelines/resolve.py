"""From declarations to DataFrames: every function is called once, after those that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from millstream.errors import ConfigError, MillstreamError, PipelineInvalid, TopicNotFound
from millstream.nearest import did_you_mean
from millstream.pipelines.attempts import ORIGIN
from millstream.pipelines.change_columns import change_columns
from millstream.pipelines.declare import SNAPSHOT, Flow, Output, Pipeline
from millstream.pipelines.graph import Graph, GraphNode
from millstream.pipelines.outputs import PipelineTopics, shaped
from millstream.pipelines.reads import reading
from millstream.pipelines.spark_errors import missing_schema, reason_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Resolved", "Resolver"]

FORMAT: Final = "millstream"


@dataclass(slots=True)
class Resolved:
    """A pipeline as DataFrames: each flow's rows, shaped for its output, and what reads what."""

    graph: Graph
    flows: dict[str, DataFrame] = field(default_factory=dict)
    reads: dict[str, set[str]] = field(default_factory=dict)  # flow -> what it reads, also by views


class Resolver:
    """Calls the functions of a pipeline. `read` in a function first resolves what it names."""

    def __init__(
        self,
        pipeline: Pipeline,
        spark: SparkSession,
        folder: Path,
        options: Mapping[str, str] | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._spark = spark
        self._topics = PipelineTopics(dry=True)  # until a call brings the broker's
        self._folder = folder
        self._options = dict(options or {})  # for every Millstream source
        self._again = False
        self._views: dict[str, DataFrame] = {}
        self._done = Resolved(Graph())
        self._columns: dict[str, Any] = {}  # output -> schema of its rows
        self._rows: dict[str, Any] = {}  # the same, shaped for the output
        self._untyped: set[str] = set()  # topics and tables that were read and have no schema
        self._path: list[str] = []  # what is being resolved, outermost first
        self._readers: list[str] = []  # the same as names of graph nodes
        self._resolved: Callable[[str, DataFrame], None] = lambda flow, rows: None

    def all(
        self, topics: PipelineTopics, resolved: Callable[[str, DataFrame], None] | None = None
    ) -> Resolved:
        """Every flow of the pipeline; an error names the function and says what is wrong.

        `resolved` is called with a flow's name and its rows as soon as they are known, now and
        when the flow is resolved again.
        """
        if resolved is not None:
            self._resolved = resolved
        with self._using(topics):
            for flow in self._pipeline.flows.values():
                self._output(self._pipeline.outputs[flow.target])
            for view in self._pipeline.views.values():
                self._view(view.name)
        return self._done

    def again(self, flow: Flow, topics: PipelineTopics) -> Resolved:
        """The flows that write to this flow's output; the rest stays as it was resolved.

        Topics may have other columns by now, and files other contents. All flows of the output
        are called, because they must agree on their columns.
        """
        self._views.clear()
        self._columns.pop(flow.target, None)
        self._again = True
        with self._using(topics):
            self._output(self._pipeline.outputs[flow.target])
        return self._done

    @contextmanager
    def _using(self, topics: PipelineTopics) -> Iterator[None]:
        self._topics = topics
        try:
            yield
        except TopicNotFound as error:
            raise PipelineInvalid(str(error)) from error
        except RecursionError as error:
            raise ConfigError("the functions of the pipeline call each other endlessly") from error

    # -- outputs and views ----------------------------------------------------------------

    def _output(self, output: Output) -> None:
        if output.name in self._columns:
            if self._again:  # its topic may have been deleted since
                self._topics.declare(output, self._rows[output.name])
            return
        self._enter(output.name)
        try:
            self._done.graph.add(GraphNode(output.name, output.kind))
            for flow in self._pipeline.flows_to(output.name):
                self._flow(flow, output)
        finally:
            self._path.pop()

    def _flow(self, flow: Flow, output: Output) -> None:
        frame = self._call(flow.name, flow.where, flow.function, output.name)
        rows = shaped(frame, output)
        first = self._columns.get(output.name)
        if first is None:
            self._topics.declare(output, rows.schema)
            self._columns[output.name] = frame.schema
            self._rows[output.name] = rows.schema
        elif output.kind != "sink" and _names(first) != _names(frame.schema):
            raise PipelineInvalid(
                f"the flows to '{output.name}' have different columns; '{flow.name}' gives "
                f"{', '.join(_names(frame.schema))}, another {', '.join(_names(first))}"
            )
        self._done.flows[flow.name] = rows
        self._done.reads[flow.name] = self._done.graph.upstream(output.name)
        self._resolved(flow.name, rows)

    def _view(self, name: str) -> DataFrame:
        if name not in self._views:
            self._enter(name)
            try:
                view = self._pipeline.views[name]
                self._done.graph.add(GraphNode(name, "view"))
                self._views[name] = self._call(name, view.where, view.function, name)
            finally:
                self._path.pop()
        return self._views[name]

    def _enter(self, name: str) -> None:
        if name in self._path:
            cycle = " -> ".join([*self._path[self._path.index(name) :], name])
            raise PipelineInvalid(
                f"the pipeline has a cycle: {cycle}. Let one of them read a topic that is written "
                f"elsewhere"
            )
        self._path.append(name)

    def _call(self, name: str, where: str, function: Any, node: str) -> DataFrame:
        from pyspark.sql import DataFrame

        self._readers.append(node)
        try:
            with reading(self._read):
                frame = function()
        except Exception as error:
            wrong_argument = type(error) is ConfigError
            if isinstance(error, MillstreamError) and not wrong_argument:
                raise
            reason = str(error) if wrong_argument else reason_of(f"{type(error).__name__}: {error}")
            reason = missing_schema(reason, self._untyped & self._inputs(node))
            raise PipelineInvalid(f"the function '{name}' ({where}) failed: {reason}") from error
        finally:
            self._readers.pop()
        if not isinstance(frame, DataFrame):
            raise PipelineInvalid(
                f"the function '{name}' ({where}) returned {type(frame).__name__}, not a DataFrame"
            )
        return frame

    # -- reading --------------------------------------------------------------------------

    def _read(self, how: str, name: str, options: Mapping[str, Any]) -> DataFrame:
        self._done.graph.edges.add((name, self._readers[-1]))
        if how == "events":
            return self._events(name, options)
        if name in self._pipeline.views:
            if options:
                raise PipelineInvalid(f"'{name}' is a view, which is read without options")
            return self._view(name)
        output = self._pipeline.outputs.get(name)
        if output is not None:
            self._output(output)
            if output.kind == "files":
                return self._files(output, how)
            if output.kind in ("sink", "postgres"):
                kind = "a sink" if output.kind == "sink" else "a table of PostgreSQL"
                raise PipelineInvalid(f"'{name}' is {kind}, which cannot be read")
        else:
            kind = "topic" if how == "stream" else "table"
            self._done.graph.add(GraphNode(name, kind, outside=True))
        return self._source(how, name, options)

    def _files(self, output: Output, how: str) -> DataFrame:
        if output.format == SNAPSHOT:
            raise PipelineInvalid(
                f"'{output.name}' ({output.where}) is a materialized view, which is "
                f"replaced at every change: read what it is computed from"
            )
        columns = self._columns[output.name]
        if self._topics.dry:
            return _nothing(self._spark, columns, batch=how == "table")
        reader = self._spark.readStream if how == "stream" else self._spark.read
        path = str(self._folder / output.options["path"])
        Path(path).mkdir(parents=True, exist_ok=True)
        frame: DataFrame = reader.schema(columns).format(output.format).load(path)
        return frame

    def _events(self, name: str, options: Mapping[str, Any]) -> DataFrame:
        from pyspark.sql import functions as sf

        from millstream.spark import event_upcasters

        if name in self._pipeline.views or name in self._pipeline.outputs:
            raise PipelineInvalid(f"'{name}' is no event store: read it with read({name!r})")
        self._done.graph.add(GraphNode(name, "store", outside=True))
        self._topics.check_exists(name, self._suggest)
        functions = options.get("upcasters")
        own = {} if functions is None else {"upcasters": event_upcasters(functions)}
        given = _from_the_first({key: str(value) for key, value in {**options, **own}.items()})
        origin = given.pop("origin", "false").lower() == "true"
        reader = self._spark.readStream.format(FORMAT).option("eventStore", name)
        frame: DataFrame = reader.options(**self._options, **given).load()
        if origin:
            place = (sf.lit(name).alias("topic"), "partition", "offset", "index")
            frame = frame.withColumn(ORIGIN, sf.struct(*place))
        return frame

    def _source(self, how: str, name: str, options: Mapping[str, Any]) -> DataFrame:
        from pyspark.sql import functions as sf

        given = {key: str(value) for key, value in options.items()}
        envelope = given.pop("envelope", "false").lower() == "true"
        origin = given.pop("origin", "false").lower() == "true"
        before = given.pop("before", "false").lower() == "true"
        what = "table" if how != "stream" and self._is_table(name) else "subscribe"
        reader = self._spark.read if how == "table" else self._spark.readStream
        if how == "table" and what == "subscribe":
            given["rows"] = "latest"
        elif what == "subscribe":
            given = _from_the_first(given)
        if "columns" not in given:
            given.setdefault("includeMetadata", "true")
        reader = reader.format(FORMAT).option(what, name).options(**self._options, **given)
        if self._topics.dry and name in self._rows:
            frame = _stand_in(self._spark, self._rows[name], batch=how == "table")
        else:
            self._topics.check_exists(name, self._suggest)
            frame = reader.load()
        if origin:
            fields = ("topic", "partition", "offset", "index")
            frame = frame.withColumn(ORIGIN, sf.struct(*fields))
        if envelope:
            return frame
        flat = _flat(frame, how, before)
        # A schema may have been registered since the flow was resolved before.
        (self._untyped.add if flat is frame else self._untyped.discard)(name)
        return flat

    def _is_table(self, name: str) -> bool:
        """Whether the broker has, or will have, a table of this name; else it is a topic."""
        output = self._pipeline.outputs.get(name)
        return output.kind == "table" if output is not None else self._topics.is_table(name)

    def _inputs(self, node: str) -> set[str]:
        """What a node reads, directly or through views."""
        found = set(self._done.graph.inputs(node))
        for view in found & self._pipeline.views.keys():
            found |= self._inputs(view)
        return found

    def _suggest(self, name: str, known: list[str]) -> str:
        mine = [*self._pipeline.views, *self._pipeline.outputs]
        return did_you_mean(name, [*mine, *known]) or f"the pipeline has {', '.join(mine)}"


def _from_the_first(options: dict[str, str]) -> dict[str, str]:
    """Options of a stream that starts with the first event unless they say otherwise."""
    starts = any(key.startswith("starting") for key in options)
    return options if starts else {**options, "startingOffsets": "earliest"}


def _stand_in(spark: SparkSession, schema: Any, batch: bool) -> DataFrame:
    """No rows of a topic that does not exist yet, to resolve a pipeline without running it."""
    from pyspark.sql.types import StructType

    envelope: Any = StructType.fromDDL(
        "key BINARY, value BINARY, topic STRING, partition INT, offset BIGINT, "
        "timestamp TIMESTAMP, subject STRING, index INT"
    )
    envelope["value"].dataType = schema["value"].dataType
    return _nothing(spark, envelope, batch)


def _nothing(spark: SparkSession, schema: Any, batch: bool) -> DataFrame:
    """No rows, with these columns."""
    from pyspark.sql import functions as sf

    frame = spark.range(0) if batch else spark.readStream.format("rate").load()
    return frame.select(*(sf.lit(None).cast(c.dataType).alias(c.name) for c in schema.fields))


def _flat(frame: DataFrame, how: str, before: bool = False) -> DataFrame:
    """The columns of the values; for a table's changes also those that describe the change."""
    from pyspark.sql import functions as sf
    from pyspark.sql.types import StructType

    value = frame.schema["value"].dataType if "value" in frame.columns else None
    if not isinstance(value, StructType):
        return frame
    columns = change_columns(value, before) if how == "changes" else None
    if columns is None:
        columns = [sf.col(f"value.`{inner.name}`") for inner in value.fields]
        if how == "changes":
            columns += [
                sf.col("key").cast("string").alias("_key"),
                sf.col("offset").alias("_offset"),
                sf.col("timestamp").alias("_time"),
                sf.col("value").isNull().alias("_deleted"),
            ]
            if before:
                raise ConfigError("before=True is for topics of changes; this one has rows only")
    if ORIGIN in frame.columns:
        columns.append(sf.col(ORIGIN))
    return frame.select(*columns)


def _names(schema: Any) -> list[str]:
    return sorted(schema.fieldNames())
