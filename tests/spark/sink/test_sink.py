"""The sink: columns, partitions, topics by row, batch writes, foreachBatch, tables."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from millstream.events.subject import partition_of
from millstream.spark import table_writer, topic_writer
from tests.spark.conftest import Account, Lake, forget_commit, last_batch


def test_a_dataframe_is_written_with_all_columns(lake: Lake, account: Account) -> None:
    account.topic("orders", partitions=3)
    moment = datetime(2024, 1, 2, 3, 4, 5, 678901, UTC)
    rows = [
        (f"k{n}", f"v{n}", moment, [("h", bytearray(b"x"))] if n % 2 else None, None if n else 2)
        for n in range(20)
    ]
    ddl = (
        "key STRING, value STRING, timestamp TIMESTAMP, "
        "headers ARRAY<STRUCT<key: STRING, value: BINARY>>, partition INT"
    )
    lake.write(lake.spark.createDataFrame(rows, ddl), topic="orders")
    events = account.events("orders")
    assert sorted(e.value for e in events) == sorted(f"v{n}".encode() for n in range(20))
    assert {e.timestamp for e in events} == {moment}
    for event in events:
        number = int(event.value[1:])
        assert event.partition == (partition_of(f"k{number}", 3) if number else 2)
        assert dict(event.headers) == ({"h": "x"} if number % 2 else {})


def test_rows_can_name_their_topic(lake: Lake, account: Account) -> None:
    account.topic("a")
    account.topic("b")
    frame = lake.spark.range(10).selectExpr(
        "if(id < 4, 'a', 'b') AS topic", "cast(id AS STRING) AS value"
    )
    lake.write(frame)
    assert sorted(account.values("a")) == [b"0", b"1", b"2", b"3"]
    assert len(account.values("b")) == 6


@pytest.mark.parametrize(
    ("columns", "options", "text"),
    [
        (["id", "'x' AS value"], {"topic": "a"}, "drop 'id'"),
        (["'x' AS key"], {"topic": "a"}, "needs a column 'value'"),
        (["'x' AS value"], {}, "set the option 'topic'"),
        (["id AS value"], {"topic": "a"}, "'value' must be binary, string or struct"),
        (["'x' AS value"], {"topic": "none"}, "there is no topic or stream 'none'"),
        (["struct(id) AS value"], {"topic": "a"}, "has no schema"),
        (["'x' AS value", "7 AS partition"], {"topic": "a"}, "partition"),
        (["'x' AS value"], {"topic": "a", "subscribe": "b"}, "belongs to a source"),
        (["'x' AS value"], {"table": "a"}, "needs a column 'key'"),
    ],
)
def test_rows_that_do_not_fit_are_rejected(
    lake: Lake, account: Account, columns: list[str], options: dict[str, str], text: str
) -> None:
    account.topic("a")
    with pytest.raises(Exception, match=text):
        lake.write(lake.spark.range(2).selectExpr(*columns), **options)
    assert account.values("a") == []


def test_nothing_of_a_failed_batch_write_is_visible(lake: Lake, account: Account) -> None:
    account.topic("target")
    frame = lake.spark.range(0, 2000, numPartitions=2).selectExpr(
        "if(id = 1999, raise_error('stop here'), cast(id AS STRING)) AS value"
    )
    with pytest.raises(Exception, match="stop here"):
        lake.write(frame, topic="target")
    assert account.values("target") == []
    with pytest.raises(Exception, match="stop here"):
        lake.write(frame, topic="target", commitMode="direct")


def test_update_mode_goes_through_foreach_batch_exactly_once(lake: Lake, account: Account) -> None:
    account.topic("words")
    account.topic("counts")
    account.run(lambda mill: mill.create_table("totals"))
    account.publish("words", [b"a", b"b", b"a"])
    checkpoint = lake.checkpoint()

    def run() -> None:
        counts = (
            lake.stream(subscribe="words", schema="value STRING")
            .groupBy("value")
            .count()
            .withColumnRenamed("value", "word")
        )
        to_topic = topic_writer("counts", key="word", url=account.url)
        to_table = table_writer("totals", key="word", url=account.url)

        def both(batch: Any, number: int) -> None:
            to_topic(batch, number)
            to_table(batch, number)

        query = counts.writeStream.outputMode("update").foreachBatch(both)
        query = query.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
        query.start().awaitTermination()

    run()
    first = [(e.key, e.value) for e in account.events("counts")]
    assert sorted(first) == [("a", b'{"word":"a","count":2}'), ("b", b'{"word":"b","count":1}')]
    forget_commit(checkpoint, last_batch(checkpoint))
    run()
    assert [(e.key, e.value) for e in account.events("counts")] == first
    account.publish("words", [b"b"])
    run()
    assert [(e.key, e.value) for e in account.events("counts")][2:] == [
        ("b", b'{"word":"b","count":2}')
    ]

    async def totals(mill: Any) -> Any:
        return await (await mill.table("totals")).as_dict()

    assert account.run(totals) == {
        "a": b'{"word":"a","count":2}',
        "b": b'{"word":"b","count":2}',
    }


def test_a_write_in_foreach_batch_without_a_name_is_rejected(lake: Lake, account: Account) -> None:
    account.topic("source")
    account.topic("target")
    account.publish("source", [b"x"])

    def write(batch: Any, _: int) -> None:
        lake.write(batch.select("value"), topic="target")

    frame = lake.stream(subscribe="source")
    query = frame.writeStream.foreachBatch(write).trigger(availableNow=True)
    with pytest.raises(Exception, match="needs the option writerName"):
        query.option("checkpointLocation", str(lake.checkpoint())).start().awaitTermination()


def test_a_table_is_read_followed_and_written(lake: Lake, account: Account) -> None:
    async def make(mill: Any) -> None:
        table = await mill.create_table("prices", partitions=2)
        await table.put_many({f"k{n}": b"%d" % n for n in range(30)})
        await table.put("k3", b"33")
        await table.delete("k4")

    account.run(make)
    frame = lake.read(table="prices", schema="key STRING, value STRING")
    found = {row.key: row.value for row in frame.collect()}
    assert found == {f"k{n}": "33" if n == 3 else str(n) for n in range(30) if n != 4}

    checkpoint = lake.checkpoint()
    changes = lake.stream(table="prices", startingOffsets=None, schema="key STRING, value STRING")
    rows, _ = lake.collect(changes, checkpoint)
    assert {row.key for row in rows} == {f"k{n}" for n in range(30)}
    assert [row.value for row in rows if row.key == "k4"] == [None]

    edits = lake.spark.createDataFrame([("k5", "55"), ("k6", None)], "key STRING, value STRING")
    lake.write(edits, table="prices")
    again = {row.key: row.value for row in frame.collect()}  # the same frame, read again
    assert again["k5"] == "55"
    assert "k6" not in again
    rows, _ = lake.collect(
        lake.stream(table="prices", startingOffsets=None, schema="key STRING, value STRING"),
        checkpoint,
    )
    assert sorted(map(tuple, rows)) == [("k5", "55"), ("k6", None)]


def test_a_stream_of_upserts_fills_a_table_and_a_join_sees_it(lake: Lake, account: Account) -> None:
    account.topic("changes")
    account.topic("asked")
    account.run(lambda mill: mill.create_table("stock"))
    account.pack("changes", [(b"%d" % n, f"k{n % 50}") for n in range(2500)])
    checkpoint = lake.checkpoint()
    for again in (False, True):
        frame = lake.stream(subscribe="changes").select("key", "value")
        lake.run(frame, checkpoint, table="stock")
        if not again:
            forget_commit(checkpoint, last_batch(checkpoint))
    table = lake.read(table="stock", schema="key STRING, value STRING")
    assert {int(row.key[1:]): int(row.value) for row in table.collect()} == {
        n: 2450 + n for n in range(50)
    }
    asked = lake.stream(subscribe="asked", schema="value STRING").withColumnRenamed("value", "key")
    joined = asked.join(table, "key")
    found: list[Any] = []
    query = (
        joined.writeStream.foreachBatch(lambda batch, _: found.extend(batch.collect()))
        .option("checkpointLocation", str(lake.checkpoint()))
        .start()
    )
    account.publish("asked", [b"k7"])
    query.processAllAvailable()
    lake.write(
        lake.spark.createDataFrame([("k7", "new")], "key STRING, value STRING"), table="stock"
    )
    account.publish("asked", [b"k7"])
    query.processAllAvailable()
    query.stop()
    assert [row.value for row in found] == ["2457", "new"]
