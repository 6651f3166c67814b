"""The demo: a year of flights as live events, a pipeline that is killed, and correct results.

`make demo`, or `python -m examples.flights --help`.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import millstream
from examples.flights import check, data
from examples.flights.replay import Progress, declare, end, replay
from examples.flights.report import Answers, Run, write_report
from millstream import Broker, BrokerSettings, Mill
from millstream.errors import TopicNotFound

PROJECT = Path(__file__).parent / "pipeline"
COMMAND = [sys.executable, "-c", "from millstream.cli.main import main; main()", "pipeline"]
RETIRED = 25  # planes that leave the register at the end
MARK = ".flights-demo"  # marks a folder that the demo created and may empty


@dataclass(frozen=True)
class Plan:
    """How the demo is run."""

    folder: Path
    days: int = 366
    seconds: float = 60.0  # duration of the replay
    kill_at: float = 0.4  # share of the flights after which the pipeline is killed
    patience: float = 600.0  # seconds for any step, on a busy machine


@dataclass
class Show:
    """The current state of the demo, for the screen and the report."""

    year: data.Year
    replay: Progress = field(default_factory=Progress)
    status: dict[str, Any] = field(default_factory=dict)
    stored: int = 0  # departures that the pipeline has stored
    notes: list[str] = field(default_factory=list)
    samples: list[tuple[float, int, int]] = field(default_factory=list)  # for the report
    marks: list[tuple[float, str]] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Seconds since the demo started."""
        return time.monotonic() - self.started


class Pipeline:
    """The pipeline in its own process."""

    def __init__(self, folder: Path, url: str, patience: float, **environment: str) -> None:
        self.folder = folder
        self._patience = f"{patience:.0f}s"
        self._environment = {**os.environ, "NATS_URL": url, **environment}
        self._log = (folder / "pipeline.log").open("ab")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            [*COMMAND, "run", str(self.folder), "--quiet", "--stop-within", self._patience],
            env=self._environment,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def kill(self) -> None:
        """Send SIGKILL to the driver, its JVM and all workers, as in a power cut."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def stop(self) -> None:
        """Stop it between two batches, and wait until it has ended."""
        words = ["stop", str(self.folder), "--timeout", self._patience]
        subprocess.run([*COMMAND, *words], check=True, stdout=self._log)
        if self._process is not None:
            self._process.wait()

    def check_alive(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            tail = (self.folder / "pipeline.log").read_text(errors="replace")[-3000:]
            raise SystemExit(f"the pipeline has ended ({self._process.returncode}):\n{tail}")

    def runs(self) -> bool:
        """Whether every flow is running."""
        flows = self.status().get("flows", [])
        return bool(flows) and all(flow["state"] == "running" for flow in flows)

    def status(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.folder / ".pipeline/status.json").read_text())
        except (OSError, ValueError):
            return {}
        return found

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()
        self._log.close()


async def run(plan: Plan, shown: Callable[[Show], None]) -> list[check.Verdict]:
    """Run the demo and compare its results, which stay in the plan's folder."""
    started = time.monotonic()
    claim(plan.folder)
    project = plan.folder / "project"
    shutil.copytree(PROJECT, project, ignore=shutil.ignore_patterns("__pycache__", ".pipeline"))
    tables = await asyncio.to_thread(data.load_tables)
    with Broker(BrokerSettings(data=plan.folder / "broker", port=0)) as broker:
        async with millstream.connect(broker.url) as mill:
            await declare(mill, tables)
            pipeline = Pipeline(project, broker.url, plan.patience)
            pipeline.start()
            try:
                # While Spark starts.
                year = await asyncio.to_thread(data.load, plan.days, tables)
                show = Show(year, started=started)
                show.notes.append("the broker runs, tables are filled; starting Spark")
                retired = await _Play(plan, mill, pipeline, show, shown).all()
            finally:
                pipeline.close()
            show.notes.append("the pipeline has stopped between two batches; comparing")
            shown(show)
            return await _judge(plan, mill, show, retired)


