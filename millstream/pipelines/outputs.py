"""The outputs of a pipeline on the broker: rows become events, topics are created for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from millstream.closing import Closing
from millstream.errors import PipelineInvalid, TopicNotFound
from millstream.pipelines.change_columns import UNCHANGED
from millstream.pipelines.declare import Output
from millstream.pipelines.postgres import (
    DELETED_MARK,
    RESERVED,
    TABLE,
    UNCHANGED_MARK,
    address_of,
)
from millstream.spark.options import connection_settings

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType

    from millstream.blocking import Mill

__all__ = ["DELETED", "KEY_SEPARATOR", "PipelineTopics", "key_text", "shaped", "stored_columns"]

# The columns of an event that a sink takes.
ENVELOPE: Final = frozenset({"key", "value", "headers", "timestamp", "topic", "partition"})
KEY_SEPARATOR: Final = "/"  # between the columns of a key
DELETED: Final = "_deleted"  # a column of changes: true for a row that deletes its key


def shaped(frame: DataFrame, output: Output) -> DataFrame:
    """The rows in the form that the output takes.

    Events for topics and tables; rows and what to do with them for PostgreSQL; else unchanged.
    """
    from pyspark.sql import functions as sf

    if output.kind not in ("topic", "table", "postgres"):
        return frame
    if output.kind != "postgres" and _is_envelope(frame, output):
        return frame
    for name in (*output.key, *([output.timestamp] if output.timestamp else [])):
        if name not in frame.columns:
            raise PipelineInvalid(
                f"'{output.name}' ({output.where}): there is no column '{name}' among "
                f"{', '.join(frame.columns)}"
            )
    delete_when = output.delete_when
    if delete_when is None and output.kind != "topic" and output.key and DELETED in frame.columns:
        delete_when = DELETED
    if output.kind == "postgres":
        return _for_postgres(frame, output, delete_when)
    kept = [f"`{name}`" for name in frame.columns if name != delete_when]
    value = sf.struct(*kept)
    if delete_when is not None:
        deleted = sf.coalesce(sf.expr(delete_when), sf.lit(False))
        value = sf.when(~deleted, value)
    columns = [value.alias("value")]
    if output.key:
        key = key_text([sf.col(f"`{name}`") for name in output.key])
        columns.insert(0, key.alias("key"))
    if output.timestamp is not None:
        columns.append(sf.col(f"`{output.timestamp}`").cast("timestamp").alias("timestamp"))
    return frame.select(*columns)


def _for_postgres(frame: DataFrame, output: Output, delete_when: str | None) -> DataFrame:
    """The columns to be stored, and those that say what becomes of a row."""
    from pyspark.sql import functions as sf

    reserved = [name for name in frame.columns if name.startswith(RESERVED)]
    if reserved:
        raise PipelineInvalid(
            f"'{output.name}' ({output.where}): the column '{reserved[0]}' has a name of "
            f"Millstream's own. Give it another one"
        )
    taken = (delete_when, *([UNCHANGED] if output.key else []))
    columns = [sf.col(f"`{name}`") for name in frame.columns if name not in taken]
    if not columns:
        raise PipelineInvalid(f"'{output.name}' ({output.where}): the rows have no columns")
    if delete_when is not None:
        columns.append(sf.coalesce(sf.expr(delete_when), sf.lit(False)).alias(DELETED_MARK))
    if output.key and UNCHANGED in frame.columns:
        columns.append(sf.col(UNCHANGED).cast("array<string>").alias(UNCHANGED_MARK))
    return frame.select(*columns)


def stored_columns(rows: StructType) -> pa.Schema:
    """The columns of shaped rows that PostgreSQL stores."""
    import pyarrow as pa
    from pyspark.sql.pandas.types import to_arrow_schema

    arrow = to_arrow_schema(rows, timezone="UTC")
    kept = [f.with_nullable(True) for f in arrow if f.name not in (DELETED_MARK, UNCHANGED_MARK)]
    return pa.schema(kept)


def _is_envelope(frame: DataFrame, output: Output) -> bool:
    from pyspark.sql.types import BinaryType, StringType, StructType

    if "value" not in frame.columns or not set(frame.columns) <= ENVELOPE:
        return False
    if output.kind == "topic" and output.key:
        return False
    return isinstance(frame.schema["value"].dataType, BinaryType | StringType | StructType)


def key_text(columns: Sequence[Column]) -> Column:
    """The key of a row, whose columns are joined to one text."""
    from pyspark.sql import functions as sf

    texts = [column.cast("string") for column in columns]
    if len(texts) == 1:
        return texts[0]
    # A null must not turn the key into that of another row.
    return sf.concat_ws(KEY_SEPARATOR, *(sf.coalesce(text, sf.lit("")) for text in texts))


class PipelineTopics(Closing):
    """Looks up and creates the topics of a pipeline."""

    def __init__(self, options: Mapping[str, str] | None = None, *, dry: bool = False) -> None:
        self.dry = dry  # create nothing; empty stand-ins replace missing topics
        self._options = options or {}  # of the connection, as sources and sinks take them
        self._mill: Mill | None = None

    def _leave(self, error: BaseException | None) -> None:
        if self._mill is not None:
            self._mill.close()
            self._mill = None

    @property
    def mill(self) -> Mill:
        """The connection, opened when it is first needed."""
        if self._mill is None:
            from millstream import blocking

            self._mill = blocking.connect(settings=connection_settings(self._options))
        return self._mill

    def check_reachable(self) -> None:
        """Connect; raises if that fails."""
        self.mill.flush()

    def check_exists(self, name: str, suggest: Callable[[str, list[str]], str]) -> None:
        """Refuse a name that neither the pipeline nor the broker has."""
        try:
            self.mill.topic(name)
        except TopicNotFound:
            known = [info.name for info in self.mill.topics()]
            raise PipelineInvalid(
                f"there is no '{name}': the pipeline does not declare it and the broker has no "
                f"such topic; {suggest(name, known)}"
            ) from None

    def is_table(self, name: str) -> bool:
        """Whether a name is that of a table; it is not if there is nothing of that name."""
        try:
            return self.mill.topic(name).settings.history is not None
        except TopicNotFound:
            return False

    def declare(self, output: Output, rows: StructType) -> None:
        """Create the output's topic or table if it is missing; it has the rows' columns."""
        if not self.dry and output.kind == "postgres":
            from millstream.pipelines.postgres_table import prepared_table

            columns = stored_columns(rows)
            address, table = address_of(output), output.options[TABLE]
            prepared_table(address, output.name, table, columns, output.key)
        if self.dry or output.kind not in ("topic", "table"):
            return
        schema = value_schema(rows)
        try:
            topic = self.mill.topic(output.name)
        except TopicNotFound:
            self._create(output, schema)
            return
        if output.kind == "table" and topic.settings.history is None:
            raise PipelineInvalid(
                f"'{output.name}' is a topic that keeps every event, and the pipeline declares it "
                f"as a table. Choose another name or delete the topic"
            )
        if schema is not None:
            self._evolve(output, rows, schema)

    def _create(self, output: Output, schema: Any) -> None:
        values: dict[str, Any] = {}
        if output.partitions is not None:
            values["partitions"] = output.partitions
        if output.kind == "table":
            self.mill.create_table(output.name, schema=schema, **values)
        else:
            self.mill.create_topic(output.name, schema=schema, **values)

    def _evolve(self, output: Output, rows: StructType, schema: Any) -> None:
        """Register the next version of the topic's schema if the rows have other columns."""
        from pyspark.sql.types import StructType

        from millstream.schemas import to_spark

        record = self.mill.schemas.find(output.name)
        if record is None:
            raise PipelineInvalid(
                f"the topic '{output.name}' has no schema, so its values are bytes: return a "
                f"column 'value' of bytes, or choose another name"
            )
        latest = self.mill.schemas.schemas_of(record)[-1]
        known = StructType.fromDDL(to_spark(latest.record, nullability=False))
        wanted = rows["value"].dataType
        if known.simpleString() != wanted.simpleString():
            self.mill.schemas.register(output.name, schema)


def value_schema(rows: StructType) -> Any:
    """The values' columns as an Arrow schema of nullable fields; None for bytes."""
    import pyarrow as pa
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    value = rows["value"].dataType
    if not isinstance(value, StructType):
        return None
    arrow = to_arrow_schema(value, timezone="UTC")
    return pa.schema([field.with_nullable(True) for field in arrow])
