"""What a behaviour of the contract is, and the small helpers that all of them use.

A behaviour does something with a client and returns what it saw, as plain data that does not
depend on chance: no times, no names of topics. Real Kafka's observations are in observed.json.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from tests.integration.gateways.kafka_contract.face import Client, Failure, Got, Member, Record

__all__ = [
    "BEHAVIOURS",
    "NOW_MS",
    "Behaviour",
    "behaviour",
    "digest",
    "eventually",
    "failure",
    "first_offset",
    "made",
    "new_name",
    "read",
    "read_all",
    "sample",
    "tried",
]

SECONDS = 60.0  # until something must have happened; a busy machine takes its time
FIRST_SECONDS = 20.0
QUIET_SECONDS = 1.0  # in which nothing must happen
NOW_MS = 1_750_000_000_000  # a time for records that does not change

Behaviour = Callable[[Client], Any]
BEHAVIOURS: dict[str, Behaviour] = {}


def behaviour(function: Behaviour) -> Behaviour:
    """Part of the contract, under its name."""
    BEHAVIOURS[function.__name__] = function
    return function


def new_name(prefix: str = "t") -> str:
    """For a topic or a group."""
    return f"{prefix}-{uuid.uuid4().hex[:12]}"


def made(client: Client, partitions: int = 1, **config: str) -> str:
    """A new topic that clients can use already; it keeps records of any time."""
    topic = new_name()
    admin = client.admin()
    admin.create(topic, partitions, 1, **{"retention_ms": "-1", **config})
    eventually(lambda: tried(lambda: admin.partitions(topic)) == partitions)
    return topic


def failure(call: Callable[[], Any]) -> int | None:
    """The code with which it fails; None if it does not."""
    try:
        call()
    except Failure as error:
        return error.code
    return None


def tried(call: Callable[[], Any]) -> Any:
    """Its result, or "error N"."""
    try:
        return call()
    except Failure as error:
        return f"error {error.code}"


def eventually(condition: Callable[[], bool], seconds: float = SECONDS) -> bool:
    """Whether it became true in time."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def read(member: Member, count: int, seconds: float = SECONDS) -> list[Got]:
    """As many records, or fewer if no more come in time."""
    until = time.monotonic() + seconds
    found: list[Got] = []
    while len(found) < count and time.monotonic() < until:
        found += member.poll(1.0)
    return found


def first_offset(member: Member) -> list[int]:
    """Of the first record that comes; empty if none does."""
    return [one.offset for one in read(member, 1, FIRST_SECONDS)][:1]


def read_all(client: Client, topic: str, count: int, partition: int = 0) -> list[Got]:
    """What a partition has, from its start, and that there is no more."""
    member = client.reader(topic, {partition: "earliest"})
    try:
        found = read(member, count)
        return found + member.poll(QUIET_SECONDS)
    finally:
        member.close()


def sample(count: int, size: int = 20) -> list[Record]:
    """Records that can be told apart, with keys, headers and times."""
    return [
        Record(
            value=b"value %d " % number + b"x" * size,
            key=b"key %d" % (number % 7),
            headers=[("number", b"%d" % number), ("even", b"yes" if number % 2 == 0 else b"no")],
            time_ms=NOW_MS + number * 10,
            partition=0,
        )
        for number in range(count)
    ]


def digest(records: Sequence[Got]) -> str:
    """Of keys, values, headers and times, in their order."""
    seen = [(one.key, one.value, one.headers, one.time_ms) for one in records]
    return hashlib.sha256(repr(seen).encode()).hexdigest()[:16]
