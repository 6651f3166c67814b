"""One Spark session for all tests of this folder, and a separate account for each test."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import millstream
from millstream.messaging import Event, NewEvent

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_numbers = itertools.count()
ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 60.0  # for a broker beside JVMs that start


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    from millstream.spark import session

    with pytest.MonkeyPatch.context() as patch:
        # Spark's Python processes import classes of the tests.
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        made = session("millstream-tests", master="local[2]", quick=True)
    yield made
    made.stop()


@pytest.fixture(autouse=True)
def _no_query_left(request: pytest.FixtureRequest) -> Iterator[None]:
    if "spark" in request.fixturenames:
        # A write looks for its source in the active session of this thread's thread in the JVM, and
        # a connection that had to be made again has another thread there, without any.
        made = request.getfixturevalue("spark")
        sessions = made._jvm.org.apache.spark.sql.classic.SparkSession
        sessions.setActiveSession(made._jsparkSession)
    yield
    if "spark" in request.fixturenames:
        for query in request.getfixturevalue("spark").streams.active:
            query.stop()


class Account:
    """A broker's account as tests use it: blocking, each call on a connection of its own."""

    def __init__(self, url: str) -> None:
        self.url = url

    def run(self, work: Callable[[millstream.Mill], Any]) -> Any:
        async def inside() -> Any:
            async with millstream.connect(
                self.url, connect_timeout=PATIENCE_SECONDS, request_timeout=PATIENCE_SECONDS
            ) as mill:
                return await work(mill)

        return asyncio.run(inside())

    def topic(self, name: str, **settings: Any) -> str:
        self.run(lambda mill: mill.create_topic(name, **settings))
        return name

    def publish(self, topic: str, events: Sequence[NewEvent | bytes]) -> None:
        async def work(mill: millstream.Mill) -> None:
            await (await mill.topic(topic)).publish_many(events)

        self.run(work)

    def pack(
        self, topic: str, events: Sequence[tuple[Any, str | None]], max_events: int = 5000
    ) -> None:
        """Write (value, key) pairs as packs."""
        from millstream.events.packs.packing import Packing

        async def work(mill: millstream.Mill) -> None:
            opened = await mill.topic(topic)
            async with opened.producer(Packing(max_events=max_events)) as producer:
                for value, key in events:
                    await producer.send(value, key)

        self.run(work)

    def events(self, topic: str) -> list[Event]:
        async def work(mill: millstream.Mill) -> list[Event]:
            return [event async for event in (await mill.topic(topic)).read()]

        found: list[Event] = self.run(work)
        return found

    def values(self, topic: str) -> list[Any]:
        return [event.value for event in self.events(topic)]


@pytest.fixture
def account(millstream_url: str) -> Account:
    return Account(millstream_url)


class Lake:
    """Shortcuts from topics to DataFrames and back, on one broker."""

    def __init__(self, spark: SparkSession, url: str, folder: Path) -> None:
        self.spark, self.url, self.folder = spark, url, folder

    def read(self, **options: Any) -> DataFrame:
        frame: DataFrame = self._options(self.spark.read.format("millstream"), options).load()
        return frame

    def stream(self, **options: Any) -> DataFrame:
        given = {"startingOffsets": "earliest", **options}
        frame: DataFrame = self._options(self.spark.readStream.format("millstream"), given).load()
        return frame

    def _options(self, reader: Any, options: dict[str, Any]) -> Any:
        schema = options.pop("schema", None)
        for name, value in {"url": self.url, **options}.items():
            if value is not None:
                reader = reader.option(name, value)
        return reader if schema is None else reader.schema(schema)

    def checkpoint(self) -> Path:
        return self.folder / f"checkpoint-{next(_numbers)}"

    def write(self, frame: DataFrame, **options: Any) -> None:
        frame.write.format("millstream").options(url=self.url, **options).mode("append").save()

    def run(self, frame: DataFrame, checkpoint: Path, **options: Any) -> StreamingQuery:
        """Write everything that is stored now to a topic, and end."""
        query = self.start(frame, checkpoint, available_now=True, **options)
        query.awaitTermination()
        return query

    def start(
        self, frame: DataFrame, checkpoint: Path, *, available_now: bool = False, **options: Any
    ) -> StreamingQuery:
        writer = frame.writeStream.format("millstream").options(url=self.url, **options)
        writer = writer.option("checkpointLocation", str(checkpoint))
        return (writer.trigger(availableNow=True) if available_now else writer).start()

    def collect(self, frame: DataFrame, checkpoint: Path) -> tuple[list[Any], StreamingQuery]:
        """The rows of every batch of an AvailableNow run."""
        rows: list[Any] = []
        query = (
            frame.writeStream.foreachBatch(lambda batch, _: rows.extend(batch.collect()))
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return rows, query


@pytest.fixture
def lake(spark: SparkSession, account: Account, tmp_path: Path) -> Lake:
    return Lake(spark, account.url, tmp_path)


def forget_commit(checkpoint: Path, batch: int) -> None:
    """Make Spark believe that a batch was not completed, so that its next run repeats it."""
    (checkpoint / "commits" / str(batch)).unlink()


def last_batch(checkpoint: Path) -> int:
    return max(int(file.name) for file in (checkpoint / "commits").iterdir() if file.name.isdigit())
