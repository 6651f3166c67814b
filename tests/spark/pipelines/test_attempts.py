"""Rows that the project's own functions refuse go their own way, each once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tests.spark.conftest import forget_commit, last_batch
from tests.spark.pipelines.project_kit import HEAD, Kit, block

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.spark.conftest import Account

ORDER = pa.schema([("customer", pa.string()), ("amount", pa.int64())])
# The project of the page; its function notes every call.
CODE = HEAD + block("python", "@mp.attempt").replace(
    "    return 1 / amount",
    '    with open(CALLS, "a") as calls:\n        print(amount, file=calls)\n    return 1 / amount',
)
# The same with stored attempts.
CODE += """
@mp.topic
def kept():
    return mp.read("tried")

@mp.topic
def kept_refused():
    return mp.refused(mp.read("kept"))
"""
FAILING_LINE = CODE.splitlines().index("    return 1 / amount") + 1


def test_every_row_is_accepted_or_refused_once_also_when_batches_run_again(
    spark: SparkSession, account: Account, tmp_path: Path
) -> None:
    account.topic("orders", schema=ORDER, partitions=2)
    kit, calls = Kit(spark, account, tmp_path), tmp_path / "calls"
    kit.write(CODE.replace("CALLS", repr(str(calls))))
    amounts: list[int | None] = [*(n % 5 for n in range(20)), None]
    publish(account, amounts)
    kit.once()
    # Once for each flow that reads them; the one that reads stored attempts calls nothing.
    wanted = [str(amount) for amount in amounts] * 3
    assert sorted(calls.read_text().split()) == sorted(wanted)
    for flow in ("rates", "rates_refused"):  # as if it was killed before it noted its batch
        checkpoint = tmp_path / ".pipeline" / "checkpoints" / flow
        forget_commit(checkpoint, last_batch(checkpoint))
    publish(account, [0, 8])
    kit.once()
    check_split(account, [*amounts, 0, 8])
    again = account.values("kept_refused")
    assert sorted(again, key=str) == sorted(account.values("rates_refused"), key=str)


def publish(account: Account, amounts: list[int | None]) -> None:
    rows = [{"customer": f"c{n}", "amount": amount} for n, amount in enumerate(amounts)]
    account.pack("orders", [(row, str(row["customer"])) for row in rows], max_events=3)


def check_split(account: Account, amounts: list[int | None]) -> None:
    orders = account.events("orders")
    good, bad = account.values("rates"), account.values("rates_refused")
    wanted = [{**e.value, "rate": 1 / e.value["amount"]} for e in orders if e.value["amount"]]
    assert len(orders) == len(amounts)
    assert sorted(good, key=str) == sorted(wanted, key=str)
    stored = {(event.topic, *event.position): event.value for event in orders}
    refused = [stored[origin_of(row)] for row in bad]
    assert sorted(refused, key=str) == sorted(
        (value for value in stored.values() if not value["amount"]), key=str
    )
    where = f"(in to_rate, pipeline.py:{FAILING_LINE})"
    for order, row in zip(refused, bad, strict=True):
        kept = {name: value for name, value in order.items() if value is not None}
        assert (json.loads(row["row"]), row["attempt"]) == (kept, "rate")
        kind = "ZeroDivisionError: division by zero" if order["amount"] == 0 else "TypeError: "
        assert row["error"].startswith(kind)
        assert row["error"].endswith(where)


def origin_of(row: dict[str, Any]) -> tuple[str, int, int, int]:
    return row["topic"], row["partition"], row["offset"], row["index"]
