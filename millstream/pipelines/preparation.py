"""Prepares Spark for quick starts: Java keeps the classes of a pipeline of the usual parts.

Java writes an archive of the classes that it has loaded when it ends. Sessions that end normally
create one, too, but only of what they happened to use, and never those that are killed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from millstream.errors import ConfigError
from millstream.spark.class_archive import CREATE, adopt_archive, claim_archives, new_archive
from millstream.spark.session import QUICK_COMPILER, check_pyspark, java_version

__all__ = ["prepare_spark"]

SECONDS: Final = 600.0  # for everything, on a busy machine
EVENTS: Final = 50

_TOML: Final = """\
[pipeline]
name = "preparation"
restarts = 0

[pipeline.spark]
"spark.driver.extraJavaOptions" = "{options}"
"""

# What pipelines are usually made of: joins of streams, of streams with tables and of tables,
# windows, topics, tables and files.
_PYTHON: Final = """\
from pyspark.sql import functions as f

from millstream import pipelines as mp


@mp.topic(key="name")
def joined():
    left, right = mp.read("left"), mp.read("right").select("name", "time", "number")
    return mp.join_streams(
        left, right.withColumnRenamed("number", "other"), on=["name", "time"], time="time",
        late="1 hour", how="left",
    )


@mp.files(path="files")
def enriched():
    return mp.enrich(mp.read("joined"), mp.read_table("names"), on="name")


@mp.table(key=["day", "name"])
def windows():
    rows = mp.read("left").withWatermark("time", "1 hour")
    counted = rows.groupBy(f.window("time", "1 day").alias("window"), "name").agg(
        f.count("*").alias("times"), f.sum("number").alias("total")
    )
    return counted.select(f.date_format("window.start", "yyyy-MM-dd").alias("day"),
                          *counted.columns[1:])


@mp.table(key="name")
def latest():
    rows = mp.read("left").where("name IS NOT NULL AND number > 0")
    return rows.groupBy("name").agg(f.max_by("text", f.struct("time", "number")).alias("text"))


@mp.table(key="name")
def both():
    return mp.join_tables(mp.read_changes("latest"), mp.read_changes("names"), on="name")
"""


@dataclass
class _Row:
    name: str
    time: datetime
    number: int
    text: str


@dataclass
class _Name:
    name: str
    title: str


def prepare_spark() -> Path:
    """Create the archive of classes for this installation, or create it again; its file.

    Takes a temporary broker, half a minute, and about 200 MB in the user's cache folder.
    """
    check_pyspark()
    java = java_version()
    if not claim_archives():
        raise ConfigError(
            "another process is creating Spark's archive of classes. Wait until it has ended"
        )
    with tempfile.TemporaryDirectory(prefix="millstream-prepare-") as folder:
        _run(Path(folder), new_archive(java))
    archive = adopt_archive(java)
    if archive is None:
        raise ConfigError(f"Java {java} ended without writing an archive of its classes")
    return archive


def _run(folder: Path, archive: Path) -> None:
    from millstream import Broker, BrokerSettings

    project = folder / "project"
    project.mkdir()
    options = f"{QUICK_COMPILER} {CREATE}{archive}"
    (project / "millstream.toml").write_text(_TOML.format(options=options), encoding="utf-8")
    (project / "pipeline.py").write_text(_PYTHON, encoding="utf-8")
    with Broker(BrokerSettings(data=folder / "broker", port=0)) as broker:
        _fill(broker.url)
        code = "from millstream.cli.main import main; main()"
        words = ["pipeline", "run", str(project), "--once", "--quiet", "--server", broker.url]
        # Java has the same stdout, so reading it to its end waits for Java, too.
        try:
            done = subprocess.run(
                [sys.executable, "-c", code, *words],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigError(
                f"Spark could not be prepared: its run did not end within {SECONDS:.0f} s. Try "
                f"again when the machine is less busy"
            ) from error
    if done.returncode:
        raise ConfigError(f"Spark could not be prepared: {(done.stderr or done.stdout).strip()}")


def _fill(url: str) -> None:
    from millstream import blocking

    start = datetime(2024, 1, 1, tzinfo=UTC)
    rows = [
        _Row(f"n{n % 5}", start + timedelta(hours=n), number=n, text=str(n))
        for n in range(1, EVENTS)
    ]
    with blocking.connect(url) as mill:
        for name in ("left", "right"):
            with mill.create_topic(name, schema=_Row).producer() as producer:
                producer.send_many(rows, key="name")
        names = mill.create_table("names", schema=_Name)
        names.put_many({f"n{n}": _Name(f"n{n}", f"Name {n}") for n in range(5)})
