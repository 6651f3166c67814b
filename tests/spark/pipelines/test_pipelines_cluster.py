"""Pipelines on a standalone cluster whose executors do not have this package installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.spark.cluster_kit import Cluster, spark_home
from tests.spark.pipelines.project_kit import HEAD

if TYPE_CHECKING:
    from tests.spark.conftest import Account

CODE = (
    HEAD
    + """
import os
import sys
import shared_words
from pyspark.sql import SparkSession

@f.udf("string")
def shouted(word):
    import millstream
    return f"{shared_words.shout(word)} {sys.executable} {os.path.abspath(millstream.__file__)}"

@mp.topic
def loud():
    words = mp.read("lines").select(f.col("value").cast("string").alias("word"))
    conf = SparkSession.active().conf
    setting = conf.get("spark.sql.adaptive.streaming.stateless.enabled")
    return words.select(shouted("word").alias("word"), f.lit(setting).alias("setting"))
"""
)
SHARED = "def shout(text):\n    return text.upper()\n"
TOML = """
[pipeline]
name = "loud"
files = ["pipeline.py"]

[pipeline.spark]
"spark.cores.max" = "1"
"spark.executor.memory" = "512m"
"spark.executor.extraJavaOptions" = "-XX:TieredStopAtLevel=1"
"spark.driver.extraJavaOptions" = "-XX:TieredStopAtLevel=1"
"spark.driver.host" = "127.0.0.1"
"spark.driver.bindAddress" = "127.0.0.1"
"""
COMMAND = [sys.executable, "-c", "from millstream.cli.main import main; main()", "pipeline"]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with everything that is installed here, except this package."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
    for item in Path(sysconfig.get_path("purelib")).iterdir():
        if "millstream" not in item.name and not item.name.startswith("__editable__"):
            (Path(paths["purelib"]) / item.name).symlink_to(item)
    python = folder / "bin" / "python"
    found = subprocess.run(
        [python, "-c", "import pyarrow, msgspec, pyspark; import millstream"],
        cwd=folder,
        env={},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "No module named 'millstream'" in found.stderr
    return python


def environment(**values: str) -> dict[str, str]:
    left = ("SPARK_", "PYSPARK_", "PYTHONPATH")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(left)}
    return {**kept, "SPARK_HOME": spark_home(), "SPARK_LOCAL_IP": "127.0.0.1", **values}


@pytest.fixture(scope="module")
def master(bare: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A master and a worker on loopback, started where this package is not installed."""
    folder = tmp_path_factory.mktemp("cluster")
    with Cluster(folder, environment(PYSPARK_PYTHON=str(bare))) as cluster:
        cluster.worker("worker")
        yield cluster.url


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "millstream.toml").write_text(TOML)
    (folder / "pipeline.py").write_text(CODE)
    (folder / "shared_words.py").write_text(SHARED)
    return folder


def run(command: list[str], account: Account, bare: Path, cwd: Path) -> None:
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment(
            NATS_URL=account.url, PYSPARK_PYTHON=str(bare), PYSPARK_DRIVER_PYTHON=sys.executable
        ),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]


def check_words(account: Account, bare: Path, archive: str) -> None:
    """Every word went through an executor's Python, which has the package from an archive.

    The archive is in the folder of the worker: Spark copied it there.
    """
    for value, word in zip(account.values("loud"), ("ONE", "TWO"), strict=True):
        assert value["setting"] == "false"  # exactly once depends on it
        shouted, python, file = value["word"].split()
        assert (shouted, python) == (word, str(bare))
        assert re.search(rf"/worker/app-[^/]+/\d+/\.?/?{archive}/millstream/__init__\.py$", file), (
            file
        )


@pytest.mark.long
def test_the_project_and_the_package_reach_executors_that_have_neither(
    account: Account, project: Path, master: str, bare: Path, tmp_path: Path
) -> None:
    account.topic("lines")
    account.publish("lines", [b"one", b"two"])
    run([*COMMAND, "run", str(project), "--once", "--master", master], account, bare, tmp_path)
    check_words(account, bare, r"millstream-[0-9a-f]{16}\.zip")


@pytest.mark.long
def test_a_packed_project_runs_with_spark_submit_on_that_cluster(
    account: Account, project: Path, master: str, bare: Path, tmp_path: Path
) -> None:
    import pyspark

    account.topic("lines")
    account.publish("lines", [b"one", b"two"])
    dist = tmp_path / "dist"
    run([*COMMAND, "package", str(project), "-o", str(dist)], account, bare, tmp_path)
    submit = str(Path(pyspark.__file__).parent / "bin" / "spark-submit")
    command = [submit, "--master", master, "--py-files", str(dist / "pipeline.zip")]
    # Settings of the driver's JVM are too late in millstream.toml; the others, such as the small
    # memory of this worker, are taken from there.
    command += ["--driver-java-options", "-XX:TieredStopAtLevel=1"]
    arguments = ["--once", "--server", account.url, "--state", str(tmp_path / "state")]
    run([*command, str(dist / "main.py"), *arguments], account, bare, tmp_path)
    check_words(account, bare, r"pipeline\.zip")
    assert (tmp_path / "state" / "checkpoints" / "loud").is_dir()
