"""A key that expired is deleted for Spark as it is for every other reader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

import millstream
from millstream import PublishOptions
from tests.spark.conftest import Account, Lake


@dataclass
class Session:
    user: str
    clicks: int


def sessions(account: Account, schema: type | None, values: list[Any]) -> None:
    """A table with the keys `kept` and `expired`; the server has marked the second as gone."""

    async def work(mill: millstream.Mill) -> None:
        table = await mill.create_table("sessions", schema=schema, marker_ttl="1m")
        await table.put("kept", values[0])
        topic = await mill.topic("sessions")
        await topic.publish(values[1], "expired", options=PublishOptions(ttl=1))
        async for change in table.changes():
            if change.deleted:
                assert change.key == "expired"
                break
        assert list(await table.as_dict()) == ["kept"]

    account.run(work)


@pytest.mark.parametrize("wire", ["bytes", "json"])
def test_an_expired_key_is_null_in_a_topic_and_absent_from_a_table(
    lake: Lake, account: Account, wire: str
) -> None:
    if wire == "bytes":
        sessions(account, None, [b"1", b"2"])
        kept: Any = b"1"
    else:
        sessions(account, Session, [{"user": "k", "clicks": 1}, {"user": "e", "clicks": 2}])
        kept = ("k", 1)
    read = lake.read(subscribe="sessions", includeMetadata="true")
    rows = read.orderBy("offset").select("key", "value").collect()
    assert [(bytes(row.key), row.value) for row in rows] == [(b"kept", kept), (b"expired", None)]
    streamed, _ = lake.collect(lake.stream(subscribe="sessions"), lake.checkpoint())
    assert {bytes(row.key): row.value for row in streamed} == {b"kept": kept, b"expired": None}
    table = lake.read(table="sessions").select("key", "value").collect()
    assert [(bytes(row.key), row.value) for row in table] == [(b"kept", kept)]
    assert lake.read(table="sessions").select("key").count() == 1
