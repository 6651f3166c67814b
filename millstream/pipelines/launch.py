"""From a project to a running pipeline: session, declarations, runner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.pipelines.graph import Graph
from millstream.pipelines.loader import load
from millstream.pipelines.outputs import PipelineTopics
from millstream.pipelines.project import Project
from millstream.pipelines.resolve import resolve
from millstream.pipelines.runner import Runner, RunSettings
from millstream.pipelines.shipping import ship

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["graph_of", "make_runner", "settings_of", "spark_for"]


def settings_of(project: Project) -> dict[str, str]:
    """The settings of Spark that a project asks for, in its millstream.toml and by what it uses."""
    settings = {"spark.sql.session.timeZone": "UTC"}
    if project.state_store == "rocksdb":
        settings |= {
            "spark.sql.streaming.stateStore.providerClass": (
                "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
            ),
            "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
            # Its snapshots go through Hadoop's own local file system, and take no other.
            "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.LocalFileSystem",
        }
    return {**settings, **project.spark}


def spark_for(project: Project, master: str | None = None) -> SparkSession:
    """The session of a project; `master` wins over millstream.toml."""
    from millstream.spark import session

    return session(project.name, master=master or project.master, conf=settings_of(project))


def make_runner(
    project: Project, settings: RunSettings | None = None, master: str | None = None
) -> Runner:
    """A runner with a session of its own; what the project declares wrongly is refused first."""
    pipeline = load(project, lambda: spark_for(project, master))
    spark = spark_for(project, master)
    ship(spark, project)
    return Runner(project, pipeline, spark, settings)


def graph_of(project: Project, url: str | None = None) -> Graph:
    """What reads what: the functions are called, nothing is written and no topic is made."""
    pipeline = load(project, lambda: spark_for(project))
    spark = spark_for(project)
    ship(spark, project)
    options = {"url": url} if url else {}
    with PipelineTopics(url, dry=True) as topics:
        return resolve(pipeline, spark, topics, project.folder, options).graph
