"""The scenarios of Kafka's clients with many kinds of fault, short.

`kafka-mixed` and `kafka-groups` do what those of `kafka_clients.py` do one by one, and more.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.kafka import KAFKA
from tests.faults.short import hold

LONG = ("kafka-mixed", "kafka-groups")
NAMES = [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in (*KAFKA,)]


@pytest.mark.parametrize("name", NAMES)
async def test_a_scenario_keeps_its_promises_through_each_kind_of_fault(
    name: str, tmp_path: Path
) -> None:
    await hold(name, tmp_path)
