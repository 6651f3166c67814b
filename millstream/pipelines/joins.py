"""Joins in one call each: two streams, a stream with a table, two tables.

They take and return DataFrames, in a pipeline or in any Spark program. Static DataFrames give the
same rows in batch, which is how a join can be tested. Pyspark is imported when a join is made.

The columns of a result are those of the left side, with the columns of the join once, then those
of the right side; `suffix` is added to a name that the left side has as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

from millstream.errors import ConfigError
from millstream.events.changes import TRUNCATE
from millstream.pipelines.change_columns import CHANGE_COLUMNS, INDEX, UNCHANGED
from millstream.pipelines.outputs import DELETED, KEY_SEPARATOR, key_text
from millstream.settings import parse_duration

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

__all__ = ["enrich", "join_streams", "join_tables"]

On: TypeAlias = str | Sequence[str] | Mapping[str, str]
Duration: TypeAlias = str | timedelta

SUFFIX: Final = "_right"
LATE: Final = "10 minutes"

_LEFT, _RIGHT = "left", "right"  # the aliases of the sides, and how errors name them
_WATERMARK: Final = "spark.watermarkDelayMs"  # where Spark notes that a column has a watermark
_KEY, _OFFSET, _TIME = "_key", "_offset", "_time"
_CHANGE: Final = (_KEY, _OFFSET, DELETED)  # what read_changes adds, apart from the time
_UNIT: Final = re.compile(r"(millisecond|second|minute|hour|day)s?\b")
_SHORT: Final = {"millisecond": "ms", "second": "s", "minute": "m", "hour": "h", "day": "d"}


# -- the calls ------------------------------------------------------------------------------


def join_streams(
    left: DataFrame,
    right: DataFrame,
    *,
    on: On,
    within: Duration | tuple[Duration, Duration] | None = None,
    how: str = "inner",
    time: str | tuple[str, str] | None = None,
    late: Duration = LATE,
    suffix: str = SUFFIX,
) -> DataFrame:
    """Rows of two streams with equal keys and times that are close to each other.

    `on` names the columns that are equal: one, several, or a mapping from left to right names.
    `within` is the largest difference of their times, "10 minutes", or a pair: how much earlier
    and how much later the right row may be. It is not needed if `on` includes the times.
    `time` names the time column, or those of both sides in a pair; by default the one with a
    watermark, else the only one of type TIMESTAMP. `how` is inner, left, right or full.

    A row that arrives `late` or more behind the newest row of its stream can be dropped; a
    watermark that a stream already has is kept instead. A row without a partner is in the result of
    a left, right or full join once no partner can arrive: when events of both streams are newer
    than its time plus `within` plus `late`, or at once if its key is null. Rows whose time is null
    are left out.
    """
    join = _Join("join_streams", left, right, on, suffix)
    chosen = join.kind(how, ("inner", "left", "right", "full"))
    if left.isStreaming != right.isStreaming:
        static = _RIGHT if left.isStreaming else _LEFT
        join.fail(f"the {static} side is not a stream. Join a stream and a table with enrich")
    names = join.two("time", time)
    times = join.time(_LEFT, left, names[0]), join.time(_RIGHT, right, names[1])
    condition = join.equal()
    if within is not None:
        earlier, later = join.two("within", within)
        condition &= _close(times, join.seconds(earlier), join.seconds(later))
    elif times not in join.pairs:
        join.fail(
            f"within= is missing. Write within='1 hour' for the largest difference between "
            f"'{times[0]}' and '{times[1]}', without which the state would grow for ever"
        )
    delay = f"{join.seconds(late) * 1000:.0f} milliseconds"
    sides = [
        join.marked(side, frame, name, delay)
        for side, frame, name in ((_LEFT, left, times[0]), (_RIGHT, right, times[1]))
    ]
    return sides[0].join(sides[1], condition, chosen).select(*join.columns(chosen))


def enrich(
    stream: DataFrame, table: DataFrame, *, on: On, how: str = "left", suffix: str = SUFFIX
) -> DataFrame:
    """Rows of a stream with the columns of a table, as the table is now.

    `on` names the columns that are equal: one, several, or a mapping from the stream's to the
    table's names. The table (`read_table`) is read again for every batch and must fit in memory.
    `how` is left, which keeps rows whose key is not in the table, or inner.
    """
    from pyspark.sql import functions as sf

    join = _Join("enrich", stream, table, on, suffix)
    chosen = join.kind(how, ("left", "inner"))
    if table.isStreaming:
        join.fail("the table is a stream. Read it with read_table, or use join_streams")
    sides = stream.alias(_LEFT), sf.broadcast(table.alias(_RIGHT))
    return sides[0].join(sides[1], join.equal(), chosen).select(*join.columns(chosen))


def join_tables(
    left: DataFrame, right: DataFrame, *, on: On, how: str = "inner", suffix: str = SUFFIX
) -> DataFrame:
    """A table of the rows of two tables with equal keys, which follows the changes of both.

    Both sides are changes (`read_changes`) of tables whose keys are the columns `on`; a table whose
    values do not include its key is joined on `_key`. `how` is inner, left, right or full. The
    column `_deleted` of the result is true if the key is no longer in it: `@table` deletes it then.
    The state has one row for each key. A result is joined again from a table that stores it.

    Static DataFrames without the columns of a change are joined as they are.
    """
    from pyspark.sql import functions as sf

    join = _Join("join_tables", left, right, on, suffix)
    chosen = join.kind(how, ("inner", "left", "right", "full"))
    streams = left.isStreaming or right.isStreaming
    if not streams and not (_is_changes(left) or _is_changes(right)):
        sides = left.alias(_LEFT), right.alias(_RIGHT)
        joined = sides[0].join(sides[1], join.equal(), chosen)
        return joined.select(*join.columns(chosen), sf.lit(False).alias(DELETED))
    for side, frame in ((_LEFT, left), (_RIGHT, right)):
        if not _is_changes(frame) or frame.isStreaming != streams:
            join.fail(
                f"the {side} side is not the changes of a table. Read it with read_changes and "
                f"keep the columns {', '.join(_CHANGE)}; to join a stream with a table, use enrich"
            )
    return _followed(join, chosen)


# -- what is joined -------------------------------------------------------------------------


class _Join:
    """The two sides of a call, with the names of the columns that are equal."""

    def __init__(self, call: str, left: DataFrame, right: DataFrame, on: On, suffix: str) -> None:
        self.call, self.left, self.right = call, left, right
        for side, frame in ((_LEFT, left), (_RIGHT, right)):
            if not hasattr(frame, "columns"):
                self.fail(f"the {side} side is {frame!r}, not a DataFrame. Read it first")
        given = [on] if isinstance(on, str) else on
        if not isinstance(given, Sequence | Set | Mapping):
            self.fail(f"on={on!r} is not a name. Name the columns that are equal on both sides")
        named = given.items() if isinstance(given, Mapping) else [(name, name) for name in given]
        self.pairs = list(named)
        if not self.pairs:
            self.fail("on= is empty. Name the columns that are equal on both sides")
        for here, there in self.pairs:
            self._check_equal_types(here, there)
        self.names = self._right_names(suffix)

    def fail(self, text: str) -> NoReturn:
        raise ConfigError(f"{self.call}: {text}")

    def kind(self, how: str, allowed: Sequence[str]) -> str:
        """The kind of a join; Spark's longer words mean the same."""
        short = how.lower().replace("_", "").removesuffix("outer") or "full"
        if short not in allowed:
            self.fail(f"how={how!r} is not possible. Choose {', '.join(allowed)}")
        return short

    def two(self, argument: str, given: Any) -> tuple[Any, Any]:
        """The two values of an argument that takes one for both, or a pair."""
        pair = tuple(given) if isinstance(given, tuple | list) else (given, given)
        if len(pair) != 2:
            self.fail(f"{argument}={given!r} is not a pair. Give one value for both sides, or two")
        return pair

    def seconds(self, text: Duration) -> float:
        """The seconds of "10 minutes", as Spark writes it, or of "10m"."""
        try:
            if isinstance(text, timedelta):
                return parse_duration(text.total_seconds())
            return parse_duration(_UNIT.sub(lambda unit: _SHORT[unit[1]], str(text).lower()))
        except ConfigError:
            self.fail(f"{text!r} is not a duration. Write it like '10 minutes', '90s' or '1h30m'")

    # -- columns --------------------------------------------------------------------------

    def _check_equal_types(self, here: str, there: str) -> None:
        from pyspark.sql.types import NumericType

        self._check_column(_LEFT, self.left, here)
        self._check_column(_RIGHT, self.right, there)
        types = self.left.schema[here].dataType, self.right.schema[there].dataType
        if _KEY in (here, there) or types[0] == types[1]:
            return
        if not all(isinstance(one, NumericType) for one in types):
            self.fail(
                f"'{here}' is {types[0].simpleString()} on the left side and '{there}' is "
                f"{types[1].simpleString()} on the right side. Convert one of them with cast"
            )

    def check_equal_texts(self) -> None:
        """Fail if equal numbers of both sides are different keys, as 1 and 1.0 are."""
        from pyspark.sql.types import IntegralType

        for here, there in self.pairs:
            types = self.left.schema[here].dataType, self.right.schema[there].dataType
            integers = all(isinstance(one, IntegralType) for one in types)
            if _KEY not in (here, there) and types[0] != types[1] and not integers:
                self.fail(
                    f"'{here}' is {types[0].simpleString()} on the left side and '{there}' is "
                    f"{types[1].simpleString()} on the right side, so equal numbers are different "
                    f"keys. Store both tables with keys of one type"
                )

    def _check_column(self, side: str, frame: DataFrame, name: str) -> None:
        if name not in frame.columns:
            self.fail(f"the {side} side {_without(frame, f'column {name!r}')}")

    def _right_names(self, suffix: str) -> dict[str, str]:
        """Column of the right side -> its name in the result; those of the join are the left's."""
        taken = {name.lower() for name in self.left.columns}
        equal = {there for _, there in self.pairs}
        result = {}
        for name in self.right.columns:
            if name not in equal:
                result[name] = f"{name}{suffix}" if name.lower() in taken else name
        new = [name.lower() for name in result.values()]
        twice = [name for name in new if name in taken or new.count(name) > 1]
        if twice:
            self.fail(
                f"the result would have two columns '{twice[0]}'. Choose another suffix= for the "
                f"columns of the right side, or rename them"
            )
        return result

    def equal(self) -> Column:
        from pyspark.sql import functions as sf

        condition = sf.lit(True)
        for here, there in self.pairs:
            left, right = _column(_LEFT, here), _column(_RIGHT, there)
            # Spark's full join of streams lets null equal null unless nulls are ruled out.
            condition &= left.isNotNull() & right.isNotNull() & (left == right)
        return condition

    def columns(self, how: str) -> list[Column]:
        """The columns of the result of a join of both sides under their aliases."""
        from pyspark.sql import functions as sf

        others = dict(self.pairs)
        result = []
        for name in self.left.columns:
            column = _column(_LEFT, name)
            if name in others and how != "inner" and how != "left":
                other = _column(_RIGHT, others[name])
                column = other if how == "right" else sf.coalesce(column, other)
            result.append(column.alias(name))
        return result + [_column(_RIGHT, name).alias(new) for name, new in self.names.items()]

    # -- times ----------------------------------------------------------------------------

    def time(self, side: str, frame: DataFrame, name: str | None) -> str:
        """The name of a side's time column."""
        from pyspark.sql.types import TimestampType

        if name is not None:
            self._check_column(side, frame, name)
            found = frame.schema[name].dataType
            if not isinstance(found, TimestampType):
                self.fail(
                    f"the time column '{name}' of the {side} side is {found.simpleString()}, not "
                    f"TIMESTAMP. Convert it, for example with to_timestamp"
                )
            return name
        typed = [c for c in frame.schema.fields if isinstance(c.dataType, TimestampType)]
        names = [c.name for c in typed if _WATERMARK in c.metadata] or [c.name for c in typed]
        if not names:
            self.fail(f"the {side} side {_without(frame, 'column of type TIMESTAMP to join by')}")
        if len(names) > 1:
            self.fail(
                f"the {side} side has the times {', '.join(names)}. Choose one: "
                f"time='{names[0]}', or time=('...', '...') if it differs on both sides"
            )
        return names[0]

    def marked(self, side: str, frame: DataFrame, time: str, delay: str) -> DataFrame:
        """A side under its alias, with a watermark on its time."""
        before = [c.name for c in frame.schema.fields if _WATERMARK in c.metadata]
        # A row without a time would stay in the state for ever.
        timed = frame.where(_column(None, time).isNotNull())
        if not before:
            timed = timed.withWatermark(time, delay)
        elif time not in before:
            self.fail(
                f"the {side} side has a watermark on '{before[0]}', and its time is '{time}'. Set "
                f"the watermark on '{time}', or set none"
            )
        return timed.alias(side)


