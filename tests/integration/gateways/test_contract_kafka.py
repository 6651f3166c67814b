"""What is recorded of Kafka is what a real one does."""

from __future__ import annotations

import pytest

from bench.kafka_peer import KafkaServer
from tests.integration.gateways.kafka_contract.contract import (
    BEHAVIOURS,
    CLIENTS,
    observe,
    observed,
)


@pytest.mark.long
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_the_record_of_kafka_is_true(behaviour: str, client: str, real_kafka: KafkaServer) -> None:
    assert observe(behaviour, client, real_kafka.bootstrap) == observed(behaviour, client)
