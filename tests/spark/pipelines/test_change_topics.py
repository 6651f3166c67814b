"""Topics of changes in pipelines: as changes, and as tables."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from millstream import pipelines as mp
from millstream.messaging import NewEvent
from tests.spark.changes_kit import START, Change, Writing
from tests.spark.pipelines.project_kit import HEAD, Kit

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.spark.conftest import Account

CODE = (
    HEAD
    + """
@mp.topic(key="_key")
def seen():
    return mp.read_changes("items", before=True)

@mp.topic
def named():
    orders = mp.read("lines").selectExpr("BIGINT(string(value)) AS id", "offset")
    return mp.enrich(orders, mp.read_table("items"), on="id")

@mp.table(key="id")
def both():
    left = mp.read_changes("items").select("*").drop("note")
    right = mp.read_changes("others").select("id", "note", "_key", "_offset", "_index", "_deleted")
    return mp.join_tables(left, right, on="id", how="full")
"""
)


@pytest.fixture
def kit(spark: SparkSession, account: Account, tmp_path: Path) -> Kit:
    account.topic("lines")
    return Kit(spark, account, tmp_path)


def test_a_topic_of_changes_is_read_as_changes_and_as_a_table(kit: Kit) -> None:
    items, others = Writing(kit.account.url), Writing(kit.account.url, "others")
    for writing in (items, others):
        writing.create(partitions=2)
    items.write(
        Change("r", 1, {"name": "a", "note": "n"}, number=None),
        Change("u", 1, {"name": "b"}, unchanged=["note"], old={"id": 1, "name": "a"}),
        Change("r", 2, {"name": "c", "note": "m"}, number=None),
        Change("d", 2, old={"name": "c"}),
        Change("c", 3, {"name": "d", "note": None}),
    )
    others.write(*(Change("c", id, {"name": "", "note": f"o{id}"}) for id in (3, 4)))
    others.write(Change("d", 4), Change("c", 5, {"note": "x"}), Change("u", 5, {"note": "y"}))
    kit.account.publish("lines", [NewEvent(b"%d" % id) for id in (1, 2, 3)])
    kit.write(CODE)
    kit.once()

    seen = sorted(kit.account.values("seen"), key=lambda row: row["_commit"])
    first, second, _, deleted, _ = seen
    assert [row["_op"] for row in seen] == ["r", "u", "r", "d", "c"]
    assert [row["_deleted"] for row in seen] == [False, False, False, True, False]
    assert (first["id"], first["_key"], first["_commit"]) == (1, "1", Decimal(1))
    assert first["_time"] == START + timedelta(seconds=1)
    assert (first["_transaction"], first["_number"]) == (None, None)
    assert (second["_transaction"], second["_number"], second["_total"]) == ("tx2", 1, 1)
    assert (second["name"], second["note"], second["_unchanged"]) == ("b", None, ["note"])
    assert second["_before"] == {"id": 1, "name": "a", "note": None}
    assert (deleted["id"], deleted["name"], deleted["note"]) == (2, "c", None)

    named = {row["id"]: (row["name"], row["note"]) for row in kit.account.values("named")}
    assert named == {1: ("b", "n"), 2: (None, None), 3: ("d", None)}
    both = {key: (row["name"], row["note"]) for key, row in kit.table("both").items()}
    assert both == {"1": ("b", None), "3": ("d", "o3"), "5": (None, "y")}


def test_what_a_join_of_tables_cannot_follow_stops_it(spark: SparkSession) -> None:
    types = "id BIGINT, note STRING, _key STRING, _offset BIGINT, _deleted BOOLEAN, _index INT, "
    types += "_op STRING, _unchanged ARRAY<STRING>"

    def joined(*rows: tuple[Any, ...]) -> Any:
        changes = spark.createDataFrame(list(rows), types).coalesce(1)
        return mp.join_tables(changes, changes.drop("note"), on="id")

    # The later change of a pack is the last one, though both have one offset.
    first, second = (1, "a", "1", 7, False, 8, "c", None), (1, "b", "1", 7, False, 9, "u", None)
    assert joined(second, first).collect()[0].note == "b"
    with pytest.raises(Exception, match="does not have the columns note"):
        joined(first, (1, None, "1", 8, False, 0, "u", ["note"])).collect()
    with pytest.raises(Exception, match="left table was truncated"):
        joined(first, (None, None, None, 8, True, 0, "t", None)).collect()


def test_captured_tables_are_joined_by_keys_of_several_columns(spark: SparkSession) -> None:
    types = "a STRING, b INT, n STRING, _key STRING, _offset BIGINT, _deleted BOOLEAN, _index INT"
    captured = spark.createDataFrame([("x", 1, "n", '["x","1"]', 1, False, 0)], types)
    other = spark.createDataFrame(
        [("x", 1, "m", "x/1", 1, False)],
        types.replace(", _index INT", "").replace("n STR", "m STR"),
    )
    (row,) = mp.join_tables(captured, other, on=["a", "b"]).collect()
    assert (row.a, row.b, row.n, row.m) == ("x", 1, "n", "m")
    wrong = spark.createDataFrame([("x", 2, "n", '["x","1"]', 1, False, 0)], types)
    with pytest.raises(Exception, match="whose key is"):
        mp.join_tables(wrong, other, on=["a", "b"]).collect()
