"""Servers for all tests of gateways."""

from __future__ import annotations

from tests.kafka_peer import kafka_bootstrap, kafka_gateway, kafka_tools, real_kafka

__all__ = ["kafka_bootstrap", "kafka_gateway", "kafka_tools", "real_kafka"]
