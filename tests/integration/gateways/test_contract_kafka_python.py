"""The contract with kafka-python: the gateway shows what real Kafka showed."""

from __future__ import annotations

import pytest

from bench.kafka_gateway import Gateway
from tests.integration.gateways.kafka_contract.contract import BEHAVIOURS, compared

CLIENT = "kafka-python"


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_the_gateway_behaves_as_kafka_does(behaviour: str, kafka_gateway: Gateway) -> None:
    seen, wanted = compared(behaviour, CLIENT, kafka_gateway.bootstrap)
    assert seen == wanted
