"""The joins of pipelines: on random late data, each gives the rows of the same join in batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from millstream import pipelines as mp
from millstream.errors import ConfigError, PipelineInvalid
from tests.spark.conftest import Account, Lake
from tests.spark.pipelines.project_kit import HEAD, Kit, arriving

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

START = datetime(2026, 3, 1, 8, tzinfo=UTC)
TIME = pa.timestamp("us", tz="UTC")
ORDER = pa.schema([("id", pa.int32()), ("amount", pa.int32()), ("time", TIME)])
PAYMENT = pa.schema([("order_id", pa.int32()), ("amount", pa.int32()), ("time", TIME)])
ORDERS = "id INT, amount INT, time TIMESTAMP"
PAYMENTS = "order_id INT, amount INT, time TIMESTAMP"
CHANGES = "_key STRING, _offset BIGINT, _time TIMESTAMP, _deleted BOOLEAN"

LATE = 20  # minutes that an event may arrive late
STEPS = (120, 240)  # minutes until which the events of each step arrive
DAY = 24 * 60  # an event then completes everything before it
END = 9_999
KINDS = ("inner", "left", "right", "full")

Row = dict[str, Any]


def at(minutes: float) -> datetime:
    return START + timedelta(minutes=minutes)


def arriving_steps(rng: random.Random, make: Callable[[int, float], Row]) -> list[list[Row]]:
    return arriving(rng, lambda _, minutes: make(rng.randrange(25), minutes), LATE, STEPS)


def order(id: int, minutes: float) -> Row:
    return {"id": id or None, "amount": round(minutes), "time": at(minutes)}


def payment(id: int, minutes: float) -> Row:
    return {"order_id": id or None, "amount": -round(minutes), "time": at(minutes)}


def joined(orders: DataFrame, payments: DataFrame, how: str) -> DataFrame:
    return mp.join_streams(
        orders,
        payments,
        on={"id": "order_id"},
        within=("10 minutes", "1 hour"),
        how=how,
        late=f"{LATE} minutes",
        suffix="_paid",
    )


def static(spark: SparkSession, rows: list[Row], schema: str) -> DataFrame:
    return spark.createDataFrame([tuple(row.values()) for row in rows], schema)


def texts(rows: list[Any]) -> list[str]:
    return sorted(str(row) for row in rows if (row["id"] or 0) < END)


def test_joined_streams_equal_the_join_in_batch_without_rows_that_are_too_late(
    lake: Lake, account: Account
) -> None:
    rng = random.Random(412)
    orders, payments = arriving_steps(rng, order), arriving_steps(rng, payment)
    too_late = order(100, 1), payment(100, 2)
    orders.append([order(END, DAY), too_late[0]])
    payments.append([payment(END + 1, DAY), too_late[1]])
    account.topic("orders", schema=ORDER)
    account.topic("payments", schema=PAYMENT)
    for topic, steps in (("orders", orders), ("payments", payments)):
        for step in steps:
            account.pack(topic, [(row, None) for row in step])

    def stream(topic: str) -> DataFrame:
        return lake.stream(subscribe=topic, maxOffsetsPerTrigger=1).select("value.*")

    def batch(topic: str, steps: list[list[Row]]) -> DataFrame:
        rows = [row for step in steps for row in step if row not in too_late]
        return static(lake.spark, rows, ORDERS if topic == "orders" else PAYMENTS)

    # Inner and left joins are in test_recipes.py, in a pipeline.
    found, _ = lake.collect(joined(stream("orders"), stream("payments"), "full"), lake.checkpoint())
    frames = batch("orders", orders), batch("payments", payments)
    rows = {how: texts(joined(*frames, how).collect()) for how in KINDS}
    assert texts(found) == rows["full"]
    # A null equals nothing, not even another null, although some have close times.
    assert {str(row.id) for row in found if row.amount is None or row.amount_paid is None} > {
        "None"
    }
    unknown = [row for row in found if row.id is None]
    assert all(row.amount is None or row.amount_paid is None for row in unknown)
    assert set(found[0].asDict()) == {"id", "amount", "time", "amount_paid", "time_paid"}
    sizes = {how: len(rows[how]) for how in KINDS}
    assert 0 < sizes["inner"] < min(sizes["left"], sizes["right"])
    assert sizes["full"] == sizes["left"] + sizes["right"] - sizes["inner"]


def test_a_stream_with_a_table_equals_the_join_in_batch(lake: Lake, account: Account) -> None:
    rng = random.Random(7)
    steps = arriving_steps(rng, order)
    account.topic("orders", schema=ORDER)
    for step in steps:
        account.pack("orders", [(row, None) for row in step])
    known = pa.schema([("number", pa.int32()), ("amount", pa.int32())])

    async def fill(mill: Any) -> None:
        table = await mill.create_table("limits", schema=known)
        for number in range(0, 25, 2):
            await table.put(str(number), {"number": number, "amount": 1000 + number})
        await table.delete("4")

    account.run(fill)
    limits = lake.read(table="limits").select("value.*")
    orders = lake.stream(subscribe="orders", maxOffsetsPerTrigger=1).select("value.*")
    all_orders = static(lake.spark, [row for step in steps for row in step], ORDERS)
    found, _ = lake.collect(mp.enrich(orders, limits, on={"id": "number"}), lake.checkpoint())
    wanted = mp.enrich(all_orders, limits, on={"id": "number"})
    assert wanted.columns == ["id", "amount", "time", "amount_right"]
    assert texts(found) == texts(wanted.collect())
    assert {row.id for row in found if row.amount_right is None} >= {1, 4}
    inner = mp.enrich(all_orders, limits, on={"id": "number"}, how="inner").collect()
    assert texts(inner) == texts([row for row in found if row.amount_right is not None])


PERSON = pa.schema([("id", pa.int32()), ("name", pa.string())])
ADDRESS = pa.schema([("id", pa.int32()), ("city", pa.string())])
TABLES = (
    HEAD
    + """
