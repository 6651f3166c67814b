"""Where the gateway differs from Kafka on purpose; docs/KAFKA.md lists the same."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["DIFFERENCES", "Difference", "Refusal", "expected"]


@dataclass(frozen=True)
class Refusal:
    """Instead of an observation: the behaviour ends with a request that is refused."""

    code: int


@dataclass(frozen=True)
class Difference:
    """One part of an observation that is not as Kafka's."""

    behaviour: str
    path: tuple[str | int, ...]  # where in the observation; empty: all of it
    gateway: Any
    reason: str
    clients: tuple[str, ...] = ()  # none: all of them


_PARTITIONS: Final = (
    "the partition of a key depends on how many there are, and consumers that read by key rely on "
    "it: a topic keeps the number of its partitions"
)

DIFFERENCES: Final[list[Difference]] = [
    Difference("a_topic_gets_more_partitions_and_never_fewer", (), Refusal(37), _PARTITIONS),
    Difference("a_group_grows_with_the_topic", (), Refusal(37), _PARTITIONS),
    Difference(
        "the_longest_name_is_allowed",
        (),
        Refusal(17),
        "a topic of Millstream has a name of at most 200 characters, one of Kafka of 249: it is "
        "part of the names of streams and of subjects",
    ),
    Difference(
        "odd_records_survive",
        ("a header that is null",),
        [[False, [["h", "b''"]]]],
        "headers of Millstream have a value: that of a header without one is empty",
        ("confluent-kafka", "aiokafka"),  # kafka-python cannot send it
    ),
]


def expected(behaviour: str, client: str, kafka: Any) -> Any:
    """What the gateway is to show where Kafka shows this; `Refusal` if it refuses to."""
    wanted = copy.deepcopy(kafka)
    for one in DIFFERENCES:
        if one.behaviour != behaviour or (one.clients and client not in one.clients):
            continue
        if not one.path:
            wanted = one.gateway
            continue
        part = wanted
        for step in one.path[:-1]:
            part = part[step]
        part[one.path[-1]] = one.gateway
    return wanted
