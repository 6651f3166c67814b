"""A guarded topic refuses a bad record with the same reason, whoever writes it; Spark writes it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest
from typer.testing import CliRunner

import millstream
from millstream.broker import Broker, Role
from millstream.cli.app import app
from millstream.errors import PartlyStored, Unfit
from millstream.testing import running_broker
from tests.integration.broker.clients import PATIENCE, client, publish_guarded
from tests.spark.conftest import Account, Lake

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

GOOD = {"id": 1, "status": "open"}
BAD = {"id": 2, "status": "lost"}
REASON = "field 'status': expected enum status (open, paid), found str 'lost'"


@dataclass
class Order:
    id: int
    status: Literal["open", "paid"] = "open"


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with running_broker(auth=True) as running:
        yield running


@pytest.fixture(scope="module")
def app_account(broker: Broker) -> Account:
    """The account as a user of the role app, with guarded topics whose guard runs."""
    who = broker.credentials(Role.APP)
    user = f"{who.user}:{who.password.reveal()}@"
    account = Account(broker.url.replace("://", f"://{user}", 1))

    async def declare(mill: millstream.Mill) -> None:
        for name, partitions in (("orders", 1), ("wide", 3)):
            await mill.create_topic(name, schema=Order, guarded=True, partitions=partitions)
        await mill.create_table("states", schema=Order, guarded=True)
        await publish_guarded(await mill.topic("orders"), GOOD, "first")

    account.run(declare)
    return account


@pytest.fixture
def lake(spark: SparkSession, app_account: Account, tmp_path: Path) -> Lake:
    return Lake(spark, app_account.url, tmp_path)


def order(lake: Lake, status: str, numbers: int = 1) -> DataFrame:
    return lake.spark.range(numbers).selectExpr(
        "cast(id AS STRING) AS key", f"struct(id, '{status}' AS status) AS value"
    )


def test_a_bad_record_is_refused_with_the_same_reason_everywhere(
    lake: Lake, app_account: Account, broker: Broker
) -> None:
    before = len(app_account.values("orders"))

    async def sdk(mill: millstream.Mill) -> str:
        topic = await mill.topic("orders")
        with pytest.raises(Unfit) as refused:
            await topic.publish(BAD, "k")
        async with topic.producer() as producer:
            await producer.send(BAD, "k")
            with pytest.raises(PartlyStored) as partly:
                await producer.flush()
        packed = partly.value.failed[0]
        assert isinstance(packed, Unfit)
        assert str(packed) == f"row 0, {REASON}"
        return str(refused.value)

    async def plain() -> str:
        async with client(broker.url, broker.credentials(Role.APP)) as connection:
            body = json.dumps(BAD).encode()
            answer = await connection.request("ingress.orders.k", body, timeout=PATIENCE)
            return str(json.loads(answer.data)["error"]["description"])

    assert app_account.run(sdk) == REASON
    assert asyncio.run(plain()) == REASON
    command = ["pub", "-t", "orders", json.dumps(BAD), "--server", app_account.url]
    done = CliRunner().invoke(app, command)
    assert isinstance(done.exception, Unfit)
    assert str(done.exception) == REASON
    with pytest.raises(Exception, match=r"errors\.data\.Unfit") as spark:
        lake.write(order(lake, "lost"), topic="orders")
    assert f"row 0, {REASON}" in str(spark.value)
    assert len(app_account.values("orders")) == before


@pytest.mark.parametrize("mode", ["direct", "staged"])
@pytest.mark.parametrize("topic", ["orders", "wide"])
def test_a_batch_is_written_through_the_guard(
    lake: Lake, app_account: Account, topic: str, mode: str
) -> None:
    before = len(app_account.values(topic))
    frame = order(lake, "paid", 3000)
    lake.write(frame, topic=topic, commitMode=mode, maxRowsPerPack=500)
    assert len(app_account.values(topic)) == before + 3000


def test_a_table_is_written_through_the_guard(lake: Lake, app_account: Account) -> None:
    lake.write(order(lake, "paid", 50), table="states")
    assert len(app_account.values("states")) == 50


def test_a_query_writes_each_row_once_through_the_guard(lake: Lake, app_account: Account) -> None:
    app_account.topic("copy", schema=Order, guarded=True)
    checkpoint = lake.checkpoint()
    columns = ("key", "struct(value.id, value.status) AS value")
    for _ in range(2):
        lake.run(lake.stream(subscribe="wide").selectExpr(*columns), checkpoint, topic="copy")
    assert len(app_account.values("copy")) == len(app_account.values("wide"))
