"""The scenarios on a cluster of three, short.

Each kind of fault once, in the midst of work, with a fixed seed; `make faults` runs them long.
Nothing in them hurries: a slow machine takes its time.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.clustered import CLUSTERED, PARTITIONED
from tests.faults.hardware import CLUSTER_POWER
from tests.faults.short import hold
from tests.faults.storing import CLUSTER_STORES

# `cluster` goes through the same faults, and nothing is promised about `periodic`.
LONG = (
    *("cluster-tables", "partition-tables", "cluster-event-store", "cluster-power-periodic"),
    "partitions",
)
NAMES = [
    pytest.param(name, marks=pytest.mark.long if name in LONG else ())
    for name in (*CLUSTERED, *CLUSTER_STORES, *PARTITIONED, *CLUSTER_POWER)
]


@pytest.mark.parametrize("name", NAMES)
async def test_a_scenario_keeps_its_promises_through_each_kind_of_fault(
    name: str, tmp_path: Path
) -> None:
    await hold(name, tmp_path)
