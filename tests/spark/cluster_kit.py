"""A standalone cluster of Spark on loopback, as processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from millstream.spark import session

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 240  # a busy machine takes a minute to start three JVMs


def spark_home() -> str:
    """Spark without its zipped Python, as in our sessions: workers start in half the time."""
    return str(sys.modules[session.__module__]._spark_home())


@contextmanager
def driver(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A driver in a process group of its own; the group is killed at the end."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SPARK_LOCAL_IP": "127.0.0.1"}
    with subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, env=environment, start_new_session=True,
        stderr=subprocess.DEVNULL, **options,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


class Cluster:
    """A master and workers of one core each; `environment` is theirs instead of this process's."""

    def __init__(self, folder: Path, environment: dict[str, str] | None = None) -> None:
        import pyspark

        self._program = str(Path(pyspark.__file__).parent / "bin" / "spark-class")
        self._folder = folder
        given = environment or {
            **os.environ,
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
        }
        self._environment = {
            **given,
            "SPARK_HOME": spark_home(),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1",
        }
        self.url = ""
        self.processes: list[subprocess.Popen[bytes]] = []

    def _start(self, log: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{log}.log").open("wb") as output:
            process = subprocess.Popen(
                [self._program, *arguments], cwd=self._folder, env=self._environment,
                start_new_session=True, stdout=output, stderr=output,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def __enter__(self) -> Cluster:
        """The master listens once it has logged its address: it chose a free port."""
        name = "org.apache.spark.deploy.master.Master"
        self._start("master", name, "--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        limit = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < limit:
            text = (self._folder / "master.log").read_text(errors="replace")
            found = re.search(r"Starting Spark master at (spark://\S+)\s", text)
            if found is not None:
                self.url = found[1]
                return self
            time.sleep(0.1)
        self.__exit__()
        raise AssertionError(f"the master does not listen: {text[-2000:]}")

    def worker(self, name: str, host: str = "127.0.0.1") -> subprocess.Popen[bytes]:
        """Start one; Spark runs a speculative attempt only on a host with another name."""
        return self._start(
            name, "org.apache.spark.deploy.worker.Worker", self.url, "--host", host,
            "--webui-port", "0", "--cores", "1", "--memory", "700m",
            "-d", str(self._folder / name),
        )  # fmt: skip

    def __exit__(self, *_: object) -> None:
        for process in reversed(self.processes):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)
