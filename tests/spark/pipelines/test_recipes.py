"""Each recipe of docs/RECIPES.md: the streaming result equals the batch result, row by row."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from examples import recipes
from millstream.testing import running_broker
from tests.spark.conftest import Account
from tests.spark.pipelines.project_kit import HEAD, Kit, arriving, wait_for

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

START = datetime(2026, 3, 1, 8, tzinfo=UTC)
TIME = pa.timestamp("us", tz="UTC")
ORDER = pa.schema(
    [("id", pa.int32()), ("customer", pa.string()), ("amount", pa.int32()), ("time", TIME)]
)
PAYMENT = pa.schema([("order_id", pa.int32()), ("paid", pa.int32()), ("time", TIME)])
PERSON = pa.schema([("name", pa.string())])
ADDRESS = pa.schema([("city", pa.string())])
CUSTOMER = pa.schema([("customer", pa.string()), ("city", pa.string())])
END = 9_999  # id of the events a day later, which complete everything before them

# State with timers needs this store, which needs this local file system.
ROCKSDB = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    "fs.file.impl": "org.apache.hadoop.fs.LocalFileSystem",
    "fs.file.impl.disable.cache": "true",
}

PIPELINE = (
    HEAD
    + """
from examples import recipes

orders = lambda: mp.read("orders", maxOffsetsPerTrigger=1)
payments = lambda: mp.read("payments", maxOffsetsPerTrigger=1)
mp.topic(name="inner_join")(lambda: recipes.inner_join(orders(), payments()))
mp.topic(name="left_join")(lambda: recipes.left_join(orders(), payments()))
mp.topic(name="full_join")(lambda: recipes.full_join(orders(), payments()))
mp.topic(name="tumbling")(lambda: recipes.tumbling(orders()))
mp.topic(name="sliding")(lambda: recipes.sliding(orders()))
mp.topic(name="sessions")(lambda: recipes.sessions(orders()))
mp.topic(name="once_each")(lambda: recipes.once_each(orders()))
mp.topic(name="silent")(lambda: recipes.silent_customers(orders()))
"""
)
TABLES = (
    HEAD
    + """
from examples import recipes