def _without(frame: DataFrame, what: str) -> str:
    from pyspark.sql.types import StructType

    text = f"has no {what}; its columns are {', '.join(frame.columns)}"
    if "value" in frame.columns and isinstance(frame.schema["value"].dataType, StructType):
        return f"{text}. Those of an event's value are selected with select('value.*')"
    return text


def _column(side: str | None, name: str) -> Column:
    from pyspark.sql import functions as sf

    quoted = f"`{name.replace('`', '``')}`"
    return sf.col(quoted if side is None else f"{side}.{quoted}")


def _close(times: tuple[str, str], earlier: float, later: float) -> Column:
    """Whether the right time is at most so much earlier and later than the left one."""
    from pyspark.sql import functions as sf

    here, there = _column(_LEFT, times[0]), _column(_RIGHT, times[1])
    before, after = (sf.expr(f"INTERVAL '{part:.6f}' SECOND") for part in (earlier, later))
    return (there + before >= here) & (there <= here + after)


# -- two tables -----------------------------------------------------------------------------


def _is_changes(frame: DataFrame) -> bool:
    return set(_CHANGE) <= set(frame.columns)


def _described(frame: DataFrame) -> tuple[str, ...]:
    """The columns that describe a change, and are not those of a row."""
    return (*_CHANGE, _TIME, *(CHANGE_COLUMNS if INDEX in frame.columns else ()))


