"""Kafka's own programs in Java, with the gateway and with a real Kafka."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from bench.harness import Figures
from bench.kafka_clients import KafkaClients
from bench.kafka_gateway import Gateway
from bench.kafka_java import consumed, end_to_end, produced
from bench.kafka_tools import Tools

GROUPS = "consumer.group.ConsumerGroupCommand"
CONFIGS = "kafka.admin.ConfigCommand"
COUNT = 2_000


class Programs:
    """The programs, with one server and a topic of their own."""

    def __init__(self, tools: Tools, bootstrap: str) -> None:
        self._tools, self.bootstrap = tools, bootstrap
        self.clients = KafkaClients(bootstrap)
        self.group = f"g{uuid4().hex[:12]}"

    def run(self, name: str, *words: str, given: str = "", check: bool = True) -> str:
        """What a program printed, its errors included where it may fail."""
        address = ("--bootstrap-server", self.bootstrap)
        done = self._tools.run(name, *address, *words, given=given, check=check)
        return done.stdout if check else done.stdout + done.stderr

    def fill(self, topic: str, count: int) -> None:
        """Values 0, 1, 2 ... with the keys key-0 to key-6."""
        values = [b"%d" % number for number in range(count)]
        keys = [f"key-{number % 7}" for number in range(count)]
        self.clients.send(self.clients.producer(), topic, values, keys)

    def offsets(self, topic: str, time: str = "latest") -> dict[int, int]:
        """By partition, of GetOffsetShell."""
        text = self.run("GetOffsetShell", "--topic", topic, "--time", time)
        lines = [line.split(":") for line in text.splitlines() if line.startswith(f"{topic}:")]
        return {int(partition): int(offset) for _, partition, offset in lines}

    def described(self, topic: str) -> dict[int, tuple[int, int]]:
        """Committed offset and lag by partition, of ConsumerGroupCommand."""
        text = self.run(GROUPS, "--describe", "--group", self.group)
        rows = (line.split() for line in text.splitlines())
        found = [row for row in rows if row[:2] == [self.group, topic]]
        return {int(row[2]): (int(row[3]), int(row[5])) for row in found}

    def reset(self, topic: str, *how: str) -> dict[int, int]:
        """The new offset by partition."""
        words = ("--reset-offsets", "--group", self.group, "--topic", topic, *how, "--execute")
        rows = [line.split() for line in self.run(GROUPS, *words).splitlines()]
        return {int(row[2]): int(row[3]) for row in rows if row[:1] == [self.group]}


@pytest.fixture
def programs(kafka_tools: Tools, kafka_bootstrap: str) -> Iterator[Programs]:
    made = Programs(kafka_tools, kafka_bootstrap)
    yield made
    made.clients.forget()


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def named(found: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [one for one in found if one["name"] == name]


def position(record: dict[str, Any]) -> tuple[int, int, str]:
    return record["partition"], record["offset"], record["value"]


def read_by_verifiable_consumer(programs: Programs, topic: str, count: int) -> list[dict[str, Any]]:
    words = ("--group-id", programs.group, "--max-messages", str(count), "--verbose")
    return objects(programs.run("VerifiableConsumer", "--topic", topic, *words))


def test_what_the_verifiable_producer_has_acked_the_verifiable_consumer_reads_once(
    programs: Programs,
) -> None:
    topic = programs.clients.make_topic(3)
    words = ("--max-messages", str(COUNT), "--repeating-keys", "50")
    said = objects(programs.run("VerifiableProducer", "--topic", topic, *words))
    (totals,) = named(said, "tool_data")
    assert (totals["sent"], totals["acked"]) == (COUNT, COUNT)
    acked = [position(one) for one in named(said, "producer_send_success")]

    seen = read_by_verifiable_consumer(programs, topic, COUNT)
    read = [position(one) for one in named(seen, "record_data")]
    assert sorted(read) == sorted(acked)
    assert {value for _, _, value in acked} == {str(number) for number in range(COUNT)}
    by_partition = {part: [at for p, at, _ in acked if p == part] for part, _, _ in acked}
    assert all(sorted(ats) == list(range(len(ats))) for ats in by_partition.values())

    commits = named(seen, "offsets_committed")
    assert all(one["success"] for one in commits)
    last = {at["partition"]: at["offset"] for one in commits for at in one["offsets"]}
    assert last == {part: len(ats) for part, ats in by_partition.items()}


def test_a_topic_is_created_described_and_deleted_by_its_command(programs: Programs) -> None:
    topic = f"orders.v1_{uuid4().hex[:8]}"
    created = programs.run(
        *("TopicCommand", "--create", "--topic", topic, "--partitions", "3"),
        *("--config", "retention.ms=3600000"),
    )
    assert f"Created topic {topic}." in created

    text = programs.run("TopicCommand", "--describe", "--topic", topic)
    head, *rows = [line for line in text.splitlines() if topic in line]
    assert re.search(r"PartitionCount: 3\s", head)
    assert "retention.ms=3600000" in head
    assert [re.findall(r"Partition: (\d+)", row) for row in rows] == [["0"], ["1"], ["2"]]
    assert all(re.search(r"Leader: \d", row) for row in rows)

    programs.run("TopicCommand", "--delete", "--topic", topic)
    assert topic not in programs.run("TopicCommand", "--list").splitlines()


@pytest.mark.long
def test_a_topic_that_exists_is_refused_and_keeps_its_partitions(programs: Programs) -> None:
    topic = programs.clients.make_topic(3)
    again = programs.run("TopicCommand", "--create", "--topic", topic, check=False)
    assert f"Topic '{topic}' already exists" in again
    assert topic in programs.run("TopicCommand", "--list").splitlines()
    fewer = ("--alter", "--topic", topic, "--partitions", "2")
    refused = programs.run("TopicCommand", *fewer, check=False)
    assert "Error while executing topic command" in refused
    assert programs.offsets(topic) == dict.fromkeys(range(3), 0)


@pytest.mark.long
def test_the_gateway_says_why_a_topic_gets_no_more_partitions(
    kafka_tools: Tools, kafka_gateway: Gateway
) -> None:
    # Kafka adds them, and the events of a key are in two partitions from then on.
    programs = Programs(kafka_tools, kafka_gateway.bootstrap)
    topic = programs.clients.make_topic(1)
    more = ("--alter", "--topic", topic, "--partitions", "4")
    refused = programs.run("TopicCommand", *more, check=False)
    assert "the partition of a key depends on how many there are" in refused
    assert programs.offsets(topic) == {0: 0}


@pytest.mark.long
def test_a_topic_that_is_not_there_is_named(programs: Programs) -> None:
    missing = f"none{uuid4().hex[:8]}"
    for action in ("--describe", "--delete"):
        text = programs.run("TopicCommand", action, "--topic", missing, check=False)
        assert f"Topic '{missing}' does not exist as expected" in text


@pytest.mark.long
def test_configs_of_a_topic_are_altered_and_described(programs: Programs) -> None:
    topic = programs.clients.make_topic(1)
    entity = ("--entity-type", "topics", "--entity-name", topic)

    def described(*more: str) -> dict[str, str]:
        text = programs.run(CONFIGS, *entity, "--describe", *more)
        return dict(re.findall(r"^  ([\w.]+)=(\S*) sensitive=", text, re.MULTILINE))

    assert described().get("retention.ms") is None
    wanted = {"retention.ms": "3600000", "max.message.bytes": "200000"}
    text = ",".join(f"{name}={value}" for name, value in wanted.items())
    programs.run(CONFIGS, *entity, "--alter", "--add-config", text)
    assert described() == wanted

    programs.run(CONFIGS, *entity, "--alter", "--delete-config", "retention.ms")
    assert described() == {"max.message.bytes": "200000"}
    everything = described("--all")
    assert everything["cleanup.policy"] == "delete"
    assert int(everything["retention.ms"]) > 3_600_000 or everything["retention.ms"] == "-1"


@pytest.mark.long
@pytest.mark.parametrize("setting", ["nonsense.ms=1", "retention.ms=soon"])
def test_a_setting_that_is_unknown_or_wrong_is_refused_by_name(
    setting: str, programs: Programs
) -> None:
    topic = programs.clients.make_topic(1)
    entity = ("--entity-type", "topics", "--entity-name", topic)
    text = programs.run(CONFIGS, *entity, "--alter", "--add-config", setting, check=False)
    assert "InvalidConfigurationException" in text
    assert setting.partition("=")[0] in text.partition("InvalidConfigurationException")[2]


@pytest.mark.long
def test_offsets_of_a_group_are_described_reset_and_deleted(programs: Programs) -> None:
    topic = programs.clients.make_topic(2)
    programs.fill(topic, 100)
    ends = programs.offsets(topic)
    assert sum(ends.values()) == 100
    read_by_verifiable_consumer(programs, topic, 100)
    assert programs.group in programs.run(GROUPS, "--list").splitlines()
    assert programs.described(topic) == {part: (end, 0) for part, end in ends.items()}
    state = programs.run(GROUPS, "--describe", "--group", programs.group, "--state")
    assert re.search(rf"{programs.group}\s.*\sEmpty\s+0\s*$", state, re.MULTILINE)

    assert programs.reset(topic, "--to-earliest") == dict.fromkeys(ends, 0)
    assert programs.described(topic) == {part: (0, end) for part, end in ends.items()}
    assert programs.reset(f"{topic}:0", "--to-offset", "3") == {0: 3}
    assert programs.reset(f"{topic}:0", "--shift-by", "2") == {0: 5}
    programs.run(GROUPS, "--delete-offsets", "--group", programs.group, "--topic", f"{topic}:0")
    assert 0 not in programs.described(topic)

    deleted = programs.run(GROUPS, "--delete", "--group", programs.group)
    assert "was successful" in deleted
    assert programs.group not in programs.run(GROUPS, "--list").splitlines()


@pytest.mark.long
def test_a_group_reads_again_from_where_it_was_reset_to(programs: Programs) -> None:
    topic = programs.clients.make_topic(1)
    programs.fill(topic, 50)
    read_by_verifiable_consumer(programs, topic, 50)
    assert programs.reset(topic, "--to-offset", "40") == {0: 40}
    again = named(read_by_verifiable_consumer(programs, topic, 10), "record_data")
    assert [int(one["value"]) for one in again] == list(range(40, 50))


@pytest.mark.long
def test_a_group_with_a_member_is_described_with_it_and_not_reset(
    programs: Programs,
) -> None:
    topic = programs.clients.make_topic(1)
    programs.fill(topic, 10)
    consumer = programs.clients.consumer(topic, **{"group.id": programs.group, "client.id": "me"})
    try:
        consumer.subscribe([topic])
        messages: list[Any] = []
        while len(messages) < 10:
            messages += consumer.consume(10, 1.0)
        consumer.commit(asynchronous=False)
        text = programs.run(GROUPS, "--describe", "--group", programs.group)
        (row,) = [line.split() for line in text.splitlines() if f" {topic} " in line]
        assert row[2:6] == ["0", "10", "10", "0"]
        assert row[-1] == "me"
        words = ("--reset-offsets", "--group", programs.group, "--topic", topic)
        refused = programs.run(GROUPS, *words, "--to-earliest", "--execute", check=False)
        assert "Assignments can only be reset if the group" in refused
        removed = programs.run(GROUPS, "--delete", "--group", programs.group, check=False)
        assert "GroupNotEmptyException" in removed
    finally:
        consumer.close()


@pytest.mark.long
def test_offsets_of_a_topic_are_found_by_time(programs: Programs) -> None:
    topic = programs.clients.make_topic(1)
    producer = programs.clients.producer()
    for number in range(10):
        producer.produce(topic, b"%d" % number, timestamp=1_700_000_000_000 + 1_000 * number)
    assert not producer.flush(30)
    assert programs.offsets(topic) == {0: 10}
    assert programs.offsets(topic, "earliest") == {0: 0}
    assert programs.offsets(topic, "1700000003500") == {0: 4}
    assert programs.offsets(topic, "max-timestamp") == {0: 9}


@pytest.mark.long
def test_lines_of_the_console_producer_are_read_by_the_console_consumer(
    programs: Programs,
) -> None:
    topic = programs.clients.make_topic(1)
    lines = "one:first\ntwo:second\none:third\n"
    programs.run(
        *("ConsoleProducer", "--topic", topic, "--reader-property", "parse.key=true"),
        *("--reader-property", "key.separator=:"),
        given=lines,
    )
    shown = (
        word
        for name in ("key", "offset")
        for word in ("--formatter-property", f"print.{name}=true")
    )
    text = programs.run(
        *("consumer.ConsoleConsumer", "--topic", topic, "--from-beginning"),
        *("--max-messages", "3", "--timeout-ms", "60000", *shown),
    )
    rows = [line.split("\t") for line in text.splitlines() if line.startswith("Offset:")]
    assert rows == [
        ["Offset:0", "one", "first"],
        ["Offset:1", "two", "second"],
        ["Offset:2", "one", "third"],
    ]


@pytest.mark.long
@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_the_performance_programs_store_and_read_everything(codec: str, programs: Programs) -> None:
    topic, count = programs.clients.make_topic(1), str(COUNT)
    words = ("--num-records", count, "--record-size", "100", "--throughput", "-1")
    codec_words = ("--command-property", f"compression.type={codec}")
    text = programs.run("ProducerPerformance", "--topic", topic, *words, *codec_words)
    assert_positive(produced(text, COUNT))
    assert programs.offsets(topic) == {0: COUNT}
    read = ("--num-records", count, "--timeout", "60000")
    text = programs.run("ConsumerPerformance", "--topic", topic, *read)
    assert_positive(consumed(text, COUNT))


@pytest.mark.long
def test_the_latency_program_gets_back_each_record_that_it_sent(programs: Programs) -> None:
    # It compares key, value and headers, and fails when they differ.
    topic = programs.clients.make_topic(1)
    words = ("--topic", topic, "--num-records", "200", "--record-size", "100")
    text = programs.run(
        *("EndToEndLatency", *words, "--producer-acks", "all", "--record-key-size", "8"),
        *("--num-headers", "2", "--record-header-key-size", "5", "--record-header-size", "9"),
    )
    assert end_to_end(text)["average"] > 0
    assert programs.offsets(topic) == {0: 200}


def assert_positive(figures: Figures) -> None:
    assert figures["rate"] > 0
