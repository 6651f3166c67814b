"""Other scenarios: importing a file, clocks that jump, and overloaded subscribers."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any, Final

import millstream
from millstream import Overload, SubscriberSettings
from millstream.errors import MillstreamError
from tests.books import balanced
from tests.faults.checker import Findings, check_deliveries, check_publishes, check_writer
from tests.faults.history import Progress, Record, body_of
from tests.faults.nemesis import BROKER, NETWORK, haunt
from tests.faults.scenarios import Scenario, sound_log
from tests.faults.supervisor import (
    ANSWER_SECONDS,
    END_SECONDS,
    REPOSITORY,
    WORK_POLL,
    WORKED,
    Orders,
    Stage,
    staged,
    until,
)

__all__ = ["SIDE_DOORS"]

COMMAND: Final = "from millstream.cli.main import main; main()"
KINDS: Final = (*BROKER, *NETWORK)
CLOCK_KINDS: Final = ("cut", "kill server", "stall")
ROWS: Final = 30_000  # of a file
SHORT_ROWS: Final = 20_000  # of a file in a short run; more than one pack
WATCH_SECONDS: Final = 0.05
IMPORT_TRIES: Final = 500
FILES_MAX: Final = 50  # until one of the imports is killed half-way
MESSAGES: Final = 20_000


async def import_file(orders: Orders) -> Findings:
    """`millstream import` of files, killed repeatedly: every row once, in order."""
    rows = SHORT_ROWS if orders.short else min(ROWS, int(orders.seconds * 1000))
    async with staged(orders) as stage:
        async with stage.mill() as mill:
            await mill.create_topic("rows", partitions=2)
        watching = asyncio.create_task(_watch_rows(stage))
        haunting = asyncio.create_task(haunt(stage, KINDS, orders.seconds))
        records: list[Record] = []
        try:
            while not haunting.done() or not _has_killed(stage, len(records) // 2):
                name = f"file{len(records) // 2}"
                file = orders.folder / "input" / f"{name}.jsonl"
                await asyncio.to_thread(_write_rows, file, name, rows)
                await _import_until_done(stage, str(file))
                records.append({"what": "given", "writer": name, "position": rows})
                records.append({"what": "flushed", "writer": name, "position": rows})
            await haunting
        finally:
            for task in (watching, haunting):
                task.cancel()
            await asyncio.gather(watching, haunting, return_exceptions=True)
        stored = await sound_log(stage, "rows")
        return stage.findings.add(check_writer(records, stored))


def _has_killed(stage: Stage, files: int) -> bool:
    """Whether an import was killed; one may end before its first rows are seen."""
    return files >= FILES_MAX or stage.findings.counts["fault: kill import"] > 0


async def _watch_rows(stage: Stage) -> None:
    """Record whenever rows have arrived: a short run needs some between its faults."""
    seen = 0
    while True:
        count = await _rows(stage)
        if count > seen:
            for _ in range(WORKED):
                stage.history.note("ok")
            seen = count
        await asyncio.sleep(WATCH_SECONDS)


async def _rows(stage: Stage) -> int:
    """Packs of rows that are stored; none while the broker is down."""
    try:
        async with stage.mill() as mill:
            return (await (await mill.topic("rows")).info()).messages
    except MillstreamError:
        return 0


def _write_rows(file: Path, name: str, rows: int) -> None:
    file.parent.mkdir(exist_ok=True)
    with file.open("w") as lines:
        for number in range(1, rows + 1):
            key = f"k{number % 5}"
            row = {"key": key, "body": body_of(f"{name}:{key}:{number}").decode()}
            lines.write(json.dumps(row) + "\n")


async def _import_until_done(stage: Stage, file: str) -> None:
    chance = stage.orders.chance(file)
    words = ["import", "rows", file, "--key", "key", "--value", "body", "--server", stage.url]
    for attempt in range(IMPORT_TRIES):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", COMMAND, *words),
            cwd=REPOSITORY,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        # Later attempts get more time, so that even a slow machine completes the file.
        patience = chance.uniform(0.5, 1.2) + attempt * 0.1
        try:
            await _its_time(stage, process, attempt, patience)
            ended = process.returncode is not None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if not ended:
            stage.findings.counts["fault: kill import"] += 1
            continue
        stage.findings.counts["imports that ended"] += 1
        if process.returncode == 0:
            return
    stage.findings.problem("stuck", f"the import did not end in {IMPORT_TRIES} attempts")


async def _its_time(
    stage: Stage, process: asyncio.subprocess.Process, attempt: int, patience: float
) -> None:
    """Return when an import has ended or should be killed: after a time, or when rows arrived."""
    ending = asyncio.create_task(process.wait())
    if not stage.orders.short:
        await asyncio.wait({ending}, timeout=patience)
    elif attempt == 0:
        progress = Progress(stage.orders.folder)
        before = progress.count()
        await until(lambda: ending.done() or progress.count() > before, END_SECONDS, WORK_POLL)
    else:
        await asyncio.wait({ending}, timeout=END_SECONDS)


async def clocks(orders: Orders) -> Findings:
    """The wall clocks of producers and consumers jump by hours, forwards and back."""
    async with staged(orders) as stage:
        async with stage.mill() as mill:
            await mill.create_topic("events")
        for number in range(2):
            await stage.worker(f"p{number}", "produce", topic="events", keys=6, pace=0.01, clock=1)
        await stage.worker("c0", "consume", topic="events", clock=1)
        await haunt(stage, CLOCK_KINDS, orders.seconds)
        await stage.end("produce")
        stored = await sound_log(stage, "events")
        await until(lambda: check_deliveries(stage.records(), stored).sound)
        await stage.end("consume")
        records = stage.records()
        jumps = sum(record["what"] == "jump" for record in records)
        stage.findings.counts["fault: clock jump"] += jumps
        findings = stage.findings.add(check_publishes(records, stored))
        return findings.add(check_deliveries(records, stored))


async def overload(orders: Orders) -> Findings:
    """Slow subscribers: dropped and delivered messages add up to what was sent."""
    findings = Findings()
    chance = orders.chance("overload")
    loop = asyncio.get_running_loop()
    deadline = loop.time() + orders.seconds
    async with staged(orders) as stage:
        rounds = 0
        while loop.time() < deadline or rounds < 3:
            policy = list(Overload)[rounds % 3]
            await _flood(stage, policy, chance.randrange(50, 2000), findings)
            rounds += 1
    return findings


async def _flood(stage: Stage, policy: Overload, room: int, findings: Findings) -> None:
    settings = SubscriberSettings(overload=policy, messages_max=room, block_seconds=1.0)
    patience: dict[str, Any] = dict.fromkeys(("connect_timeout", "request_timeout"), ANSWER_SECONDS)
    async with (
        millstream.connect(stage.url, **patience) as sender,
        millstream.connect(stage.url, **patience) as mill,
        mill.subscribe("flood", settings) as subscriber,
    ):
        await subscriber.flush()
        reading = asyncio.create_task(_read_slowly(subscriber))
        for number in range(MESSAGES):
            await sender.publish("flood", b"%d" % number)
        await sender.flush()
        await subscriber.flush()
        counters = subscriber.counters
        reading.cancel()
        findings.counts["fault: flood"] += 1
        findings.counts["operations"] += MESSAGES
        findings.counts["events"] += counters.received
        findings.counts[f"dropped by {policy}"] += counters.dropped
        if not balanced(counters):
            findings.problem("claimed", f"{policy}: the counters do not add up: {counters}")
        if counters.interruptions == 0 and counters.received != MESSAGES:
            findings.problem("lost", f"{policy}: sent {MESSAGES}, received {counters.received}")


async def _read_slowly(subscriber: millstream.Subscriber) -> None:
    count = 0
    async for _ in subscriber:
        count += 1
        if count % 50 == 0:
            await asyncio.sleep(0.002)


SIDE_DOORS: Final[dict[str, Scenario]] = {
    "import": import_file,
    "clocks": clocks,
    "overload": overload,
}
