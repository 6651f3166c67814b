"""Every header that has a meaning, with odd values, in all columns of the source."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

import millstream
from tests.hostile import Hostile, store

if TYPE_CHECKING:
    from tests.spark.conftest import Account, Lake


@dataclasses.dataclass
class Reading:
    sensor: int


@pytest.mark.parametrize("typed", [False, True], ids=["bytes", "typed"])
def test_the_other_events_are_rows_of_all_columns(
    account: Account, lake: Lake, typed: bool
) -> None:
    settings: dict[str, Any] = {"schema": Reading} if typed else {}

    async def fill(mill: millstream.Mill) -> tuple[list[Hostile], list[Any]]:
        topic = await mill.create_topic("odd", **settings)
        messages = await store(mill, "odd")
        events = [event async for event in topic.read(undecodable="drop")]
        return messages, [(e.offset, e.timestamp.replace(tzinfo=None), e.key) for e in events]

    messages, expected = account.run(fill)
    bad = [n for n, m in enumerate(messages, 1) if m.unreadable or (typed and m.bad_schema)]
    options = {"subscribe": "odd", "includeHeaders": "true", "includeMetadata": "true"}
    rows = lake.read(**options, undecodable="drop").orderBy("offset").collect()
    found = [
        (row.offset, row.timestamp, None if row.key is None else text(row.key)) for row in rows
    ]
    assert [row[0] for row in found] == [row[0] for row in expected]
    assert [row[2] for row in found] == [row[2] for row in expected]
    assert [row[1] for row in found] == [row[1] for row in expected]
    nulls = lake.read(**options, undecodable="null").where("reason IS NOT NULL")
    assert sorted(row.offset for row in nulls.collect()) == bad
    names = {pair.key for row in rows for pair in row.headers or ()}
    assert {"X-\uefff", "a b", "", "\N{SKULL}"} <= names
    assert b"\xff" in {bytes(pair.value) for row in rows for pair in row.headers or ()}


def text(data: bytes) -> str:
    return bytes(data).decode("utf-8", "surrogateescape")
