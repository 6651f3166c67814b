"""A table as of a time, in Spark: the same values as in the SDK, or the same error."""

from __future__ import annotations

import random
from datetime import datetime, timedelta

import pytest

import millstream
from millstream.errors import HistoryGone
from millstream.messaging.topics.purging import Purge
from tests.spark.conftest import Account, Lake

Answer = dict[bytes, bytes] | str


def answer_of_spark(lake: Lake, time: datetime) -> Answer:
    """The table as Spark reads it, or that it is gone."""
    try:
        rows = lake.read(table="stock", asOf=time.isoformat()).select("key", "value").collect()
    except Exception as error:
        return "gone" if "HistoryGone" in str(error) else f"{error}"
    return {bytes(row.key): bytes(row.value) for row in rows}


def test_a_table_as_of_a_time_is_what_the_sdk_reads(lake: Lake, account: Account) -> None:
    chance = random.Random(7)

    async def write(mill: millstream.Mill) -> list[datetime]:
        table = await mill.create_table("stock", history=3, partitions=2)
        times = []
        for number in range(40):
            key = chance.choices(["a", "b.c", "d", "e"], weights=[12, 4, 2, 1])[0]
            if chance.random() < 0.2:
                await table.delete(key)
            elif await table.revision(key):
                await table.put(key, b"%d" % number)
            else:
                await table.put(key, b"%d" % number, revision=0)
            event = await table.topic.last(key)
            assert event is not None
            times.append(event.timestamp)
        return times

    async def read(mill: millstream.Mill) -> dict[datetime, Answer]:
        table = await mill.table("stock")
        answers: dict[datetime, Answer] = {}
        for time in moments:
            try:
                found = await (await table.at(time)).as_dict()
                answers[time] = {key.encode(): value for key, value in found.items()}
            except HistoryGone:
                answers[time] = "gone"
        return answers

    times = account.run(write)
    moments = [times[number] for number in (0, 25, 33, 38, 39)]
    expected = account.run(read)
    assert {type(answer) for answer in expected.values()} == {str, dict}
    assert {time: answer_of_spark(lake, time) for time in moments} == expected
    assert lake.read(table="stock", asOf=times[39].isoformat()).select("offset").count() == len(
        expected[times[39]]
    )

    account.run(lambda mill: purge(mill))
    assert answer_of_spark(lake, times[38]) == "gone"
    with pytest.raises(Exception, match="in the future"):
        lake.read(table="stock", asOf=(times[0] + timedelta(days=9)).isoformat()).collect()


async def purge(mill: millstream.Mill) -> None:
    table = await mill.table("stock")
    await table.topic.admin.purge(Purge(key="a"))
