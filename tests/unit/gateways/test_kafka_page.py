"""docs/KAFKA.md says what the gateway does: its tables are compared with the code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from bench.kafka_peer import KAFKA
from bench.peers_spark_start import CONNECTOR
from millstream.declared import declared_fields, default_text
from millstream.gateways.kafka.group_members import GroupBounds
from millstream.gateways.kafka.kafka_topic import HIDDEN
from millstream.gateways.kafka.partition_offsets import RESERVED, SAVE_MESSAGES
from millstream.gateways.kafka.partition_writer import WAITING_BYTES_MAX
from millstream.gateways.kafka.producer_state import PRODUCERS_MAX
from millstream.gateways.kafka.protocol import VERSIONS
from millstream.gateways.kafka.settings import KafkaSettings
from millstream.gateways.kafka.topic_configs import CONFIGS
from tests.integration.gateways.kafka_contract.differences import DIFFERENCES

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "KAFKA.md").read_text()
TEXT = " ".join(PAGE.split())
MEBIBYTE = 1024 * 1024
JAVA = "Kafka's programs in Java"


def tables(heading: str) -> Iterator[list[list[str]]]:
    """The rows of each table under a heading, without the row of titles; names without quotes."""
    part = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    for block in re.findall(r"(?:^\|.*\n)+", part, re.MULTILINE):
        lines = block.splitlines()[2:]
        yield [[cell.strip().strip("`") for cell in line[1:-1].split("|")] for line in lines]


def test_the_calls_and_their_versions() -> None:
    (rows,) = tables("Calls and versions")
    served = {
        "".join(word.capitalize() for word in api.name.split("_")): (str(int(api)), low, high)
        for api, (low, high) in VERSIONS.items()
    }
    said = {name: (number, *map(int, versions.split(" to "))) for name, number, versions in rows}
    assert said == served


def test_the_settings_of_topics() -> None:
    said = dict(zip(("setting", "kept", "fixed"), tables("Settings of topics"), strict=True))
    for kind, rows in said.items():
        known = {name: one for name, one in CONFIGS.items() if one.kind.value == kind}
        assert {row[0]: row[1] for row in rows} == {n: one.default for n, one in known.items()}
    assert {row[0]: row[2] for row in said["fixed"]} == {
        name: one.why for name, one in CONFIGS.items() if one.why
    }


def test_the_settings_of_the_gateway() -> None:
    (rows,) = tables("Settings of the gateway")
    declared = [
        [one.name or item.name, default_text(one, item.default) or "", one.help.replace("|", r"\|")]
        for item, one in declared_fields(KafkaSettings)
    ]
    assert rows == declared


def test_the_differences_from_kafka_have_their_reasons() -> None:
    missing = [one for one in DIFFERENCES if " ".join(one.reason.split()) not in TEXT]
    assert not missing


def test_the_steps_whose_time_is_counted() -> None:
    (rows,) = tables("Sizing")
    sources = [path.read_text() for path in (ROOT / "millstream/gateways").rglob("*.py")]
    steps = {name for source in sources for name in re.findall(r'\.step\("([^"]+)"\)', source)}
    assert {row[0] for row in rows} == steps


def test_the_clients_are_those_that_tests_use() -> None:
    (rows,) = tables("Clients")
    said = {row[0].split(" (")[0].partition(":")[0]: row[1] for row in rows}
    locked = dict(
        line.split(" ;")[0].split("==")
        for line in (ROOT / "requirements.lock").read_text().splitlines()
    )
    for name in ("confluent-kafka", "kafka-python", "aiokafka"):
        assert said[name] == locked[name]
    go = (ROOT / "tests/integration/gateways/franz_go/go.mod").read_text()
    assert f"franz-go v{said['franz-go']}\n" in go
    assert f"Kafka {said[JAVA]}" == KAFKA
    assert said["Spark's connector, `spark-sql-kafka-0-10`"].startswith(CONNECTOR)


def test_the_limits() -> None:
    bounds = GroupBounds()
    for text in (
        f"the {PRODUCERS_MAX:,} producers",
        f"up to {RESERVED:,} are skipped",
        f"or {SAVE_MESSAGES:,} messages",
        f"more than {WAITING_BYTES_MAX // MEBIBYTE} MiB wait",
        f"{bounds.max_groups:,} groups, {bounds.max_members:,} members in each",
        f"sessions of {bounds.min_session:.0f} seconds to {bounds.max_session / 60:.0f} minutes",
        *(f"`{name}`" for name in HIDDEN),
    ):
        assert text in TEXT
    assert bounds.offsets_retention == 7 * 86_400
    assert "expire after seven days" in TEXT