mp.table(name="customers_with_address", key="id")(
    lambda: recipes.customers_with_address(mp.read_changes("people"), mp.read_changes("addresses"))
)
"""
)


def at(minutes: float) -> datetime:
    return START + timedelta(minutes=minutes)


def order(id: int, customer: str, minutes: float) -> dict[str, Any]:
    return {"id": id, "customer": customer, "amount": id * 10, "time": at(minutes)}


def payment(id: int, minutes: float) -> dict[str, Any]:
    return {"order_id": id, "paid": id * 9, "time": at(minutes)}


# 3 and 7 are never paid, 8 too late; 50 is paid but was never ordered; 2 is a duplicate.
# The random ones are less late than the ten minutes that the recipes allow.
RNG = random.Random(99)
STEPS = (76, 210)  # minutes until which the random events of a step arrive
SOME_ORDERS = arriving(RNG, lambda n, time: order(1000 + n, f"c{n}", time), 9, STEPS)
SOME_PAYMENTS = arriving(RNG, lambda n, time: payment(1000 + n, time), 9, STEPS)
ORDERS = [
    [
        *(order(1, "ann", 0), order(2, "ben", 5), order(3, "ann", 20), order(2, "ben", 5)),
        *SOME_ORDERS[0],
    ],
    [order(7, "cleo", 70), order(8, "ann", 75), order(9, "ben", 200), *SOME_ORDERS[1]],
]
PAYMENTS = [
    [payment(1, 10), payment(2, 30), *SOME_PAYMENTS[0]],
    [payment(8, 75 + 61), payment(50, 100), payment(9, 210), *SOME_PAYMENTS[1]],
]
LATE_ORDER, LATE_PAYMENT = order(4, "dora", 1), payment(4, 2)
DAY = 24 * 60
LAST = ([order(END, "END", DAY)], [payment(END + 1, DAY)])


@pytest.fixture(scope="module")
def kit(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kit]:
    """The recipes on the same events in three steps; before the last one the pipeline restarts.

    A step is a pack, and a batch reads one pack.
    """
    from pyspark import cloudpickle

    cloudpickle.register_pickle_by_value(recipes)  # type: ignore[no-untyped-call]
    for name, value in ROCKSDB.items():
        spark.conf.set(name, value)
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    with running_broker() as broker:
        account = Account(broker.url)
        account.topic("orders", schema=ORDER)
        account.topic("payments", schema=PAYMENT)
        made = Kit(spark, account, tmp_path_factory.mktemp("recipes"))
        made.write(PIPELINE)
        for values, topic in ((ORDERS, "orders"), (PAYMENTS, "payments")):
            for step in values:
                account.pack(topic, [(value, None) for value in step])
        made.once()
        account.pack("orders", [(value, None) for value in (LATE_ORDER, *LAST[0])])
        account.pack("payments", [(value, None) for value in (LATE_PAYMENT, *LAST[1])])
        made.once()
        yield made
    for name in ROCKSDB:
        spark.conf.unset(name)


def frames(kit: Kit, *, late: bool = False) -> tuple[DataFrame, DataFrame]:
    """All events as batch frames; late ones only on request."""
    orders = [*ORDERS[0], *ORDERS[1], *([LATE_ORDER] if late else [])]
    payments = [*PAYMENTS[0], *PAYMENTS[1], *([LATE_PAYMENT] if late else [])]
    return (
        kit.spark.createDataFrame(
            [tuple(row.values()) for row in orders],
            "id INT, customer STRING, amount INT, time TIMESTAMP",
        ),
        kit.spark.createDataFrame(
            [tuple(row.values()) for row in payments], "order_id INT, paid INT, time TIMESTAMP"
        ),
    )


def batch_rows(frame: DataFrame) -> list[str]:
    return sorted(str(_plain(row.asDict())) for row in frame.collect())


def stream_rows(kit: Kit, topic: str) -> list[str]:
    return sorted(str(_plain(value)) for value in kit.account.values(topic))


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.replace(tzinfo=UTC).isoformat() if isinstance(value, datetime) else value
        for key, value in row.items()
    }


@pytest.mark.parametrize("name", ["inner_join", "left_join", "full_join"])
def test_a_join_of_two_streams_is_the_join_in_batch(kit: Kit, name: str) -> None:
    question = getattr(recipes, name)
    wanted = batch_rows(question(*frames(kit)))
    assert stream_rows(kit, name) == wanted
    # The late events would have been a row, so that they were dropped is seen.
    assert batch_rows(question(*frames(kit, late=True))) != wanted


@pytest.mark.parametrize("name", ["tumbling", "sliding", "sessions"])
def test_windows_are_those_of_the_batch(kit: Kit, name: str) -> None:
    question = getattr(recipes, name)
    wanted = batch_rows(question(frames(kit)[0]))
    assert stream_rows(kit, name) == wanted
    assert batch_rows(question(frames(kit, late=True)[0])) != wanted


def test_a_duplicate_is_dropped(kit: Kit) -> None:
    found = [row for row in stream_rows(kit, "once_each") if str(END) not in row]
    assert found == batch_rows(frames(kit)[0].dropDuplicates(["id"]))


def test_timers_report_silent_customers_and_since_when(kit: Kit) -> None:
    quiet: list[dict[str, Any]] = []
    orders, _ = frames(kit)
    times: dict[str, list[datetime]] = {}
    for row in sorted(orders.collect(), key=lambda row: row.time):
        times.setdefault(row.customer, []).append(row.time)
    for customer, moments in times.items():
        # The last order before an hour without one.
        for this, following in zip(moments, [*moments[1:], None], strict=True):
            if following is None or following - this > timedelta(hours=1):
                quiet.append({"customer": customer, "since": this})
    assert stream_rows(kit, "silent") == sorted(str(_plain(row)) for row in quiet)


async def _begin(mill: Any) -> None:
    people, addresses = await mill.table("people"), await mill.table("addresses")
    for key in ("1", "2", "3", "4"):
        await people.put(key, {"name": f"name {key}"})
    for key in ("2", "3", "4", "5"):
        await addresses.put(key, {"city": f"city {key}"})


async def _change(mill: Any) -> None:
    people, addresses = await mill.table("people"), await mill.table("addresses")
    await addresses.put("1", {"city": "late city"})
    await people.put("2", {"name": "new name"})
    await people.delete("3")
    await addresses.delete("4")


async def _undo(mill: Any) -> None:
    await (await mill.table("people")).put("3", {"name": "back again"})
    await (await mill.table("addresses")).delete("5")


CHANGES = (_begin, _change, _undo)


@pytest.mark.long
def test_a_join_of_two_tables_follows_both_with_deletes(
    spark: SparkSession, account: Account, tmp_path: Path
) -> None:
    account.run(lambda mill: mill.create_table("people", schema=PERSON))
    account.run(lambda mill: mill.create_table("addresses", schema=ADDRESS))
    kit = Kit(spark, account, tmp_path)
    kit.write(TABLES)
    for change in CHANGES:
        account.run(change)
        kit.once()

    def table(name: str) -> DataFrame:
        reader = kit.spark.read.format("millstream").option("url", kit.account.url)
        frame = reader.option("table", name).load()
        return frame.selectExpr("CAST(key AS STRING) AS id", "value.*")

    wanted = {
        row["id"]: {"id": row["id"], "name": row["name"], "city": row["city"]}
        for row in table("people").join(table("addresses"), "id").collect()
    }
    assert wanted["3"]["name"] == "back again"
    assert wanted["2"]["name"] == "new name"
    assert set(wanted) == {"1", "2", "3"}
    assert kit.table("customers_with_address") == wanted


def test_a_stream_sees_the_table_as_it_is_at_each_batch(
    spark: SparkSession, account: Account, tmp_path: Path
) -> None:
    account.topic("orders", schema=ORDER)
    account.run(lambda mill: mill.create_table("customers", schema=CUSTOMER))
    kit = Kit(spark, account, tmp_path)
    kit.write(
        HEAD
        + """
