"""All scenarios by name, and what each needs of the machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tests.faults.clustered import CLUSTERED, PARTITIONED
from tests.faults.disk import can_mount
from tests.faults.hardware import FLIPPED, MOUNTED
from tests.faults.network import can_partition
from tests.faults.scenarios import SINGLE, Scenario
from tests.faults.side_doors import SIDE_DOORS
from tests.faults.sparked import SPARKED, can_spark

__all__ = ["SCENARIOS", "why_not"]

SCENARIOS: Final[dict[str, Scenario]] = {
    **SINGLE,
    **SIDE_DOORS,
    **FLIPPED,
    **CLUSTERED,
    **PARTITIONED,
    **MOUNTED,
    **SPARKED,
}
_NEEDS: Final[dict[str, Callable[[], str | None]]] = {
    **dict.fromkeys(PARTITIONED, can_partition),
    **dict.fromkeys(MOUNTED, can_mount),
    **dict.fromkeys(SPARKED, can_spark),
}


def why_not(name: str) -> str | None:
    """Why a scenario cannot run here; None when it can."""
    return _NEEDS[name]() if name in _NEEDS else None
