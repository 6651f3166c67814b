"""The demo: a year of flights as live events, a pipeline that is killed on the way, one answer.

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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import millstream
from examples.flights import check, data
from examples.flights.charts import write_report
from examples.flights.replay import Progress, declare, replay
from millstream import Broker, BrokerSettings, Mill

PROJECT = Path(__file__).parent / "pipeline"
COMMAND = [sys.executable, "-c", "from millstream.cli.main import main; main()", "pipeline"]
RETIRED = 25  # planes that leave the register at the end


@dataclass(frozen=True)
class Plan:
    """How the demo is run."""

    folder: Path
    days: int = 366
    seconds: float = 75.0  # of the replay
    kill_at: float = 0.4  # of the replay
    patience: float = 600.0  # seconds for any part, on a machine with other work


@dataclass
class Show:
    """What is known at a moment, for whoever shows it."""

    year: data.Year
    replay: Progress = field(default_factory=Progress)
    status: dict[str, Any] = field(default_factory=dict)
    stored: int = 0  # departures that the pipeline has stored
    notes: list[str] = field(default_factory=list)


class Pipeline:
    """The pipeline as a process of its own."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self._environment = {**os.environ, "NATS_URL": url}
        self._log = (folder / "pipeline.log").open("ab")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            [*COMMAND, "run", str(self.folder), "--quiet"],
            env=self._environment,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def kill(self) -> None:
        """SIGKILL to the driver, its JVM and all workers: as if the power went."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def stop(self) -> None:
        subprocess.run([*COMMAND, "stop", str(self.folder)], check=True, stdout=self._log)
        if self._process is not None:
            self._process.wait()

    def check_alive(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            tail = (self.folder / "pipeline.log").read_text(errors="replace")[-3000:]
            raise SystemExit(f"the pipeline ended by itself ({self._process.returncode}):\n{tail}")

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
    """All of it; the verdicts. Results stay in the plan's folder."""
    show = Show(await asyncio.to_thread(data.load, plan.days))
    shutil.rmtree(plan.folder, ignore_errors=True)
    project = plan.folder / "project"
    shutil.copytree(PROJECT, project, ignore=shutil.ignore_patterns("__pycache__", ".pipeline"))
    with Broker(BrokerSettings(data=plan.folder / "broker", port=0)) as broker:
        async with millstream.connect(broker.url) as mill:
            await declare(mill, show.year)
            pipeline = Pipeline(project, broker.url)
            pipeline.start()
            try:
                retired = await _play(plan, mill, pipeline, show, shown)
            finally:
                pipeline.close()
            show.notes.append("the pipeline has stopped between two batches; comparing")
            shown(show)
            return await _judge(plan, mill, show.year, retired)


async def _play(
    plan: Plan, mill: Mill, pipeline: Pipeline, show: Show, shown: Callable[[Show], None]
) -> set[str]:
    """Replay, kill and restart, wait until everything is through; the planes that were retired."""
    await _until(lambda: bool(pipeline.status()), plan.patience, pipeline, show, shown)
    replaying = asyncio.create_task(replay(mill, show.year, plan.seconds, show.replay))
    # Killed where results are on their way: some are stored, the rest is not.
    total = len(show.year.flights)
    await _until(
        lambda: (
            replaying.done() or (show.replay.flights > total * plan.kill_at and show.stored > 0)
        ),
        plan.seconds + plan.patience,
        pipeline,
        show,
        shown,
        mill,
    )
    pipeline.kill()
    show.notes.append(
        f"killed the pipeline with SIGKILL after {show.stored:,} stored departures; started again"
    )
    pipeline.start()
    await _until(replaying.done, plan.seconds + 30, pipeline, show, shown, mill)
    await replaying
    show.notes.append(f"all {total:,} flights are published; waiting for the pipeline")
    wanted = len(await asyncio.to_thread(check.departures, show.year))
    quiet = _Quiet(pipeline)
    await _until(lambda: quiet(show.stored >= wanted), plan.patience, pipeline, show, shown, mill)
    retired = set(sorted(show.year.tables["planes"][1]["tailnum"].to_pylist())[:RETIRED])
    planes = await mill.table("planes")
    for plane in sorted(retired):
        await planes.delete(plane)
    show.notes.append(f"{RETIRED} planes were deleted from the table: the fleet follows")
    fleet = await mill.table("fleet")
    gone = _Gone(sorted(retired))
    while not await gone(fleet):
        await _until(lambda: True, plan.patience, pipeline, show, shown, mill)
        await asyncio.sleep(0.5)
    await asyncio.to_thread(pipeline.stop)
    return retired


