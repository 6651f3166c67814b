"""The SQL files of Spark Declarative Pipelines, read by Spark's own parser.

The parser runs in Spark's JVM. A session has one, but a bare JVM is enough to parse and starts in
about a third of the time. So commands that only list what a project declares (`ls`, `reset`,
`package`) start no session for its SQL files, and no JVM for a project without any.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from millstream.errors import ConfigError, PipelineInvalid
from millstream.pipelines.declare import check_name

if TYPE_CHECKING:
    from pyspark.errors import ParseException
    from pyspark.sql import DataFrame

__all__ = ["Statement", "query_of", "read_sql"]

Kind = Literal["streaming table", "materialized view", "temporary view", "flow"]

# Spark's plan of a statement -> what it declares, and the method that returns the plan's query.
_PLANS: Final[dict[str, tuple[Kind, str]]] = {
    "CreateStreamingTable": ("streaming table", ""),
    "CreateStreamingTableAsSelect": ("streaming table", "query"),
    "CreateMaterializedViewAsSelect": ("materialized view", "query"),
    "CreateViewCommand": ("temporary view", "plan"),
    "CreateFlowCommand": ("flow", "flowOperation"),
}
_AUTO_CDC: Final = ("CreateStreamingTableAutoCdc", "AutoCdcInto")
# Spark's messages: [CONDITION] sentence. SQLSTATE: 42601 (line 1, pos 2), then the SQL text.
_SENTENCE: Final = re.compile(r"\s*(?:\[[\w.]+\] )?(.*?)(?: SQLSTATE: .*)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Statement:
    """One CREATE statement of a file."""

    kind: Kind
    name: str
    target: str  # where its rows go; other than the name for a flow only
    text: str
    has_query: bool
    where: str  # file and line


def read_sql(
    text: str, path: Path, settings: Mapping[str, str] = MappingProxyType({})
) -> list[Statement]:
    """The statements of a file; PipelineInvalid names the file and line of the first wrong one.

    Without a session the parser gets the project's `settings`, which may change the syntax.
    """
    parser = _parser(settings)
    return [_statement(parser, part, line, path.name) for part, line in _split(text)]


def query_of(statement: Statement) -> DataFrame:
    """The rows of a statement's query, in the active session."""
    from pyspark.sql import DataFrame, SparkSession

    session: Any = SparkSession.active()
    # Parsed for every call: Spark marks a plan as analysed even if a table was missing.
    plan = _query(_parser().parsePlan(statement.text))
    rows = session._jvm.org.apache.spark.sql.classic.Dataset.ofRows(session._jsparkSession, plan)
    return DataFrame(rows, session)


def _parser(settings: Mapping[str, str] = MappingProxyType({})) -> Any:
    from pyspark import SparkContext
    from pyspark.errors import IllegalArgumentException
    from pyspark.errors.exceptions.captured import install_exception_handler
    from pyspark.sql import SparkSession

    from millstream.spark.session import start_java

    session: Any = SparkSession.getActiveSession()
    if session is not None:
        return session._jsparkSession.sessionState().sqlParser()  # with the session's settings
    start_java()
    install_exception_handler()  # which a session does: Java's ParseException becomes Python's
    jvm: Any = SparkContext._jvm
    conf = jvm.org.apache.spark.sql.internal.SQLConf.get()
    for name, value in settings.items():
        if name.startswith("spark.sql."):
            try:
                conf.setConfString(name, value)
            except IllegalArgumentException as error:
                raise ConfigError(f"{name} = {value!r}: {_sentence(error)}") from error
    return jvm.org.apache.spark.sql.execution.SparkSqlParser()


def _split(text: str) -> Iterator[tuple[str, int]]:
    """Each statement with the line on which its text starts, split as spark-pipelines does it."""
    from pyspark import SparkContext

    jvm: Any = SparkContext._jvm
    utils = getattr(getattr(jvm.org.apache.spark.sql.catalyst.util, "StringUtils$"), "MODULE$")
    position = 0
    for part in _sequence(utils.splitSemiColon(text, False)):  # False: no SQL scripts
        position = text.index(part, position)
        yield part, text.count("\n", 0, position) + 1
        position += len(part)


def _sequence(found: Any) -> list[str]:
    """A Scala sequence of strings as a list."""
    iterator = found.iterator()
    parts = []
    while iterator.hasNext():
        parts.append(str(iterator.next()))
    return parts


def _statement(parser: Any, text: str, first_line: int, file: str) -> Statement:
    from pyspark.errors import ParseException

    try:
        plan = parser.parsePlan(text)
    except ParseException as error:
        line = first_line + _line(error, text) - 1
        raise PipelineInvalid(f"{file}:{line}: {_sentence(error)}") from error
    where = f"{file}:{first_line + plan.origin().line().get() - 1}"
    try:
        return _declared(plan, text, where)
    except PipelineInvalid as error:
        raise PipelineInvalid(f"{where}: {error}") from error


def _sentence(error: Exception) -> str:
    found = _SENTENCE.fullmatch(str(error))
    return found[1] if found else str(error)


def _line(error: ParseException, text: str) -> int:
    """The line of a syntax error within its statement."""
    found = getattr(error, "_origin").start().line()  # noqa: B009
    line = int(found.get()) if found.isDefined() else 1
    if line > text.count("\n") + 1:  # for a comment that is not closed Spark gives the column
        return text.count("\n", 0, len(text) - len(text.lstrip())) + 1
    return line


def _declared(plan: Any, text: str, where: str) -> Statement:
    kind = str(plan.nodeName())
    if kind in _AUTO_CDC:
        raise PipelineInvalid(
            "AUTO CDC is not supported: keep the latest row of each key in a table, "
            "@table(key=...) of millstream.pipelines"
        )
    if kind not in _PLANS or (
        kind == "CreateViewCommand" and str(plan.viewType()) != "LocalTempView"
    ):
        raise PipelineInvalid(
            f"only CREATE STREAMING TABLE, MATERIALIZED VIEW, TEMPORARY VIEW and FLOW are "
            f"supported, not: {' '.join(text.split())[:80]}"
        )
    declares, _ = _PLANS[kind]
    name = _name(plan.name().nameParts())
    target = _flow_target(plan.flowOperation()) if declares == "flow" else name
    return Statement(declares, name, target, text, _query(plan) is not None, where)


def _query(plan: Any) -> Any:
    """The plan of a statement's query; None for a table without one."""
    declares, method = _PLANS[str(plan.nodeName())]
    if not method:
        return None
    found: Any = getattr(plan, method)()
    return found.query() if declares == "flow" else found


def _flow_target(operation: Any) -> str:
    """The table that a flow inserts into. The refusals are those of spark-pipelines."""
    kind = str(operation.nodeName())
    if kind in _AUTO_CDC:
        raise PipelineInvalid("AUTO CDC flows are not supported")
    plain = (
        kind == "InsertIntoStatement"
        and operation.byName()
        and not operation.overwrite()
        and not operation.ifPartitionNotExists()
        and operation.partitionSpec().isEmpty()
        and operation.userSpecifiedCols().isEmpty()
    )
    if not plain:
        raise PipelineInvalid("write a flow as CREATE FLOW ... AS INSERT INTO ... BY NAME SELECT")
    return _name(operation.table().multipartIdentifier())


def _name(parts: Any) -> str:
    name = ".".join(found := _sequence(parts))
    if len(found) > 1:
        raise PipelineInvalid(f"the name '{name}' has several parts; use one without dots")
    return check_name("table", name)
