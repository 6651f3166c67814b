"""The source: columns, options, ranges, replays."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from millstream.messaging import NewEvent
from millstream.spark import lag
from tests.spark.conftest import Account, Lake, forget_commit, last_batch


def rows_of(frame: Any) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in frame.orderBy("partition", "offset", "index").collect()]


def test_plain_messages_and_packs_have_the_same_columns(lake: Lake, account: Account) -> None:
    account.topic("orders")
    moment = datetime(2024, 5, 6, 7, 8, 9, 123456, UTC)
    account.publish(
        "orders",
        [
            NewEvent(b"one", "a.b", {"h": "x"}, moment),
            NewEvent(None, "gone"),
            NewEvent(b"two"),
        ],
    )
    before = datetime.now(UTC)
    account.pack("orders", [(b"three", "c"), (b"four", None)])
    after = datetime.now(UTC)
    frame = lake.read(subscribe="orders", includeHeaders=True)
    assert frame.columns == [
        "key", "value", "topic", "partition", "offset", "timestamp", "subject", "index", "headers",
    ]  # fmt: skip
    found = frame.orderBy("offset", "index").collect()
    assert [(r.key, r.value, r.topic, r.partition, r["index"]) for r in found] == [
        (b"a.b", b"one", "orders", 0, 0),
        (b"gone", None, "orders", 0, 0),
        (None, b"two", "orders", 0, 0),
        (b"c", b"three", "orders", 0, 0),
        (None, b"four", "orders", 0, 1),
    ]
    assert [r.offset for r in found[:3]] == [1, 2, 3]
    assert found[3].offset == found[4].offset > 3
    assert found[0].timestamp.astimezone(UTC) == moment
    assert found[0].subject == "orders.a=2Eb"
    assert [(h.key, bytes(h.value)) for h in found[0].headers] == [("h", b"x")]
    assert before <= found[3].timestamp.astimezone(UTC) <= after


def test_a_user_schema_and_columns_choose_what_is_read(lake: Lake, account: Account) -> None:
    account.topic("orders")
    account.publish("orders", [NewEvent(b"one", "a")])
    account.pack("orders", [(b"two", "b")])
    chosen = lake.read(subscribe="orders", schema="value STRING, key STRING")
    assert sorted(map(tuple, chosen.collect())) == [("one", "a"), ("two", "b")]
    named = lake.read(subscribe="orders", columns="offset,key")
    assert named.columns == ["key", "offset"]
    assert named.count() == 2
    for schema, text in [
        ("price DOUBLE", "asks for the column 'price'"),
        ("offset STRING", "asks for offset as string"),
        ("value STRUCT<a: INT>", "asks for value as"),
        ("reason STRING", "undecodable = null"),
    ]:
        with pytest.raises(Exception, match=text):
            lake.read(subscribe="orders", schema=schema).collect()


def test_starts_and_ends_of_a_batch_read(lake: Lake, account: Account) -> None:
    account.topic("orders", partitions=2)
    account.publish("orders", [NewEvent(b"%d" % n, f"k{n}") for n in range(20)])
    time.sleep(0.002)
    between = time.time_ns() // 1_000_000
    time.sleep(0.002)
    account.publish("orders", [NewEvent(b"%d" % n, f"k{n}") for n in range(20, 30)])
    every = rows_of(lake.read(subscribe="orders"))
    assert len(every) == 30
    first = [row for row in every if int(row[1]) < 20]
    last = [row for row in every if int(row[1]) >= 20]
    assert rows_of(lake.read(subscribe="orders", startingTimestamp=between)) == last
    assert rows_of(lake.read(subscribe="orders", endingTimestamp=between)) == first
    times = json.dumps({"orders": {"0": between, "1": 0}})
    some = rows_of(lake.read(subscribe="orders", startingOffsetsByTimestamp=times))
    assert some == [row for row in every if row in last or row[3] == 1]
    starts = json.dumps({"orders": {"0": 3, "1": -2}})
    ends = json.dumps({"orders": {"0": -1, "1": 4}})
    found = rows_of(lake.read(subscribe="orders", startingOffsets=starts, endingOffsets=ends))
    assert found == [r for r in every if (r[3] == 0 and r[4] >= 3) or (r[3] == 1 and r[4] < 4)]
    assert rows_of(lake.read(assign='{"orders": [1]}')) == [r for r in every if r[3] == 1]
    far = (time.time_ns() // 1_000_000) + 3_600_000
    with pytest.raises(Exception, match="startingOffsetsByTimestampStrategy"):
        lake.read(subscribe="orders", startingTimestamp=far).collect()
    late = lake.read(
        subscribe="orders", startingTimestamp=far, startingOffsetsByTimestampStrategy="latest"
    )
    assert late.count() == 0


def test_any_stream_can_be_read_by_subject(lake: Lake, account: Account) -> None:
    async def make(mill: Any) -> None:
        await mill.jetstream.create_stream({"name": "RAW", "subjects": ["raw.>"]})
        for n in range(6):
            await mill.publish_acked(f"raw.{'eu' if n % 2 else 'us'}.{n}", b"%d" % n)

    account.run(make)
    frame = lake.read(stream="RAW", subjects="raw.eu.*")
    assert [(r.subject, r.key, r.value) for r in frame.orderBy("offset").collect()] == [
        ("raw.eu.1", None, b"1"),
        ("raw.eu.3", None, b"3"),
        ("raw.eu.5", None, b"5"),
    ]
    assert lake.read(stream="RAW").count() == 6


def test_a_pattern_finds_topics_including_new_ones(lake: Lake, account: Account) -> None:
    account.topic("eu-orders")
    account.publish("eu-orders", [b"1"])
    checkpoint = lake.checkpoint()
    frame = lake.stream(subscribePattern=".*-orders", schema="topic STRING, value STRING")
    rows, _ = lake.collect(frame, checkpoint)
    assert sorted(map(tuple, rows)) == [("eu-orders", "1")]
    account.topic("us-orders", partitions=2)
    account.publish("us-orders", [NewEvent(b"2", "a"), NewEvent(b"3", "b")])
    account.publish("eu-orders", [b"4"])
    frame = lake.stream(subscribePattern=".*-orders", schema="topic STRING, value STRING")
    rows, _ = lake.collect(frame, checkpoint)
    assert sorted(map(tuple, rows)) == [
        ("eu-orders", "4"),
        ("us-orders", "2"),
        ("us-orders", "3"),
    ]


def test_a_replayed_batch_reads_the_same_rows_in_the_same_tasks(
    lake: Lake, account: Account
) -> None:
    account.topic("orders", partitions=2)
    account.publish("orders", [NewEvent(b"%d" % n, f"k{n % 5}") for n in range(200)])
    account.pack("orders", [(b"p%d" % n, f"k{n % 5}") for n in range(200)], max_events=20)
    checkpoint = lake.checkpoint()
    seen: dict[int, list[Any]] = {}

    def keep(batch: Any, number: int) -> None:
        placed = batch.selectExpr("*", "spark_partition_id() AS task")
        seen[number] = sorted(map(tuple, placed.collect()), key=lambda row: row[3:])

    def run(**options: Any) -> dict[int, list[Any]]:
        seen.clear()
        frame = lake.stream(subscribe="orders", maxOffsetsPerTrigger=70, **options)
        query = frame.writeStream.foreachBatch(keep).option("checkpointLocation", str(checkpoint))
        query.trigger(availableNow=True).start().awaitTermination()
        return dict(seen)

    first = run(minPartitions=5)
    assert sum(map(len, first.values())) == 400
    assert first[0] == []
    batch = last_batch(checkpoint)
    account.publish("orders", [b"later"] * 10)
    forget_commit(checkpoint, batch)
    again = run(minPartitions=2)  # another option does not change the cut of a kept batch
    assert again[batch] == first[batch]
    assert {row[-1] for row in first[batch]} == {row[-1] for row in again[batch]}


def test_the_start_of_a_new_query_is_pinned_before_anything_is_read(
    lake: Lake, account: Account
) -> None:
    account.topic("orders")
    account.publish("orders", [b"old"])
    checkpoint = lake.checkpoint()
    rows, _ = lake.collect(lake.stream(subscribe="orders", startingOffsets="latest"), checkpoint)
    assert rows == []
    account.publish("orders", [b"a", b"b"])
    forget_commit(checkpoint, 0)  # as if the driver had died in its first batch
    rows, _ = lake.collect(lake.stream(subscribe="orders", startingOffsets="latest"), checkpoint)
    assert [row.value for row in rows] == [b"a", b"b"]


def test_rate_limit_and_lag_are_in_the_progress(lake: Lake, account: Account) -> None:
    account.topic("orders", partitions=2)
    account.publish("orders", [NewEvent(b"x", f"k{n}") for n in range(100)])
    frame = lake.stream(subscribe="orders", maxOffsetsPerTrigger=40)
    rows, query = lake.collect(frame, lake.checkpoint())
    assert len(rows) == 100
    progress = [p for p in query.recentProgress if p["numInputRows"]]
    assert [p["numInputRows"] for p in progress] == [40, 40, 20]
    sources = [p["sources"][0] for p in progress]
    lags = [lag(source["endOffset"], source["latestOffset"]) for source in sources]
    assert lags == [60, 20, 0]


def test_filters_narrow_a_batch_read(lake: Lake, account: Account) -> None:
    account.topic("orders", partitions=2)
    account.publish("orders", [NewEvent(b"%d" % n, f"k{n % 4}") for n in range(40)])
    account.pack("orders", [(b"p%d" % n, f"k{n % 4}") for n in range(40)])
    frame = lake.read(subscribe="orders")
    every = frame.collect()
    assert len(every) == 80

    def same(condition: str, keep: Any) -> None:
        found = lake.read(subscribe="orders").where(condition).collect()
        assert sorted(map(str, found)) == sorted(str(row) for row in every if keep(row))

    same("key = X'6B32'", lambda r: r.key == b"k2")
    same(
        "key IN (X'6B32', X'6B33') AND offset > 5",
        lambda r: r.key in (b"k2", b"k3") and r.offset > 5,
    )
    same(
        "partition = 1 AND offset BETWEEN 2 AND 4",
        lambda r: r.partition == 1 and 2 <= r.offset <= 4,
    )
    middle = sorted(row.timestamp for row in every)[40]
    same(f"timestamp >= TIMESTAMP '{middle}'", lambda r: r.timestamp >= middle)
    same("topic = 'other'", lambda r: False)


def test_the_tasks_of_a_key_have_one_filter_while_there_are_no_packs(account: Account) -> None:
    from pyspark.sql.datasource import EqualTo

    from millstream.spark.options import connection_settings, source_options
    from millstream.spark.source.batch_reader import FilteringBatchReader
    from millstream.spark.source.range_reader import RangeReader, RangeTask

    given = {"url": account.url, "subscribe": "orders"}
    settings = connection_settings(given)

    def filters() -> list[int]:
        reader = RangeReader(settings, pa.schema([]))
        batch = FilteringBatchReader(settings, source_options(given, batch=True), reader)
        batch.pushFilters([EqualTo(("key",), b"k2")])
        tasks = [task for task in batch.partitions() if isinstance(task, RangeTask)]
        chosen = [task.row_filter for task in tasks]
        return [len(rows.subjects("orders")) for rows in chosen if rows is not None]

    account.topic("orders")
    account.publish("orders", [NewEvent(b"%d" % n, f"k{n % 4}") for n in range(40)])
    assert filters() == [1]
    account.pack("orders", [(b"p", "k2")])
    assert filters() == [2]


def test_filters_narrow_the_offsets_that_are_read() -> None:
    from pyspark.sql.datasource import EqualTo, GreaterThan, LessThanOrEqual

    from millstream.spark.source.pushdown import narrow

    done = narrow([GreaterThan(("offset",), 10), LessThanOrEqual(("offset",), 20)])
    assert (done.first, done.end) == (11, 21)
    keyed = narrow([EqualTo(("key",), b"a.b")])
    assert keyed.rows.subjects("orders.1") == ("orders.1.a=2Eb", "orders.1.*.>")
    assert replace(keyed.rows, packs=False).subjects("orders.1") == ("orders.1.a=2Eb",)
    assert narrow([EqualTo(("partition",), 3)]).partitions == frozenset({3})
