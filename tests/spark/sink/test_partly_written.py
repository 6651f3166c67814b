"""A batch write that fails half-way says what is stored, and that is what is stored."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.spark.conftest import Lake, Place

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

STORED = re.compile(r"([\w-]+)/(\d+): ([\d,]+) rows, the last at offset (\d+)")


def named(error: Exception) -> list[tuple[str, int, int, int]]:
    """Topic, partition, rows and last offset of what an error says is stored."""
    assert "PartlyWritten" in str(error)
    found = STORED.findall(str(error))
    return [
        (topic, int(number), int(rows.replace(",", "")), int(last))
        for topic, number, rows, last in found
    ]


def held(place: Place, *topics: str) -> list[tuple[str, int, int, int]]:
    """The same, of what is there."""
    events = [(topic, event) for topic in topics for event in place.events(topic)]
    counts = Counter((topic, event.partition) for topic, event in events)
    return [
        (*at, rows, max(e.offset for topic, e in events if (topic, e.partition) == at))
        for at, rows in sorted(counts.items())
    ]


def half_full(place: Place) -> None:
    """Topics that rows are written to in the order of their names; the second one takes no row."""
    place.topic("first", partitions=2)
    place.topic("second", max_messages=1, discard="new")  # the fence's own message fills it


ROWS = ("if(id % 3 = 0, 'second', 'first') AS topic", "cast(id AS STRING) AS value")


def test_rows_of_more_than_one_unit_are_named_as_far_as_they_are_stored(
    lake: Lake, place: Place
) -> None:
    place.topic("target", max_bytes="40MiB", discard="new", storage="memory")
    frame = lake.spark.range(0, 768, numPartitions=2).selectExpr(
        "lpad(cast(id AS STRING), 65536, '.') AS value"
    )
    with pytest.raises(Exception, match="PartlyWritten") as caught:
        lake.write(frame, topic="target", compression="none")  # 48 MiB; a unit has 32
    assert "maximum bytes exceeded" in str(caught.value)
    assert named(caught.value) == held(place, "target")
    stored = [int(value.lstrip(b".") or b"0") for value in place.values("target")]
    assert 256 < len(stored) < 512
    assert len(set(stored)) == len(stored)


def test_a_topic_that_refuses_its_rows_leaves_those_of_the_others_and_names_them(
    lake: Lake, place: Place
) -> None:
    half_full(place)
    frame = lake.spark.range(0, 30, numPartitions=2).selectExpr(*ROWS)
    with pytest.raises(Exception, match="PartlyWritten") as caught:
        lake.write(frame)
    assert named(caught.value) == held(place, "first", "second")
    found = Counter(int(value) for value in place.values("first"))
    assert found == Counter(n for n in range(30) if n % 3)
    assert place.values("second") == []


def test_a_write_of_which_nothing_is_stored_names_nothing(lake: Lake, place: Place) -> None:
    half_full(place)
    frame = lake.spark.range(0, 30, numPartitions=2).selectExpr("cast(id AS STRING) AS value")
    with pytest.raises(Exception, match="maximum messages exceeded") as caught:
        lake.write(frame, topic="second")
    assert "PartlyWritten" not in str(caught.value)
    assert place.values("second") == []


@pytest.mark.parametrize("way", ["foreachBatch", "format"])
def test_a_batch_of_a_query_that_failed_half_way_goes_on_when_it_is_run_again(
    lake: Lake, place: Place, way: str
) -> None:
    half_full(place)
    place.topic("source")
    place.publish("source", [b"%d" % n for n in range(30)])
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
        assert named(caught.value) == held(place, "first", "second")
    place.run(lambda mill: mill.edit_topic("second", max_messages=100))
    run()
    found = Counter(int(value) for value in place.values("first"))
    assert found == Counter(n for n in range(30) if n % 3)
    assert Counter(int(value) for value in place.values("second")) == Counter(range(0, 30, 3))
