"""Scenarios on one broker: a workload, its faults, and what must be true at the end."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from tests.faults.checker import (
    Findings,
    Stored,
    check_deliveries,
    check_group,
    check_once_awake,
    check_outputs,
    check_publishes,
    check_writer,
    seen_events,
)
from tests.faults.history import Record, id_of
from tests.faults.linearizable import check_table
from tests.faults.nemesis import BROKER, CLIENTS, NETWORK, PAUSES, haunt
from tests.faults.supervisor import Orders, Stage, staged, stored_events, until
from tests.faults.worker import outputs_of, reader_settings

__all__ = ["EVERYTHING", "LEASED", "PAUSED", "SINGLE", "Scenario", "sound_log"]

Scenario = Callable[[Orders], Coroutine[Any, Any, Findings]]

EVERYTHING: Final = (*BROKER, *NETWORK, *CLIENTS)
LEASED: Final = (*EVERYTHING, *PAUSES)
PAUSED: Final = (*PAUSES, "freeze consumer", "freeze producer")


async def sound_log(stage: Stage, name: str) -> list[Stored]:
    """All events of a topic, after `verify` has found nothing."""
    async with stage.mill() as mill:
        topic = await mill.topic(name)
        async for report in topic.admin.verify():
            last = report
        for flaw in last.flaws:
            stage.findings.problem("flaw", f"{name}: {flaw}")
        return await stored_events(topic)


async def _whole_log(stage: Stage, name: str, retention: str) -> list[Stored]:
    """All events of a topic, also those that were removed because they are handled."""
    left = await sound_log(stage, name)
    if retention == "limits":
        return left
    return list({*left, *seen_events(stage.records())})  # in this order: none slips through


async def _subscription(
    orders: Orders, faults: Sequence[str], pace: float, **plan: Any
) -> Findings:
    """Producers, and two members of a subscription that acknowledge what they read."""
    retention = orders.retention_of("limits", "interest", "workqueue")
    plan = {"topic": "events", "lease": 2.0 if orders.short else 3.0, **plan}
    async with staged(orders) as stage:
        stage.findings.facts["retention"] = retention
        async with stage.mill() as mill:
            topic = await mill.create_topic("events", partitions=2, retention=retention)
            # Before anything is published: an interest topic keeps only what somebody waits for.
            await (await topic.subscribe("readers", reader_settings(plan))).close()
        for number in range(2):
            await stage.worker(f"p{number}", "produce", topic="events", keys=6, pace=pace)
            await stage.worker(f"c{number}", "consume", **plan)
        await haunt(stage, faults, orders.seconds)
        await stage.end("produce")
        stored = await _whole_log(stage, "events", retention)
        await until(lambda: check_deliveries(stage.records(), stored).sound)
        await stage.end("consume")
        records = stage.records()
        findings = stage.findings.add(check_publishes(records, stored))
        findings.add(check_deliveries(records, stored))
        if faults is PAUSED:
            findings.add(check_once_awake(records, await _dead_letters(stage)))
        return findings


async def _dead_letters(stage: Stage) -> list[str]:
    async with stage.mill() as mill:
        queue = await (await mill.topic("events")).dead_letters("readers")
        return [str(id_of(letter.value)) for letter in await queue.list()]


async def publish(orders: Orders) -> Findings:
    """Single acknowledged publishes, and a subscription that acknowledges what it reads."""
    return await _subscription(orders, LEASED, 0.004)


async def pauses(orders: Orders) -> Findings:
    """Only pauses, longer than the lease: nothing is handled again, nothing is dead-lettered."""
    # So few that a stopped member could get more: copies of what it has.
    return await _subscription(orders, PAUSED, 0.3, max_deliver=3, nacks=0)


async def writers(orders: Orders) -> Findings:
    """Packs through exactly-once writers; one of them has a rival of the same name."""
    async with staged(orders) as stage:
        async with stage.mill() as mill:
            await mill.create_topic("packs", partitions=2)
        plan = {"topic": "packs", "keys": 5, "pace": 0.02}
        await stage.worker("w0", "write", writer="alone", lanes=2, **plan)
        await stage.worker("w1", "write", writer="shared", lanes=1, **plan)
        await stage.worker("w2", "write", writer="shared", lanes=1, **plan)
        await haunt(stage, (*BROKER, *NETWORK, *CLIENTS[:2]), orders.seconds)
        await stage.end("write")
        # A rival that is fenced in its last moment may have stored more in one partition than in
        # the other: beyond the position of the writer, which whoever comes next continues from.
        await stage.worker("w3", "write", writer="shared", lanes=1, **plan)
        await until(lambda: _caught_up(stage.records(), "w3"))
        await stage.end("write")
        stored = await sound_log(stage, "packs")
        return stage.findings.add(check_writer(stage.records(), stored))


def _caught_up(records: Sequence[Record], last: str) -> bool:
    """Whether the last one of the rivals has stored as much as the others were given."""
    stored, given = 0, 0
    for record in records:
        if record.get("writer") != "shared":
            continue
        if not record["who"].startswith(f"{last}."):
            given = max(given, record["position"])
        elif record["what"] == "flushed":
            stored = max(stored, record["position"])
    return stored >= given


async def groups(orders: Orders) -> Findings:
    """An ordered group whose members are killed, frozen and paused."""
    retention = orders.retention_of("limits", "interest")
    async with staged(orders) as stage:
        stage.findings.facts["retention"] = retention
        async with stage.mill() as mill:
            topic = await mill.create_topic("work", partitions=4, retention=retention)
            await topic.group("team").open()  # an interest topic keeps events from now on
        await stage.worker("p0", "produce", topic="work", keys=12, pace=0.02)
        # In a short run a machine that stalls for a moment must not make members look dead: events
        # whose owners keep dying are dead-lettered.
        lease = 5.0 if orders.short else 2.0
        for number in range(3):
            await stage.worker(f"m{number}", "join", topic="work", pace=0.004, lease=lease)
        await haunt(stage, LEASED, orders.seconds)
        await stage.end("produce")
        stored = await _whole_log(stage, "work", retention)
        await until(lambda: not check_group(stage.records(), stored).problems["skipped"])
        await stage.end("join")
        records = stage.records()
        findings = stage.findings.add(check_publishes(records, stored))
        return findings.add(check_group(records, stored))


async def process(orders: Orders) -> Findings:
    """Consume, transform, produce, exactly once; two processes of the same name compete."""
    async with staged(orders) as stage:
        async with stage.mill() as mill:
            await mill.create_topic("input", partitions=2)
            await mill.create_topic("output", partitions=3)
        await stage.worker("p0", "produce", topic="input", keys=6, pace=0.01)
        await stage.worker("t0", "transform", topic="input", target="output")
        await haunt(stage, EVERYTHING, orders.seconds)
        await stage.end("produce")
        stored = await sound_log(stage, "input")

        async def complete() -> bool:
            outputs = await sound_log(stage, "output")
            return not check_outputs(stored, outputs, outputs_of).problems["lost"]

        await until(complete)
        await stage.end("transform")
        outputs = await sound_log(stage, "output")
        findings = stage.findings.add(check_publishes(stage.records(), stored))
        return findings.add(check_outputs(stored, outputs, outputs_of))


async def tables(orders: Orders) -> Findings:
    """A table under compare-and-set by several clients: is it linearizable?"""
    async with staged(orders) as stage:
        async with stage.mill() as mill:
            await mill.create_table("state", partitions=2)
        for number in range(3):
            await stage.worker(f"t{number}", "table", table="state", keys=4, pace=0.02)
        await haunt(stage, (*BROKER, *NETWORK, *CLIENTS[:2]), orders.seconds)
        await stage.end("table")
        return stage.findings.add(check_table(stage.records()))


SINGLE: Final[dict[str, Scenario]] = {
    "publish": publish,
    "pauses": pauses,
    "writers": writers,
    "groups": groups,
    "process": process,
    "tables": tables,
}
