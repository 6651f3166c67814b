"""From a project to a running pipeline: session, declarations, runner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from millstream.pipelines.declare import Pipeline
from millstream.pipelines.graph import Graph
from millstream.pipelines.loader import load
from millstream.pipelines.outputs import PipelineTopics
from millstream.pipelines.project import Project
from millstream.pipelines.resolve import Resolver
from millstream.pipelines.runner import Runner, RunSettings
from millstream.pipelines.shipping import ship
from millstream.settings import names_a_broker, project_broker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["broker_options", "graph_of", "make_runner", "settings_of", "spark_for"]


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

    return session(
        project.name,
        master=master or project.master,
        log=project.spark_log,
        conf=settings_of(project),
    )


def make_runner(
    project: Project, settings: RunSettings | None = None, master: str | None = None
) -> Runner:
    """A runner with a session of its own; a project that does not load starts no session."""
    settings = settings or RunSettings()
    pipeline, spark = _loaded(project, settings.options, master)
    return Runner(project, pipeline, spark, settings)


def _loaded(
    project: Project, options: Mapping[str, str], master: str | None = None
) -> tuple[Pipeline, SparkSession]:
    """What a project declares, and its session, which is not started without a broker."""

    def start() -> SparkSession:
        with PipelineTopics(options) as topics:
            topics.check_reachable()
        return spark_for(project, master)

    pipeline = load(project, start)
    spark = start()
    ship(spark, project)
    return pipeline, spark


def graph_of(project: Project, options: Mapping[str, str]) -> Graph:
    """What reads what: the functions are called, nothing is written and no topic is created."""
    pipeline, spark = _loaded(project, options)
    with PipelineTopics(options, dry=True) as topics:
        return Resolver(pipeline, spark, project.folder, options).all(topics).graph


def broker_options(
    project: Project, url: str | None = None, context: str | None = None
) -> dict[str, str]:
    """The options of every source and sink that say where the broker is.

    Spark's processes would look for millstream.toml in their own working directory. With NATS_URL
    or NATS_CONTEXT they look there, and on another machine it may have another value.
    """
    found = {"url": url, "context": context}
    if not names_a_broker(url, context):
        found["url"], tls = project_broker(project.folder)
        if tls is not None:
            found |= {"tlsPin": tls.pin, "tlsCert": tls.cert, "tlsKey": tls.key}
            found["tlsFirst"] = str(tls.handshake_first).lower()
    return {name: value for name, value in found.items() if value is not None}
