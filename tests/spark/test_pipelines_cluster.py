"""A pipeline on a standalone cluster, and packed for spark-submit: code travels by itself."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.spark.conftest import Place

pytestmark = pytest.mark.timeout(400)

CODE = """
from pyspark.sql import functions as f
from millstream import pipelines as mp
from shared_words import shout

@mp.topic
def loud():
    words = mp.read("lines").select(f.col("value").cast("string").alias("word"))
    return words.select(f.udf(shout, "string")("word").alias("word"))
"""
SHARED = "def shout(text):\n    return text.upper()\n"
COMMAND = [sys.executable, "-c", "from millstream.cli.main import main; main()", "pipeline"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def environment(url: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SPARK_", "PYSPARK_"))}
    return {
        **kept,
        "NATS_URL": url,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_DAEMON_MEMORY": "256m",
    }


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "millstream.toml").write_text(
        '[pipeline]\nname = "loud"\nfiles = ["pipeline.py"]\n'
        '[pipeline.spark]\n"spark.executor.memory" = "512m"\n"spark.cores.max" = "1"\n'
        '"spark.driver.host" = "127.0.0.1"\n"spark.driver.bindAddress" = "127.0.0.1"\n'
    )
    (folder / "pipeline.py").write_text(CODE)
    (folder / "shared_words.py").write_text(SHARED)
    return folder


@pytest.fixture
def master(tmp_path: Path) -> Iterator[str]:
    """A master and a worker on loopback."""
    import pyspark

    spark_class = str(Path(pyspark.__file__).parent / "bin" / "spark-class")
    port = free_port()
    address = f"spark://127.0.0.1:{port}"
    deploy = "org.apache.spark.deploy"
    where = ["--host", "127.0.0.1"]
    commands = [
        [f"{deploy}.master.Master", *where, "--port", str(port), "--webui-port", "0"],
        [
            *[f"{deploy}.worker.Worker", address, *where, "--port", "0", "--webui-port", "0"],
            *["--cores", "1", "--memory", "512m", "-d", str(tmp_path / "worker")],
        ],
    ]
    processes: list[subprocess.Popen[bytes]] = []
    log = tmp_path / "cluster.log"
    with log.open("wb") as output:
        for command in commands:
            processes.append(
                subprocess.Popen(
                    [spark_class, *command],
                    env=environment(""),
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            )
        deadline = time.monotonic() + 120
        while not re.search(r"Registering worker", log.read_text(errors="replace")):
            assert time.monotonic() < deadline, log.read_text(errors="replace")[-3000:]
            time.sleep(0.2)
        yield address
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run(command: list[str], url: str, cwd: Path) -> Any:
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment(url),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return done


def test_the_project_and_the_package_reach_the_executors(
    place: Place, project: Path, master: str, tmp_path: Path
) -> None:
    place.topic("lines")
    place.publish("lines", [b"one", b"two"])
    run([*COMMAND, "run", str(project), "--once", "--master", master], place.url, tmp_path)
    assert sorted(value["word"] for value in place.values("loud")) == ["ONE", "TWO"]


def test_a_packed_project_runs_with_spark_submit(
    place: Place, project: Path, tmp_path: Path
) -> None:
    import pyspark

    place.topic("lines")
    place.publish("lines", [b"one", b"two"])
    dist = tmp_path / "dist"
    run([*COMMAND, "package", str(project), "-o", str(dist)], place.url, tmp_path)
    submit = str(Path(pyspark.__file__).parent / "bin" / "spark-submit")
    command = [submit, "--master", "local[2]", "--py-files", str(dist / "pipeline.zip")]
    arguments = ["--once", "--server", place.url, "--state", str(tmp_path / "state")]
    run([*command, str(dist / "main.py"), *arguments], place.url, tmp_path)
    assert sorted(value["word"] for value in place.values("loud")) == ["ONE", "TWO"]
    assert (tmp_path / "state" / "checkpoints" / "loud").is_dir()