# Types of key columns whose text is the same in Spark and in captures.
_PLAIN: Final = frozenset(("string", "byte", "short", "integer", "long"))


@dataclass(frozen=True, slots=True)
class _Changes:
    """One side of a join of tables: its columns besides the key, and their names in the result."""

    side: str
    frame: DataFrame
    on: list[str]
    names: dict[str, str]

    def keyed(self, types: Sequence[DataType]) -> DataFrame:
        """Each change by its table's key: the columns of the key, and the rest as one struct."""
        from pyspark.sql import functions as sf

        key, on = sf.col(_KEY), [_column(None, name) for name in self.on]
        wrong = ~sf.col(DELETED) & ~self._key_text(on).eqNullSafe(key)
        names = ", ".join(self.on)
        message = sf.concat(
            sf.lit(f"join_tables: {names} is '"),
            sf.coalesce(self._key_text(on), sf.lit("null")),
            sf.lit(f"' in a row of the {self.side} table whose key is '"),
            key,
            sf.lit("'. Tables are joined by their keys; enrich looks up another column of a table"),
        )
        kept = [_column(None, name) for name in (DELETED, *self.names)]
        checked = sf.when(wrong, sf.raise_error(message))
        joined = key
        if INDEX in self.frame.columns:
            checked = self._checked_change(checked, key)
            # In the form of tables, which the other side may be. Deletions have their key, too.
            joined = key_text(on)
        return self.frame.select(
            checked.otherwise(joined).alias(_KEY),
            *(
                column.try_cast(kind).alias(f"on{n}")
                for n, (column, kind) in enumerate(zip(on, types, strict=True))
            ),
            sf.struct(*kept).alias(self.side),
            self._place().alias(f"{self.side}{_OFFSET}"),
        )

    def _key_text(self, on: Sequence[Column]) -> Column:
        """The key of a row as its topic has it; captures write one of several columns as JSON."""
        from pyspark.sql import functions as sf

        if INDEX not in self.frame.columns:
            return key_text(on)
        if any(self.frame.schema[name].dataType.typeName() not in _PLAIN for name in self.on):
            return sf.col(_KEY)  # written in another form by Spark: it cannot be compared
        return (
            key_text(on) if len(on) == 1 else sf.to_json(sf.array(*(c.cast("string") for c in on)))
        )

    def _checked_change(self, checked: Column, key: Column) -> Column:
        """Fail for a change that says less of its row than the join needs."""
        from pyspark.sql import functions as sf

        if "_op" in self.frame.columns:
            emptied = sf.lit(
                f"join_tables: the {self.side} table was truncated, which the join cannot follow. "
                f"Reset the flow with --empty-outputs"
            )
            checked = checked.when(sf.col("_op") == TRUNCATE, sf.raise_error(emptied))
        if UNCHANGED in self.frame.columns and self.names:
            lacking = sf.concat(
                sf.lit("join_tables: a change of the row '"),
                key,
                sf.lit(f"' of the {self.side} table does not have the columns "),
                sf.array_join(UNCHANGED, ", "),
                sf.lit(", which it did not change. Let the database send them (REPLICA IDENTITY "),
                sf.lit("FULL), or leave them out with drop(...)"),
            )
            needed = sf.array(*(sf.lit(name) for name in self.names))
            lacks = sf.coalesce(sf.arrays_overlap(UNCHANGED, needed), sf.lit(False))
            checked = checked.when(lacks, sf.raise_error(lacking))
        return checked

    def _place(self) -> Column:
        """What orders the changes of a key. Events of a pack share an offset."""
        from pyspark.sql import functions as sf

        if INDEX not in self.frame.columns:
            return sf.col(_OFFSET)
        return sf.struct(_OFFSET, INDEX)

    def last(self) -> Column:
        """The change with the highest offset; those of the other side have none."""
        from pyspark.sql import functions as sf

        return sf.max_by(self.side, f"{self.side}{_OFFSET}").alias(self.side)

    @property
    def alive(self) -> Column:
        from pyspark.sql import functions as sf

        return sf.coalesce(~_column(self.side, DELETED), sf.lit(False))

    def columns(self) -> list[Column]:
        from pyspark.sql import functions as sf

        return [
            sf.when(self.alive, _column(self.side, name)).alias(new)
            for name, new in self.names.items()
        ]


