"""Joins, windows and state as functions over DataFrames; docs/RECIPES.md explains each of them.

Every function takes streams (and tables) and returns a stream, for use in a pipeline:

    @mp.topic
    def paid_orders():
        return recipes.inner_join(mp.read("orders"), mp.read("payments"))
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as f
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from millstream import pipelines as mp


def inner_join(orders: DataFrame, payments: DataFrame) -> DataFrame:
    hour = ("0 minutes", "1 hour")  # a payment is never earlier than its order
    joined = mp.join_streams(orders, payments, on={"id": "order_id"}, within=hour)
    return joined.select("id", "amount", "paid")


def left_join(orders: DataFrame, payments: DataFrame) -> DataFrame:
    hour = ("0 minutes", "1 hour")  # a payment is never earlier than its order
    joined = mp.join_streams(orders, payments, on={"id": "order_id"}, within=hour, how="left")
    return joined.select("id", "amount", "paid")


def full_join(orders: DataFrame, payments: DataFrame) -> DataFrame:
    hour = ("0 minutes", "1 hour")  # a payment is never earlier than its order
    joined = mp.join_streams(orders, payments, on={"id": "order_id"}, within=hour, how="full")
    return joined.select("id", "amount", "paid")


def with_customer(orders: DataFrame, customers: DataFrame) -> DataFrame:
    return mp.enrich(orders, customers, on="customer").select("id", "customer", "city")


def customers_with_address(people: DataFrame, addresses: DataFrame) -> DataFrame:
    return mp.join_tables(people, addresses, on="_key").withColumnRenamed("_key", "id")


def tumbling(orders: DataFrame) -> DataFrame:
    windows = orders.withWatermark("time", "10 minutes").groupBy(f.window("time", "1 hour"))
    return windows.agg(f.sum("amount").alias("amount")).select("window.start", "amount")


def sliding(orders: DataFrame) -> DataFrame:
    window = f.window("time", "1 hour", "15 minutes")
    windows = orders.withWatermark("time", "10 minutes").groupBy(window)
    return windows.agg(f.sum("amount").alias("amount")).select("window.start", "amount")


def sessions(orders: DataFrame) -> DataFrame:
    window = f.session_window("time", "30 minutes").alias("session")
    groups = orders.withWatermark("time", "10 minutes").groupBy("customer", window)
    counted = groups.agg(f.count("*").alias("orders"))
    return counted.select("customer", "session.start", "session.end", "orders")


def once_each(orders: DataFrame) -> DataFrame:
    return orders.withWatermark("time", "1 hour").dropDuplicatesWithinWatermark(["id"])


class Silence(StatefulProcessor):
    """Reports customers that have not ordered for an hour, in event time."""

    HOUR_MS = 3_600_000

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._last = handle.getValueState("last", "last BIGINT")

    def handleInputRows(  # noqa: N802
        self,
        key: Any,
        rows: Iterator[Row],
        timerValues: Any,  # noqa: N803
    ) -> Iterator[Row]:
        before = self._last.get()
        last = None if before is None else before[0]
        for time in sorted(int(row.time.timestamp() * 1000) for row in rows):
            if last is not None and time - last > self.HOUR_MS:
                yield self._row(key, last)
            last = time if last is None else max(last, time)
        self._last.update((last,))
        for timer in self._handle.listTimers():
            self._handle.deleteTimer(timer)
        self._handle.registerTimer((last or 0) + self.HOUR_MS)

    def handleExpiredTimer(  # noqa: N802
        self,
        key: Any,
        timerValues: Any,  # noqa: N803
        expiredTimerInfo: Any,  # noqa: N803
    ) -> Iterator[Row]:
        last = self._last.get()
        if last is not None:
            self._last.clear()
            yield self._row(key, last[0])

    def _row(self, key: Any, last: int) -> Row:
        return Row(customer=key[0], since=datetime.fromtimestamp(last / 1000, UTC))

    def close(self) -> None:
        """There is nothing to close."""


def silent_customers(orders: DataFrame) -> DataFrame:
    return (
        orders.withWatermark("time", "10 minutes")
        .groupBy("customer")
        .transformWithState(
            statefulProcessor=Silence(),
            outputStructType="customer STRING, since TIMESTAMP",
            outputMode="Append",
            timeMode="EventTime",
        )
    )
