"""Prunes the plans of flows in a thread, while the functions of other flows are called."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

from millstream.pipelines.pruning import pruned

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["PruningAhead"]


class PruningAhead:
    """The rows of each flow from sources that read no more than the flow uses.

    One thread: Spark plans a query on one core, and two are what a small machine has.
    """

    def __init__(self, spark: SparkSession) -> None:
        self._spark: Any = spark
        self._pool = ThreadPoolExecutor(1, "millstream-pruning", initializer=self._use_session)
        self._flows: dict[str, Future[DataFrame]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def add(self, flow: str, rows: DataFrame) -> None:
        """Begin with this flow; its rows replace those that were given before."""
        self._flows[flow] = self._pool.submit(pruned, rows)

    def rows(self, flow: str) -> DataFrame:
        """The rows of a flow that was added."""
        return self._flows[flow].result()

    def _use_session(self) -> None:
        # A thread of Python has one of Java's, which knows no session of its own.
        sessions = self._spark._jvm.org.apache.spark.sql.classic.SparkSession
        sessions.setActiveSession(self._spark._jsparkSession)
