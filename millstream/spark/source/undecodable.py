"""Rows that could not be decoded: left out, and counted where a query shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Observation

__all__ = ["drop_undecodable"]


def drop_undecodable(rows: DataFrame, name: str | Observation = "undecodable") -> DataFrame:
    """The rows whose value could be decoded; the others are counted in the query's progress.

    For rows that were read with `undecodable` = `null`. Each batch's count and one of the reasons
    are in `query.lastProgress.observedMetrics[name]`: `dropped` and `example`. For a batch read
    give an `Observation`, whose `get` has the same two.
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
