"""Kafka clients and the SDK on one topic, while gateways, brokers and connections break.

One kind of trouble in each scenario, so that a short run is short; all clients work in all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench.kafka_gateway import Gateway
from tests.faults import nemesis
from tests.faults.checker import Findings, check_publishes
from tests.faults.kafka_clients_checker import (
    MEMBER,
    Logged,
    check_answered,
    check_commits,
    check_group,
    check_offsets,
    check_produced,
    check_readers,
    check_same,
    unprocessed,
)
from tests.faults.kafka_clients_load import read_all
from tests.faults.nemesis import NETWORK, Step, haunt
from tests.faults.proxy import Proxy
from tests.faults.scenarios import Scenario, sound_log
from tests.faults.supervisor import (
    CATCH_UP_SECONDS,
    END_SECONDS,
    REPOSITORY,
    Child,
    Orders,
    Stage,
    staged,
    until,
)

__all__ = ["KAFKA_CLIENTS", "KAFKA_CLIENT_KINDS", "can_kafka"]

TOPIC: Final = "events"
GROUP: Final = "team"
PARTITIONS: Final = 3
SESSION: Final = 6.0  # seconds, the shortest that there is
NATIVE: Final = "s0"  # the SDK's producer
FREEZE: Final = 2.0  # seconds that a gateway is stopped for, at least
LAST_SECONDS: Final = 120.0  # to read everything at the end
CHECK_SECONDS: Final = 0.5  # between two looks at long histories

KAFKA_CLIENT_KINDS: Final[dict[str, tuple[str, ...]]] = {
    "kafka-gateway": ("end gateway",),
    "kafka-broker": ("end broker",),
    "kafka-network": NETWORK,
    "kafka-pauses": ("pause member", "stop gateway a while"),
}
SHORT_KILLS: Final = 3  # of one kind in a short run
# What is done between two faults of a short run: values answered, commits, and times of reading.
WORKED: Final = {"p0": 10, "p1": 10, "a0": 10, NATIVE: 1, "settled": 1, "f0": 1, "seen": 1}
AT_WORK: Final = 0.7  # share of the faults in a long run that wait for that


def can_kafka() -> str | None:
    """None if the clients are installed; otherwise why the scenarios cannot run."""
    for library, extra in (("kio", "kafka"), ("aiokafka", "kafka"), ("confluent_kafka", "dev")):
        if importlib.util.find_spec(library) is None:
            return f"it needs {library}: pip install millstream[{extra}]"
    return None


class KafkaChild(Child):
    """A process of kafka_clients_load.py."""

    async def start(self) -> None:
        orders = self._stage.orders
        plan = {
            "folder": str(orders.folder),
            "seed": orders.seed,
            "name": self.name,
            "life": self.lives,
            **self._plan,
        }
        self.lives += 1
        words = ("tests.faults.kafka_clients_load", self.role, json.dumps(plan))
        with (orders.folder / f"{self.name}.err").open("ab") as errors:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", *words), cwd=REPOSITORY, stderr=errors
            )


class Guarded:
    """The gateway behind a proxy, whose address is the one that it advertises.

    While it is down, any process may take its port. So the proxy passes nothing on meanwhile.
    """

    def __init__(self, stage: Stage, front: Proxy) -> None:
        self._stage, self._front = stage, front
        self.gateway = Gateway(stage.url, stage.orders.folder, advertised=front.port)

    @property
    def bootstrap(self) -> str:
        return self.gateway.bootstrap

    async def start(self) -> None:
        await asyncio.to_thread(self.gateway.start)
        self._front.target = ("127.0.0.1", self.gateway.port)

    async def kill(self) -> None:
        self.check()
        self._front.target = None
        await asyncio.to_thread(self.gateway.kill)

    def check(self) -> None:
        """One that ended on its own is a problem."""
        if not self.gateway.alive:
            text = f"the gateway ended on its own: {self.gateway.words()}"
            self._stage.findings.problem("crashed", text)


_gateways: dict[int, Guarded] = {}  # by the id of the stage, for the faults


class Work:
    """Counts what the clients have done, reading only new records."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: Counter[Path] = Counter()
        self._done: Counter[str] = Counter()

    def done(self) -> Counter[str]:
        """What was answered to each producer, and what the group and the reader have done."""
        for file in self._folder.glob("*.jsonl"):
            with file.open("rb") as notes:
                notes.seek(self._read[file])
                fresh = notes.read()
            complete = fresh[: fresh.rfind(b"\n") + 1]
            self._read[file] += len(complete)
            name = file.name.split(".")[0]
            for what in ("ok", "settled", "seen"):
                count = complete.count(f'"what":"{what}"'.encode())
                self._done[name if name in WORKED else what] += count
        return self._done.copy()


class KafkaStage(Stage):
    """A stage where a fault comes after every client has worked, not only those of the broker."""

    async def worked(self) -> None:
        work = Work(self.orders.folder)
        before = work.done()

        def grown() -> bool:
            now = work.done()
            return all(now[who] >= before[who] + more for who, more in WORKED.items())

        if not await until(grown, END_SECONDS):
            done = dict(work.done() - before)
            self.findings.problem("stuck", f"within {END_SECONDS:g} s the clients did {done}")


async def _at_work(stage: Stage, step: Step) -> None:
    """In a long run: mostly when everybody is back at work, sometimes while they are on the way.

    What follows a restart takes clients longer than the pause before the next fault.
    """
    if not stage.orders.short and step.pick < AT_WORK:
        await stage.worked()


