"""A worker without Spark: memory, redriven packs, concurrent attempts, staged topics."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, IntegerType, LongType, StructType

from millstream.errors import ConfigError, PartlyWritten, TopicNotFound
from millstream.events.packs.pack import encode, envelope
from millstream.settings import ConnectionSettings
from millstream.spark import broker_access, datasource
from millstream.spark.datasource import MillstreamDataSource
from millstream.spark.options import SinkOptions
from millstream.spark.sink.staging import Staging, ensure_staging
from millstream.spark.sink.targets import find_target
from millstream.spark.sink.task_sink import TaskRows, write_chains
from millstream.spark.source.batch_reader import BatchReader
from millstream.spark.source.stream_reader import StreamReader
from millstream.wire.message import OutgoingMessage
from millstream.wire.protocol import encode_headers
from millstream.wire.sync.connection import BlockingConnection
from millstream.wire.sync.publish import publish_one
from millstream.wire.sync.streams import find_streams
from tests.spark.conftest import Account

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).parent / "read_windows.py"


@dataclass
class Order:
    id: int


@pytest.fixture
def settings(account: Account) -> ConnectionSettings:
    return ConnectionSettings(urls=(account.url,))


def store(settings: ConnectionSettings, subject: str, headers: dict[str, str], data: bytes) -> None:
    with BlockingConnection(settings) as connection:
        message = OutgoingMessage(subject.encode(), encode_headers(headers), data)
        publish_one(connection, message, 120)


def test_readers_use_the_schemas_that_were_found_when_the_query_was_built(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    account.topic("orders", schema=Order)
    source = MillstreamDataSource({"url": account.url, "subscribe": "orders", "columns": "value"})
    assert source.schema() == "`value` struct<id: bigint>"
    carried: MillstreamDataSource = pickle.loads(pickle.dumps(source))

    def asked_again(*_: object) -> None:
        raise AssertionError("the broker was asked twice for the same schema")

    monkeypatch.setattr(datasource, "find_partitions", asked_again)
    schema = StructType().add("value", StructType().add("id", LongType()))
    for reader in (carried.reader(schema), carried.streamReader(schema)):
        assert isinstance(reader, BatchReader | StreamReader)
        assert list(reader._reader.schemas) == ["orders"]


@pytest.mark.parametrize("option", ["subscribe", "stream", "table"])
def test_a_name_that_no_stream_can_have_is_rejected_without_asking(option: str) -> None:
    source = MillstreamDataSource({"url": "nats://127.0.0.1:1", option: "a.b"})
    with pytest.raises(ConfigError, match=r"'a\.b' cannot be the name of a topic or stream"):
        source.schema()


def test_topics_of_any_number_of_partitions_are_found_together(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, partitions in (("one", 1), ("two", 2), ("five", 5)):
        account.topic(name, partitions=partitions)
    calls: list[list[str]] = []

    def counted(jetstream: Any, names: list[str], timeout: float) -> list[Any]:
        calls.append(names)
        return find_streams(jetstream, names, timeout)

    monkeypatch.setattr(broker_access, "find_streams", counted)
    jetstream = broker_access.jetstream_to(ConnectionSettings(urls=(account.url,)))
    found = broker_access.find_topics(jetstream, ["one", "two", "five", "five-3"])
    assert {topic: [info.config["name"] for info in infos] for topic, infos in found.items()} == {
        "one": ["one"],
        "two": ["two-0", "two-1"],
        "five": [f"five-{number}" for number in range(5)],
        "five-3": ["five-3"],
    }
    assert len(calls) == 2
    jetstream.ask("STREAM.DELETE.five-3")
    with pytest.raises(TopicNotFound, match="'five' is incomplete: partition 3 is missing"):
        broker_access.find_topics(jetstream, ["one", "five"])


# -- memory -----------------------------------------------------------------------------------


def peaks(url: str, topic: str, *numbers: int) -> list[dict[str, int]]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), url, topic, *map(str, numbers)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "few", "many"), [("packs", 20, 200), ("plain", 12_000, 72_000)], ids=str
)
def test_a_range_of_many_windows_takes_no_more_memory_than_one_of_few(
    account: Account, settings: ConnectionSettings, kind: str, few: int, many: int
) -> None:
    account.topic("many", storage="memory")
    if kind == "plain":
        account.publish("many", [b"x" * 100] * many)
    else:
        # Packs of 1 MB that are hundreds of times smaller on their way.
        rows = envelope(pa.array([b"y" * 1000] * 1000, pa.binary()))
        pack = encode(rows, compression="zstd")
        with BlockingConnection(settings) as connection:
            block = encode_headers(pack.headers)
            message = OutgoingMessage(b"many._pack.w", block, bytes(pack.payload))
            for _ in range(many):
                publish_one(connection, message, 120)
    window = few // 6
    _, short, long = peaks(account.url, "many", window, few, few, many)  # the first loads modules
    each = 1 if kind == "plain" else 1000
    assert (short["rows"], long["rows"]) == (few * each, many * each)
    assert long["arrow"] < short["arrow"] * 1.2 + 2**20
    assert long["python"] < short["python"] * 1.2 + 2**20
    if kind == "packs":  # all of them in one window: they are opened one by one
        (whole,) = peaks(account.url, "many", many, many)
        assert whole["arrow"] < short["arrow"] * 1.2 + 2**20


# -- redriven ---------------------------------------------------------------------------------


def offsets(account: Account, topic: str) -> list[tuple[int, int, bytes]]:
    schema = StructType().add("offset", LongType()).add("index", IntegerType())
    reader = MillstreamDataSource({"url": account.url, "subscribe": topic}).reader(
        schema.add("value", BinaryType())
    )
    found: list[Any] = [batch for task in reader.partitions() for batch in reader.read(task)]
    return [tuple(row.values()) for batch in found for row in batch.to_pylist()]


def test_an_event_redriven_for_one_subscription_is_not_read_again(
    account: Account, settings: ConnectionSettings
) -> None:
    account.topic("orders")
    pack = encode(envelope(pa.array([b"a", b"b"], pa.binary())))
    payload = bytes(pack.payload)
    store(settings, "orders._pack.w", pack.headers, payload)
    store(settings, "orders._pack.redriven", {**pack.headers, "Mill-For": "billing"}, payload)
    store(settings, "orders._", {"Mill-For": "billing"}, b"redriven")
    store(settings, "orders._", {"Mill-Redrives": "1"}, b"redriven to all")
    store(settings, "orders._note", {}, b"our own")
    store(settings, "orders._pack.w", pack.headers, payload)
    assert offsets(account, "orders") == [
        (1, 0, b"a"),
        (1, 1, b"b"),
        (4, 0, b"redriven to all"),
        (6, 0, b"a"),
        (6, 1, b"b"),
    ]


# -- two attempts of one task -----------------------------------------------------------------


@pytest.mark.parametrize("partitions", [1, 3])
def test_a_speculative_attempt_that_overtakes_leaves_one_copy(
    account: Account, settings: ConnectionSettings, partitions: int
) -> None:
    account.topic("target", partitions=partitions)
    values = [b"%06d" % n for n in range(3000)]
    keys = pa.array([b"k%d" % (n % 17) for n in range(3000)], pa.binary())
    whole = pa.record_batch({"key": keys, "value": pa.array(values, pa.binary())})
    options = SinkOptions(topic="target", pack_rows=100)
    halfway, overtaken = Event(), Event()
    totals: list[int] = []

    def rows() -> TaskRows:
        return TaskRows(own_settings(account), options, find_target(settings, "target"), 0)

    def slow() -> Iterator[pa.RecordBatch]:
        yield whole.slice(0, 1500)
        halfway.set()
        assert overtaken.wait(240)
        yield whole.slice(1500)

    def first_attempt() -> None:
        totals.append(write_chains(rows(), slow(), "spark-q-0", 0))

    thread = Thread(target=first_attempt)
    thread.start()
    assert halfway.wait(240)
    totals.append(write_chains(rows(), iter([whole]), "spark-q-0", 0))
    overtaken.set()
    thread.join(240)
    assert totals == [3000, 3000]
    assert Counter(account.values("target")) == Counter(values)


def own_settings(account: Account) -> ConnectionSettings:
    """Settings that no other thread has a connection for."""
    return ConnectionSettings(urls=(account.url,), name=f"attempt-{os.urandom(4).hex()}")


# -- staged -----------------------------------------------------------------------------------


def frame(rows: list[tuple[str, bytes]]) -> list[pa.RecordBatch]:
    topics, values = zip(*rows, strict=True)
    columns = {"topic": pa.array(topics), "value": pa.array(values, pa.binary())}
    return [pa.record_batch(columns)]


def stage(settings: ConnectionSettings, rows: list[tuple[str, bytes]], task: int = 0) -> Any:
    options = SinkOptions(staged=True, pack_rows=2)
    ensure_staging(settings, 1)
    return Staging(settings, "spark-q", 0).stage(
        TaskRows(settings, options, None, task), frame(rows)
    )


def test_a_staged_batch_is_written_to_several_topics_once(
    account: Account, settings: ConnectionSettings
) -> None:
    account.topic("left")
    account.topic("right", partitions=2)
    rows = [("left" if n % 3 else "right", b"%d" % n) for n in range(30)]
    total, first = stage(settings, rows[:20])
    more, second = stage(settings, rows[20:], task=1)
    assert (total, more) == (20, 10)
    assert account.values("left") == account.values("right") == []
    for _ in range(2):  # Spark may ask the driver to commit again
        Staging(settings, "spark-q", 0).commit([*first, *second])
        assert account.values("left") == [value for topic, value in rows if topic == "left"]
        wanted = Counter(value for topic, value in rows if topic == "right")
        assert Counter(account.values("right")) == wanted


def test_a_commit_that_fails_halfway_reports_what_is_stored_and_continues_later(
    account: Account, settings: ConnectionSettings
) -> None:
    account.topic("first")
    account.topic("second", max_messages=2, discard="new")  # its fence takes the rest
    store(settings, "second._", {}, b"full")
    _, packs = stage(settings, [("first", b"1"), ("second", b"2"), ("first", b"3")])
    with pytest.raises(PartlyWritten, match=r"first/0: 2 rows, the last at offset \d+") as caught:
        Staging(settings, "spark-q", 0).commit(packs)
    assert len(caught.value.written) == 1
    assert account.values("first") == [b"1", b"3"]
    assert account.values("second") == [b"full"]

    async def make_room(mill: Any) -> None:
        await (await mill.topic("second")).admin.purge()
        await mill.edit_topic("second", max_messages=100)

    account.run(make_room)
    Staging(settings, "spark-q", 0).commit([])  # the batch is run again: the manifest holds
    assert account.values("first") == [b"1", b"3"]
    assert account.values("second") == [b"2"]
