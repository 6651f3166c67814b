"""Spark rows beside Kafka."""

from __future__ import annotations

from collections.abc import Iterator

from bench.harness import PeerAbsent, Result, Skipped
from bench.kafka_peer import KafkaServer


def rows(kafka: KafkaServer | PeerAbsent, quick: bool) -> Iterator[Result | Skipped]:
    yield from ()