def claim(folder: Path) -> None:
    """Create the folder, or empty one that an earlier run created; any other is refused."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        if not (folder / MARK).is_file():
            raise SystemExit(f"{folder} is not a folder of this demo: choose another --folder")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()


@dataclass
class _Play:
    """Replays, kills and restarts the pipeline, and waits until everything is processed."""

    plan: Plan
    mill: Mill
    pipeline: Pipeline
    show: Show
    shown: Callable[[Show], None]
    offset: int = 1  # of the next departure to count

    async def all(self) -> set[str]:
        """Run all steps; returns the planes that were retired."""
        plan, show, pipeline = self.plan, self.show, self.pipeline
        await self._until(pipeline.runs)
        show.notes.append("the pipeline runs; the year starts")
        replaying = asyncio.create_task(replay(self.mill, show.year, plan.seconds, show.replay))
        try:
            # Killed in the middle: some results are stored, others are not.
            total = len(show.year.flights)
            await self._until(
                lambda: show.replay.flights > total * plan.kill_at and show.stored > 0
            )
            pipeline.kill()
            show.marks.append((show.seconds, "killed"))
            show.notes.append(
                f"killed the pipeline with SIGKILL after {show.stored:,} stored departures; "
                f"started again"
            )
            pipeline.start()
            await self._until(replaying.done)
            await replaying
        finally:
            replaying.cancel()
        # Only now: Spark advances the watermark with events, not when it starts.
        await end(self.mill, show.year)
        show.notes.append(f"all {total:,} flights are published; waiting for the pipeline")
        wanted = len(await asyncio.to_thread(check.departures, show.year))
        quiet = _Quiet(pipeline)
        await self._until(lambda: quiet(show.stored >= wanted))
        retired = await self._retire()
        await asyncio.to_thread(pipeline.stop)
        return retired

    async def _retire(self) -> set[str]:
        """Delete some planes from their table, and wait until they are gone from the fleet."""
        retired = sorted(self.show.year.tables["planes"][1]["tailnum"].to_pylist())[:RETIRED]
        planes, fleet = await self.mill.table("planes"), await self.mill.table("fleet")
        for plane in retired:
            await planes.delete(plane)
        self.show.notes.append(f"{RETIRED} planes were deleted; the fleet must follow")
        left = set(retired)

        async def look() -> None:
            left.intersection_update([entry.key async for entry in fleet.entries()])

        await self._until(lambda: not left, look)
        return set(retired)

    async def _until(
        self, condition: Callable[[], bool], look: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Update the screen until the condition is true; end the demo if that takes too long."""
        deadline = time.monotonic() + self.plan.seconds + self.plan.patience
        while True:
            self.pipeline.check_alive()
            await self._see()
            if look is not None:
                await look()
            if condition():
                return
            if time.monotonic() > deadline:
                raise SystemExit(f"it takes too long; see {self.pipeline.folder / 'pipeline.log'}")
            await asyncio.sleep(0.5)

    async def _see(self) -> None:
        show = self.show
        show.status = self.pipeline.status()
        await self._count()
        show.samples.append((show.seconds, show.replay.flights, show.stored))
        self.shown(show)

    async def _count(self) -> None:
        """Count the stored departures, reading only new ones."""
        try:
            topic = await self.mill.topic("departures")
        except TopicNotFound:
            return  # the pipeline has not created it yet
        async for batch in topic.batches(start=millstream.Start.at_offset(self.offset)):
            self.show.stored += batch.num_rows
            self.offset = max(self.offset, int(batch.column("offset")[-1].as_py()) + 1)


class _Quiet:
    """True after several measurements in a row in which no flow had a lag."""

    TIMES = 4  # one a second; the first may be old, and flows read from other flows

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._measured: set[str] = set()

    def __call__(self, complete: bool) -> bool:
        flows = self._pipeline.status().get("flows", [])
        quiet = complete and bool(flows) and all(flow["lag_messages"] == 0 for flow in flows)
        if not quiet:
            self._measured.clear()
        else:
            self._measured.update(flow["lag_time"] for flow in flows[:1] if flow["lag_time"])
        return len(self._measured) >= self.TIMES


def _command(*words: str) -> None:
    subprocess.run([*COMMAND, *words], check=True, stdout=subprocess.DEVNULL)


async def _judge(plan: Plan, mill: Mill, show: Show, retired: set[str]) -> list[check.Verdict]:
    year = show.year
    lake = plan.folder / "project" / "lake" / "departures"
    await asyncio.to_thread(_command, "compact", str(lake))
    flights, weather = len(year.flights), len(year.weather)
    joined = await check.topic_rows(mill, "departures")
    rows = await asyncio.to_thread(check.file_rows, lake)
    delays = await check.table_rows(mill, "delays")
    fleet = await check.table_rows(mill, "fleet")
    both = flights + len(year.tables["planes"][1])
    answers = (
        ("departures (topic)", flights + weather, joined, check.departures(year)),
        ("departures (Parquet)", len(joined), rows, check.enriched(year)),
        ("delays (table)", flights, delays, check.delays(year)),
        ("fleet (table)", both, fleet, check.fleet(year, retired)),
    )
    keys = (["id"], ["id"], ["day", "origin"], ["tailnum"])
    verdicts = [
        check.compare(name, events, found, wanted, key)
        for (name, events, found, wanted), key in zip(answers, keys, strict=True)
    ]
    run = Run(flights, weather, show.seconds, show.replay.speed, show.samples, show.marks)
    write_report(plan.folder / "report.html", run, Answers(verdicts, delays, rows, fleet))
    return verdicts
