"""In a real session: credentials and TLS, every type of a schema, undecodable values."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import millstream
from millstream.broker import Broker, Role, ServerTls
from millstream.errors import ConfigError
from millstream.messaging import NewEvent
from millstream.schemas import types as t
from millstream.schemas.formats.spark import spark_arrow_type, spark_type
from millstream.settings import Tls
from millstream.spark import drop_undecodable
from millstream.testing import running_broker
from tests.certificates import make_certificate
from tests.spark.conftest import Account, Lake

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# -- credentials and TLS ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a self-signed certificate for 127.0.0.1, and its key."""
    return make_certificate(tmp_path_factory.mktemp("certificate")).parent


@pytest.fixture(scope="module")
def guarded(certificate: Path) -> Iterator[Broker]:
    tls = ServerTls(certificate / "server.pem", certificate / "server.key")
    with running_broker(auth=True, tls=tls) as broker:
        yield broker


def test_source_and_sink_use_tls_and_credentials(
    spark: SparkSession, guarded: Broker, certificate: Path, tmp_path: Path
) -> None:
    who = guarded.credentials(Role.ADMIN)
    right = {
        "url": guarded.url,
        "tlsCa": str(certificate / "server.pem"),
        "user": who.user,
        "password": who.password.reveal(),
    }
    rows = spark.createDataFrame([(b"k", b"v")], "key BINARY, value BINARY")

    async def make() -> None:
        async with millstream.connect(
            guarded.url, user=who.user, password=who.password, tls=Tls(ca=right["tlsCa"])
        ) as mill:
            await mill.create_topic("source")
            await mill.create_topic("target")

    asyncio.run(make())
    rows.write.format("millstream").options(**right, topic="source").mode("append").save()
    stream = spark.readStream.format("millstream").options(
        **right, subscribe="source", startingOffsets="earliest"
    )
    query = (
        stream.load().select("key", "value")
        .writeStream.format("millstream").options(**right, topic="target")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True).start()
    )  # fmt: skip
    query.awaitTermination()
    reader = spark.read.format("millstream").options(**right, subscribe="target")
    assert [(bytes(r.key), bytes(r.value)) for r in reader.load().collect()] == [(b"k", b"v")]

    def refused(**wrong: str) -> str:
        options = {**right, **wrong, "subscribe": "target"}
        options = {name: text for name, text in options.items() if text}
        with pytest.raises(Exception) as caught:
            spark.read.format("millstream").options(**options).load().collect()
        return str(caught.value)

    answer = refused(password="guess-what")
    assert "refused the credentials" in answer
    assert "guess-what" not in answer
    assert "in Spark tlsCa" in refused(tlsCa="")


# -- every type -------------------------------------------------------------------------------

TYPES: dict[str, t.Type] = {
    "bool": t.Bool(),
    **{f"int{bits}": t.Int(bits, True) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": t.Int(bits, False) for bits in (8, 16, 32, 64)},
    "float32": t.Float(32),
    "float64": t.Float(64),
    "string": t.String(),
    "binary": t.Binary(),
    "decimal": t.Decimal(12, 3),
    "date": t.Date(),
    "time": t.Time(),
    "instant": t.Timestamp(True),
    "local": t.Timestamp(False),
    "duration": t.Duration(),
    "uuid": t.Uuid(),
    "enum": t.Enum("colour", ("red", "green")),
    "maybe": t.Nullable(t.Int(32, True)),
    "list": t.List(t.Nullable(t.Date())),
    "map": t.Map(key=t.String(), value=t.List(t.Int(8, False))),
    "union": t.Union((t.String(), t.Int(64, True))),
    "record": t.Record("inner", (t.Field("a b", t.Time()), t.Field("select", t.Bool()))),
}


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("name", TYPES)
def test_spark_parses_the_type_of_a_schema_and_expects_what_is_read(name: str) -> None:
    from pyspark.sql.pandas.types import to_arrow_type
    from pyspark.sql.types import StructType

    type_ = TYPES[name]
    for nullability in (True, False):
        ddl = f"`the value` {spark_type(type_, nullability=nullability)}"
        parsed = StructType.fromDDL(ddl)
        assert isinstance(parsed, StructType)
        found = to_arrow_type(parsed["the value"].dataType, timezone="UTC")
        wanted = spark_arrow_type(type_)
        assert _bare(str(found)) == _bare(str(wanted))


def _bare(type_: str) -> str:
    """Without the names of list items, which Spark ignores."""
    return type_.replace(" not null", "").replace("<item:", "<element:").replace(" ", "")


# -- what could not be decoded ----------------------------------------------------------------


def test_rows_that_were_dropped_are_counted_in_the_progress_of_a_query(
    lake: Lake, account: Account, spark: SparkSession
) -> None:
    from pyspark.sql import Observation

    from tests.spark.source.test_typed import order, publish, typed

    typed(account, "orders")
    account.topic("bare")
    publish(account, "orders", [order(1), order(2)])

    async def damage(mill: Any) -> None:
        for _ in range(3):
            await mill.publish_acked("orders.bad", b"{not json")

    account.run(damage)
    publish(account, "orders", [order(3)])
    frame = drop_undecodable(lake.stream(subscribe="orders", undecodable="null"))
    rows, query = lake.collect(frame, lake.checkpoint())
    assert [row.value.id for row in rows] == [1, 2, 3]
    counts = [p.observedMetrics["undecodable"] for p in query.recentProgress if p.observedMetrics]
    assert sum(count.dropped for count in counts) == 3
    assert any("JSON" in (count.example or "") for count in counts)

    seen = Observation("seen")
    kept = drop_undecodable(lake.read(subscribe="orders", undecodable="null"), seen)
    assert kept.count() == 3
    assert seen.get["dropped"] == 3
    account.publish("bare", [NewEvent(b"x")])
    with pytest.raises(ConfigError, match="undecodable = null"):
        drop_undecodable(lake.read(subscribe="bare"))
