"""Pipelines: a folder of functions that return DataFrames, run continuously and exactly once."""

from millstream.pipelines.attempts import accepted, attempt, refused
from millstream.pipelines.declare import (
    Flow,
    Output,
    Pipeline,
    files,
    flow,
    loading,
    sink,
    table,
    topic,
    view,
)
from millstream.pipelines.joins import enrich, join_streams, join_tables
from millstream.pipelines.loader import load
from millstream.pipelines.postgres import postgres
from millstream.pipelines.project import Project, open_project
from millstream.pipelines.reads import read, read_changes, read_events, read_table

__all__ = [
    "Flow",
    "Output",
    "Pipeline",
    "Project",
    "accepted",
    "attempt",
    "enrich",
    "files",
    "flow",
    "join_streams",
    "join_tables",
    "load",
    "loading",
    "open_project",
    "postgres",
    "read",
    "read_changes",
    "read_events",
    "read_table",
    "refused",
    "sink",
    "table",
    "topic",
    "view",
]
