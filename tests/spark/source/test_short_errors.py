"""What a notebook shows of a wrong name: our sentence in the first line, and no traceback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pyspark.errors import AnalysisException, StreamingQueryException

from tests.spark.conftest import Account, Lake

CREATE = "[PYTHON_DATA_SOURCE_ERROR] Failed to create Python data source instance: "
PLAN = "[PYTHON_DATA_SOURCE_ERROR] Failed to generate Python data source read partitions: "
WRITE = "[PYTHON_DATA_SOURCE_ERROR] Failed to initialize Python data source writer: "
CONFIG = "millstream.errors.base.ConfigError: "
TOPIC = "millstream.errors.topics.TopicNotFound: "
NEAR = "there is no topic or stream 'ordres'. Did you mean 'orders'?"


def shown(call: Callable[[], Any]) -> list[str]:
    with pytest.raises(AnalysisException) as caught:
        call()
    return str(caught.value).splitlines()


def test_a_wrong_name_is_one_line_and_proposes_the_right_one(account: Account, lake: Lake) -> None:
    account.topic("orders")
    end = " SQLSTATE: 38000"
    unknown = "unknown option 'subscribee': did you mean 'subscribe'?"
    assert shown(lambda: lake.read(subscribee="orders")) == [CREATE + CONFIG + unknown, end]
    assert shown(lambda: lake.read(subscribe="ordres")) == [CREATE + TOPIC + NEAR, end]
    assert shown(lambda: lake.stream(subscribe="ordres")) == [CREATE + TOPIC + NEAR, end]
    rows = lake.read(subscribe="orders").select("value")
    target = rows.write.format("millstream").options(url=lake.url, topic="ordres").mode("append")
    assert shown(target.save) == [WRITE + TOPIC + NEAR, end]
    other = lake.read(subscribe="orders", startingOffsets='{"orders": {"7": 3}}')
    first, last = shown(other.collect)
    assert first.startswith(f"{PLAN}{CONFIG}option 'startingOffsets' must name exactly")
    assert last == end


@pytest.mark.parametrize("trigger", [{"availableNow": True}, {"processingTime": "0 seconds"}])
def test_a_stream_that_has_no_reader_says_why(
    account: Account, lake: Lake, trigger: dict[str, Any]
) -> None:
    account.topic("orders")
    query = (
        lake.stream(subscribe="orders", endingOffsets="latest")
        .writeStream.format("noop")
        .option("checkpointLocation", str(lake.checkpoint()))
        .trigger(**trigger)
        .start()
    )
    with pytest.raises(StreamingQueryException) as caught:
        query.awaitTermination(240)
    first, second, *_ = str(caught.value).splitlines()
    assert first.endswith(
        f"{CONFIG}option 'endingOffsets' belongs to a batch read (spark.read), not to "
        "a streaming source"
    )
    assert second.startswith(" SQLSTATE: ")
