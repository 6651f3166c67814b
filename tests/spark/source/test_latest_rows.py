"""The latest rows of topics that keep every event, on real Spark."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest

import millstream
from millstream.events.row_buffer import Columns
from millstream.messaging.topics.purging import Purge
from millstream.spark.source import latest_reader
from tests.spark.changes_kit import ITEM, Change, Writing
from tests.spark.conftest import Account, Lake


def rows_in(lake: Lake, **options: Any) -> dict[int, dict[str, Any]]:
    found = lake.read(subscribe="items", rows="latest", **options).select("key", "value.*")
    rows = [row.asDict() for row in found.collect()]
    assert all(row.pop("key") == str(row["id"]).encode() for row in rows)
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


def snapshot(count: int) -> list[Change]:
    text = {"name": "n", "note": "of the snapshot"}
    return [Change("r", id, text, number=None, commit=1) for id in range(count)]


def updates(chance: random.Random, count: int) -> list[Change]:
    changes = []
    for number in range(count):
        id = chance.randrange(40)
        if chance.random() < 0.2:
            changes += [Change("d", id), Change("c", id, {"name": "new", "note": f"{number}"})]
        else:
            changes.append(Change("u", id, {"name": f"{number}"}, unchanged=["note"]))
    return changes


def test_the_latest_rows_are_those_of_the_table_now_and_then(lake: Lake, account: Account) -> None:
    writing, chance = Writing(account.url), random.Random(5)
    writing.create(partitions=2)
    writing.write(*snapshot(40), pack=7)
    writing.write(*updates(chance, 60), pack=9)
    before = dict(writing.rows)
    assert rows_in(lake) == before
    then = max(event.timestamp for event in account.events("items"))
    ends = {"items": {str(n): 2**62 for n in (0, 1)}}
    with pytest.raises(Exception, match="beyond its end"):
        rows_in(lake, endingOffsets=str(ends).replace("'", '"'))

    # Other columns, and none at all.
    latest = lake.read(subscribe="items", rows="latest", columns="value.name,partition")
    assert latest.count() == 40
    assert {row.partition for row in latest.collect()} == {0, 1}
    assert lake.read(subscribe="items", rows="latest", columns="offset").count() == 40

    # A truncation is in one partition and counts for both; what follows it stays.
    writing.write(Change("c", 90, {"name": "gone", "note": ""}), Change("t"))
    writing.write(*(Change("c", id, {"name": "x", "note": "y"}) for id in range(90, 96)))
    assert rows_in(lake) == writing.rows
    assert len(writing.rows) == 6
    assert rows_in(lake, asOf=then.isoformat()) == before
    with pytest.raises(Exception, match="in the future"):
        rows_in(lake, asOf=(then + timedelta(days=1)).isoformat())

    account.run(lambda mill: purge(mill))
    with pytest.raises(Exception, match="expired or were deleted"):
        rows_in(lake)
    assert 0 < len(rows_in(lake, failOnDataLoss="false")) <= 6


async def purge(mill: millstream.Mill) -> None:
    await (await mill.topic("items")).admin.purge(Purge(keep=2))


def test_rows_with_tombstones_are_folded_and_events_without_a_key_are_refused(
    lake: Lake, account: Account
) -> None:
    async def write(mill: millstream.Mill) -> None:
        topic = await mill.create_topic("items", schema=ITEM, partitions=2)
        rows = [(1, "a"), (2, "b"), (3, "c"), (1, "d"), (2, None)]
        value = [{"id": id, "name": name, "note": None} for id, name in rows]
        types = pa.struct([("id", pa.int64()), ("name", pa.string()), ("note", pa.string())])
        frame = {"value": pa.array(value, types), "key": [str(id) for id, _ in rows]}
        frame |= {"gone": [name is None for _, name in rows]}
        columns = Columns(value="value", key="key", tombstone="gone")
        async with topic.writer("w") as writer:
            await writer.write_batch(pa.table(frame), position=5, columns=columns)
        await topic.publish({"id": 3, "name": "plain", "note": "n"}, key="3")

    account.run(write)
    found = {id: (row["name"], row["note"]) for id, row in rows_in(lake).items()}
    assert found == {1: ("d", None), 3: ("plain", "n")}
    account.topic("bytes")
    account.pack("bytes", [(b"1", "a"), (b"2", "b"), (b"3", "a")])
    latest = lake.read(subscribe="bytes", rows="latest")
    assert {(bytes(r.key), bytes(r.value)) for r in latest.collect()} == {
        (b"a", b"3"),
        (b"b", b"2"),
    }
    account.pack("bytes", [(b"4", None)])
    with pytest.raises(Exception, match="has no key"):
        latest.collect()


def test_a_joined_stream_sees_the_rows_of_each_batch_and_reads_only_later_events(
    lake: Lake, account: Account
) -> None:
    writing = Writing(account.url)
    writing.create()
    writing.write(*snapshot(latest_reader.KEPT_AFTER + 5), pack=10_000)
    account.topic("ids")
    latest = lake.read(subscribe="items", rows="latest", columns="value").select("value.*")
    stream = lake.stream(subscribe="ids").selectExpr("BIGINT(string(value)) AS id")
    joined = stream.join(latest, "id")
    seen: list[tuple[int, str, str]] = []
    query = (
        joined.writeStream.foreachBatch(lambda batch, _: seen.extend(map(tuple, batch.collect())))
        .option("checkpointLocation", str(lake.checkpoint()))
        .start()
    )
    try:
        for number in range(4):
            account.publish("ids", [b"7"])
            query.processAllAvailable()
            assert seen[-1] == (7, writing.rows[7]["name"], "of the snapshot")
            assert len(seen) == number + 1
            writing.write(Change("u", 7, {"name": f"later {number}"}, unchanged=["note"]))
    finally:
        query.stop()
    kept = lake.spark.range(0, 1, 1, 1).mapInArrow(kept_files, "name STRING, rows BIGINT").collect()
    assert [row.rows for row in kept] == [latest_reader.KEPT_AFTER + 5]


def kept_files(batches: Any) -> Any:
    """The folds that are kept where tasks run."""
    folder = latest_reader._folder()
    assert folder is not None
    for path in folder.glob("*.arrow"):
        rows = sum(batch.num_rows for batch in pa.ipc.open_file(str(path)).read_all().to_batches())
        yield pa.RecordBatch.from_pylist([{"name": path.name, "rows": rows}])
