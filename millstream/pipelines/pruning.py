"""Reads only what a flow uses: its plan tells which columns, and which fields of a struct.

Spark does not tell a source written in Python which columns a query needs, and converts every one
of them for every row. So the flow's plan is optimized once to look at it; then every source in it
is replaced by one that reads less, under a projection with the same columns as before. What is not
read is an expression that fails: Spark removes it, because nothing uses it, and a plan in which one
is left is not used. The functions of the flow are not called again.

Plans are not part of Spark's public API. A plan that cannot be read or changed stays as it is.

A call to the JVM takes a fifth of a millisecond, and Spark's JSON of a plan a tenth of a second. So
a plan is read by few calls: its nodes one by one, but all expressions of a node as one text.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from millstream.spark.options import METADATA

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructField, StructType

__all__ = ["pruned"]

_log = logging.getLogger("millstream.pipelines")

FORMAT: Final = "millstream"
_SQL: Final = "org.apache.spark.sql"
# These use what they name and pass on everything, except for the last two.
_PASSING: Final = frozenset(
    {
        "Filter",
        "EventTimeWatermark",
        "SubqueryAlias",
        "Sort",
        "BatchEvalPython",
        "ArrowEvalPython",
        "Project",  # passes on what it only names
        "Aggregate",  # passes on nothing
    }
)
_SOURCES: Final = frozenset({"StreamingRelationV2", "DataSourceV2Relation"})  # streams, batches
_MARK: Final = "millstream did not read the column "
_EXCLUDED: Final = "spark.sql.optimizer.excludedRules"
# It makes `value IS NOT NULL` of a comparison with a field, as if the complete value was used.
_INFERENCE: Final = "org.apache.spark.sql.catalyst.optimizer.InferFiltersFromConstraints"
_SETTINGS: Final = {  # for plans that are optimized and not run
    # It refuses streams, which are run in another way.
    "spark.sql.streaming.unsupportedOperationCheck": "false",
    # Offering filters to a source starts a Python process, and takes them out of the plan.
    "spark.sql.python.filterPushdown.enabled": "false",
}
_FIXED: Final = ("boolean", "tinyint", "smallint", "int", "bigint", "float", "double", "timestamp")
_BETWEEN: Final = "\x1f"  # the columns of a list as text
# A column as text: its name, its id, and marks of numbers and of times with a watermark.
_COLUMN: Final = re.compile(r"#(\d+)L?(?:-T\d+ms)?$")
_ID: Final = re.compile(r"#(\d+)")
# A line of a tree as text: three characters for each level, then what is there.
_LINE: Final = re.compile(r"((?:[: ] {2})*[:+]- )(.*)")

Ids = tuple[int, ...]  # of the columns of a source, which are the same in every plan
Used = dict[str, set[str] | None]  # column -> its fields that are used; None: all of it


@dataclass(frozen=True, slots=True, eq=False)  # two of Java's objects are compared by a call
class _Node:
    """A node of a plan."""

    java: Any
    children: Any  # Java's sequence
    below: tuple[_Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """A leaf of a plan that is ours."""

    node: _Node
    ids: Ids
    whole: StructType
    stream: bool

    def options(self) -> Any:
        """Its options, as Java's map."""
        java = self.node.java
        return java.extraOptions() if self.stream else java.options()


def pruned(rows: DataFrame) -> DataFrame:
    """The same rows, from sources that read only the columns and fields that are used."""
    try:
        return _pruned(rows)
    except Exception as error:  # of Spark's internals, which may differ in another version
        _log.info("reading all columns, because the plan cannot be changed: %s", error)
        return rows


def _pruned(rows: DataFrame) -> DataFrame:
    from pyspark.sql import DataFrame

    session: Any = rows.sparkSession
    plan = _walked(_java(rows).queryExecution().analyzed())
    sources = list(_sources(plan))
    if not sources:
        return rows
    # A source that is used twice must not become two.
    leaves = {source.ids: source for source in sources}
    own = _own_session(session)
    found = _uses(_walked(_optimized(own, plan.java)), leaves)
    new: dict[Ids, Any] = {}
    for ids, source in leaves.items():
        use = found.get(ids)
        less = source.whole if use is None else _less(source.whole, use, source.options())
        if less != source.whole:
            new[ids] = _replaced(session, source, less)
    if not new:
        return rows
    nodes = {source.node: new[source.ids] for source in sources if source.ids in new}
    changed = _rows_of(session._jsparkSession, _rebuilt(plan, nodes))
    # A plan with an expression that fails would fail the flow, which works without this.
    if _is_marked(_optimized(own, changed.queryExecution().analyzed())):
        raise RuntimeError("a column is used in a way that was not seen")
    return DataFrame(changed, session)


def _java(rows: DataFrame) -> Any:
    return rows._jdf


def _class(name: str) -> Any:
    """A class of Java's, by its whole name: each part of a path would be a call."""
    from pyspark import SparkContext

    return getattr(SparkContext._jvm, name)


