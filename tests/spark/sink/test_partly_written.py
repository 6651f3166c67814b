"""A batch write that fails halfway reports exactly what is stored."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.spark.conftest import Account, Lake

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

STORED = re.compile(r"([\w-]+)/(\d+): ([\d,]+) rows, the last at offset (\d+)")


def named(error: Exception) -> list[tuple[str, int, int, int]]:
    """Topic, partition, rows and last offset that an error reports as stored."""
    assert "PartlyWritten" in str(error)
    found = STORED.findall(str(error))
    return [
        (topic, int(number), int(rows.replace(",", "")), int(last))
        for topic, number, rows, last in found
    ]


def held(account: Account, *topics: str) -> list[tuple[str, int, int, int]]:
    """The same, of what is really stored."""
    events = [(topic, event) for topic in topics for event in account.events(topic)]
    counts = Counter((topic, event.partition) for topic, event in events)
    return [
        (*at, rows, max(e.offset for topic, e in events if (topic, e.partition) == at))
        for at, rows in sorted(counts.items())
    ]


def half_full(account: Account) -> None:
    """Topics that rows are written to in the order of their names; the second one is full."""
    account.topic("first", partitions=2)
    account.topic("second", max_messages=1, discard="new")  # the fence's own message fills it


ROWS = ("if(id % 3 = 0, 'second', 'first') AS topic", "cast(id AS STRING) AS value")


def test_the_stored_rows_of_several_units_are_reported(lake: Lake, account: Account) -> None:
    account.topic("target", max_bytes="40MiB", discard="new", storage="memory")
    frame = lake.spark.range(0, 768, numPartitions=2).selectExpr(
        "lpad(cast(id AS STRING), 65536, '.') AS value"
    )
    with pytest.raises(Exception, match="PartlyWritten") as caught:
        lake.write(frame, topic="target", compression="none")  # 48 MiB; a unit has 32
    assert "maximum bytes exceeded" in str(caught.value)
    assert named(caught.value) == held(account, "target")
    stored = [int(value.lstrip(b".") or b"0") for value in account.values("target")]
    assert 256 < len(stored) < 512
    assert len(set(stored)) == len(stored)


def test_a_topic_that_rejects_its_rows_leaves_those_of_the_others_and_reports_them(
    lake: Lake, account: Account
) -> None:
    half_full(account)
    frame = lake.spark.range(0, 30, numPartitions=2).selectExpr(*ROWS)
    with pytest.raises(Exception, match="PartlyWritten") as caught:
        lake.write(frame)
    assert named(caught.value) == held(account, "first", "second")
    found = Counter(int(value) for value in account.values("first"))
    assert found == Counter(n for n in range(30) if n % 3)
    assert account.values("second") == []


def test_a_write_that_stored_nothing_reports_nothing(lake: Lake, account: Account) -> None:
    half_full(account)
    frame = lake.spark.range(0, 30, numPartitions=2).selectExpr("cast(id AS STRING) AS value")
    with pytest.raises(Exception, match="maximum messages exceeded") as caught:
        lake.write(frame, topic="second")
    assert "PartlyWritten" not in str(caught.value)
    assert account.values("second") == []


@pytest.mark.parametrize("way", ["foreachBatch", "format"])
def test_a_batch_that_failed_halfway_continues_when_it_is_run_again(
    lake: Lake, account: Account, way: str
) -> None:
    half_full(account)
    account.topic("source")
    account.publish("source", [b"%d" % n for n in range(30)])
    checkpoint = lake.checkpoint()

    def write(batch: DataFrame, _: int) -> None:
        lake.write(batch, writerName="copy", commitMode="staged")

    def run() -> None:
        numbers = lake.stream(subscribe="source").selectExpr("cast(value AS STRING) AS id")
        rows = numbers.selectExpr(*ROWS)
        if way == "format":
            lake.run(rows, checkpoint, commitMode="staged")
            return
        query = rows.writeStream.foreachBatch(write).trigger(availableNow=True)
        query.option("checkpointLocation", str(checkpoint)).start().awaitTermination()

    for _ in range(2):  # there is still no room when it is run again
        with pytest.raises(Exception, match="PartlyWritten") as caught:
            run()
        assert named(caught.value) == held(account, "first", "second")
    account.run(lambda mill: mill.edit_topic("second", max_messages=100))
    run()
    found = Counter(int(value) for value in account.values("first"))
    assert found == Counter(n for n in range(30) if n % 3)
    assert Counter(int(value) for value in account.values("second")) == Counter(range(0, 30, 3))