from examples import recipes

@mp.topic
def located():
    return recipes.with_customer(mp.read("orders"), mp.read_table("customers"))
"""
    )

    def move(city: str) -> None:
        async def work(mill: Any) -> None:
            value = {"customer": "ann", "city": city}
            await (await mill.table("customers")).put("ann", value)

        account.run(work)

    def located() -> list[str]:
        try:
            return stream_rows(kit, "located")
        except LookupError:
            return []

    def asked(orders: list[dict[str, Any]]) -> list[str]:
        """The same question in batch, with the table as it is now."""
        rows = [tuple(order.values()) for order in orders]
        frame = spark.createDataFrame(rows, "id INT, customer STRING, amount INT, time TIMESTAMP")
        reader = spark.read.format("millstream").option("url", account.url)
        customers = reader.option("table", "customers").load().select("value.*")
        return batch_rows(recipes.with_customer(frame, customers))

    first, second = [order(1, "ann", 0)], [order(2, "ann", 1), order(3, "ben", 1)]
    move("Bern")
    with kit.running():
        account.pack("orders", [(row, None) for row in first])
        wanted = asked(first)
        assert "Bern" in wanted[0]
        wait_for(lambda: located() == wanted)
        move("Basel")
        account.pack("orders", [(row, None) for row in second])
        later = sorted([*wanted, *asked(second)])
        wait_for(lambda: located() == later)
    assert len(later) == 3
    assert "Basel" in str(later)


def test_the_page_shows_the_recipes_as_they_are() -> None:
    page = (Path(__file__).parents[3] / "docs" / "RECIPES.md").read_text()
    found = [
        item
        for _, item in inspect.getmembers(recipes)
        if getattr(item, "__module__", "") == recipes.__name__
    ]
    assert len(found) == 11
    missing = [item.__name__ for item in found if inspect.getsource(item).strip() not in page]
    assert not missing
