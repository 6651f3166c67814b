"""The gateway and Kafka side by side: who is measured, what it cost whom, and the rows of it."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bench.effort import cpu_seconds, family_of
from bench.harness import (
    OURS,
    Figures,
    PeerAbsent,
    Result,
    Skipped,
    better_of,
    raced,
    spread,
    take_turns,
    wanted,
)
from bench.kafka_clients import KafkaClients
from bench.kafka_gateway import Gateway
from bench.kafka_peer import KAFKA, KafkaServer
from bench.startup import COMMAND
from millstream.broker import Broker

__all__ = ["CPU", "RATE", "Load", "Names", "Row", "Side", "Stage", "gateway_side", "kafka_side"]

STATUS_SECONDS = 60.0
STEP = ", step of the gateway"
Names = Mapping[str, tuple[str, str]]  # figure -> what follows the name of the row, and the unit
RATE: Names = {"rate": ("", "records/s")}
# A server is the gateway and its broker together, or Kafka.
CPU: Names = {
    "client": (", CPU of the client", "us/record"),
    "server": (", CPU of the server", "us/record"),
    "gateway": (", CPU of the gateway", "us/record"),
    "broker": (", CPU of its broker", "us/record"),
    "busy": (", share of one core that the gateway used", "%"),  # near 100 it is the limit
}


@dataclass(frozen=True)
class Side:
    """One server as Kafka's clients see it, and its processes."""

    name: str
    clients: KafkaClients
    make_topic: Callable[[int], str]  # with so many partitions
    processes: Mapping[str, Callable[[], int]]  # by what they are
    restart: Callable[[], None]  # what it has in memory is gone; nothing for Kafka
    steps: Callable[[], dict[str, float]]  # CPU seconds of each step of the gateway, up to now

    @property
    def bootstrap(self) -> str:
        """Where clients begin."""
        return self.clients.bootstrap

    def families(self) -> dict[str, set[int]]:
        """The processes with those that they started."""
        return {name: {*family_of(pid())} for name, pid in self.processes.items() if pid()}


def gateway_side(gateway: Gateway, broker: Broker) -> Side:
    """The gateway on this broker. What is stored is as durable as the broker makes it."""
    clients = KafkaClients(gateway.bootstrap)

    def restart() -> None:
        gateway.stop()
        gateway.start()

    return Side(
        OURS,
        clients,
        clients.make_topic,
        {"gateway": lambda: gateway.pid, "broker": lambda: broker.pid},
        restart,
        lambda: gateway_steps(broker.url),
    )


def kafka_side(server: KafkaServer, *, fsync: bool) -> Side:
    """Kafka, with a sync before each answer or without."""
    return Side(
        KAFKA,
        server,
        lambda partitions: server.create_topic(fsync=fsync, partitions=partitions),
        {"kafka": lambda: server.pid},
        lambda: None,
        dict,
    )


def gateway_steps(url: str) -> dict[str, float]:
    """CPU seconds of each step since the gateway was started; PeerAbsent if it does not say."""
    done = subprocess.run(
        [*COMMAND, "gateway", "status", "--json", "--server", url],
        capture_output=True,
        text=True,
        check=False,
        timeout=STATUS_SECONDS,
    )
    if done.returncode:
        raise PeerAbsent(f"gateway status: {done.returncode}: {done.stderr[-300:].strip()}")
    try:
        found = added_steps(json.loads(done.stdout))
    except ValueError as error:
        raise PeerAbsent(f"gateway status gave no JSON: {error}") from error
    return found


def added_steps(books: Any) -> dict[str, float]:
    """The CPU seconds of all `steps` in it, wherever they are: gateways may be several processes.

    >>> added_steps({"gateways": [{"books": {"steps": {"decode": {"cpu_seconds": 2.0}}}}]})
    {'decode': 2.0}
    """
    total: dict[str, float] = {}
    inside = list(books.values()) if isinstance(books, dict) else books
    for part in inside if isinstance(inside, list) else ():
        for name, seconds in added_steps(part).items():
            total[name] = total.get(name, 0.0) + seconds
    steps = books.get("steps") if isinstance(books, dict) else None
    for name, entry in steps.items() if isinstance(steps, dict) else ():
        if isinstance(entry, dict) and "cpu_seconds" in entry:
            total[name] = total.get(name, 0.0) + float(entry["cpu_seconds"])
    return total


