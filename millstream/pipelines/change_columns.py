"""The columns of a topic of changes, as `read_changes` gives them. Pyspark is imported on use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from millstream.events import changes as ch
from millstream.spark.source.change_schema import is_change

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import StructType

__all__ = ["CHANGE_COLUMNS", "INDEX", "UNCHANGED", "change_columns"]

INDEX: Final = "_index"  # in the order of a topic it comes after `_offset`
UNCHANGED: Final = "_unchanged"
_OF_SOURCE: Final = (ch.COMMIT, ch.TRANSACTION, ch.NUMBER, ch.TOTAL)
# What a topic of changes has besides the columns that a table's changes have too.
CHANGE_COLUMNS: Final = (
    *(INDEX, "_op", *(f"_{name}" for name in _OF_SOURCE)),
    *(UNCHANGED, "_before"),
)


def change_columns(value: StructType, before: bool) -> list[Column] | None:
    """The columns of a topic of changes; None if its values are none."""
    from pyspark.sql import functions as sf
    from pyspark.sql.types import StructType

    types = {field.name: field.dataType for field in value.fields}
    inner = {
        name: frozenset(kind.fieldNames()) if isinstance(kind, StructType) else frozenset[str]()
        for name, kind in types.items()
    }
    row = types.get(ch.AFTER)
    if not is_change(inner) or not isinstance(row, StructType):
        return None
    # A deletion has the row before it, at least its key.
    known = sf.coalesce(f"value.{ch.AFTER}", f"value.{ch.BEFORE}")
    op = sf.col(f"value.{ch.OP}")
    columns = [
        *(known.getField(inner.name).alias(inner.name) for inner in row.fields),
        sf.col("key").cast("string").alias("_key"),
        sf.col("offset").alias("_offset"),
        sf.col(f"value.{ch.SOURCE}.{ch.TIME}").alias("_time"),
        sf.coalesce(op.isin(ch.DELETE, ch.TRUNCATE), sf.lit(True)).alias("_deleted"),
        sf.col("index").alias(INDEX),
        op.alias("_op"),
        *(sf.col(f"value.{ch.SOURCE}.{name}").alias(f"_{name}") for name in _OF_SOURCE),
        sf.col(f"value.{ch.UNCHANGED}").alias(UNCHANGED),
    ]
    return [*columns, sf.col(f"value.{ch.BEFORE}").alias("_before")] if before else columns
