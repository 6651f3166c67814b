"""A real Kafka, and the Kafka gateway, as servers for tests.

Kafka comes as jars from Maven Central; tests that need it are skipped, with a word, where Java,
Maven or the jars are missing. A conftest.py that imports these fixtures makes them usable in its
folder.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.harness import PeerAbsent
from bench.kafka_gateway import Gateway
from bench.kafka_peer import KafkaServer
from bench.kafka_tools import Tools
from millstream.testing import running_broker

__all__ = ["kafka_bootstrap", "kafka_gateway", "kafka_tools", "real_kafka", "running_gateway"]


@pytest.fixture(scope="session")
def real_kafka() -> Iterator[KafkaServer]:
    """One Kafka for the session. Tests must not stop it."""
    try:
        server = KafkaServer()
    except (PeerAbsent, subprocess.TimeoutExpired) as error:
        pytest.skip(f"no real Kafka: {error}")
    with server:
        yield server


@pytest.fixture(scope="session")
def kafka_tools() -> Tools:
    """Kafka's own programs in Java."""
    try:
        return Tools()
    except (PeerAbsent, subprocess.TimeoutExpired) as error:
        pytest.skip(f"no tools of Kafka: {error}")


@contextmanager
def running_gateway(folder: Path) -> Iterator[Gateway]:
    """A broker with a gateway in a process of its own."""
    with running_broker() as broker, Gateway(broker.url, folder) as gateway:
        yield gateway


@pytest.fixture(scope="session")
def kafka_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """One gateway for the session. Tests must not stop it."""
    with running_gateway(tmp_path_factory.mktemp("gateway")) as gateway:
        yield gateway


@pytest.fixture(params=[pytest.param("real_kafka", marks=pytest.mark.long), "kafka_gateway"])
def kafka_bootstrap(request: pytest.FixtureRequest) -> str:
    """Where clients begin: each test that asks for it runs with a real Kafka and the gateway."""
    server: KafkaServer | Gateway = request.getfixturevalue(request.param)
    return server.bootstrap