def declare(how):
    @mp.table(name=how + "_table", key="id")
    def joined():
        people, addresses = mp.read_changes("people"), mp.read_changes("addresses")
        return mp.join_tables(people, addresses, on="id", how=how)

for how in ("left", "full"):
    declare(how)
"""
)


@pytest.mark.long
def test_joined_tables_follow_random_changes_and_deletes_of_both(
    spark: SparkSession, account: Account, tmp_path: Path
) -> None:
    rng = random.Random(21)
    account.run(lambda mill: mill.create_table("people", schema=PERSON))
    account.run(lambda mill: mill.create_table("addresses", schema=ADDRESS))

    async def change(mill: Any) -> None:
        tables = [(await mill.table("people"), "name"), (await mill.table("addresses"), "city")]
        for _ in range(60):
            table, column = rng.choice(tables)
            key = rng.randrange(12)
            if rng.random() < 0.4:
                await table.delete(str(key))
            else:
                await table.put(str(key), {"id": key, column: f"{column} {rng.randrange(1000)}"})

    kit = Kit(spark, account, tmp_path)
    kit.write(TABLES)
    for _ in range(2):
        account.run(change)
        kit.once()
    people, addresses = (
        spark.read.format("millstream")
        .options(url=account.url, table=name)
        .load()
        .select("value.*")
        for name in ("people", "addresses")
    )
    for how in ("left", "full"):
        wanted = {
            str(row.id): {"id": row.id, "name": row.name, "city": row.city}
            for row in mp.join_tables(people, addresses, on="id", how=how).collect()
        }
        assert kit.table(f"{how}_table") == wanted, how


def changes(spark: SparkSession, columns: str, rows: list[tuple[Any, ...]]) -> DataFrame:
    """Changes of a table as read_changes gives them, from (value, key); no value is a delete."""
    empty = (None,) * columns.count(" ")
    numbered = [
        (*(value or empty), key, offset, START, value is None)
        for offset, (value, key) in enumerate(rows)
    ]
    return spark.createDataFrame(numbered, f"{columns}, {CHANGES}")


@pytest.mark.parametrize("how", KINDS)
def test_the_changes_of_two_tables_give_the_join_of_the_tables(
    spark: SparkSession, how: str
) -> None:
    rng = random.Random(5)
    logs: list[list[tuple[Any, ...]]] = []
    tables: list[dict[int, tuple[int, str]]] = []
    for name in ("name", "city"):
        keys = [rng.randrange(30) for _ in range(80)]
        values = [
            None if rng.random() < 0.4 else (key, f"{name} {n}") for n, key in enumerate(keys)
        ]
        logs.append([(value, str(key)) for key, value in zip(keys, values, strict=True)])
        last = dict(zip(keys, values, strict=True))
        tables.append({key: value for key, value in last.items() if value is not None})
    left = changes(spark, "id INT,name STRING", logs[0])
    # Changes may arrive in any order.
    right = changes(spark, "id INT,city STRING", logs[1]).orderBy("city")
    rows = mp.join_tables(left, right, on="id", how=how)
    names, cities = ({key: text for key, (_, text) in table.items()} for table in tables)
    chosen = {
        "inner": names.keys() & cities.keys(),
        "left": names.keys(),
        "right": cities.keys(),
        "full": names.keys() | cities.keys(),
    }[how]
    assert {tuple(row) for row in rows.where("NOT _deleted").collect()} == {
        (key, names.get(key), cities.get(key), False) for key in chosen
    }
    assert {row.id for row in rows.where("_deleted").collect()}.isdisjoint(chosen)


def test_tables_are_joined_by_keys_of_several_columns_and_by_the_key_itself(
    spark: SparkSession,
) -> None:
    left = changes(
        spark,
        "day DATE,zone STRING,flights INT",
        [
            ((START.date(), "Europe/Bern", 5), "2026-03-01/Europe/Bern"),
            ((START.date(), None, 6), "2026-03-01/"),
            ((START.date(), "x", 7), "2026-03-01/x"),
            (None, "2026-03-01/x"),
        ],
    )
    right = changes(
        spark,
        "day DATE,zone STRING,flights INT",
        [
            ((START.date(), "Europe/Bern", 50), "2026-03-01/Europe/Bern"),
            (None, "2026-03-01/gone"),
            (None, "2026-03-01/Europe/Bern"),
        ],
    )
    day = START.date()
    rows = mp.join_tables(left, right, on=["day", "zone"], how="full").collect()
    assert {tuple(row) for row in rows} == {
        (day, "Europe/Bern", 5, None, False),
        (day, None, 6, None, False),
        (day, "x", None, None, True),
        (day, "gone", None, None, True),
    }
    by_key = mp.join_tables(left.drop("day"), right.drop("day", "zone"), on="_key", suffix="_2")
    assert by_key.columns == ["_key", "zone", "flights", "flights_2", "_deleted"]
    number = changes(spark, "id INT,name STRING", [((1, "ann"), "1"), ((2, "ben"), "2")])
    city = changes(spark, "city STRING", [(("Bern",), "1"), (("Basel",), "3")])
    mixed = mp.join_tables(number, city, on={"id": "_key"}, how="full").collect()
    assert {tuple(row) for row in mixed} == {
        (1, "ann", "Bern", False),
        (2, "ben", None, False),
        (3, None, "Basel", False),
    }


def test_a_table_that_is_not_joined_by_its_key_stops_the_flow_with_the_reason(
    spark: SparkSession,
) -> None:
    orders = changes(spark, "id INT,customer INT", [((1, 5), "1"), ((2, 2), "2")])
    customers = changes(spark, "customer INT,city STRING", [((5, "Bern"), "5")])
    with pytest.raises(Exception, match="customer is '5' in a row of the left table whose key is"):
        mp.join_tables(orders, customers, on="customer").collect()


def test_times_may_be_columns_of_the_join_and_watermarks_of_the_user_are_kept(
    spark: SparkSession,
) -> None:
    rate = spark.readStream.format("rate").load()
    left = rate.selectExpr("value AS id", "timestamp AS hour", "timestamp AS other")
    right = rate.selectExpr("value AS id", "timestamp AS hour").withWatermark("hour", "3 hours")
    found = mp.join_streams(left, right, on=["id", "hour"], time="hour", late="1h30m", how="left")
    assert found.columns == ["id", "hour", "other"]
    delays = [
        mp.join_streams(left, right, on="id", within=timedelta(minutes=1), time="hour")
        .schema[name]
        .metadata["spark.watermarkDelayMs"]
        for name in ("hour", "hour_right")
    ]
    assert delays == [600_000, 10_800_000]
    rows = [(1, START), (2, None)]
    timed = spark.createDataFrame(rows, "id INT, time TIMESTAMP")
    # A row without a time is in no result, in batch as in a stream.
    assert mp.join_streams(timed, timed, on="id", within="1s", how="full").count() == 1


WRONG: list[tuple[Callable[[DataFrame, DataFrame], object], str]] = [
    (
        lambda a, b: mp.join_streams(a, b, on="id", within="1h"),
        "right side has no column 'id'; its",
    ),
    (lambda a, b: mp.join_streams(a, a, on="nope", within="1h"), "left side has no column 'nope'"),
    (lambda a, _: mp.join_streams(a, a, on="id"), "within= is missing.*'time' and 'time'"),
    (lambda a, _: mp.join_streams(a, a, on="id", within="1 moon"), "'1 moon' is not a duration"),
    (lambda a, _: mp.join_streams(a, a, on="id", within="1h", how="semi"), "Choose inner, left, r"),
    (lambda a, _: mp.join_streams(a, a, on="id", within="1h", time="t"), "no column 't'; its col"),
    (
        lambda a, _: mp.join_streams(a, a.drop("time"), on="id", within="1h"),
        "right side has no column of type TIMESTAMP to join by; its columns are id, amount",
    ),
    (
        lambda a, _: mp.join_streams(a, a, on="id", within="1h", time="amount"),
        "time column 'amount' of the left side is int, not TIMESTAMP",
    ),
    (
        lambda a, _: mp.join_streams(a.withColumn("b", a.time), a, on="id", within="1h"),
        "left side has the times time, b. Choose one: time='time'",
    ),
    (
        lambda a, _: mp.join_streams(a, a.withColumn("id", a.time), on="id", within="1h"),
        "'id' is int on the left side and 'id' is timestamp on the right side",
    ),
    (
        lambda a, _: mp.enrich(a.withColumnRenamed("time", "amount_right"), a, on="id"),
        "two columns 'amount_right'. Choose another suffix=",
    ),
    (lambda a, _: mp.enrich(a, a, on=[]), "on= is empty"),
    (
        lambda a, _: mp.join_streams(a, a, on="id", within=("1h",)),  # type: ignore[arg-type]
        "is not a pair. Give one value for both sides, or two",
    ),
    (
        lambda a, _: mp.join_streams(a, a, on="id", within=60),  # type: ignore[arg-type]
        "60 is not a duration. Write it like '10 minutes'",
    ),
    (
        lambda a, _: mp.join_streams(a, a, on="id", within=timedelta(minutes=-1)),
        "is not a duration. Write it like",
    ),
    (
        lambda a, _: mp.enrich(a, "customers", on="id"),  # type: ignore[arg-type]
        "right side is 'customers', not a DataFrame. Read it first",
    ),
    (
        lambda a, b: mp.enrich(a, b, on=a.id == b.order_id),  # type: ignore[arg-type]
        "is not a name. Name the columns",
    ),
    (lambda a, _: mp.enrich(a, a, on="id", how="full"), "how='full' is not possible. Choose left"),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_a_join_that_cannot_be_made_is_refused_with_what_to_do(
    spark: SparkSession, call: Callable[[DataFrame, DataFrame], object], message: str
) -> None:
    a = spark.createDataFrame([], ORDERS)
    b = spark.createDataFrame([], PAYMENTS)
    with pytest.raises(ConfigError, match=message):
        call(a, b)


def test_streams_tables_and_changes_are_not_mixed_up(spark: SparkSession) -> None:
    stream = spark.readStream.format("rate").load()
    table = spark.createDataFrame([], "value BIGINT, timestamp TIMESTAMP")
    with pytest.raises(ConfigError, match=r"right side is not a stream.*enrich"):
        mp.join_streams(stream, table, on="value", within="1h")
    with pytest.raises(ConfigError, match=r"the table is a stream. Read it with read_table"):
        mp.enrich(stream, stream, on="value")
    with pytest.raises(ConfigError, match=r"left side is not the changes.*_key, _offset, _deleted"):
        mp.join_tables(stream, stream, on="value")
    marked = stream.selectExpr("*", "timestamp AS t").withWatermark("t", "1 hour")
    with pytest.raises(ConfigError, match="left side has a watermark on 't', and its time is 'ti"):
        mp.join_streams(marked, stream, on="value", within="1h", time="timestamp")
    some = changes(spark, "id INT", [((1,), "1")])
    with pytest.raises(ConfigError, match="right side is not the changes of a table"):
        mp.join_tables(some, table, on={"id": "value"})
    number = changes(spark, "id DOUBLE", [((1.0,), "1.0")])
    with pytest.raises(ConfigError, match=r"so equal numbers are different keys"):
        mp.join_tables(some, number, on="id")
    with pytest.raises(ConfigError, match=r"complete key of a table. Join on it alone"):
        mp.join_tables(some, some, on=["id", "_key"])


@pytest.mark.parametrize(
    "call",
    [
        "mp.enrich(mp.read('orders'), mp.read_table('limits'), on='id')",
        "mp.read('orders').join(mp.read_table('limits'), 'id')",
        "mp.read('seen').join(mp.read_table('limits'), 'id')",
        "mp.join_tables(mp.read_changes('limits'), mp.read_changes('limits'), on='id')",
    ],
)
def test_a_join_with_a_table_without_a_schema_names_the_table(
    spark: SparkSession, account: Account, tmp_path: Path, call: str
) -> None:
    account.topic("orders", schema=ORDER)
    account.run(lambda mill: mill.create_table("limits"))
    kit = Kit(spark, account, tmp_path)
    view = "@mp.view\ndef seen(): return mp.read('orders')\n"
    kit.write(f"{HEAD}{view}@mp.topic\ndef a(): return {call}")
    advice = "'limits' has no schema, .* 'millstream schema register limits FILE'"
    with pytest.raises(PipelineInvalid, match=rf"'a' \(pipeline.py:\d+\) failed.*id.*{advice}"):
        kit.graph()
