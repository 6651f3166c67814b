"""Flows of a pipeline over an event store: several views of one log, exactly once."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from millstream.errors import PipelineInvalid
from tests.spark.conftest import Account, forget_commit, last_batch
from tests.spark.event_store.accounts import EVENTS, Deposited, Opened, Withdrawn
from tests.spark.event_store.store_kit import Store
from tests.spark.pipelines.project_kit import HEAD, PAGE, Kit

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COPIES = """
@mp.topic(key="aggregate")
def copies():
    return mp.read_events("accounts").select("aggregate", "version", "offset", "index", "event")
"""


def of_the_page() -> str:
    """The example of docs/PIPELINES.md."""
    found = re.search(r"(?:^    [^\n]*\n|^\n)*^    def balances.*?(?=^\S)", PAGE, re.M | re.S)
    assert found is not None
    return re.sub(r"^    ", "", found[0], flags=re.M)


def balances(kit: Kit) -> dict[str, int]:
    return {key: row["balance"] for key, row in kit.table("balances").items()}


@pytest.mark.long
def test_views_of_a_store_have_every_event_once_also_if_a_batch_runs_again(
    spark: SparkSession, account: Account, tmp_path: Path
) -> None:
    kit, store = Kit(spark, account, tmp_path), Store(account)
    store.append("a1", Opened("ann"), Deposited(5), Withdrawn(2))
    store.append("b2", Deposited(7))
    kit.write(HEAD + of_the_page() + COPIES)
    assert kit.graph().nodes["accounts"].kind == "store"
    flows = kit.once()
    assert balances(kit) == {"a1": 3, "b2": 7}
    assert (flows["copies"]["rows_in"], flows["copies"]["lag_messages"]) == (4, 0)
    store.append("a1", Deposited(1, "USD"))
    store.delete("b2")
    kit.once()
    for commits in tmp_path.rglob("commits"):
        forget_commit(commits.parent, last_batch(commits.parent))
    kit.once()
    assert balances(kit) == {"a1": 4}
    copies = Counter((row["aggregate"], row["version"]) for row in account.values("copies"))
    assert copies == dict.fromkeys([("a1", n) for n in (1, 2, 3, 4)] + [("b2", 1), ("b2", 2)], 1)
    files = spark.read.parquet(str(tmp_path / "data" / "deposits")).collect()
    assert sorted((row.aggregate, row.amount, row.currency) for row in files) == [
        ("a1", 1, "USD"),
        ("a1", 5, "EUR"),
        ("b2", 7, "EUR"),
    ]


def test_functions_convert_old_versions_in_a_flow(
    spark: SparkSession, account: Account, tmp_path: Path
) -> None:
    kit, store = Kit(spark, account, tmp_path), Store(account)
    old: Any = dataclass(type("Deposited", (), {"__annotations__": {"cents": int}}))
    store.append("a1", old(1200), classes=[Opened, old, Withdrawn])
    store.how = {"upcasters": {("Deposited", 1): lambda event: {"amount": event["cents"] // 100}}}
    store.append("a1", Deposited(3), classes=EVENTS)
    code = """
def to_amount(event):
    return {"amount": event["cents"] // 100}

@mp.topic(key="aggregate")
def amounts():
    events = mp.read_events("accounts", upcasters={("Deposited", 1): to_amount})
    return events.select("aggregate", "Deposited.amount")
"""
    kit.write(HEAD + code)
    kit.once()
    assert [row["amount"] for row in account.values("amounts")] == [12, 3]
    kit.write(HEAD + code.replace('upcasters={("Deposited", 1): to_amount}', ""))
    with pytest.raises(PipelineInvalid, match="version 1 of event 'Deposited'"):
        kit.once()


def test_what_is_no_store_is_refused_before_anything_starts(
    spark: SparkSession, account: Account, tmp_path: Path
) -> None:
    kit = Kit(spark, account, tmp_path)
    account.topic("orders")
    for name, reason in (("orders", "is a topic and not an event store"), ("copies", "no event")):
        kit.write(HEAD + COPIES.replace('"accounts"', f'"{name}"'))
        with pytest.raises(PipelineInvalid, match=reason):
            kit.once()
