"""Kill captures, sinks, brokers and databases: python -m tests.faults.cdc --seed N --kills 30"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import millstream
from millstream import Mill
from millstream.errors import MillstreamError
from tests.faults import cdc_load
from tests.faults.cdc_stage import Hopeless, Plan, Stage, staged
from tests.faults.cdc_worker import RECONNECT
from tests.faults.checker import Findings
from tools.postgres_server import PostgresAbsent

__all__ = ["TARGETS", "run"]

TARGETS: Final = ("capture", "broker", "postgres", "sink")
SNAPSHOT_TARGETS: Final = ("capture", "capture", "broker", "postgres")
# Of all kills: most bugs would be in the capture.
BAG: Final = ("capture", "capture", "broker", "postgres", "sink")
PACKS: Final = 6  # stored in the topics between two kills of a snapshot; each writer's claim is one
PROGRESS_SECONDS: Final = 120.0
PAUSES: Final = (0.0, 0.05, 0.2, 0.5, 1.0)  # seconds of work after that
DOWN: Final = (0.0, 0.0, 0.1, 0.5)  # seconds before it is started again
POLL: Final = 0.2  # of the database, which has work to do
QUICK_POLL: Final = 0.01  # of a snapshot, which may end soon


async def run(plan: Plan, folder: Path) -> Findings:
    """Kill them while they work, let them catch up, and compare topics and tables."""
    with staged(plan, folder) as stage:
        for worker in stage.workers:
            worker.start()
        try:
            async with millstream.connect(stage.broker.url, reconnect=RECONNECT) as mill:
                await _haunt(stage, mill)
            await asyncio.to_thread(stage.finish_load)
            await stage.check_everything()
            await asyncio.to_thread(stage.check_sink)
            await asyncio.to_thread(stage.capture.end)
            await asyncio.to_thread(stage.sink.end)
        except Hopeless:
            pass  # it is among the findings
        return stage.findings


async def _haunt(stage: Stage, mill: Mill) -> None:
    chance = stage.plan.chance("kills")
    bag: list[str] = []
    for number in range(stage.plan.kills):
        if number < stage.plan.snapshot_kills:
            await _progress(stage, lambda: _stored(mill), PACKS, QUICK_POLL)
            target = SNAPSHOT_TARGETS[number % len(SNAPSHOT_TARGETS)]
        else:
            await _progress(stage, lambda: asyncio.to_thread(stage.confirmed), 1)
            if not bag:
                bag = chance.sample(BAG, len(BAG))
            target = bag.pop()
            await asyncio.sleep(chance.choice(PAUSES))
        await asyncio.to_thread(stage.check)
        await asyncio.to_thread(stage.kill, target, chance.choice(DOWN))
    await _progress(stage, lambda: asyncio.to_thread(stage.confirmed), 1)


async def _progress(
    stage: Stage, look: Callable[[], Awaitable[int]], step: int, poll: float = POLL
) -> None:
    """Until what is looked at has grown since this call: no process is killed before it worked."""
    clock = asyncio.get_running_loop().time
    late = clock() + PROGRESS_SECONDS
    began = await look()
    while await look() < began + step:
        await asyncio.to_thread(stage.check)
        if clock() > late:
            stage.give_up(f"nothing was stored within {PROGRESS_SECONDS:g} s")
        await asyncio.sleep(poll)


async def _stored(mill: Mill) -> int:
    """Messages in the topics of the capture: packs of events."""
    found = 0
    for table in cdc_load.TABLES:
        try:
            found += (await (await mill.topic(table)).info()).messages
        except MillstreamError:  # not created yet, or the broker is on its way back
            continue
    return found


def main() -> int:
    """One run; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.cdc", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="decides the kills and the workload")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--rows", type=int, default=100_000, help="before the capture begins")
    parser.add_argument("--folder", type=Path, help="for logs (default: a temporary one)")
    chosen = parser.parse_args()
    folder = chosen.folder or Path(tempfile.mkdtemp(prefix="millstream-cdc-"))
    plan = Plan(chosen.seed, chosen.kills, chosen.rows, snapshot_kills=chosen.kills // 4)
    try:
        findings = asyncio.run(run(plan, folder))
    except PostgresAbsent as error:
        sys.stderr.write(f"{error}\n")
        return 2
    report = {
        "sound": findings.sound,
        "counts": dict(sorted(findings.counts.items())),
        "problems": dict(findings.problems),
        "examples": dict(findings.examples),
        "logs": str(folder),
    }
    sys.stdout.write(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    return 0 if findings.sound else 1


if __name__ == "__main__":
    sys.exit(main())