def _sequence(items: Iterable[Any]) -> Any:
    return _class("PythonUtils").toSeq(list(items))


def _rows_of(session: Any, plan: Any) -> Any:
    return _class(f"{_SQL}.classic.Dataset").ofRows(session, plan)


# -- looking --------------------------------------------------------------------------------


def _own_session(session: Any) -> Any:
    """A copy of Java's session to optimize plans in, with its own settings.

    The session itself may be in use: by the functions of a project, by flows that start meanwhile.
    """
    copy = session._jsparkSession.cloneSession()
    conf = copy.conf()
    given = conf.get(_EXCLUDED, "")
    conf.set(_EXCLUDED, f"{given},{_INFERENCE}" if given else _INFERENCE)
    for name, value in _SETTINGS.items():
        conf.set(name, value)
    return copy


def _optimized(session: Any, plan: Any) -> Any:
    return _rows_of(session, plan).queryExecution().optimizedPlan()


def _walked(java: Any) -> _Node:
    children = java.children()
    below = tuple(_walked(children.apply(index)) for index in range(children.size()))
    return _Node(java, children, below)


def _paths(node: _Node, above: tuple[Any, ...] = ()) -> Iterator[tuple[_Node, tuple[Any, ...]]]:
    """The leaves of a plan, and the nodes above each of them, beginning with the nearest."""
    if not node.below:
        yield node, above
    for child in node.below:
        yield from _paths(child, (node.java, *above))


def _sources(plan: _Node) -> Iterator[_Source]:
    for node, _ in _paths(plan):
        leaf, kind = node.java, str(node.java.nodeName())
        stream = kind == "StreamingRelationV2"
        if kind in _SOURCES and (leaf.sourceName() if stream else leaf.table().name()) == FORMAT:
            yield _Source(node, _ids(leaf), _schema(leaf), stream)


def _ids(leaf: Any) -> Ids:
    columns = str(leaf.output().mkString(_BETWEEN)).split(_BETWEEN)
    found = [int(match[1]) for column in columns if (match := _COLUMN.search(column))]
    return tuple(found) if len(found) == len(columns) else ()


def _schema(leaf: Any) -> StructType:
    import json

    from pyspark.sql.types import StructType

    return StructType.fromJson(json.loads(leaf.schema().json()))


def _uses(plan: _Node, leaves: Mapping[Ids, _Source]) -> dict[Ids, Used | None]:
    """What is used of each leaf of an optimized plan; None: everything."""
    found: dict[Ids, Used | None] = {}
    for node, above in _paths(plan):
        ids = _ids(node.java)
        # A leaf that became another one in the meantime is not in the answer: it stays as it is.
        if ids in leaves:
            use = _used(dict(zip(ids, leaves[ids].whole.fields, strict=True)), above)
            found[ids] = _both(found[ids], use) if ids in found else use
    return found


def _both(one: Used | None, other: Used | None) -> Used | None:
    if one is None or other is None:
        return None
    result = dict(one)
    for name, fields in other.items():
        known = result.get(name, set())
        result[name] = None if known is None or fields is None else known | fields
    return result


def _used(passed: Mapping[int, StructField], above: Iterable[Any]) -> Used | None:
    """What the nodes above a leaf use of it, from the nearest to where nothing is passed on."""
    used: Used = {}
    for node in above:
        kind = str(node.nodeName())
        if kind not in _PASSING:
            break
        if not node.subqueries().isEmpty():
            return None  # it is unknown what they use
        text = str(_together(node).treeString())
        named = _collect(_lines(text), passed, used, only_named=kind == "Project")
        if kind == "Project":
            passed = {id_: column for id_, column in passed.items() if id_ in named}
        elif kind == "Aggregate":
            passed = {}
        if not passed:
            break
    return used | dict.fromkeys(column.name for column in passed.values())


def _together(node: Any) -> Any:
    """The expressions of a node as one, which can be asked for all of them at once."""
    return _class(f"{_SQL}.catalyst.expressions.CreateArray")(node.expressions(), False)


