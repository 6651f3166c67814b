"""A flow reads only the columns that it uses, and its results are those of reading all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from millstream.pipelines import pruning
from millstream.pipelines.pruning import pruned
from tests.spark.conftest import Account, Lake
from tests.spark.pipelines.project_kit import HEAD, PATIENCE_SECONDS, Kit

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ALL = {"key", "value", "topic", "partition", "offset", "timestamp", "subject", "index"}
PRICES = {"value.price", "value.customer"}
EXCLUDED = "spark.sql.optimizer.excludedRules"


@dataclass
class Item:
    name: str
    amount: int


@dataclass
class Order:
    id: int
    customer: str
    price: float
    item: Item


@pytest.fixture
def orders(lake: Lake, account: Account) -> Lake:
    for name in ("orders", "others"):
        account.topic(name, schema=Order, partitions=2)
        events = [
            ({"id": n, "customer": f"c{n % 3}", "price": n / 4, "item": {"name": "x", "amount": n}},
             f"k{n % 7}")
            for n in range(60)
        ]  # fmt: skip
        account.pack(name, events[:40], max_events=20)
        account.pack(name, events[40:])
    account.topic("plain")
    account.pack("plain", [(b"%d" % n, f"k{n % 7}") for n in range(20)])
    return lake


def names(schema: Any) -> set[str]:
    """The columns of a schema; of `value` the fields, if some are missing."""
    found = set()
    for field in schema.fields:
        inner = getattr(field.dataType, "names", [])
        whole = field.name != "value" or not inner or len(inner) == 4
        found |= {field.name} if whole else {f"value.{name}" for name in inner}
    return found


def read(frame: DataFrame) -> list[set[str]]:
    """What the sources of these rows read."""
    plan = frame._jdf.queryExecution().analyzed()
    return [names(source.whole) for source in pruning._sources(pruning._walked(plan))]


def total(orders: DataFrame, _: DataFrame) -> DataFrame:
    flat = orders.select("value.*").where("price > 3")
    return flat.groupBy("customer").sum("price")


def joined(orders: DataFrame, others: DataFrame) -> DataFrame:
    left = orders.selectExpr("value.id AS id", "value.price AS price", "offset")
    right = others.selectExpr("value.id AS other", "value.customer AS customer")
    return left.join(right, left["id"] == right["other"]).select("id", "price", "customer")


def whole_value(orders: DataFrame, _: DataFrame) -> DataFrame:
    from pyspark.sql import functions as f

    shown = f.udf(lambda value: f"{value.id}:{value.item.amount}", "string")
    return orders.select(shown("value").alias("text"))


def one_field(orders: DataFrame, _: DataFrame) -> DataFrame:
    from pyspark.sql import functions as f

    double = f.udf(lambda price: price * 2, "double")
    return orders.select(double("value.price").alias("twice"), "key")


def watermarked(orders: DataFrame, _: DataFrame) -> DataFrame:
    marked = orders.withWatermark("timestamp", "1 hour")
    return marked.dropDuplicatesWithinWatermark(["key"]).select("key")


def union(orders: DataFrame, others: DataFrame) -> DataFrame:
    return orders.selectExpr("value.id AS n").union(others.selectExpr("value.item.amount"))


def twice(orders: DataFrame, _: DataFrame) -> DataFrame:
    return orders.selectExpr("value.id AS n").union(orders.selectExpr("`offset` * 0 + index"))


def in_sql(orders: DataFrame, others: DataFrame) -> DataFrame:
    orders.createOrReplaceTempView("pruned_orders")
    text = "SELECT value.customer, offset FROM pruned_orders WHERE value IS NOT NULL"
    return orders.sparkSession.sql(f"WITH found AS ({text}) SELECT customer, offset FROM found")


def generated(orders: DataFrame, _: DataFrame) -> DataFrame:
    return orders.selectExpr("explode(sequence(1L, value.id % 3 + 1)) AS n", "value.customer")


def every(orders: DataFrame, _: DataFrame) -> DataFrame:
    return orders.select("*").where("offset > 0")


def to_sink(orders: DataFrame, _: DataFrame) -> DataFrame:
    return orders.where("value.price > 2").select("key", "value")


def counted(orders: DataFrame, _: DataFrame) -> DataFrame:
    return orders.groupBy().count()


def filtered(orders: DataFrame, _: DataFrame) -> DataFrame:
    # A batch source takes this filter out of the plan when it runs.
    return orders.where("offset >= 2").select("value.id")


def of_several_lines(orders: DataFrame, _: DataFrame) -> DataFrame:
    # Plans are read as text: a constant has several lines there as well.
    name = "concat('#1\\n', value.item.name, '\\n   #2')"
    return orders.selectExpr("concat(value.customer, '\\n- x') AS `a.b: c`", f"{name} AS `\x1f`")


def misleading(orders: DataFrame, _: DataFrame) -> DataFrame:
    # This one looks like a column of its own; then more is read than is used.
    return orders.selectExpr("concat(value.customer, '\\n:- x\\n+- value#1: string') AS text")


def long(orders: DataFrame, _: DataFrame) -> DataFrame:
    # More columns than Spark shows of a list.
    return orders.selectExpr(*(f"value.price + {n} AS n{n}" for n in range(60)), "value.id")


def nested(orders: DataFrame, _: DataFrame) -> DataFrame:
    return orders.selectExpr("value.item.amount + 1 AS n", "value.item.name")


FLOWS: list[tuple[Callable[[DataFrame, DataFrame], DataFrame], list[set[str]], bool]] = [
    (total, [PRICES], False),
    (joined, [{"value.id", "value.price"}, {"value.id", "value.customer"}], True),
    (whole_value, [{"value"}], True),
    (one_field, [{"key", "value.price"}], True),
    (watermarked, [{"key", "value.id", "timestamp"}], True),
    (union, [{"value.id"}, {"value.item"}], True),
    (generated, [{"value.id", "value.customer"}], True),
    (in_sql, [{"value", "offset"}], True),
    (every, [ALL], True),
    (to_sink, [{"key", "value"}], True),
    (counted, [{"value.id"}], False),
    (nested, [{"value.item"}], True),
    (filtered, [{"value.id", "offset"}], False),
    (filtered, [{"value.id", "offset"}], True),
    (of_several_lines, [{"value.customer", "value.item"}], True),
    (misleading, [{"value"}], True),
    (long, [{"value.id", "value.price"}], True),
]  # fmt: skip


@pytest.mark.parametrize(("flow", "columns", "streams"), FLOWS)
def test_pruned_rows_are_the_same_rows(
    orders: Lake,
    flow: Callable[[DataFrame, DataFrame], DataFrame],
    columns: list[set[str]],
    streams: bool,
) -> None:
    kinds = [orders.stream] if streams else [orders.read]
    for kind in kinds:
        frames = [kind(subscribe=name, includeMetadata="true") for name in ("orders", "others")]
        rows = flow(*frames)
        less = pruned(rows)
        assert read(less) == columns
        assert less.columns == rows.columns
        assert less.schema.simpleString() == rows.schema.simpleString()
        if streams:
            expected, _ = orders.collect(rows, orders.checkpoint())
            found, _ = orders.collect(less, orders.checkpoint())
        else:
            expected, found = rows.collect(), less.collect()
        assert sorted(map(str, found)) == sorted(map(str, expected)) != []


def test_a_query_continues_from_its_checkpoint_when_it_is_pruned(orders: Lake) -> None:
    checkpoint = orders.checkpoint()
    stream = orders.stream(subscribe="orders", includeMetadata="true", maxOffsetsPerTrigger=1)
    # One source that is used twice: pruning must not make two of it.
    frame = twice(stream, stream)
    first, _ = orders.collect(frame, checkpoint)
    again, _ = orders.collect(pruned(frame), checkpoint)
    assert len(first) == 120
    assert again == []
    assert read(pruned(frame))[0] == {"value.id", "offset", "index"}


def test_topics_without_a_schema_tables_and_stores_are_pruned(
    orders: Lake, account: Account
) -> None:
    plain = orders.stream(subscribe="plain")
    text = pruned(plain.selectExpr("string(value) AS text", "partition"))
    assert read(text) == [{"value", "partition"}]
    assert read(pruned(plain.groupBy("key").count())) == [{"key"}]
    # A value that cannot be decoded is dropped, used or not.
    checked = orders.stream(subscribe="plain", undecodable="drop")
    assert read(pruned(checked.groupBy("key").count())) == [{"key", "value"}]
    account.run(lambda mill: mill.create_table("stock", schema=Order))
    table = orders.read(table="stock").selectExpr("value.customer AS c", "value.price")
    both = orders.stream(subscribe="orders").selectExpr("value.customer AS c", "timestamp")
    found = pruned(both.join(table, "c"))
    assert read(found) == [{"value.customer", "timestamp"}, PRICES]


def test_a_plan_that_cannot_be_read_is_used_as_it_is(
    orders: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = total(orders.read(subscribe="orders"), orders.read(subscribe="others"))
    with monkeypatch.context() as patch:
        patch.setattr(pruning, "_uses", lambda *_: 1 / 0)
        assert pruned(frame) is frame
    # What was not seen to be used must not become an error of a task.
    with monkeypatch.context() as patch:
        patch.setattr(pruning, "_uses", lambda _, leaves: {ids: {"key": None} for ids in leaves})
        assert pruned(frame) is frame
    assert pruned(orders.spark.range(3)).count() == 3
    assert orders.spark.conf.get(EXCLUDED, None) is None


def test_what_is_left_is_found_in_a_long_list_of_columns(
    orders: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = long(orders.stream(subscribe="orders"), orders.stream(subscribe="others"))
    price = {"value": {"price"}}
    monkeypatch.setattr(pruning, "_uses", lambda _, leaves: dict.fromkeys(leaves, price))
    assert pruned(frame) is frame  # `value.id` is the last of 61


def test_the_settings_of_the_session_stay_as_they_are_while_a_plan_is_changed(
    orders: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark.sql.conf import RuntimeConfig

    conf = orders.spark.conf
    frame = total(orders.read(subscribe="orders"), orders.read(subscribe="others"))
    changes: list[str] = []
    seen: list[dict[str, str]] = []
    inner = pruning._uses

    def watched(*given: Any) -> Any:
        seen.append(dict(conf.getAll))
        return inner(*given)

    monkeypatch.setattr(pruning, "_uses", watched)
    conf.set(EXCLUDED, "org.apache.spark.sql.catalyst.optimizer.CollapseWindow")
    try:
        before = dict(conf.getAll)
        with monkeypatch.context() as patch:
            patch.setattr(RuntimeConfig, "set", lambda _, name, __: changes.append(name))
            patch.setattr(RuntimeConfig, "unset", lambda _, name: changes.append(name))
            assert read(pruned(frame)) == [PRICES]
        assert [before, before] == [*seen, dict(conf.getAll)]
        assert changes == []
    finally:
        conf.unset(EXCLUDED)


def test_flows_are_pruned_at_the_same_time(orders: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = [
        orders.stream(subscribe=name, includeMetadata="true") for name in ("orders", "others")
    ]
    flows = [entry for entry in FLOWS if entry[0] in (total, joined, nested, counted)]
    together = threading.Barrier(len(flows))
    inner = pruning._optimized

    def optimized(*given: Any) -> Any:
        together.wait(PATIENCE_SECONDS)  # each of them is in the middle of its work
        return inner(*given)

    def work(rows: DataFrame) -> list[set[str]]:
        # Spark looks for data sources in the thread's active session.
        kind = type(orders.spark)._get_j_spark_session_class(orders.spark._jvm)
        kind.setActiveSession(orders.spark._jsparkSession)
        return read(pruned(rows))

    monkeypatch.setattr(pruning, "_optimized", optimized)
    before = dict(orders.spark.conf.getAll)
    with ThreadPoolExecutor(len(flows)) as threads:
        found = list(threads.map(work, [flow(*frames) for flow, _, _ in flows]))
    assert found == [columns for _, columns, _ in flows]
    assert dict(orders.spark.conf.getAll) == before


def test_the_calls_to_java_do_not_grow_with_the_columns_of_a_plan(
    orders: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    jvm: Any = orders.spark._jvm
    client = type(jvm._gateway_client)
    inner, calls = client.send_command, 0

    def counted_calls(self: Any, command: str, *given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += not command.startswith("m")  # not those that free what Python has forgotten
        return inner(self, command, *given, **named)

    orders_stream = orders.stream(subscribe="orders")
    found = []
    for flow in (one_field, long):
        frame = flow(orders_stream, orders_stream)
        with monkeypatch.context() as patch:
            patch.setattr(client, "send_command", counted_calls)
            calls = 0
            assert pruned(frame) is not frame
        found.append(calls)
    few, many = found
    assert 0 < many < few + 60  # 60 columns more; a walk through each takes at least six calls


FLOW = (
    HEAD
    + """
calls = []

@mp.table(key="customer")
def spent():
    calls.append(1)
    if len(calls) > 1:
        raise RuntimeError("called twice")
    orders = mp.read("orders", envelope=True).where("offset >= 1")
    return orders.groupBy("value.customer").agg(f.sum("value.price").alias("spent"))
"""
)


@pytest.mark.parametrize("prune", [True, False])
def test_a_flow_of_a_project_is_pruned_and_called_once(
    spark: SparkSession,
    account: Account,
    orders: Lake,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prune: bool,
) -> None:
    from millstream.pipelines import pruning_ahead

    found: list[set[str]] = []

    def watched(rows: DataFrame) -> DataFrame:
        less = pruned(rows)
        found.extend(read(less))
        return less

    monkeypatch.setattr(pruning_ahead, "pruned", watched)
    kit = Kit(spark, account, tmp_path)
    kit.write(FLOW, "" if prune else "prune = false\n")
    kit.once()
    assert kit.table("spent") == {
        f"c{c}": {"customer": f"c{c}", "spent": sum(n / 4 for n in range(60) if n % 3 == c)}
        for c in range(3)
    }
    assert found == ([{*PRICES, "offset"}] if prune else [])
