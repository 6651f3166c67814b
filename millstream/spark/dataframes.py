"""Functions on DataFrames: exactly-once writers for `foreachBatch`, and rows that were not decoded.

Spark rejects output mode `update` for sinks written in Python. Inside `foreachBatch` the same sink
writes with the same guarantee:

    totals.writeStream.outputMode("update").foreachBatch(table_writer("totals", key="customer"))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from millstream.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Observation, SparkSession

    from millstream.event_store.event_types import Upcasters
    from millstream.event_store.folding import Fold

__all__ = ["as_events", "drop_undecodable", "states_as_of", "table_writer", "topic_writer"]

BatchFunction = Callable[["DataFrame", int], None]
FORMAT = "millstream"


def topic_writer(
    topic: str, *, key: str | Sequence[str] | None = None, name: str | None = None, **options: str
) -> BatchFunction:
    """A function for `foreachBatch` that appends each batch to a topic exactly once.

    Rows with a column `value` are written as they are; otherwise all columns become the value, and
    `key` names the columns that form the key. `name` distinguishes several writers to one topic in
    the same query. `options` are those of the sink (url, commitMode, ...).
    """
    return _writer({"topic": topic, **options}, topic, key, name)


def table_writer(
    table: str, *, key: str | Sequence[str] | None = None, name: str | None = None, **options: str
) -> BatchFunction:
    """A function for `foreachBatch` that puts each batch's rows into a table; see `topic_writer`.

    A row whose column `value` is null deletes its key.
    """
    return _writer({"table": table, **options}, table, key, name)


def _writer(
    options: dict[str, str], topic: str, key: str | Sequence[str] | None, name: str | None
) -> BatchFunction:
    def write(batch: DataFrame, _: int) -> None:
        rows = batch if key is None else as_events(batch, topic, key, **_connection(options))
        if key is None and "value" not in rows.columns:
            raise ConfigError(
                f"the rows have no column 'value', only {', '.join(rows.columns)}: name the "
                f"columns of the key (key=...), and all columns become the value"
            )
        chosen = {**options, "writerName": name or topic}
        rows.write.format(FORMAT).options(**chosen).mode("append").save()

    return write


def _connection(options: dict[str, str]) -> dict[str, str]:
    sink = ("topic", "table", "commitmode", "writername", "compression")
    return {name: text for name, text in options.items() if name.lower() not in sink}


def as_events(
    rows: DataFrame, topic: str, key: str | Sequence[str], **connection: str
) -> DataFrame:
    """Any rows as the columns `key` and `value` of a sink.

    The key is the text of the named columns (several are joined by `/`). The value has all columns:
    as a struct if the topic has a schema, otherwise as JSON text.
    """
    from pyspark.sql import functions as f

    from millstream.spark.options import connection_settings
    from millstream.spark.sink.targets import find_target

    names = [key] if isinstance(key, str) else list(key)
    unknown = [name for name in names if name not in rows.columns]
    if unknown or not names:
        raise ConfigError(
            f"no column {unknown or names}; the columns are {', '.join(rows.columns)}"
        )
    typed = find_target(connection_settings(connection), topic).schema is not None
    value: Column = f.struct(*[f.col(f"`{name}`") for name in rows.columns])
    texts = [f.col(f"`{name}`").cast("string") for name in names]
    return rows.select(
        (texts[0] if len(texts) == 1 else f.concat_ws("/", *texts)).alias("key"),
        (value if typed else f.to_json(value)).alias("value"),
    )


def drop_undecodable(rows: DataFrame, name: str | Observation = "undecodable") -> DataFrame:
    """The rows whose value could be decoded; the others are counted in the query's progress.

    For rows that were read with `undecodable` = `null`. `query.lastProgress.observedMetrics[name]`
    has each batch's count (`dropped`) and one of the reasons (`example`). For a batch read pass an
    `Observation`, whose `get` has the same two.
    """
    from pyspark.sql import functions as f

    if "reason" not in rows.columns:
        raise ConfigError(
            f"drop_undecodable needs the column 'reason': read with the option undecodable = null. "
            f"The columns are {', '.join(rows.columns)}"
        )
    dropped = f.count("reason").alias("dropped")
    counted = rows.observe(name, dropped, f.min("reason").alias("example"))
    return counted.where("reason IS NULL").drop("reason")


def states_as_of(
    spark: SparkSession,
    store: str,
    state: type,
    at: datetime,
    *,
    events: Iterable[type] | Mapping[str, type],
    fold: Fold | None = None,
    upcasters: Upcasters | None = None,
    **options: str,
) -> DataFrame:
    """The states of all aggregates of an event store as of a time, by classes given as they are.

    For classes that Spark's workers cannot import, such as those of a notebook, and for a `fold`
    function of a state and an event instead of the method `apply`. Other options are those of
    `format("millstream")`: `asOfClock`, `minPartitions`, `url`, ...
    """
    from millstream.spark.state_classes import pickled_classes
    from millstream.spark.stores import event_upcasters

    chosen = {
        "eventStore": store,
        "asOf": at.isoformat(),
        "state": pickled_classes(state, fold, events),
        **({} if upcasters is None else {"upcasters": event_upcasters(upcasters)}),
        **options,
    }
    return spark.read.format(FORMAT).options(**chosen).load()
