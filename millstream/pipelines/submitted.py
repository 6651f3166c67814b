"""Runs a packed project in spark-submit: main.py of the package calls this."""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import millstream
from millstream.errors import ConfigError
from millstream.pipelines.launch import settings_of
from millstream.pipelines.loader import load
from millstream.pipelines.project import Project, open_project
from millstream.pipelines.runner import Runner, RunSettings, stopped_by_signals
from millstream.pipelines.shipping import ship_project
from millstream.settings import names_a_broker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["run_submitted"]

INSIDE = "millstream_project"


def run_submitted(name: str, arguments: Sequence[str]) -> None:
    """Run the packed project until SIGTERM, or with --once until it has caught up."""
    parser = argparse.ArgumentParser(prog="main.py", description=f"Runs the pipeline '{name}'.")
    parser.add_argument("--once", action="store_true", help="catch up, then end")
    parser.add_argument("--server", help="address of the broker (default: NATS_URL)")
    parser.add_argument("--state", required=True, help="folder for status and checkpoints")
    given = parser.parse_args(arguments)
    if not names_a_broker(given.server):
        raise ConfigError("no broker address: give --server nats://host:4222 or set NATS_URL")
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as folder:
        archive = _archive()
        project = _unpack(archive, Path(folder), given.state)
        spark = _session(project)
        ship_project(spark, project, archive)
        options = {"url": given.server} if given.server else {}
        settings = RunSettings(once=given.once, options=options)
        runner = Runner(project, load(project), spark, settings)
        with runner.state.running(), stopped_by_signals(runner):
            runner.run()
        spark.stop()


def _session(project: Project) -> SparkSession:
    """The session with the settings that the project and exactly-once need; spark-submit's win."""
    from pyspark import SparkConf
    from pyspark.sql import SparkSession

    from millstream.spark import session_settings

    given = SparkConf()
    master = given.get("spark.master", "local[*]") or ""
    ours = {n: v for n, v in session_settings(master).items() if not n.startswith("spark.ui.")}
    builder = SparkSession.builder.appName(project.name)
    for setting, value in {**ours, **settings_of(project)}.items():
        if not given.contains(setting):
            builder = builder.config(setting, value)
    return builder.getOrCreate()


def _archive() -> Path:
    """The archive that this package was loaded from."""
    found = [p for p in Path(millstream.__file__).parents if p.is_file() and zipfile.is_zipfile(p)]
    if not found:
        raise ConfigError("run main.py with spark-submit --py-files pipeline.zip")
    return found[0]


def _unpack(archive: Path, folder: Path, state: str) -> Project:
    """Extract the project's files from the archive."""
    with zipfile.ZipFile(archive) as packed:
        for item in packed.namelist():
            if item.startswith(f"{INSIDE}/") and ".." not in Path(item).parts:
                packed.extract(item, folder)
    project = open_project(folder / INSIDE)
    state_folder = Path(state).resolve()
    inside = project.checkpoints.startswith(str(project.folder))
    checkpoints = str(state_folder / "checkpoints") if inside else project.checkpoints
    return dataclasses.replace(project, state=state_folder, checkpoints=checkpoints)
