"""franz-go, the client in Go, with the gateway and with a real Kafka."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from uuid import uuid4

import pytest

from bench.kafka_clients import KafkaClients
from bench.kafka_peer import end_with_parent

SOURCE = Path(__file__).parent / "franz_go"
FETCH_SECONDS = 300.0
BUILD_SECONDS = 500.0
COUNT = 1_000

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of `franz_go/`, built with the libraries of the Go proxy."""
    go = shutil.which("go")
    if go is None:
        pytest.skip("go is not installed")

    def run(*words: str, timeout: float) -> subprocess.CompletedProcess[str]:
        command = [go, *words]
        return subprocess.run(
            command, cwd=SOURCE, capture_output=True, text=True, check=False, timeout=timeout
        )

    try:
        fetched = run("mod", "download", timeout=FETCH_SECONDS)
    except subprocess.TimeoutExpired:
        pytest.skip("franz-go could not be fetched in time")
    if fetched.returncode:
        pytest.skip(f"franz-go could not be fetched: {fetched.stderr[-300:].strip()}")
    built = tmp_path_factory.mktemp("franz_go") / "franz_go"
    done = run("build", "-o", str(built), ".", timeout=BUILD_SECONDS)
    assert done.returncode == 0, done.stderr
    return built


@pytest.mark.parametrize("partitions", [1, 3])
def test_franz_go_writes_and_reads_as_a_group(
    partitions: int, program: Path, kafka_bootstrap: str
) -> None:
    topic = KafkaClients(kafka_bootstrap).make_topic(partitions)
    done = subprocess.run(
        [program, kafka_bootstrap, topic, f"g{uuid4().hex[:12]}", str(COUNT)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        preexec_fn=end_with_parent,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "acked": COUNT,
        "read": COUNT,
        "wrong": 0,
        "headers": 1,
        "again": 0,
        "last_value": True,
    }
