"""Reads only what a flow uses: its plan tells which columns, and which fields of a struct.

Spark does not tell a source written in Python which columns a query needs, and converts every one
of them for every row. So the flow's plan is optimized once to look at it; then every source in it
is replaced by one that reads less, under a projection with the same columns as before. What is not
read is an expression that fails: Spark removes it, because nothing uses it, and a plan in which one
is left is not used. The functions of the flow are not called again.

Plans are not part of Spark's public API. A plan that cannot be read or changed stays as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from millstream.spark.options import METADATA

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructType

__all__ = ["pruned"]

_log = logging.getLogger("millstream.pipelines")

FORMAT: Final = "millstream"
# These use what they name and pass on everything.
_PASSING: Final = frozenset(
    {
        "Filter",
        "EventTimeWatermark",
        "SubqueryAlias",
        "Sort",
        "BatchEvalPython",
        "ArrowEvalPython",
    }
)
_SOURCES: Final = frozenset({"StreamingRelationV2", "DataSourceV2Relation"})  # streams, batches
_MARK: Final = "millstream did not read the column "
_SHOWN: Final = "spark.sql.debug.maxToStringFields"
_EXCLUDED: Final = "spark.sql.optimizer.excludedRules"
# It makes `value IS NOT NULL` of a comparison with a field, as if the complete value was used.
_INFERENCE: Final = "org.apache.spark.sql.catalyst.optimizer.InferFiltersFromConstraints"
_FIXED: Final = ("boolean", "tinyint", "smallint", "int", "bigint", "float", "double", "timestamp")

Used = dict[str, set[str] | None]  # column -> its fields that are used; None: all of it


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
    plan = _java(rows).queryExecution().analyzed()
    leaves = {_ids(leaf): leaf for leaf in _sources(plan)}
    if not leaves:
        return rows
    found = _uses(_optimized(session, plan), leaves)
    new: dict[tuple[int, ...], Any] = {}
    for ids, leaf in leaves.items():
        use, whole = found.get(ids), _schema(leaf)
        less = whole if use is None else _less(whole, use, _options(leaf))
        if less != whole:
            new[ids] = _replaced(session, leaf, whole, less)
    if not new:
        return rows
    changed = _rebuilt(session, plan, new)
    # A plan with an expression that fails would fail the flow, which works without this.
    with _set(session, _SHOWN, "1000000"):
        if _MARK in _optimized(session, changed).toString():
            raise RuntimeError("a column is used in a way that was not seen")
    java = session._jvm.org.apache.spark.sql.classic.Dataset.ofRows(session._jsparkSession, changed)
    return DataFrame(java, session)


def _java(rows: DataFrame) -> Any:
    return rows._jdf


# -- looking --------------------------------------------------------------------------------


def _each(sequence: Any) -> Iterator[Any]:
    iterator = sequence.iterator()
    while iterator.hasNext():
        yield iterator.next()


def _kind(node: Any) -> str:
    return str(node.getClass().getSimpleName())


def _sources(plan: Any) -> Iterator[Any]:
    """The leaves of a plan that are ours."""
    below = list(_each(plan.children()))
    for child in below:
        yield from _sources(child)
    if below:
        return
    kind = _kind(plan)
    if (
        kind in _SOURCES
        and (plan.sourceName() if kind == "StreamingRelationV2" else plan.table().name()) == FORMAT
    ):
        yield plan


def _ids(leaf: Any) -> tuple[int, ...]:
    return tuple(int(column.exprId().id()) for column in _each(leaf.output()))


def _schema(leaf: Any) -> StructType:
    import json

    from pyspark.sql.types import StructType

    return StructType.fromJson(json.loads(leaf.schema().json()))


def _options(leaf: Any) -> Any:
    """The options of a leaf, as Java's map."""
    return leaf.extraOptions() if _kind(leaf) == "StreamingRelationV2" else leaf.options()


@contextmanager
def _set(session: SparkSession, name: str, value: str) -> Iterator[None]:
    """While this is open, the session has this setting."""
    before = session.conf.get(name, None)
    session.conf.set(name, value)
    try:
        yield
    finally:
        if before is None:
            session.conf.unset(name)
        else:
            session.conf.set(name, before)