@asynccontextmanager
async def guarded(orders: Orders) -> AsyncIterator[Stage]:
    """A broker, a gateway, a proxy in front of each; the faults of the network hit the clients."""
    async with staged(orders) as plain, Proxy("127.0.0.1", 0) as front:
        front.target = None
        stage = KafkaStage(**vars(plain))  # `plain` ends its processes: they share the list
        stage.proxy = front
        one = Guarded(stage, front)
        _gateways[id(stage)] = one
        try:
            await one.start()
            yield stage
            one.check()
        finally:
            one.gateway.send_signal(signal.SIGCONT)
            await asyncio.to_thread(one.gateway.kill)
            del _gateways[id(stage)]


# -- faults ---------------------------------------------------------------------------------


async def _end_gateway(stage: Stage, step: Step) -> None:
    await _at_work(stage, step)
    one = _gateways[id(stage)]
    await one.kill()
    await asyncio.sleep(step.length)
    await one.start()


async def _end_broker(stage: Stage, step: Step) -> None:
    await _at_work(stage, step)
    await nemesis.kill(stage.nodes[0], step.length)


async def _stop_gateway(stage: Stage, step: Step) -> None:
    one = _gateways[id(stage)]
    one.gateway.send_signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(FREEZE + step.length)
    finally:
        one.gateway.send_signal(signal.SIGCONT)


async def _pause_member(stage: Stage, step: Step) -> None:
    """Stop a member for longer than its session: the other one takes over."""
    await _at_work(stage, step)
    members = [child for child in stage.of_role("consume") if child.alive]
    child = members[int(step.pick * len(members))]
    child.signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(SESSION * (1.3 + step.length / 3))
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.signal(signal.SIGCONT)


nemesis.FAULTS.update(
    {
        "end gateway": _end_gateway,
        "end broker": _end_broker,
        "stop gateway a while": _stop_gateway,
        "pause member": _pause_member,
    }
)


# -- the run --------------------------------------------------------------------------------


async def _child(stage: Stage, name: str, role: str, **plan: Any) -> None:
    common = {
        "bootstrap": _gateways[id(stage)].bootstrap,
        "topic": TOPIC,
        "partitions": PARTITIONS,
        "group": GROUP,
        "lease": SESSION,
    }
    child = stage.children[name] = KafkaChild(stage, name, role, {**common, **plan})
    await child.start()


async def _run(orders: Orders, faults: Sequence[str]) -> Findings:
    """Producers of three kinds, a group, and a reader of everything."""
    async with guarded(orders) as stage:
        async with stage.mill() as mill:
            await mill.create_topic(TOPIC, partitions=PARTITIONS)
        await stage.worker(NATIVE, "produce", topic=TOPIC, keys=4, pace=0.03)
        for number in range(2):
            await _child(stage, f"p{number}", "produce", pace=0.05)
            await _child(stage, f"{MEMBER}{number}", "consume")
        await _child(stage, "a0", "produce-too", pace=0.08)
        await _child(stage, "f0", "follow")
        if not await until(lambda: _grouped(stage), END_SECONDS):
            stage.findings.problem("stuck", f"no group of two in {END_SECONDS:g} s")
        await haunt(stage, faults, orders.seconds)
        await stage.end("produce", "produce-too")
        return await _judge(stage)


def _grouped(stage: Stage) -> bool:
    """Whether both members have partitions: the first one had to give some back."""
    having = {r["who"] for r in stage.records() if r["what"] == "assigned" and r["partitions"]}
    return len(having) == 2


async def _judge(stage: Stage) -> Findings:
    """Read everything, wait until the group and the other readers have it, and compare."""
    bootstrap, findings = _gateways[id(stage)].bootstrap, stage.findings
    log: list[Logged] = await asyncio.to_thread(
        read_all, bootstrap, TOPIC, PARTITIONS, LAST_SECONDS
    )
    for who in (MEMBER, "f"):
        if not await until(
            partial(_all_read, stage, log, who), CATCH_UP_SECONDS, pause=CHECK_SECONDS
        ):
            findings.problem("stuck", f"'{who}' did not catch up in {CATCH_UP_SECONDS:g} s")
    await stage.end("consume", "follow")
    stored = await sound_log(stage, TOPIC)
    records = stage.records()
    findings.add(check_produced(records, log)).add(check_answered(records))
    findings.add(check_offsets(records, log)).add(check_same(log, [one.id for one in stored]))
    findings.add(check_readers(records, log)).add(check_commits(records))
    findings.add(check_group(records, log))
    native = [r for r in records if r["who"].startswith(f"{NATIVE}.")]
    own = [one for one in stored if (one.id or NATIVE).startswith(NATIVE)]
    findings.add(check_publishes(native, own))
    for record in records:
        if record["what"] in ("refused", "failed", "uncommitted"):
            findings.counts[f"{record['what']}: {record['error'][:60]}"] += 1
    text = await asyncio.to_thread((stage.orders.folder / "gateway.log").read_text, "utf-8")
    findings.counts["tracebacks in the gateway's log"] += text.count("Traceback (most recent")
    return findings


def _all_read(stage: Stage, log: Sequence[Logged], who: str) -> bool:
    return not unprocessed(stage.records(), log, who)


async def _scenario(name: str, orders: Orders) -> Findings:
    faults = KAFKA_CLIENT_KINDS[name]
    return await _run(orders, faults * SHORT_KILLS if len(faults) == 1 else faults)


KAFKA_CLIENTS: Final[dict[str, Scenario]] = {
    name: partial(_scenario, name) for name in KAFKA_CLIENT_KINDS
}
