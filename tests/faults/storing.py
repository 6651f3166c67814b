"""Scenarios of the event store: 16 writers on hot and cold aggregates, on one node and on three."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from millstream import EventStore, Mill
from tests.faults.checker import Findings
from tests.faults.clustered import LEADERS, local_stage
from tests.faults.ledger import EVENTS, Account, fold
from tests.faults.nemesis import BROKER, CLIENTS, NETWORK, haunt
from tests.faults.scenarios import Scenario
from tests.faults.store_checker import StoredMark, check_store
from tests.faults.store_worker import SNAPSHOT_EVERY
from tests.faults.supervisor import Orders, Stage, staged

__all__ = ["CLUSTER_STORES", "CLUSTER_STORE_KINDS", "STORES", "STORE_KINDS"]

STORE_KINDS: Final = (*BROKER, *NETWORK, *CLIENTS[:2])
CLUSTER_STORE_KINDS: Final = (*BROKER, *LEADERS, *CLIENTS[:2])
PROCESSES: Final = 4
WRITERS: Final = 4  # in each
NAME: Final = "accounts"
PAST: Final = 30  # aggregates whose past states are loaded at the end


async def _open(mill: Mill, **settings: Any) -> EventStore:
    return await mill.event_store(
        NAME, Account, events=EVENTS, snapshot_every=SNAPSHOT_EVERY, **settings
    )


async def _store(stage: Stage, faults: tuple[str, ...], replicas: int) -> Findings:
    """Appends of every kind; at the end the log is compared with all that the writers saw."""
    # Where the broker soon forgets the ids of appends, the store has to recognise them itself.
    window = stage.orders.chance("window").choice(("100ms", "2m"))
    stage.findings.facts["duplicate window"] = window
    async with stage.mill() as mill:
        await _open(mill, replicas=replicas, duplicate_window=window)
    for number in range(PROCESSES):
        await stage.worker(f"w{number}", "append", store=NAME, writers=WRITERS, pace=0.02)
    await haunt(stage, faults, stage.orders.seconds)
    await stage.end("append")
    async with stage.mill() as mill:
        store = await _open(mill)
        stored = [
            StoredMark(one.id, one.version, one.offset, one.data) async for one in store.all()
        ]
        stage.findings.add(check_store(stage.records(), stored, copies=replicas))
        if stage.findings.sound:
            await _check_past(stage, store)
    return stage.findings


async def _check_past(stage: Stage, store: EventStore) -> None:
    """States now, at a version and as of a time are folds of the log."""
    chance = stage.orders.chance("past")
    events = [one async for one in store.all()]
    ids = sorted({one.id for one in events})
    for id in chance.sample(ids, min(PAST, len(ids))):
        own = [one for one in events if one.id == id]
        then = chance.choice(own)
        wanted = {
            "now": (own, await store.load(id)),
            f"at {then.version}": (own[: then.version], await store.load(id, at=then.version)),
        }
        # A time has microseconds: everything of that microsecond is included.
        until = then.stored + timedelta(microseconds=1)
        past = [one for one in own if one.stored <= then.stored]
        wanted[f"as of {until}"] = (past, await store.load(id, at=until))
        for moment, (part, loaded) in wanted.items():
            stage.findings.counts["past states"] += 1
            if (loaded.version, loaded.state) != (len(part), fold(one.data for one in part)):
                stage.findings.problem("wrong state", f"{id} {moment}: {loaded}")


async def event_store(orders: Orders) -> Findings:
    """An event store on one node."""
    async with staged(orders) as stage:
        return await _store(stage, STORE_KINDS, 1)


async def cluster_event_store(orders: Orders) -> Findings:
    """An event store with three replicas; nodes and leaders are killed, restarted and frozen."""
    async with local_stage(orders) as stage:
        return await _store(stage, CLUSTER_STORE_KINDS, 3)


STORES: Final[dict[str, Scenario]] = {"event-store": event_store}
CLUSTER_STORES: Final[dict[str, Scenario]] = {"cluster-event-store": cluster_event_store}