def _optimized(session: Any, plan: Any) -> Any:
    given = session.conf.get(_EXCLUDED, None)
    with _set(session, _EXCLUDED, f"{given},{_INFERENCE}" if given else _INFERENCE):
        return session._jsparkSession.sessionState().optimizer().execute(plan)


def _uses(
    plan: Any, leaves: Mapping[tuple[int, ...], Any], above: tuple[Any, ...] = ()
) -> dict[tuple[int, ...], Used | None]:
    """What is used of each leaf of an optimized plan; None: everything."""
    below = list(_each(plan.children()))
    if not below:
        ids = _ids(plan)
        # A leaf that became another one in the meantime is not in the answer: it stays as it is.
        return {ids: _used(plan, above)} if ids in leaves else {}
    found: dict[tuple[int, ...], Used | None] = {}
    for child in below:
        for ids, use in _uses(child, leaves, (*above, plan)).items():
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


def _used(leaf: Any, above: Iterable[Any]) -> Used | None:
    """What the nodes above a leaf use of it, from the nearest to where nothing is passed on."""
    passed = {int(column.exprId().id()): str(column.name()) for column in _each(leaf.output())}
    used: Used = {}
    for node in reversed(tuple(above)):
        kind, expressions = _kind(node), list(_each(node.expressions()))
        if kind == "Project":  # a column that is only named is passed on
            named = [e for e in expressions if _kind(e) == "AttributeReference"]
            expressions = [e for e in expressions if _kind(e) != "AttributeReference"]
        elif kind not in _PASSING and kind != "Aggregate":
            break
        if not all(_collect(expression, passed, used) for expression in expressions):
            return None
        if kind == "Project":
            ids = {int(column.exprId().id()) for column in named}
            passed = {id_: name for id_, name in passed.items() if id_ in ids}
        elif kind == "Aggregate":
            passed = {}
        if not passed:
            break
    return used | dict.fromkeys(passed.values())


def _collect(expression: Any, names: Mapping[int, str], used: Used) -> bool:
    """Add what an expression uses; False if that is unknown."""
    kind = _kind(expression)
    if "Subquery" in kind or kind == "Exists":
        return False
    if kind == "AttributeReference":
        name = names.get(int(expression.exprId().id()))
        if name is not None:
            used[name] = None
        return True
    below = list(_each(expression.children()))
    if kind == "GetStructField" and _kind(below[0]) == "AttributeReference":
        name = names.get(int(below[0].exprId().id()))
        fields = used.setdefault(name, set()) if name is not None else None
        if fields is not None:
            fields.add(str(expression.extractFieldName()))
        return True
    return all(_collect(child, names, used) for child in below)


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


def _replaced(session: Any, leaf: Any, whole: StructType, less: StructType) -> Any:
    """A plan with the columns of a leaf, under their ids, over a source that reads less."""
    stream = _kind(leaf) == "StreamingRelationV2"
    reader = (session.readStream if stream else session.read).format(FORMAT).schema(less)
    reader._jreader.options(_options(leaf).asCaseSensitiveMap())
    columns = [_column(field.name, field.dataType, less) for field in whole.fields]
    chosen = _java(reader.load().selectExpr(*columns)).queryExecution().analyzed()
    catalyst = session._jvm.org.apache.spark.sql.catalyst
    none, empty = session._jvm.scala.Option.empty(), session._jvm.PythonUtils.toSeq([])
    names = [
        catalyst.expressions.Alias(new, old.name(), old.exprId(), old.qualifier(), none, empty)
        for new, old in zip(_each(chosen.output()), _each(leaf.output()), strict=True)
    ]
    return catalyst.plans.logical.Project(session._jvm.PythonUtils.toSeq(names), chosen)


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


def _rebuilt(session: Any, plan: Any, new: Mapping[tuple[int, ...], Any]) -> Any:
    below = list(_each(plan.children()))
    if not below:
        return new.get(_ids(plan), plan)
    return plan.withNewChildren(
        session._jvm.PythonUtils.toSeq([_rebuilt(session, child, new) for child in below])
    )
