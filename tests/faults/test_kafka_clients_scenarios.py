"""The scenarios with Kafka clients, short.

Each kind of fault once, or one kind several times, in the midst of work, with a fixed seed;
`make faults` runs them long. Nothing in them hurries: a slow machine takes its time.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.kafka_clients import KAFKA_CLIENTS
from tests.faults.short import hold


@pytest.mark.parametrize("name", list(KAFKA_CLIENTS))
async def test_a_scenario_keeps_its_promises_through_each_kind_of_fault(
    name: str, tmp_path: Path
) -> None:
    await hold(name, tmp_path)
