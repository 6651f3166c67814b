"""Faults: what they do, and when; the seed decides.

The schedule of a run is decided before it starts, so the same seed gives the same faults with the
same lengths and pauses. What the processes make of them depends on the machine as well: a run that
finds something is repeated with its seed until it shows again.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

from tests.faults.supervisor import Child, Node, Stage

__all__ = [
    "BROKER",
    "CLIENTS",
    "FAULTS",
    "NETWORK",
    "PAUSES",
    "Step",
    "freeze",
    "haunt",
    "kill",
    "schedule",
]

PRODUCING: Final = ("produce", "write", "table", "append")
CONSUMING: Final = ("consume", "join", "transform")
LEASED: Final = ("consume", "join")
SHORT_LENGTHS: Final = (0.05, 0.2, 0.5)  # seconds of a fault in a short run


class Step(NamedTuple):
    """One fault of the schedule."""

    pause: float  # seconds before it
    fault: str
    length: float  # its duration in seconds
    pick: float  # 0 to 1: which target it hits


def schedule(chance: random.Random, faults: Sequence[str], seconds: float) -> list[Step]:
    """The faults of a run; every kind occurs before any is repeated."""
    steps: list[Step] = []
    total = 0.0
    bag: list[str] = []
    while total < seconds:
        if not bag:
            bag = list(faults)
            chance.shuffle(bag)
        step = Step(
            pause=chance.uniform(0.2, 2.0),
            fault=bag.pop(),
            length=chance.choice((0.05, 0.3, 0.8, 1.5, 3.0)),
            pick=chance.random(),
        )
        steps.append(step)
        total += step.pause + step.length
    return steps


async def haunt(stage: Stage, faults: Sequence[str], seconds: float) -> None:
    """Inject faults for this long (each kind once in a short run), then end all of them."""
    await stage.ready()
    if stage.orders.short:
        await _each_once(stage, faults)
    else:
        await _for_long(stage, faults, seconds)
    if stage.proxy is not None:
        stage.proxy.heal()


async def _each_once(stage: Stage, faults: Sequence[str]) -> None:
    chance = stage.orders.chance("nemesis")
    for fault in chance.sample(faults, len(faults)):
        await stage.worked()
        await _strike(stage, Step(0.0, fault, chance.choice(SHORT_LENGTHS), chance.random()))
    await stage.worked()


async def _for_long(stage: Stage, faults: Sequence[str], seconds: float) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    for step in schedule(stage.orders.chance("nemesis"), faults, seconds * 2):
        if loop.time() + step.pause > deadline:
            break
        await asyncio.sleep(step.pause)
        await _strike(stage, step)
    await asyncio.sleep(max(0.0, deadline - loop.time()))


async def _strike(stage: Stage, step: Step) -> None:
    stage.history.note("fault", kind=step.fault, length=step.length)
    await FAULTS[step.fault](stage, step)
    stage.findings.counts[f"fault: {step.fault}"] += 1
    stage.history.note("healed", kind=step.fault)
    await stage.crashes()


def _node(stage: Stage, step: Step) -> Node:
    return stage.nodes[int(step.pick * len(stage.nodes))]


async def _kill_node(stage: Stage, step: Step) -> None:
    await kill(_node(stage, step), step.length)


async def kill(node: Node, length: float) -> None:
    await asyncio.to_thread(node.kill)
    await asyncio.sleep(length)
    await asyncio.to_thread(node.start)


async def _restart_node(stage: Stage, step: Step) -> None:
    node = _node(stage, step)
    await asyncio.to_thread(node.stop)
    await asyncio.sleep(step.length)
    await asyncio.to_thread(node.start)


async def _freeze_node(stage: Stage, step: Step) -> None:
    await freeze(_node(stage, step), step.length)


async def freeze(node: Node, length: float) -> None:
    pid = node.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(length * 2)
    finally:
        os.kill(pid, signal.SIGCONT)


def _hit(roles: tuple[str, ...], stage: Stage, step: Step) -> Child | None:
    found = stage.of_role(*roles)
    return found[int(step.pick * len(found))] if found else None


def _kill_worker(*roles: str) -> Callable[[Stage, Step], Awaitable[None]]:
    async def fault(stage: Stage, step: Step) -> None:
        child = _hit(roles, stage, step)
        if child is not None:
            await child.kill()
            await asyncio.sleep(step.length / 3)
            await child.start()

    return fault


def _freeze_worker(*roles: str) -> Callable[[Stage, Step], Awaitable[None]]:
    async def fault(stage: Stage, step: Step) -> None:
        child = _hit(roles, stage, step)
        if child is not None:
            child.signal(signal.SIGSTOP)
            await asyncio.sleep(step.length * 1.5)
            child.signal(signal.SIGCONT)

    return fault


async def _pause_consumer(stage: Stage, step: Step) -> None:
    """Stop a member for longer than its lease, as a closed laptop does: others take over."""
    child = _hit(LEASED, stage, step)
    if child is not None:
        child.signal(signal.SIGSTOP)
        await asyncio.sleep(child.lease * (1.2 + 1.3 * step.pick))
        child.signal(signal.SIGCONT)


def _proxied(action: Callable[[Stage, Step], None]) -> Callable[[Stage, Step], Awaitable[None]]:
    async def fault(stage: Stage, step: Step) -> None:
        if stage.proxy is not None:
            action(stage, step)
            await asyncio.sleep(step.length)
            stage.proxy.heal()

    return fault


def _cut(stage: Stage, step: Step) -> None:
    if stage.proxy is not None:
        stage.proxy.refusing = step.pick < 0.5
        stage.proxy.cut()


def _half_close(stage: Stage, step: Step) -> None:
    if stage.proxy is not None:
        stage.proxy.half_close(towards_server=step.pick < 0.5)


def _delay(stage: Stage, step: Step) -> None:
    if stage.proxy is not None:
        stage.proxy.delay = 0.02 + step.pick / 2


def _stall(stage: Stage, _: Step) -> None:
    if stage.proxy is not None:
        stage.proxy.stall()


def _drop(stage: Stage, _: Step) -> None:
    if stage.proxy is not None:
        stage.proxy.dropping = True


FAULTS: Final[dict[str, Callable[[Stage, Step], Awaitable[None]]]] = {
    "kill server": _kill_node,
    "restart server": _restart_node,
    "freeze server": _freeze_node,
    "kill producer": _kill_worker(*PRODUCING),
    "freeze producer": _freeze_worker(*PRODUCING),
    "kill consumer": _kill_worker(*CONSUMING),
    "freeze consumer": _freeze_worker(*CONSUMING),
    "pause consumer": _pause_consumer,
    "cut": _proxied(_cut),
    "half-close": _proxied(_half_close),
    "delay": _proxied(_delay),
    "stall": _proxied(_stall),
    "drop bytes": _proxied(_drop),
}

BROKER: Final = ("kill server", "restart server", "freeze server")
NETWORK: Final = ("cut", "half-close", "delay", "stall", "drop bytes")
PAUSES: Final = ("pause consumer",)  # for longer than the lease
CLIENTS: Final = ("kill producer", "freeze producer", "kill consumer", "freeze consumer")
