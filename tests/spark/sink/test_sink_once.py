"""A batch that Spark runs twice writes once."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from millstream.messaging import NewEvent
from tests.spark.conftest import Account, Lake, forget_commit, last_batch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def through(frame: DataFrame) -> DataFrame:
    return frame.selectExpr("key", "value")


def numbers(account: Account, topic: str, count: int) -> list[bytes]:
    values = [str(n).encode() for n in range(count)]
    account.publish(topic, [NewEvent(value, f"k{int(value) % 11}") for value in values])
    return values


@pytest.mark.parametrize("mode", ["direct", "staged"])
def test_a_batch_that_is_run_again_writes_nothing_twice(
    lake: Lake, account: Account, mode: str
) -> None:
    account.topic("source", partitions=2)
    account.topic("target", partitions=3)
    values = numbers(account, "source", 300)
    checkpoint = lake.checkpoint()

    def run() -> None:
        frame = lake.stream(subscribe="source", maxOffsetsPerTrigger=100)
        lake.run(through(frame), checkpoint, topic="target", commitMode=mode)

    run()
    assert Counter(account.values("target")) == Counter(values)
    forget_commit(checkpoint, last_batch(checkpoint))
    run()
    assert Counter(account.values("target")) == Counter(values)
    more = [b"new-%d" % n for n in range(50)]
    account.publish("source", more)
    run()
    assert Counter(account.values("target")) == Counter(values + more)
    by_key = [e for e in account.events("target") if e.key == "k3"]
    assert [int(e.value) for e in by_key] == sorted(int(e.value) for e in by_key)
