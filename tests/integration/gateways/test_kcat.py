"""kcat, the command of librdkafka, with the gateway and with a real Kafka."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from uuid import uuid4

import pytest

from bench.kafka_clients import KafkaClients
from bench.kafka_gateway import Gateway
from bench.kafka_peer import KafkaServer, end_with_parent
from millstream.mill import connect
from millstream.testing import running_broker
from tests.integration.gateways.kafka_contract.behaviours import eventually

SECONDS = 120.0  # kcat waits for ever where a server does not move it on
FROM_START = ("-C", "-q", "-e", "-o", "beginning")

pytestmark = pytest.mark.skipif(
    shutil.which("kcat") is None, reason="kcat is not installed: make system-deps"
)


def kcat(bootstrap: str, *words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        ["kcat", "-b", bootstrap, *words],
        input=given,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
        preexec_fn=end_with_parent,
    )
    assert done.returncode == 0, done.stderr
    return done


def lines(bootstrap: str, *words: str) -> list[str]:
    return kcat(bootstrap, *words).stdout.splitlines()


@pytest.fixture
def topic(kafka_bootstrap: str) -> str:
    return KafkaClients(kafka_bootstrap).make_topic(1)


def fill(bootstrap: str, topic: str, count: int) -> None:
    given = "".join(f"key-{number}:value-{number}\n" for number in range(count))
    kcat(bootstrap, "-P", "-t", topic, "-K:", given=given)


def test_it_lists_the_topic_with_its_partitions(kafka_bootstrap: str) -> None:
    topic = KafkaClients(kafka_bootstrap).make_topic(3)
    found = json.loads(kcat(kafka_bootstrap, "-L", "-J", "-t", topic).stdout)
    (one,) = found["topics"]
    assert one["topic"] == topic
    assert [part["partition"] for part in one["partitions"]] == [0, 1, 2]
    brokers = {broker["id"] for broker in found["brokers"]}
    assert {part["leader"] for part in one["partitions"]} <= brokers
    everything = json.loads(kcat(kafka_bootstrap, "-L", "-J").stdout)
    assert topic in [each["topic"] for each in everything["topics"]]


def test_it_reads_what_it_wrote_with_keys_and_headers(kafka_bootstrap: str, topic: str) -> None:
    kcat(
        *(kafka_bootstrap, "-P", "-t", topic, "-K:", "-H", "a=1", "-H", "b=2"),
        given="first:one\nsecond:two\n",
    )
    form = "%p %o %k %s %h\n"
    assert lines(kafka_bootstrap, *FROM_START, "-t", topic, "-f", form) == [
        "0 0 first one a=1,b=2",
        "0 1 second two a=1,b=2",
    ]


def test_it_reads_the_last_ten_and_from_an_offset(kafka_bootstrap: str, topic: str) -> None:
    fill(kafka_bootstrap, topic, 30)
    read = ("-C", "-q", "-e", "-t", topic, "-f", "%o\n", "-o")
    assert lines(kafka_bootstrap, *read, "-10") == [str(at) for at in range(20, 30)]
    assert lines(kafka_bootstrap, *read, "25") == [str(at) for at in range(25, 30)]
    assert lines(kafka_bootstrap, *read, "end") == []


def test_it_asks_for_offsets_by_time(kafka_bootstrap: str, topic: str) -> None:
    fill(kafka_bootstrap, topic, 5)
    times = [int(line) for line in lines(kafka_bootstrap, *FROM_START, "-t", topic, "-f", "%T\n")]
    first = next(at for at, time in enumerate(times) if time >= times[3])
    for asked, offset in ((-1, 5), (-2, 0), (0, 0), (times[3], first), (times[-1] + 60_000, -1)):
        (answer,) = lines(kafka_bootstrap, "-Q", "-t", f"{topic}:0:{asked}")
        assert answer.endswith(f"offset {offset}"), asked


def test_a_group_goes_on_where_it_was(kafka_bootstrap: str, topic: str) -> None:
    fill(kafka_bootstrap, topic, 10)
    group = f"g{uuid4().hex[:12]}"
    earliest = ("-X", "auto.offset.reset=earliest")
    read = ("-G", group, "-q", *earliest, "-f", "%o\n", "-c")
    assert lines(kafka_bootstrap, *read, "6", topic) == [str(at) for at in range(6)]
    assert lines(kafka_bootstrap, *read, "4", topic) == [str(at) for at in range(6, 10)]


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_each_codec_is_used_and_read_again(codec: str, kafka_bootstrap: str, topic: str) -> None:
    # kcat stops compressing, in silence, where a server does not offer the oldest Produce.
    values = [f"value-{number}-{'x' * 40}" for number in range(200)]
    said = kcat(
        *(kafka_bootstrap, "-P", "-t", topic, "-z", codec, "-X", "debug=msg"),
        given="".join(f"{value}\n" for value in values),
    ).stderr
    sent = [line for line in said.splitlines() if "Produce MessageSet with" in line]
    assert sent
    assert all(line.endswith(f", {codec})") for line in sent)
    assert lines(kafka_bootstrap, *FROM_START, "-t", topic, "-f", "%s\n") == values


def test_records_of_a_megabyte_arrive_whole(kafka_bootstrap: str, topic: str) -> None:
    value = "0123456789" * 90_000
    kcat(kafka_bootstrap, "-P", "-t", topic, given=f"{value}\n")
    assert lines(kafka_bootstrap, *FROM_START, "-t", topic, "-f", "%S %s\n") == [
        f"{len(value)} {value}"
    ]


def ends_after_a_gap(bootstrap: str, topic: str, left: int, end: int) -> None:
    """kcat -e reads what is left and ends, though the last record is not the end of the log."""
    (answer,) = lines(bootstrap, "-Q", "-t", f"{topic}:0:-1")
    assert answer.endswith(f"offset {end}")
    for start in ("beginning", str(left)):
        read = ("-C", "-e", "-o", start, "-t", topic, "-f", "%o\n")
        done = kcat(bootstrap, *read)
        first = 0 if start == "beginning" else left
        assert done.stdout.split() == [str(at) for at in range(first, left)]
        assert f"Reached end of topic {topic} [0] at offset {end}" in done.stderr


@pytest.mark.long
def test_it_ends_after_a_gap_at_the_end_of_a_log_of_kafka(real_kafka: KafkaServer) -> None:
    topic = real_kafka.make_topic(1)
    fill(real_kafka.bootstrap, topic, 6)
    producer = real_kafka.producer(**{"transactional.id": uuid4().hex})
    producer.init_transactions(60)
    producer.begin_transaction()
    producer.produce(topic, b"never committed")
    producer.flush(60)
    producer.abort_transaction(60)
    # The record that was aborted, and the mark that says so; Kafka writes that after its answer.
    asked = (real_kafka.bootstrap, "-Q", "-t", f"{topic}:0:-1")
    assert eventually(lambda: lines(*asked)[0].endswith("offset 8"))
    ends_after_a_gap(real_kafka.bootstrap, topic, 6, 8)


async def test_it_ends_after_a_gap_at_the_end_of_a_log_of_the_gateway(tmp_path: Path) -> None:
    with running_broker() as broker:
        async with connect(broker.url) as mill:
            topic = await mill.create_topic("orders")
            receipts = await topic.publish_many(b"%d" % number for number in range(10))
            for receipt in receipts[6:]:
                await mill.jetstream.delete_message("orders", receipt.offset)
        with Gateway(broker.url, tmp_path) as gateway:
            ends_after_a_gap(gateway.bootstrap, "orders", 6, 10)


async def test_it_sees_a_topic_that_was_made_a_moment_ago_by_a_native_client(
    tmp_path: Path,
) -> None:
    with running_broker() as broker, Gateway(broker.url, tmp_path) as gateway:
        kcat(gateway.bootstrap, "-L")  # what the gateway knows, it knows from before
        async with connect(broker.url) as mill:
            topic = await mill.create_topic("fresh")
            await topic.publish(b"native", key="k")
        read = (*FROM_START, "-t", "fresh", "-f", "%o %k %s\n")
        assert lines(gateway.bootstrap, *read) == ["0 k native"]
