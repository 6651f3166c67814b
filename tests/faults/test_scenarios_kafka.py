"""The scenarios of Kafka's clients with many kinds of fault, short."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.kafka import KAFKA
from tests.faults.short import hold


@pytest.mark.parametrize("name", KAFKA)
async def test_a_scenario_keeps_its_promises_through_each_kind_of_fault(
    name: str, tmp_path: Path
) -> None:
    await hold(name, tmp_path)
