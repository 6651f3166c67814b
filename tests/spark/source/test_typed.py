"""Topics with a schema: typed columns in and out, evolution, undecodable values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest

from millstream import Columns
from tests.spark.conftest import Account, Lake, forget_commit, last_batch


@dataclass
class Order:
    id: int
    customer: str
    price: float


def grown() -> type:
    """The next version of the same record."""

    @dataclass
    class Order:
        id: int
        customer: str
        price: float
        note: str | None = None

    return Order


def typed(account: Account, name: str, **settings: Any) -> None:
    account.topic(name, schema=Order, **settings)


def publish(account: Account, topic: str, values: list[Any]) -> None:
    async def work(mill: Any) -> None:
        opened = await mill.topic(topic)
        await opened.publish_many(values)

    account.run(work)


def order(n: int) -> dict[str, Any]:
    return {"id": n, "customer": f"c{n % 3}", "price": n / 2}


@pytest.mark.parametrize("wire_format", ["json", "avro", "protobuf"])
def test_values_are_typed_columns_from_packs_and_plain_events(
    lake: Lake, account: Account, wire_format: str
) -> None:
    typed(account, "orders", wire_format=wire_format)
    publish(account, "orders", [order(n) for n in range(5)])
    account.pack("orders", [(order(n), None) for n in range(5, 20)])
    frame = lake.read(subscribe="orders")
    assert frame.schema["value"].dataType.simpleString() == (
        "struct<id:bigint,customer:string,price:double>"
    )
    rows = frame.selectExpr("value.*").orderBy("id").collect()
    assert [row.asDict() for row in rows] == [order(n) for n in range(20)]
    total = frame.groupBy("value.customer").sum("value.price").collect()
    assert {row[0]: row[1] for row in total}["c0"] == sum(n / 2 for n in range(0, 20, 3))


def test_deletions_of_a_frame_are_null_values(lake: Lake, account: Account) -> None:
    typed(account, "orders")
    frame = pa.table(
        {
            "id": [1, None, 3],
            "customer": ["a", "b", "c"],
            "price": [0.5, None, 1.5],
            "gone": [False, True, None],
        }
    )

    async def work(mill: Any) -> None:
        async with (await mill.topic("orders")).writer("w") as writer:
            columns = Columns(key="customer", tombstone="gone")
            await writer.write_batch(frame, position=3, columns=columns)

    account.run(work)
    read = lake.read(subscribe="orders", includeMetadata="true")
    rows = read.orderBy("offset", "index").collect()
    assert [bytes(row.key) for row in rows] == [b"a", b"b", b"c"]
    assert [None if row.value is None else row.value.id for row in rows] == [1, None, 3]
    kept = lake.read(subscribe="orders").where("value IS NOT NULL").count()
    assert kept == 2


def test_a_topic_with_a_schema_has_few_columns_unless_it_is_asked_for_more(
    lake: Lake, account: Account
) -> None:
    typed(account, "orders")
    account.pack("orders", [(order(n), f"k{n}") for n in range(3)])
    for read in (lake.read, lake.stream):
        assert read(subscribe="orders").columns == ["key", "value", "timestamp"]
        asked = read(subscribe="orders", includeMetadata="true")
        assert asked.columns == [
            *("key", "value", "topic", "partition", "offset"),
            *("timestamp", "subject", "index"),
        ]
    account.run(lambda mill: mill.create_table("stock", schema=Order))
    assert lake.read(table="stock").columns == ["key", "value", "timestamp"]
    # What a query of an earlier version does: it selects one of the other columns.
    checkpoint = lake.checkpoint()
    with pytest.raises(Exception, match=r"UNRESOLVED_COLUMN.*`offset`"):
        lake.stream(subscribe="orders").select("offset")
    asked = lake.stream(subscribe="orders", includeMetadata="true").select("offset", "index")
    rows, _ = lake.collect(asked, checkpoint)
    account.pack("orders", [(order(3), None)])
    asked = lake.stream(subscribe="orders", columns="offset,index").select("offset", "index")
    more, _ = lake.collect(asked, checkpoint)
    assert sorted(map(tuple, rows + more)) == [(1, 0), (1, 1), (1, 2), (2, 0)]


def test_columns_choose_fields_of_the_value(lake: Lake, account: Account) -> None:
    typed(account, "orders")
    account.pack("orders", [(order(n), None) for n in range(10)])
    frame = lake.read(subscribe="orders", columns="value.price")
    assert frame.schema.simpleString() == "struct<value:struct<price:double>>"
    assert frame.selectExpr("sum(value.price)").collect()[0][0] == 22.5
    named = lake.read(subscribe="orders", schema="value STRUCT<price: DOUBLE, id: BIGINT>")
    assert named.selectExpr("sum(value.id)").collect()[0][0] == 45
    with pytest.raises(Exception, match="no field 'cost'; they have id, customer, price"):
        lake.read(subscribe="orders", columns="value.cost")
    with pytest.raises(Exception, match="asks for value as"):
        lake.read(subscribe="orders", schema="value STRUCT<price: STRING>").collect()


def test_typed_rows_are_checked_and_written_once(lake: Lake, account: Account) -> None:
    typed(account, "orders", partitions=2)
    typed(account, "copy", partitions=2)
    account.pack("orders", [(order(n), f"k{n}") for n in range(500)])
    checkpoint = lake.checkpoint()
    for again in (False, True):
        frame = lake.stream(subscribe="orders").select("key", "value", "timestamp")
        lake.run(frame, checkpoint, topic="copy")
        if not again:
            forget_commit(checkpoint, last_batch(checkpoint))
    copied = lake.read(subscribe="copy").selectExpr("value.*").orderBy("id").collect()
    assert [row.asDict() for row in copied] == [order(n) for n in range(500)]
    wrong = lake.spark.range(3).selectExpr("struct(id, 'x' AS customer) AS value")
    with pytest.raises(Exception, match="price"):
        lake.write(wrong, topic="copy")
    text = lake.spark.range(3).selectExpr("'x' AS value")
    with pytest.raises(Exception, match="has a schema: give the value as a struct"):
        lake.write(text, topic="copy")


def test_a_schema_may_grow_while_a_query_runs_and_between_its_runs(
    lake: Lake, account: Account
) -> None:
    typed(account, "orders")
    account.pack("orders", [(order(1), None)])
    checkpoint = lake.checkpoint()
    rows: list[dict[str, Any]] = []

    def keep(batch: Any, _: int) -> None:
        rows.extend(row.asDict() for row in batch.selectExpr("value.*").collect())

    def start() -> Any:
        frame = lake.stream(subscribe="orders")
        return (
            frame.writeStream.foreachBatch(keep)
            .option("checkpointLocation", str(checkpoint))
            .start()
        )

    query = start()
    query.processAllAvailable()

    async def evolve(mill: Any) -> None:
        await mill.schemas.evolve("orders", grown())

    account.run(evolve)
    account.pack("orders", [({**order(2), "note": "hi"}, None)])
    query.processAllAvailable()
    query.stop()
    assert rows == [order(1), order(2)]  # a running query keeps the version it began with
    account.pack("orders", [({**order(3), "note": "new"}, None)])
    query = start()
    query.processAllAvailable()
    query.stop()
    assert rows[2:] == [{**order(3), "note": "new"}]
    old = lake.read(subscribe="orders").selectExpr("value.*").orderBy("id").collect()
    assert [row.note for row in old] == [None, "hi", "new"]


def spoil(account: Account, topic: str) -> None:
    async def work(mill: Any) -> None:
        await mill.publish_acked(f"{topic}.bad", b"{not json")
        pack = {"Mill-Pack": "1", "Content-Type": "application/vnd.apache.arrow.stream"}
        headers = {**pack, "Mill-Count": "1", "Mill-Checksum": "00000000"}
        await mill.publish_acked(f"{topic}._pack.x", b"junk", headers=headers)

    account.run(work)


def test_an_undecodable_value_fails_is_null_or_is_dropped(lake: Lake, account: Account) -> None:
    typed(account, "orders")
    publish(account, "orders", [order(1)])
    spoil(account, "orders")
    publish(account, "orders", [order(2)])
    with pytest.raises(Exception, match="orders/0, offset 2, index 0"):
        lake.read(subscribe="orders").collect()
    read = {"subscribe": "orders", "includeMetadata": "true"}
    rows = lake.read(**read, undecodable="null").orderBy("offset").collect()
    assert [row.value is None for row in rows] == [False, True, True, False]
    assert [row.reason is None for row in rows] == [True, False, False, True]
    assert rows[2].reason.startswith("not a valid pack")
    kept = lake.read(**read, undecodable="drop").orderBy("offset").collect()
    assert [row.value.id for row in kept] == [1, 2]
