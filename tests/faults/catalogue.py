"""All scenarios by name, their faults, and what they need from the machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tests.faults import side_doors, sparked
from tests.faults.clustered import CLUSTERED, LEADERS, PARTITIONED, PARTITIONS
from tests.faults.disk import can_mount
from tests.faults.hardware import FLIPPED, MOUNTED
from tests.faults.kafka import KAFKA, KAFKA_KINDS, can_kafka
from tests.faults.nemesis import BROKER, CLIENTS, NETWORK
from tests.faults.network import can_partition
from tests.faults.scenarios import EVERYTHING, LEASED, PAUSED, SINGLE, Scenario
from tests.faults.side_doors import SIDE_DOORS
from tests.faults.sparked import SPARKED, can_spark
from tests.faults.storing import CLUSTER_STORE_KINDS, CLUSTER_STORES, STORE_KINDS, STORES

__all__ = ["KINDS", "SCENARIOS", "why_not"]

SCENARIOS: Final[dict[str, Scenario]] = {
    **SINGLE,
    **STORES,
    **SIDE_DOORS,
    **FLIPPED,
    **CLUSTERED,
    **CLUSTER_STORES,
    **PARTITIONED,
    **MOUNTED,
    **SPARKED,
    **KAFKA,
}
# The kinds of fault that every run of a scenario must include, however short it is.
KINDS: Final[dict[str, tuple[str, ...]]] = {
    "publish": LEASED,
    "pauses": PAUSED,
    "writers": (*BROKER, *NETWORK, *CLIENTS[:2]),
    "groups": LEASED,
    "process": EVERYTHING,
    "tables": (*BROKER, *NETWORK, *CLIENTS[:2]),
    "event-store": STORE_KINDS,
    "import": (*side_doors.KINDS, "kill import"),
    "clocks": (*side_doors.CLOCK_KINDS, "clock jump"),
    "overload": ("flood",),
    "flipped-byte": ("flipped byte",),
    "cluster": (*BROKER, *LEADERS, *CLIENTS),
    "cluster-tables": (*BROKER, *LEADERS),
    "cluster-event-store": CLUSTER_STORE_KINDS,
    "partitions": (*PARTITIONS, "kill leader"),
    "partition-tables": PARTITIONS,
    "power": ("power loss",),
    "cluster-power": ("power loss", "power loss of a node"),
    "power-periodic": ("power loss",),
    "cluster-power-periodic": ("power loss",),
    "full-disk": ("disk full",),
    "spark": sparked.KINDS,
    **KAFKA_KINDS,
}
_NEEDS: Final[dict[str, Callable[[], str | None]]] = {
    **dict.fromkeys(PARTITIONED, can_partition),
    **dict.fromkeys(MOUNTED, can_mount),
    **dict.fromkeys(SPARKED, can_spark),
    **dict.fromkeys(KAFKA, can_kafka),
}


def why_not(name: str) -> str | None:
    """Why a scenario cannot run on this machine; None if it can."""
    return _NEEDS[name]() if name in _NEEDS else None
