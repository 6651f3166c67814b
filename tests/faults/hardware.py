"""Scenarios of failing hardware: power, full disks, flipped bytes, clocks that jump."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from millstream.broker import Broker, BrokerSettings, Cluster, Durability, LogLoss
from millstream.errors import DataLoss, MillstreamError
from millstream.messaging import NewEvent
from tests.faults import nemesis
from tests.faults.checker import Findings, Stored, check_deliveries, check_publishes, check_writer
from tests.faults.clustered import LocalNode
from tests.faults.disk import Disk, lose_power
from tests.faults.history import History, Progress, body_of
from tests.faults.nemesis import Step, haunt
from tests.faults.scenarios import Scenario, sound_log
from tests.faults.supervisor import (
    START_SECONDS,
    WORKED,
    Node,
    Orders,
    SingleNode,
    Stage,
    staged,
    stored_events,
    until,
)

__all__ = ["CLUSTER_POWER", "FLIPPED", "MOUNTED", "UNCOUNTED"]

UNCOUNTED: Final = "did not serve again at all, so nothing was counted"
STORE: Final = "nodes/{}/store"
SYNC_SECONDS: Final = 5.0  # the default of `periodic`
SERVE_SECONDS: Final = 30.0  # for a cluster to elect its leaders after all nodes were gone
SHORT_SERVE_SECONDS: Final = 15.0  # in a short run, which fails for neither answer
SHORT_SYNC_SECONDS: Final = 1.0  # in a short run
FILLED_SECONDS: Final = 1.0
REST_SECONDS: Final = 6.0  # the keeper saves a checkpoint every five
READ_SECONDS: Final = 60.0  # to read and verify a small log, damaged or not


@asynccontextmanager
async def disk_stage(orders: Orders, count: int = 1, **settings: Any) -> AsyncIterator[Stage]:
    """One node or a cluster, each store on a disk of its own; `stage.disks` has them by node."""
    orders.folder.mkdir(parents=True, exist_ok=True)
    data = orders.folder / "data"
    chosen = BrokerSettings(data=data, **settings)
    # Under `periodic` replicas may never become current on their own: do not wait for long.
    patience = START_SECONDS if chosen.durability is Durability.FSYNC else START_SECONDS / 2
    running: Broker | Cluster = Broker(chosen) if count == 1 else Cluster(chosen, nodes=count)
    async with AsyncExitStack() as last:  # each step runs, even if the one before failed
        disks: dict[str, Disk] = {}
        for name in (f"n{n}" for n in range(1, count + 1)):
            image = orders.folder / f"{name}.img"
            disks[name] = await asyncio.to_thread(Disk, image, data / STORE.format(name))
            last.push_async_callback(asyncio.to_thread, disks[name].close)
        last.push_async_callback(asyncio.to_thread, running.stop, grace=5.0)
        await asyncio.to_thread(running.start, timeout=START_SECONDS)
        nodes: list[Node] = (
            [SingleNode(running, "n1")]
            if isinstance(running, Broker)
            else [LocalNode(running, name, patience) for name in running.nodes]
        )
        url, history = running.url, History(orders.folder, "nemesis")
        stage = Stage(orders, nodes, url, lambda: url, history, disks=disks)
        last.push_async_callback(stage.close)
        yield stage


def _lose_power(stage: Stage, nodes: list[Node]) -> None:
    lose_power([node.pid for node in nodes], [stage.disks[node.name] for node in nodes])
    for node in nodes:
        node.kill()
    for node in nodes:
        stage.disks[node.name].unmount()
        stage.disks[node.name].mount()


async def _power(stage: Stage, step: Step) -> None:
    """All nodes lose power in the same instant."""
    await asyncio.to_thread(_lose_power, stage, stage.nodes)
    await asyncio.sleep(step.length / 3)
    starts = [asyncio.to_thread(node.start) for node in stage.nodes]
    # Do not raise an error while other nodes still start: they would outlive the stage.
    for outcome in await asyncio.gather(*starts, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


async def _power_of_one(stage: Stage, step: Step) -> None:
    node = stage.nodes[int(step.pick * len(stage.nodes))]
    await asyncio.to_thread(_lose_power, stage, [node])
    await asyncio.sleep(step.length)
    await asyncio.to_thread(node.start)


async def _full(stage: Stage, step: Step) -> None:
    """Other programs fill the disk; after that the server needs a restart, as its health says."""
    node = stage.nodes[0]
    disk = stage.disks[node.name]
    stage.findings.counts["bytes filled"] += await asyncio.to_thread(disk.fill)
    await asyncio.sleep(FILLED_SECONDS + step.length)
    await asyncio.to_thread(disk.free)
    if step.pick < 0.5:
        await asyncio.to_thread(node.stop)
    else:
        await asyncio.to_thread(node.kill)
    await asyncio.to_thread(node.start)


nemesis.FAULTS.update(
    {"power loss": _power, "power loss of a node": _power_of_one, "disk full": _full}
)


async def _under(stage: Stage, faults: tuple[str, ...], **topic: Any) -> Findings:
    """Publishes, packs and a subscription."""
    async with stage.mill() as mill:
        await mill.create_topic("events", **topic)
        await mill.create_topic("packs", **topic)
    await stage.worker("p0", "produce", topic="events", keys=8, pace=0.004)
    await stage.worker("c0", "consume", topic="events")
    await stage.worker("w0", "write", topic="packs", writer="w", keys=5, pace=0.02, lanes=1)
    await haunt(stage, faults, stage.orders.seconds)
    await asyncio.gather(stage.end("produce"), stage.end("write"))
    stored = await sound_log(stage, "events")
    packs = await sound_log(stage, "packs")
    await until(lambda: check_deliveries(stage.records(), stored).sound)
    await stage.end("consume")
    records = stage.records()
    findings = stage.findings.add(check_publishes(records, stored))
    findings.add(check_deliveries(records, stored))
    return findings.add(check_writer(records, packs))


async def power(orders: Orders) -> Findings:
    """Power loss under `fsync`: acknowledged events are stored."""
    async with disk_stage(orders) as stage:
        return await _under(stage, ("power loss",))


async def cluster_power(orders: Orders) -> Findings:
    """Three replicas under `fsync`; one node, or all together, lose power."""
    async with disk_stage(orders, 3) as stage:
        return await _under(stage, ("power loss", "power loss of a node"), replicas=3)


async def power_periodic(orders: Orders) -> Findings:
    """Power loss under `periodic`: how many acknowledged events are lost; a figure, not a problem.

    Only counts are compared: the offsets of events that were lost before the broker's next
    checkpoint are used again.
    """
    return await _measured(orders, 1)


async def cluster_power_periodic(orders: Orders) -> Findings:
    """The same with three replicas: they do not help if all lose power together."""
    return await _measured(orders, 3)


async def _measured(orders: Orders, nodes: int) -> Findings:
    interval = SHORT_SYNC_SECONDS if orders.short else SYNC_SECONDS
    async with disk_stage(orders, nodes, durability="periodic", sync_interval=interval) as stage:
        async with stage.mill() as mill:
            await mill.create_topic("events", replicas=nodes)
        for disk in stage.disks.values():
            await asyncio.to_thread(
                disk.sync
            )  # the topic itself must survive; only events may be lost
        await stage.worker("p0", "produce", topic="events", keys=8, pace=0.004)
        await stage.ready()
        chance = orders.chance("power")
        for _ in range(max(1, int(orders.seconds / (interval * 2)))):
            # Some time after a sync: what came since is lost.
            await asyncio.sleep(interval + chance.random() * interval)
            if nodes == 1 or not stage.findings.counts["fault: power loss"]:
                await stage.worked()
            elif not await _serves_again(stage, nodes):  # it did, some seconds ago
                stage.findings.counts[UNCOUNTED] += 1
                return stage.findings
            stage.findings.counts["fault: power loss"] += 1
            await _power(stage, Step(0, "power loss", 0.3, 0))
            if nodes > 1 and not await _serves_again(stage, nodes):
                stage.findings.counts[UNCOUNTED] += 1
                return stage.findings
        await stage.end("produce")
        async with stage.mill() as mill:
            topic = await mill.topic("events")
            try:
                stored = await stored_events(topic)
            except DataLoss:
                stage.findings.counts["readers were told of the loss"] += 1
                stored = await stored_events(topic, fail_on_data_loss=False)
        measured = check_publishes(stage.records(), stored)
        lost = measured.problems.pop("lost", 0)
        # Some offsets are used again, so an earlier receipt may name another event.
        measured.problems.pop("claimed", 0)
        measured.problems.pop("reordered", 0)
        measured.examples.clear()
        measured.counts["lost under periodic, as documented"] = lost
        return stage.findings.add(measured)


async def _serves_again(stage: Stage, replicas: int) -> bool:
    """Whether publishes are acknowledged again; if not, do what docs/RELIABILITY.md advises.

    A figure, not a problem: under `periodic` replicas that lost their ends may never agree.
    """
    if await _serves(stage):
        return True
    stage.findings.counts["did not recover on its own"] += 1
    with contextlib.suppress(MillstreamError, TimeoutError):
        async with asyncio.timeout(SERVE_SECONDS), stage.mill() as mill:
            await mill.edit_topic("events", replicas=1)
            await mill.edit_topic("events", replicas=replicas)
    return await _serves(stage)


async def _serves(stage: Stage) -> bool:
    progress = Progress(stage.orders.folder)
    enough = progress.count() + WORKED
    limit = SHORT_SERVE_SECONDS if stage.orders.short else SERVE_SECONDS
    return await until(lambda: progress.count() >= enough, limit)


async def full_disk(orders: Orders) -> Findings:
    """Other programs fill the disk repeatedly; nothing acknowledged is lost."""
    async with disk_stage(orders) as stage:
        return await _under(stage, ("disk full",))


async def flipped_byte(orders: Orders) -> Findings:
    """One byte of a block changes: it is never served, and verify reports what is lost."""
    findings = Findings()
    chance = orders.chance("flips")
    loop = asyncio.get_running_loop()
    deadline = loop.time() + orders.seconds
    rounds = 0
    while loop.time() < deadline or rounds < len(FLIPS):
        folder = orders.folder / f"flip{rounds}"
        flip = Flip(*FLIPS[rounds % len(FLIPS)], rested=not orders.short and chance.random() < 0.5)
        await _flip_once(Orders(orders.scenario, rounds, 0, folder), flip, chance, findings)
        rounds += 1
    return findings


class Flip(NamedTuple):
    """The log whose byte is flipped, and how its broker ended before."""

    kind: str
    killed: bool
    rested: bool  # long enough for the keeper to have saved a checkpoint

    def __str__(self) -> str:
        how = f"{self.kind}, {'killed' if self.killed else 'stopped'}"
        return f"{how}, at rest" if self.rested else how


FLIPS: Final = (("packs", True), ("plain", False), ("plain", True), ("packs", False))


async def _flip_once(orders: Orders, flip: Flip, chance: random.Random, findings: Findings) -> None:
    async with staged(orders) as stage:
        broker = stage.nodes[0]
        names = [f"x:k{n % 7}:{n}" for n in range(1, 2001)]
        async with stage.mill() as mill:
            topic = await mill.create_topic("log")
            if flip.kind == "plain":
                await topic.publish_many(NewEvent(body_of(n), n.split(":")[1]) for n in names[:500])
            else:
                async with topic.writer("x") as writer:
                    for position, name in enumerate(names, 1):
                        await writer.write(body_of(name), name.split(":")[1], position=position)
                        if position % 50 == 0:
                            await writer.flush()
            before = await stored_events(topic)
        if flip.rested:
            await asyncio.sleep(REST_SECONDS)
        await asyncio.to_thread(broker.kill if flip.killed else broker.stop)
        await asyncio.to_thread(_flip, orders.folder / "data", chance)
        await asyncio.to_thread(broker.start)
        findings.counts["fault: flipped byte"] += 1
        findings.counts["operations"] += len(before)
        await _judge_flip(stage, before, str(flip), findings)


def _flip(data: Path, chance: random.Random) -> None:
    blocks = [b for b in data.rglob("msgs/*.blk") if b.parent.parent.name == "log"]
    block = chance.choice(sorted(blocks))
    content = bytearray(block.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    block.write_bytes(content)


async def _judge_flip(stage: Stage, before: list[Stored], how: str, findings: Findings) -> None:
    losses = await asyncio.to_thread(_losses, stage)
    async with stage.mill() as mill:
        try:
            async with asyncio.timeout(READ_SECONDS):
                topic = await mill.topic("log")
                after = await stored_events(topic)
                async for report in topic.admin.verify():
                    last = report
                reported = not last.sound
        except TimeoutError:
            findings.problem("stuck", f"{how}: reading {stage.orders.folder} does not end")
            return
        except MillstreamError as error:
            findings.counts[f"reported by an error ({how}): {type(error).__name__}"] += 1
            return
        findings.counts["events"] += len(after)
        wrong = set(after) - set(before)
        for event in wrong:
            findings.problem("corrupt", f"{how}: offset {event.offset} is served changed")
        if len(after) == len(before):
            findings.counts["nothing lost"] += 1
        elif reported:
            findings.counts[f"reported by verify ({how})"] += 1
        elif losses:
            certain = any(loss.marked is not None and loss.last < loss.marked for loss in losses)
            word = "as lost" if certain else "as lost or torn"
            findings.counts[f"reported by the broker at its start, {word} ({how})"] += 1
        else:
            findings.problem(
                "lost", f"{how}: {len(before) - len(after)} lost, and nothing reports it"
            )
        if losses and len(after) == len(before):
            findings.problem("claimed", f"{how}: {losses[0].text}; but nothing is lost")


def _losses(stage: Stage) -> tuple[LogLoss, ...]:
    (node,) = stage.nodes
    return node.broker.health().losses if isinstance(node, SingleNode) else ()


CLUSTER_POWER: Final[dict[str, Scenario]] = {
    "cluster-power": cluster_power,
    "cluster-power-periodic": cluster_power_periodic,
}
MOUNTED: Final[dict[str, Scenario]] = {
    "power": power,
    "power-periodic": power_periodic,
    **CLUSTER_POWER,
    "full-disk": full_disk,
}
FLIPPED: Final[dict[str, Scenario]] = {"flipped-byte": flipped_byte}