class Load:
    """Measures from its creation to `done`: time, and the CPU of each kind of process.

    The client is this process with all that it started, such as Java, but without the servers,
    also those of the other side.
    """

    def __init__(self, side: Side, servers: set[int]) -> None:
        self._side, self._servers = side, servers
        self._before = self._cpu()
        self._began = time.perf_counter()

    def done(self, records: int) -> Figures:
        """Records a second, the CPU of a record in microseconds, how busy the gateway was."""
        seconds = time.perf_counter() - self._began
        after = self._cpu()
        used = {
            name: (cpu - self._before.get(name, 0.0)) / records * 1e6 for name, cpu in after.items()
        }
        server = sum(cpu for name, cpu in used.items() if name != "client")
        found = {"rate": records / seconds, "server": server, **used}
        if "gateway" in used:
            found["busy"] = used["gateway"] * records / 1e6 / seconds * 100
        return found

    def _cpu(self) -> dict[str, float]:
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        client = cpu_seconds({*family_of(os.getpid())} - self._servers)
        found = {name: cpu_seconds(pids) for name, pids in self._side.families().items()}
        return {"client": client + ended.ru_utime + ended.ru_stime, **found}


def _nothing(_: Side) -> None:
    """For rows that need no preparation."""


@dataclass(frozen=True)
class Row:
    """What is measured: `records` records in each of so many rounds."""

    name: str
    names: Names
    records: int
    rounds: int
    prepare: Callable[[Side], object] = _nothing  # before the first round; not measured
    restarts: bool = False  # the gateway, in each round


@dataclass(frozen=True)
class Stage:
    """The gateway, and Kafka or why it is absent."""

    ours: Side
    kafka: Side | PeerAbsent

    @property
    def sides(self) -> list[Side]:
        """Those that are here."""
        return [self.ours] if isinstance(self.kafka, PeerAbsent) else [self.ours, self.kafka]

    def load(self, side: Side) -> Load:
        """Begin to measure."""
        families = (pids for one in self.sides for pids in one.families().values())
        return Load(side, set().union(*families))

    def beside(self, row: Row, work: Callable[[Side], Figures]) -> Iterator[Result | Skipped]:
        """The results of one piece of work, done by both in turns."""
        names = [row.name + text for text, _ in row.names.values()]
        if not wanted(row.name, *names, row.name + STEP):
            return
        for side in self.sides:
            row.prepare(side)
        works = {side.name: _bound(work, side) for side in self.sides}
        before = _steps(self.ours)
        taken = take_turns(works, row.rounds)
        after = _steps(self.ours)
        own, theirs = taken[OURS], taken.get(KAFKA, [])
        if isinstance(own, PeerAbsent):
            yield Skipped(row.name, str(own))
            return
        if isinstance(theirs, PeerAbsent):
            yield Skipped(f"{row.name} against {KAFKA}", str(theirs))
            theirs = []
        yield from figures_of(row, own, theirs)
        for found in (before, after):
            if isinstance(found, PeerAbsent):
                yield Skipped(row.name + STEP, str(found))
                return
        if not isinstance(before, PeerAbsent) and not isinstance(after, PeerAbsent):
            yield from steps_of(row, before, after)


def figures_of(row: Row, own: list[Figures], theirs: list[Figures]) -> Iterator[Result]:
    """A result for each figure; those that only the gateway has stand alone."""
    for figure, (text, unit) in row.names.items():
        mine = [one[figure] for one in own if figure in one]
        others = [one[figure] for one in theirs if figure in one]
        if mine and others:
            yield raced(row.name + text, unit, mine, KAFKA, others, better=better_of(unit))
        elif mine:
            yield Result(row.name + text, statistics.median(mine), unit, spread=spread(mine))


def _bound(work: Callable[[Side], Figures], side: Side) -> Callable[[], Figures]:
    return lambda: work(side)


def _steps(side: Side) -> dict[str, float] | PeerAbsent:
    try:
        return side.steps()
    except (PeerAbsent, subprocess.TimeoutExpired) as error:
        return PeerAbsent(str(error))


def steps_of(row: Row, before: Mapping[str, float], after: Mapping[str, float]) -> Iterator[Result]:
    """What each step of the gateway used for a record."""
    # One round more than is measured comes first. Books begin again when the gateway is restarted.
    records = row.records if row.restarts else row.records * (row.rounds + 1)
    for step, seconds in sorted(after.items()):
        used = seconds - (0.0 if row.restarts else before.get(step, 0.0))
        if used > 0:
            yield Result(f"{row.name}{STEP}: {step}", used / records * 1e6, "us/record")
