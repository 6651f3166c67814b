"""Filters of a batch read that save reading. Spark applies every one of them again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import datasource as spark

from millstream.event_store.ids import subject_of
from millstream.events.subject import KEY_BYTES_MAX, key_token
from millstream.spark.source.offsets import PartitionState

__all__ = ["Narrowed", "RowFilter", "narrow"]

# Keys that are requested by subject; with more it is faster to read everything.
KEYS_MAX: Final = 100
_NO_END: Final = 2**62


@dataclass(frozen=True, slots=True)
class RowFilter:
    """Which rows the worker drops, before they cost the JVM anything."""

    keys: frozenset[bytes] | None = None  # None: every key
    since: datetime | None = None  # inclusive
    until: datetime | None = None  # inclusive
    packs: bool = True  # whether there may be packs, which can hold any key
    aggregates: frozenset[str] | None = None  # of an event store; None: every one

    def subjects(self, prefix: str | None) -> tuple[str, ...]:
        """The subjects that can hold these keys; empty: all.

        One key without packs is one filter, which the broker answers from its index of subjects;
        with several it walks through the range.
        """
        if prefix is not None and self.aggregates is not None:
            return self._of_aggregates(prefix, self.aggregates)
        if prefix is None or self.keys is None or not 0 < len(self.keys) <= KEYS_MAX:
            return ()
        if any(len(key) > KEY_BYTES_MAX for key in self.keys):
            return ()
        plain = sorted(f"{prefix}.{key_token(key)}" for key in self.keys)
        return (*plain, f"{prefix}.*.>") if self.packs else tuple(plain)

    @staticmethod
    def _of_aggregates(prefix: str, ids: frozenset[str]) -> tuple[str, ...]:
        usable = [id for id in ids if id and len(id.encode()) <= KEY_BYTES_MAX]
        if not 0 < len(usable) == len(ids) <= KEYS_MAX:
            return ()
        return tuple(sorted(subject_of(prefix, id) for id in usable))

    def rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows that pass."""
        names = batch.schema.names
        if self.keys is not None and "key" in names:
            keys = pa.array(sorted(self.keys), pa.binary())
            found = pc.is_in(batch.column("key").cast(pa.binary()), value_set=keys)
            batch = batch.filter(found)
        if self.aggregates is not None and "aggregate" in names:
            ids = pa.array(sorted(self.aggregates), pa.string())
            batch = batch.filter(pc.is_in(batch.column("aggregate"), value_set=ids))
        if self.since is not None and "timestamp" in names:
            batch = batch.filter(pc.greater_equal(batch.column("timestamp"), self.since))
        if self.until is not None and "timestamp" in names:
            batch = batch.filter(pc.less_equal(batch.column("timestamp"), self.until))
        return batch


@dataclass(frozen=True, slots=True)
class Narrowed:
    """The part of a read that the filters leave."""

    first: int = 1  # offset, inclusive
    end: int = _NO_END  # offset, exclusive
    topics: frozenset[str] | None = None
    partitions: frozenset[int] | None = None
    rows: RowFilter = RowFilter()

    def takes(self, state: PartitionState) -> bool:
        """Whether any row of a partition can pass."""
        return (self.topics is None or state.topic in self.topics) and (
            self.partitions is None or state.partition in self.partitions
        )

    @property
    def row_filter(self) -> RowFilter | None:
        return None if self.rows == RowFilter() else self.rows


def narrow(filters: Iterable[Any]) -> Narrowed:
    """The narrowest read that still has every row that all filters let pass."""
    result = Narrowed()
    for one in filters:
        if not isinstance(one, _COMPARISONS) or len(one.attribute) != 1:
            continue
        step = _STEPS.get(one.attribute[0])
        if step is not None:
            result = step(result, one)
    return result


_COMPARISONS: Final = (
    spark.EqualTo,
    spark.In,
    spark.GreaterThan,
    spark.GreaterThanOrEqual,
    spark.LessThan,
    spark.LessThanOrEqual,
)


def _values(one: Any) -> frozenset[Any] | None:
    """The values that an equality allows; None for other comparisons."""
    if isinstance(one, spark.EqualTo):
        return frozenset([one.value])
    if isinstance(one, spark.In):
        return frozenset(one.value)
    return None


def _both(old: frozenset[Any] | None, new: frozenset[Any] | None) -> frozenset[Any] | None:
    if new is None:
        return old
    return new if old is None else old & new


def _by_topic(done: Narrowed, one: Any) -> Narrowed:
    return replace(done, topics=_both(done.topics, _values(one)))


def _by_partition(done: Narrowed, one: Any) -> Narrowed:
    return replace(done, partitions=_both(done.partitions, _values(one)))


def _by_key(done: Narrowed, one: Any) -> Narrowed:
    values = _values(one)
    if values is not None:
        values = frozenset(
            v.encode() if isinstance(v, str) else bytes(v) for v in values if v is not None
        )
    return replace(done, rows=replace(done.rows, keys=_both(done.rows.keys, values)))


def _by_aggregate(done: Narrowed, one: Any) -> Narrowed:
    values = _values(one)
    if values is not None:
        values = frozenset(value for value in values if isinstance(value, str))
    ids = _both(done.rows.aggregates, values)
    return replace(done, rows=replace(done.rows, aggregates=ids))


def _by_offset(done: Narrowed, one: Any) -> Narrowed:
    values = _values(one)
    first, end = done.first, done.end
    if values is not None:
        if not values:
            return replace(done, end=first)
        first, end = max(first, min(values)), min(end, max(values) + 1)
    elif isinstance(one, spark.GreaterThan):
        first = max(first, one.value + 1)
    elif isinstance(one, spark.GreaterThanOrEqual):
        first = max(first, one.value)
    elif isinstance(one, spark.LessThan):
        end = min(end, one.value)
    else:
        end = min(end, one.value + 1)
    return replace(done, first=first, end=end)


def _by_time(done: Narrowed, one: Any) -> Narrowed:
    since, until = done.rows.since, done.rows.until
    if isinstance(one, spark.GreaterThan | spark.GreaterThanOrEqual | spark.EqualTo):
        since = one.value if since is None else max(since, one.value)
    if isinstance(one, spark.LessThan | spark.LessThanOrEqual | spark.EqualTo):
        until = one.value if until is None else min(until, one.value)
    return replace(done, rows=replace(done.rows, since=since, until=until))


_STEPS: Final[Mapping[str, Callable[[Narrowed, Any], Narrowed]]] = {
    "topic": _by_topic,
    "partition": _by_partition,
    "key": _by_key,
    "aggregate": _by_aggregate,
    "offset": _by_offset,
    "timestamp": _by_time,
}
