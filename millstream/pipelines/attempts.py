"""UDFs that refuse a row instead of failing the flow, and the two ways its rows then go."""

from __future__ import annotations

import functools
import operator
import traceback
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final

from millstream.errors import PipelineInvalid
from millstream.pipelines.spark_errors import ERROR_CHARS, in_code, may_pass

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

__all__ = ["ORIGIN", "accepted", "attempt", "refused"]

ORIGIN: Final = "_origin"  # the column of read(..., origin=True)
# The fields of an attempt's column.
VALUE: Final = "value"
REFUSED: Final = "refused"  # why the function refused the row; null: it did not
ORIGIN_TYPE: Final = "struct<topic: string, partition: int, offset: bigint, index: int>"


def attempt(returns: str | DataType) -> Callable[[Callable[..., Any]], Callable[..., Column]]:
    """A UDF whose errors stay with their row: `accepted` and `refused` then split the rows.

    Its column has the fields `value` and `refused`, the error. What may pass (a service that is
    away) still fails the flow, which is restarted. The function is called row by row.
    """

    def declare(function: Callable[..., Any]) -> Callable[..., Column]:
        @functools.wraps(function)
        def column(*inputs: Any) -> Column:
            from pyspark.sql import functions as sf
            from pyspark.sql.types import DataType, StructType

            # When it is used: only then there is certainly a session, which reads the DDL.
            kind = DataType.fromDDL(returns) if isinstance(returns, str) else returns
            both = StructType().add(VALUE, kind).add(REFUSED, "string")
            # Else Spark calls it twice for each row: for the value, and to filter by the error.
            made = sf.udf(_guarded(function), both).asNondeterministic()
            return made(*inputs)

        return column

    return declare


def _guarded(function: Callable[..., Any]) -> Callable[..., tuple[Any, str | None]]:
    code = getattr(function, "__code__", None)
    folder = None if code is None else PurePath(code.co_filename).parent

    def guarded(*values: Any) -> tuple[Any, str | None]:
        try:
            return function(*values), None
        except Exception as error:
            if may_pass(type(error).__name__):
                raise
            found = traceback.extract_tb(error.__traceback__)
            where = in_code([(f.filename, f.lineno or 0, f.name) for f in found], folder)
            text = _text(error)
            return None, f"{text} ({where})" if where else text

    guarded.__name__ = getattr(function, "__name__", "attempt")
    return guarded


def _text(error: Exception) -> str:
    """An error's name and words; what is wrong with them must not fail the flow either."""
    try:
        words = str(error)
    except Exception:
        words = "its text cannot be shown"
    text = f"{type(error).__name__}: {words}"[:ERROR_CHARS]
    return text.encode("utf-8", "backslashreplace").decode()  # half of a character pair


def accepted(rows: DataFrame) -> DataFrame:
    """The rows that every attempt accepted, with the attempts' values; without `_origin`."""
    from pyspark.sql import functions as sf

    attempts = _attempts(rows)
    kept = [
        sf.col(f"`{name}`.{VALUE}").alias(name) if name in attempts else sf.col(f"`{name}`")
        for name in rows.columns
        if name != ORIGIN
    ]
    return rows.where(~_is_refused(attempts)).select(*kept)


def refused(rows: DataFrame) -> DataFrame:
    """The rows that an attempt refused.

    Columns: `error` and `attempt` (the column), `topic`, `partition`, `offset` and `index` if the
    rows were read with `origin=True`, and `row`: the other columns as JSON (bytes as base64).
    """
    from pyspark.sql import functions as sf

    attempts = _attempts(rows)
    reasons = [sf.col(f"`{name}`.{REFUSED}") for name in attempts]
    names = [sf.when(sf.col(f"`{name}`.{REFUSED}").isNotNull(), name) for name in attempts]
    origin = sf.col(ORIGIN) if ORIGIN in rows.columns else sf.lit(None).cast(ORIGIN_TYPE)
    others = [f"`{name}`" for name in rows.columns if name not in attempts and name != ORIGIN]
    row = sf.to_json(sf.struct(*others)) if others else sf.lit("{}")
    return rows.where(_is_refused(attempts)).select(
        sf.coalesce(*reasons).alias("error"),
        sf.coalesce(*names).alias("attempt"),
        *(origin[field].alias(field) for field in ("topic", "partition", "offset", "index")),
        row.alias("row"),
    )


def _is_refused(attempts: Sequence[str]) -> Column:
    from pyspark.sql import functions as sf

    checks = [sf.col(f"`{name}`.{REFUSED}").isNotNull() for name in attempts]
    return functools.reduce(operator.or_, checks)


def _attempts(rows: DataFrame) -> list[str]:
    """The columns that attempts made, which a stored topic keeps as they are."""
    from pyspark.sql.types import StructType

    found = [
        field.name
        for field in rows.schema.fields
        if isinstance(field.dataType, StructType) and field.dataType.names == [VALUE, REFUSED]
    ]
    if not found:
        raise PipelineInvalid(
            f"no column of these rows is made by an attempt: {', '.join(rows.columns)}. Split the "
            f"rows where the attempt's column still has its fields '{VALUE}' and '{REFUSED}'"
        )
    return found
