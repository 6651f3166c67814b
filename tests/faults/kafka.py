"""Clients of Kafka on topics of the gateway, while gateways, brokers and connections die."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from bench.kafka_gateway import Gateway
from tests.faults import nemesis
from tests.faults.checker import Findings, check_publishes, check_writer
from tests.faults.history import Progress
from tests.faults.kafka_checker import (
    Seen,
    check_commits,
    check_members,
    check_names,
    check_produced,
    check_readers,
    skipped_by_members,
)
from tests.faults.nemesis import Step, haunt
from tests.faults.proxy import Proxy
from tests.faults.scenarios import Scenario, sound_log
from tests.faults.supervisor import (
    END_SECONDS,
    START_SECONDS,
    WORK_POLL,
    Child,
    Orders,
    Stage,
    staged,
    until,
)

__all__ = ["KAFKA", "KAFKA_KINDS", "can_kafka"]

TOPIC: Final = "events"
PARTITIONS: Final = 3
WORKER: Final = "tests.faults.kafka_worker"
PRODUCERS: Final = ("kafka-produce", "kafka-produce-async")
READERS: Final = ("kafka-tail", "kafka-join")
KEEP_SECONDS: Final = 0.2  # between two looks at whether the gateway runs
RESTART_PAUSE: Final = 0.2
WORKED: Final = 10  # events that a client of Kafka wrote between two faults of a short run
SESSION_SECONDS: Final = 6.0

GATEWAY: Final = ("kill gateway", "restart gateway", "freeze gateway")
LINKS: Final = ("cut clients", "stall clients", "drop clients' bytes")
MIXED: Final = (*GATEWAY, *LINKS, "kill server", "cut", "kill Kafka producer")
GROUPED: Final = (
    *("kill gateway", "kill server", "cut clients", "stall"),
    *("kill Kafka member", "pause Kafka member", "freeze Kafka producer"),
)
EXPIRED: Final = ("expire head", "expire all", "kill gateway", "kill server")
KAFKA_KINDS: Final = {"kafka-mixed": MIXED, "kafka-groups": GROUPED, "kafka-retention": EXPIRED}


def can_kafka() -> str | None:
    """None if the clients are installed; otherwise why the scenarios cannot run."""
    for library, extra in (("kio", "kafka"), ("aiokafka", "kafka"), ("confluent_kafka", "dev")):
        if importlib.util.find_spec(library) is None:
            return f"it needs {library}: pip install millstream[{extra}]"
    return None


class GatewayKeeper:
    """Keeps a gateway running behind a proxy: the address of the proxy is what clients are told."""

    def __init__(self, stage: Stage, proxy: Proxy) -> None:
        self.proxy = proxy
        self._stage = stage
        self._gateway: Gateway | None = None
        self._changing = asyncio.Lock()

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.proxy.port}"

    async def start(self) -> None:
        """Start one; tried again while the broker is away."""
        self._last = ""
        if not await until(self._started, START_SECONDS, RESTART_PAUSE):
            self._stage.findings.problem("stuck", f"the gateway does not start: {self._last}")

    async def _started(self) -> bool:
        # On another port each time: while it is down, any process may take the one it had.
        folder = self._stage.orders.folder
        gateway = Gateway(self._stage.url, folder, advertised=self.proxy.port)
        try:
            await asyncio.to_thread(gateway.start)
        except RuntimeError as error:
            await asyncio.to_thread(gateway.kill)
            self._stage.findings.counts["starts of the gateway that failed"] += 1
            self._last = str(error)
            return False
        self._gateway = gateway
        self.proxy.target = ("127.0.0.1", gateway.port)
        return True

    async def keep(self) -> None:
        """Start it again whenever it has ended by itself."""
        while True:
            async with self._changing:
                if self._gateway is not None and not self._gateway.alive:
                    self._stage.findings.counts["gateways that ended"] += 1
                    await self.kill()
                    await self.start()
            await asyncio.sleep(KEEP_SECONDS)

    async def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        gateway, self._gateway = self._gateway, None
        self.proxy.target = None
        if gateway is not None:
            await asyncio.to_thread(gateway.kill if number is signal.SIGKILL else gateway.stop)

    @asynccontextmanager
    async def away(self, number: signal.Signals = signal.SIGKILL) -> AsyncIterator[None]:
        """Without a gateway for a while."""
        async with self._changing:
            await self.kill(number)
            try:
                yield
            finally:
                await self.start()

    async def freeze(self, seconds: float) -> None:
        async with self._changing:
            if self._gateway is not None:
                self._gateway.send_signal(signal.SIGSTOP)
                try:
                    await asyncio.sleep(seconds)
                finally:
                    self._gateway.send_signal(signal.SIGCONT)


_keepers: dict[int, GatewayKeeper] = {}  # by the id of the stage, for the faults


@asynccontextmanager
async def _kafka_stage(orders: Orders) -> AsyncIterator[tuple[Stage, GatewayKeeper]]:
    """A broker, a gateway, a proxy before each of them, and a topic."""
    async with staged(orders) as stage, Proxy("127.0.0.1", 0) as proxy:
        proxy.target = None
        keeper = _keepers[id(stage)] = GatewayKeeper(stage, proxy)
        try:
            async with stage.mill() as mill:
                await mill.create_topic(TOPIC, partitions=PARTITIONS)
            await keeper.start()
            keeping = asyncio.create_task(keeper.keep())
            try:
                yield stage, keeper
            finally:
                keeping.cancel()
                await asyncio.gather(keeping, return_exceptions=True)
        finally:
            for child in stage.children.values():  # before the gateway: they would wait for it
                await child.kill()
            await keeper.kill()
            del _keepers[id(stage)]


# -- faults -----------------------------------------------------------------------------------


async def _at_work(stage: Stage) -> None:
    """Return when clients of Kafka have got something stored from now on."""
    progress = Progress(stage.orders.folder, "k*.jsonl")
    enough = progress.count() + WORKED
    if not await until(lambda: progress.count() >= enough, END_SECONDS, WORK_POLL):
        stage.findings.problem("stuck", f"clients of Kafka got nothing done in {END_SECONDS:g} s")


Fault = Callable[[Stage, Step], Awaitable[None]]


def _working(fault: Fault) -> Fault:
    async def then(stage: Stage, step: Step) -> None:
        if stage.orders.short:
            await _at_work(stage)
        await fault(stage, step)

    return then


def _end_gateway(number: signal.Signals) -> Fault:
    async def fault(stage: Stage, step: Step) -> None:
        async with _keepers[id(stage)].away(number):
            await asyncio.sleep(step.length)

    return fault


async def _freeze_gateway(stage: Stage, step: Step) -> None:
    await _keepers[id(stage)].freeze(step.length * 2)


def _linked(action: Callable[[Proxy, Step], None]) -> Fault:
    async def fault(stage: Stage, step: Step) -> None:
        proxy = _keepers[id(stage)].proxy
        action(proxy, step)
        await asyncio.sleep(step.length)
        proxy.heal()

    return fault


def _cut(proxy: Proxy, step: Step) -> None:
    proxy.refusing = step.pick < 0.5
    proxy.cut()


def _stall(proxy: Proxy, _: Step) -> None:
    proxy.stall()


def _drop(proxy: Proxy, _: Step) -> None:
    proxy.dropping = True


def _one_of(stage: Stage, step: Step, *roles: str) -> Child:
    found = stage.of_role(*roles)
    return found[int(step.pick * len(found))]


def _kill_child(*roles: str) -> Fault:
    async def fault(stage: Stage, step: Step) -> None:
        child = _one_of(stage, step, *roles)
        await child.kill()
        await asyncio.sleep(step.length / 3)
        await child.start()

    return fault


def _pause_child(*roles: str, seconds: float) -> Fault:
    async def fault(stage: Stage, step: Step) -> None:
        child = _one_of(stage, step, *roles)
        child.signal(signal.SIGSTOP)
        await asyncio.sleep(seconds + step.length)
        child.signal(signal.SIGCONT)

    return fault


def _expire(everything: bool) -> Fault:
    """Retention removes the head of each partition, or all of it, while the gateway is away."""

    async def fault(stage: Stage, step: Step) -> None:
        async with _keepers[id(stage)].away(), stage.mill() as mill:
            topic = await mill.topic(TOPIC)
            for partition in topic.handle.partitions:
                state = (await mill.jetstream.stream_info(partition.stream)).state
                first, after = state.first_seq, state.last_seq + 1
                keep = after if everything else first + int((after - first) * step.pick)
                await mill.jetstream.purge_stream(partition.stream, {"seq": max(keep, 1)})
                stage.history.note("removed", partition=partition.number)

    return fault


nemesis.FAULTS.update(
    {
        "kill gateway": _working(_end_gateway(signal.SIGKILL)),
        "restart gateway": _working(_end_gateway(signal.SIGTERM)),
        "freeze gateway": _working(_freeze_gateway),
        "cut clients": _working(_linked(_cut)),
        "stall clients": _working(_linked(_stall)),
        "drop clients' bytes": _working(_linked(_drop)),
        "kill Kafka producer": _working(_kill_child(*PRODUCERS)),
        "freeze Kafka producer": _working(_pause_child(*PRODUCERS, seconds=0.5)),
        "kill Kafka member": _working(_kill_child("kafka-join")),
        "pause Kafka member": _working(_pause_child("kafka-join", seconds=SESSION_SECONDS)),
        "expire head": _working(_expire(everything=False)),
        "expire all": _working(_expire(everything=True)),
    }
)


# -- scenarios --------------------------------------------------------------------------------


async def _client(stage: Stage, name: str, role: str, **plan: Any) -> None:
    plan = {"topic": TOPIC, "partitions": PARTITIONS, "module": WORKER, **plan}
    await stage.worker(name, role, bootstrap=_keepers[id(stage)].bootstrap, **plan)


async def _run(orders: Orders, faults: Sequence[str], members: int, native: bool) -> Findings:
    strategy = orders.chance("strategy").choice(("range", "cooperative-sticky"))
    async with _kafka_stage(orders) as (stage, keeper):
        stage.findings.facts["strategy"] = strategy
        for number in range(2):
            await _client(stage, f"k{number}", "kafka-produce", keys=5, pace=0.004)
        await _client(stage, "ka", "kafka-produce-async", keys=5, pace=0.02)
        await _client(stage, "reader", "kafka-tail")
        for number in range(members):
            await _client(stage, f"member{number}", "kafka-join", strategy=strategy)
        if native:
            await stage.worker("p0", "produce", topic=TOPIC, keys=3, pace=0.05)
            await stage.worker(
                "w0", "write", topic=TOPIC, writer="packs", lanes=1, keys=3, pace=0.1
            )
        await haunt(stage, faults, orders.seconds)
        await _at_work(stage)
        await stage.end(*PRODUCERS, "produce", "write")
        return await _check(stage, keeper, bool(members), native)


async def _check(stage: Stage, keeper: GatewayKeeper, grouped: bool, native: bool) -> Findings:
    final, starts = await _scan(keeper)
    if grouped:
        await until(lambda: not skipped_by_members(stage.records(), final))
    await until(lambda: _read_to(stage, final))
    await stage.end(*READERS)
    records, findings = stage.records(), stage.findings
    findings.add(check_names(records, final))
    findings.add(check_produced(records, final, starts))
    findings.add(check_readers(records))
    if grouped:
        findings.add(check_members(records, final))
        committed = await _asked(keeper, "committed_offsets")
        findings.add(check_commits(records, committed))
    await _check_native(stage, final, native)
    return findings


async def _asked(keeper: GatewayKeeper, question: str) -> Any:
    from tests.faults import kafka_worker  # it loads the clients, which other scenarios do not need

    return await asyncio.to_thread(
        getattr(kafka_worker, question), keeper.bootstrap, TOPIC, PARTITIONS
    )


async def _scan(keeper: GatewayKeeper) -> tuple[list[Seen], dict[int, int]]:
    found: tuple[list[Seen], dict[int, int]] = await _asked(keeper, "scan")
    return found


def _read_to(stage: Stage, final: Sequence[Seen]) -> bool:
    """Whether the reader that began with the run has read to the end."""
    ends: dict[int, int] = {}
    for seen in final:
        ends[seen.partition] = max(ends.get(seen.partition, 0), seen.offset)
    for record in stage.records():
        end = ends.get(record["partition"]) if record["what"] == "seen" else None
        if end is not None and record["events"][-1][0] >= end:
            del ends[record["partition"]]
    return not ends


async def _check_native(stage: Stage, final: Sequence[Seen], native: bool) -> None:
    """The SDK reads the same events, and keeps its own promises among clients of Kafka."""
    stored = await sound_log(stage, TOPIC)
    kafka = sorted((seen.partition, seen.offset, str(seen.id)) for seen in final)
    own = [(event.partition, str(event.id)) for event in sorted(stored, key=lambda e: e.position)]
    if own != [(partition, name) for partition, _, name in kafka]:
        missing = {name for *_, name in kafka} ^ {name for _, name in own}
        stage.findings.problem(
            "unequal", f"the SDK reads other events than Kafka's clients: {sorted(missing)[:10]}"
        )
    if native:
        records = [record for record in stage.records() if record.get("via") != "kafka"]
        published = [record for record in records if record["who"].startswith("p0.")]
        written = [record for record in records if record["who"].startswith("w0.")]
        events = [event for event in stored if str(event.id).startswith("p0.")]
        stage.findings.add(_uncounted(check_publishes(published, events)))
        packs = [event for event in stored if str(event.id).startswith("packs:")]
        stage.findings.add(_uncounted(check_writer(written, packs)))


def _uncounted(findings: Findings) -> Findings:
    """Its events are counted already, with those of Kafka's clients."""
    del findings.counts["events"]
    return findings


async def kafka_mixed(orders: Orders) -> Findings:
    """Idempotent producers of two libraries, SDK producers between them, and a group."""
    return await _run(orders, MIXED, 2, native=True)


async def kafka_groups(orders: Orders) -> Findings:
    """A group whose members are killed and paused for longer than their sessions."""
    return await _run(orders, GROUPED, 3, native=False)


async def kafka_retention(orders: Orders) -> Findings:
    """What is stored is removed while the gateway is away: offsets go on, and never repeat."""
    return await _run(orders, EXPIRED, 0, native=False)


KAFKA: Final[dict[str, Scenario]] = {
    "kafka-mixed": kafka_mixed,
    "kafka-groups": kafka_groups,
    "kafka-retention": kafka_retention,
}
