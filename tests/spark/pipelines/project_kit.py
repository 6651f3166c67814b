"""A pipeline project for tests, on their session and broker."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millstream.errors import FlowsFailed
from millstream.messaging import NewEvent
from millstream.pipelines import open_project
from millstream.pipelines.loader import load
from millstream.pipelines.outputs import PipelineTopics
from millstream.pipelines.resolve import Resolver
from millstream.pipelines.runner import Runner, RunSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.spark.conftest import Account

HEAD = """
from pyspark.sql import functions as f
from millstream import pipelines as mp
"""

PAGE = (Path(__file__).parents[3] / "docs" / "PIPELINES.md").read_text()

# The limit of a wait for something certain, on a machine that may stall.
PATIENCE_SECONDS = 240.0
# For short-lived processes: the compiler that starts quickly.
QUICK = '[pipeline.spark]\n"spark.driver.extraJavaOptions" = "-XX:TieredStopAtLevel=1"\n'


class Kit:
    """A project in its own folder, on the tests' session and broker."""

    def __init__(self, spark: SparkSession, account: Account, folder: Path) -> None:
        self.spark, self.account, self.folder = spark, account, folder
        self.failed: FlowsFailed | None = None  # how the last continuous run ended

    def write(self, code: str, toml: str = "") -> None:
        (self.folder / "millstream.toml").write_text(f'[pipeline]\nname = "words"\n{toml}')
        (self.folder / "pipeline.py").write_text(code)

    def runner(self, *, once: bool = True) -> Runner:
        project = open_project(self.folder)
        settings = RunSettings(
            once=once, stop_seconds=PATIENCE_SECONDS, options={"url": self.account.url}
        )
        return Runner(project, load(project), self.spark, settings)

    def once(self) -> dict[str, dict[str, Any]]:
        """Run until all is read; returns the status of the flows."""
        runner = self.runner()
        with runner.state.running():
            runner.run()
        return {flow["name"]: flow for flow in runner.status("stopped")["flows"]}

    @contextmanager
    def running(self) -> Iterator[Runner]:
        runner = self.runner(once=False)
        self.failed = None

        def work() -> None:
            # Spark looks for data sources in the thread's active session.
            kind = type(self.spark)
            kind._get_j_spark_session_class(self.spark._jvm).setActiveSession(
                self.spark._jsparkSession
            )
            try:
                with runner.state.running():
                    runner.run()
            except FlowsFailed as error:
                self.failed = error

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield runner
        finally:
            runner.stop()
            thread.join(PATIENCE_SECONDS + 60)
            assert not thread.is_alive()

    def table(self, name: str) -> dict[str, Any]:
        async def work(mill: Any) -> Any:
            return await (await mill.table(name)).as_dict()

        found: dict[str, Any] = self.account.run(work)
        return found

    def lines(self, *texts: str) -> None:
        self.account.publish("lines", [NewEvent(text.encode()) for text in texts])

    def graph(self) -> Any:
        project = open_project(self.folder)
        with PipelineTopics({"url": self.account.url}, dry=True) as topics:
            options = {"url": self.account.url}
            return Resolver(load(project), self.spark, self.folder, options).all(topics).graph


def block(language: str, words: str) -> str:
    """The block of the page that contains these words."""
    blocks = re.findall(rf"^```{language}\b[^\n]*\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (found,) = [body for body in blocks if words in body]
    return str(found)


def arriving(
    rng: random.Random,
    make: Callable[[int, float], dict[str, Any]],
    late: float,
    ends: Sequence[int],
) -> list[list[dict[str, Any]]]:
    """Random events, made from a number and a time in minutes, in steps that end at these minutes.

    Each event arrives less than `late` minutes after its time.
    """
    steps: list[list[dict[str, Any]]] = [[] for _ in ends]
    for number in range(40):
        minutes = rng.randrange(int((ends[-1] - late) * 60)) / 60
        arrival = minutes + rng.random() * late
        step = next(n for n, end in enumerate(ends) if arrival < end)
        steps[step].append(make(number, minutes))
    return steps


def wait_for(condition: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    start = time.monotonic()
    while not condition():
        passed = time.monotonic() - start
        assert passed < seconds, "it did not happen"
        time.sleep(min(0.5, 0.05 + passed / 10))  # a check takes CPU time from what is waited for


def alive_in(session: int) -> list[int]:
    """The running processes of a session; Spark's workers have process groups of their own."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            state, _, _, number = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue
        if int(number) == session and state != "Z":
            found.append(int(folder.name))
    return found