def _lines(text: str) -> list[tuple[int, str]]:
    """The lines of a tree, with how deep they are: first that of its root, last an empty one."""
    lines = [(0, "")]
    for line in text.split("\n"):
        match = _LINE.fullmatch(line)
        if match:
            lines.append((len(match[1]) // 3, match[2]))
        else:  # the text of a constant may have several lines
            depth, begin = lines[-1]
            lines[-1] = (depth, begin + line)
    return [*lines, (0, "")]


def _collect(
    lines: Sequence[tuple[int, str]],
    columns: Mapping[int, StructField],
    used: Used,
    *,
    only_named: bool,
) -> set[int]:
    """Add what expressions use of columns; returns those that are only named, if that counts."""
    named: set[int] = set()
    three = zip(lines, lines[1:], lines[2:], strict=False)
    for (depth_above, above), (depth, line), (depth_below, _) in three:
        if depth_below > depth:
            continue  # what it uses is in the lines below it
        # What only looks like a column, in the text of a constant, is read as well.
        for match in _ID.finditer(line):
            column = columns.get(int(match[1]))
            if column is None:
                continue
            if only_named and depth == 1:
                named.add(int(match[1]))
                continue
            alone = depth_above < depth and depth_below < depth
            field = _field(above, line[: match.end()], column.dataType) if alone else None
            fields = used.setdefault(column.name, set())
            if field is None:
                used[column.name] = None
            elif fields is not None:
                fields.add(field)
    return named


def _field(text: str, column: str, kind: DataType) -> str | None:
    """The field of a struct column that an expression takes; None if it is another expression."""
    match = re.fullmatch(rf"{re.escape(column)}(?:-T\d+ms)?\.(.+)", text)
    return match[1] if match and match[1] in getattr(kind, "names", ()) else None


def _is_marked(plan: Any) -> bool:
    """Whether a plan has an expression for what is not read."""
    number = 0  # of a node, in a count that includes those of subqueries
    while (node := plan.apply(number)) is not None:
        # Not the text of the plan: it leaves out fields of a long list.
        if _MARK in str(_together(node).collectLeaves().mkString(_BETWEEN)):
            return True
        number += 1
    return False


# -- changing -------------------------------------------------------------------------------


def _less(whole: StructType, used: Used, options: Any) -> StructType:
    """The columns and fields of a source that are used, and what must be read in any case."""
    from pyspark.sql.types import BinaryType, StructType

    used = dict(used)
    # A value that cannot be decoded fails the flow or is dropped, used or not.
    if "value" in whole.names and "value" not in used and not options.containsKey("eventStore"):
        kind = whole["value"].dataType
        if options.containsKey("undecodable") or not isinstance(kind, BinaryType):
            used["value"] = _one_field(kind)
    if not used:  # a row needs a column
        used[next((name for name in METADATA[1:] if name in whole.names), whole.names[0])] = None
    less = StructType()
    for field in whole.fields:
        if field.name in used:
            fields = used[field.name]
            column: Any = field.dataType
            if fields is not None:
                column = StructType([inner for inner in column.fields if inner.name in fields])
            less.add(field.name, column, field.nullable, field.metadata)
    return less


def _one_field(kind: DataType) -> set[str] | None:
    """The field of a struct that costs least; None if it is no struct."""
    from pyspark.sql.types import StructType

    if not isinstance(kind, StructType) or not kind.fields:
        return None
    fixed = [field.name for field in kind.fields if field.dataType.simpleString() in _FIXED]
    return {(fixed or kind.names)[0]}


def _replaced(session: Any, source: _Source, less: StructType) -> Any:
    """A plan with the columns of a leaf, under their ids, over a source that reads less."""
    reader = (session.readStream if source.stream else session.read).format(FORMAT).schema(less)
    reader._jreader.options(source.options().asCaseSensitiveMap())
    columns = [_column(field.name, field.dataType, less) for field in source.whole.fields]
    chosen = _java(reader.load().selectExpr(*columns)).queryExecution().analyzed()
    new, old = chosen.output(), source.node.java.output()
    alias = _class(f"{_SQL}.catalyst.expressions.Alias")
    none, empty = _class("scala.Option").empty(), _sequence([])
    names = [
        # Without a qualifier, which is for finding columns by name: here they are found already.
        alias(new.apply(index), field.name, old.apply(index).exprId(), empty, none, empty)
        for index, field in enumerate(source.whole.fields)
    ]
    return _class(f"{_SQL}.catalyst.plans.logical.Project")(_sequence(names), chosen)


def _column(name: str, kind: DataType, less: StructType) -> str:
    """A column as SQL: what is read of it, and what fails if it is used after all."""
    from pyspark.sql.types import StructType

    if name not in less.names:
        return f"{_missing(name, kind)} AS {_quoted(name)}"
    read = less[name].dataType
    if read == kind or not isinstance(kind, StructType) or not isinstance(read, StructType):
        return _quoted(name)
    fields = [
        f"{_quoted(name)}.{_quoted(inner.name)} AS {_quoted(inner.name)}"
        if inner.name in read.names
        else f"{_missing(f'{name}.{inner.name}', inner.dataType)} AS {_quoted(inner.name)}"
        for inner in kind.fields
    ]
    return f"struct({', '.join(fields)}) AS {_quoted(name)}"


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"


def _missing(name: str, kind: DataType) -> str:
    text = name.replace("\\", " ").replace("'", " ")
    return f"CAST(raise_error('{_MARK}{text}') AS {kind.simpleString()})"


def _rebuilt(node: _Node, new: Mapping[_Node, Any]) -> Any:
    if node in new:
        return new[node]
    children = node.children
    for index, child in enumerate(node.below):
        changed = _rebuilt(child, new)
        if changed is not child.java:
            children = children.updated(index, changed)
    return node.java if children is node.children else node.java.withNewChildren(children)