def _followed(join: _Join, how: str) -> DataFrame:
    """One aggregation over the changes of both tables: the last one of each side, for each key."""
    from pyspark.sql import functions as sf

    if len(join.pairs) > 1 and any(_KEY in pair for pair in join.pairs):
        join.fail(f"'{_KEY}' is the complete key of a table. Join on it alone")
    join.check_equal_texts()
    kept = {name: n for name, n in join.names.items() if name not in _described(join.right)}
    equal = [here for here, _ in join.pairs]
    own = [name for name in join.left.columns if name not in (*_described(join.left), *equal)]
    left = _Changes(_LEFT, join.left, equal, {name: name for name in own})
    right = _Changes(_RIGHT, join.right, [there for _, there in join.pairs], kept)
    types = [join.left.schema[name].dataType for name in equal]
    both = left.keyed(types).unionByName(right.keyed(types), allowMissingColumns=True)
    parts = [sf.max(f"on{n}").alias(f"on{n}") for n in range(len(types))]
    last = both.groupBy(_KEY).agg(*parts, left.last(), right.last())
    alive = {
        "inner": left.alive & right.alive,
        "left": left.alive,
        "right": right.alive,
        "full": left.alive | right.alive,
    }[how]
    return last.select(
        *_key_columns(equal, types), *left.columns(), *right.columns(), (~alive).alias(DELETED)
    )


def _key_columns(names: Sequence[str], types: Sequence[DataType]) -> list[Column]:
    """The columns of the key from a row that had them, else from the key's text.

    A key of which only the deletion is still stored never had a row.
    """
    from pyspark.sql import functions as sf

    texts = sf.split(_KEY, re.escape(KEY_SEPARATOR))
    whole = len(names) == 1
    result = []
    for n, (name, kind) in enumerate(zip(names, types, strict=True)):
        text = sf.col(_KEY) if whole else sf.when(sf.size(texts) == len(names), texts[n])
        part = sf.nullif(text, sf.lit("")).try_cast(kind)
        result.append(sf.coalesce(f"on{n}", part).alias(name))
    return result