class _Quiet:
    """Whether no flow has had anything left to read for some seconds."""

    SECONDS = 4.0  # the lag is measured every second, and flows read from flows

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._since: float | None = None

    def __call__(self, complete: bool) -> bool:
        flows = self._pipeline.status().get("flows", [])
        quiet = complete and bool(flows) and all(flow["lag_messages"] == 0 for flow in flows)
        if not quiet:
            self._since = None
        elif self._since is None:
            self._since = time.monotonic()
        return self._since is not None and time.monotonic() - self._since >= self.SECONDS


class _Gone:
    """Whether none of the retired planes is in the fleet any more."""

    def __init__(self, planes: list[str]) -> None:
        self._planes = planes
        self._deadline = time.monotonic() + 60

    async def __call__(self, fleet: Any) -> bool:
        left = [entry.key async for entry in fleet.entries() if entry.key in self._planes]
        if left and time.monotonic() > self._deadline:
            raise SystemExit(f"the fleet still has {len(left)} planes that were deleted")
        return not left


async def _until(
    condition: Callable[[], bool],
    seconds: float,
    pipeline: Pipeline,
    show: Show,
    shown: Callable[[Show], None],
    mill: Mill | None = None,
) -> None:
    deadline = time.monotonic() + seconds
    while True:
        pipeline.check_alive()
        show.status = pipeline.status()
        if mill is not None:
            show.stored = await _events(mill, "departures")
        shown(show)
        if condition():
            return
        if time.monotonic() > deadline:
            raise SystemExit(f"nothing came of it within {seconds:.0f} s; see {pipeline.folder}")
        await asyncio.sleep(0.5)


_counted: dict[str, tuple[int, int]] = {}  # topic: next offset, events before it


async def _events(mill: Mill, name: str) -> int:
    """How many events a topic has; only what is new is read."""
    try:
        topic = await mill.topic(name)
    except millstream.MillstreamError:
        return 0
    offset, count = _counted.get(name, (1, 0))
    async for batch in topic.batches(start=millstream.Start.at_offset(offset)):
        count += batch.num_rows
        offset = max(offset, int(batch.column("offset")[-1].as_py()) + 1)
    _counted[name] = (offset, count)
    return count


def _command(*words: str) -> None:
    subprocess.run([*COMMAND, *words], check=True, stdout=subprocess.DEVNULL)


async def _judge(plan: Plan, mill: Mill, year: data.Year, retired: set[str]) -> list[check.Verdict]:
    lake = plan.folder / "project" / "lake" / "departures"
    await asyncio.to_thread(_command, "compact", str(lake))
    flights, weather = len(year.flights), len(year.weather)
    joined = await check.topic_rows(mill, "departures")
    rows = await asyncio.to_thread(check.file_rows, lake)
    delays = await check.table_rows(mill, "delays")
    fleet = await check.table_rows(mill, "fleet")
    both = flights + len(year.tables["planes"][1])
    answers = (
        ("departures and weather (topic)", flights + weather, joined, check.departures(year)),
        ("with carrier, plane, airport (Parquet)", len(joined), rows, check.enriched(year)),
        ("delays by airport and day (table)", flights, delays, check.delays(year)),
        ("fleet by carrier (table)", both, fleet, check.fleet(year, retired)),
    )
    keys = (["id"], ["id"], ["day", "origin"], ["tailnum"])
    verdicts = [
        check.compare(name, events, found, wanted, key)
        for (name, events, found, wanted), key in zip(answers, keys, strict=True)
    ]
    write_report(plan.folder / "report.html", verdicts, delays, rows, fleet)
    return verdicts
