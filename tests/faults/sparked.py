"""Spark from topic to topic with a join, while drivers, Python workers and brokers die."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import Final

from millstream import NewEvent
from millstream.errors import MillstreamError
from millstream.settings import child_environment
from tests.faults import nemesis
from tests.faults.checker import Findings, Stored, check_outputs, check_publishes
from tests.faults.history import id_of
from tests.faults.nemesis import Step, haunt
from tests.faults.scenarios import Scenario, sound_log
from tests.faults.supervisor import REPOSITORY, Orders, Stage, staged, until

__all__ = ["SPARKED", "can_spark"]

KEYS: Final = 6
KINDS: Final = ("kill Spark driver", "kill Spark worker", "kill server", "cut")
AT_WORK: Final = 0.7  # share of the kills in a long run that wait until output is written
START_SECONDS: Final = 240.0  # until the first output, on a busy machine
FINISH_SECONDS: Final = 300.0
CHECK_SECONDS: Final = 0.5  # between checks of the output, which take time from Spark


def can_spark() -> str | None:
    """None if Spark is installed; otherwise why the scenario cannot run."""
    if importlib.util.find_spec("pyspark") is None:
        return "Spark needs the extra: pip install millstream[spark]"
    return None


class Driver:
    """A driver with its JVM and Python workers, in a process group of its own."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._process: asyncio.subprocess.Process | None = None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        folder = self._stage.orders.folder
        mode = ("direct", "staged")[self._stage.orders.seed % 2]
        words = ("tests.faults.spark_driver", self._stage.url, str(folder / "checkpoint"), mode)
        with (folder / "driver.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", *words),
                cwd=REPOSITORY,
                env=child_environment(SPARK_LOCAL_IP="127.0.0.1"),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    async def keep(self) -> None:
        """Restart it after a query has failed permanently, as a pipeline runner does."""
        if not self.alive:
            self._stage.findings.counts["drivers that gave up"] += 1
            await self.start()

    async def kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()

    def workers(self) -> list[int]:
        """The Python workers that run its tasks."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, IndexError):
                # Workers leave the driver's process group, never its session.
                session = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[3])
                words = (entry / "cmdline").read_bytes()
                if self._process and session == self._process.pid and b"daemon" in words:
                    found.append(int(entry.name))
        return found


_drivers: dict[int, Driver] = {}  # by the id of the stage, for the faults


async def _at_work(stage: Stage, step: Step) -> None:
    """Mostly kill while batches are being written; otherwise at any moment, even at start-up."""
    if stage.orders.short or step.pick < AT_WORK:
        before = await _written(stage)

        async def grown() -> bool:
            await _drivers[id(stage)].keep()
            return await _written(stage) > before

        await until(grown, START_SECONDS, CHECK_SECONDS)


async def _kill_driver(stage: Stage, step: Step) -> None:
    await _at_work(stage, step)
    driver = _drivers[id(stage)]
    await driver.kill()
    await asyncio.sleep(step.length / 3)
    await driver.start()


async def _kill_worker(stage: Stage, step: Step) -> None:
    await _at_work(stage, step)
    driver = _drivers[id(stage)]
    workers: list[int] = []

    async def found() -> bool:
        await driver.keep()
        workers[:] = driver.workers()
        return bool(workers)

    if not await until(found, START_SECONDS):
        stage.findings.problem("stuck", "Spark has no Python worker that could be killed")
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(workers[int(step.pick * len(workers))], signal.SIGKILL)


nemesis.FAULTS.update({"kill Spark driver": _kill_driver, "kill Spark worker": _kill_worker})


async def spark(orders: Orders) -> Findings:
    """Topic to topic with a join: the output is a function of the input."""
    async with staged(orders) as stage:
        async with stage.mill() as mill:
            await mill.create_topic("input", partitions=2)
            await mill.create_topic("output", partitions=2)
            labels = await mill.create_topic("labels")
            await labels.publish_many(NewEvent(b"of k%d" % n, f"k{n}") for n in range(KEYS))
        pace = 0.1 if orders.short else 0.02
        await stage.worker("p0", "produce", topic="input", keys=KEYS, pace=pace)
        driver = _drivers[id(stage)] = Driver(stage)
        try:
            await driver.start()
            await _at_work(stage, Step(0, "none", 0, 0))
            await haunt(stage, KINDS, orders.seconds)
            return await _finish(stage, driver)
        finally:
            await driver.kill()
            del _drivers[id(stage)]


async def _written(stage: Stage) -> int:
    """The size of the output; unchanged while the broker is down."""
    try:
        async with stage.mill() as mill:
            info = await (await mill.topic("output")).info()
            return sum(part.last_offset for part in info.partitions)
    except MillstreamError:
        return 0


async def _finish(stage: Stage, driver: Driver) -> Findings:
    await stage.end("produce")
    stored = await sound_log(stage, "input")

    async def complete() -> bool:
        await driver.keep()
        return not check_outputs(stored, await _outputs(stage), _same).problems["lost"]

    await until(complete, FINISH_SECONDS, CHECK_SECONDS)
    await driver.kill()
    findings = stage.findings.add(check_publishes(stage.records(), stored))
    return findings.add(check_outputs(stored, await _outputs(stage), _same))


def _same(name: str) -> list[str]:
    return [name]


async def _outputs(stage: Stage) -> list[Stored]:
    """What Spark wrote; an event with the wrong label has no id."""
    found = []
    async with stage.mill() as mill:
        async for event in (await mill.topic("output")).read():
            body, _, label = event.value.rpartition(b"@")
            name = id_of(body) if label == f"of {event.key}".encode() else None
            found.append(Stored(name, event.key, event.partition, event.offset, event.index))
    return found


SPARKED: Final[dict[str, Scenario]] = {"spark": spark}
