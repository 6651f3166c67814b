"""Where the gateway differs from Kafka on purpose; docs/KAFKA.md lists the same."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["DIFFERENCES", "Difference", "expected"]


@dataclass(frozen=True)
class Difference:
    """One place of an observation that is not as Kafka's."""

    behaviour: str
    path: tuple[str | int, ...]  # where in the observation
    gateway: Any
    reason: str
    clients: tuple[str, ...] = ()  # none: all of them


DIFFERENCES: Final[list[Difference]] = []


def expected(behaviour: str, client: str, kafka: Any) -> Any:
    """What the gateway is to show where Kafka shows this."""
    wanted = copy.deepcopy(kafka)
    for one in DIFFERENCES:
        if one.behaviour != behaviour or (one.clients and client not in one.clients):
            continue
        if not one.path:
            wanted = one.gateway
            continue
        place = wanted
        for step in one.path[:-1]:
            place = place[step]
        place[one.path[-1]] = one.gateway
    return wanted
