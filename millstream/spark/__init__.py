"""Spark: topics and tables as DataFrames, read and written exactly once."""

from millstream.spark.dataframes import (
    as_events,
    drop_undecodable,
    states_as_of,
    table_writer,
    topic_writer,
)
from millstream.spark.session import session, session_settings
from millstream.spark.source.offsets import lag
from millstream.spark.stores import event_upcasters

__all__ = [
    "as_events",
    "drop_undecodable",
    "event_upcasters",
    "lag",
    "session",
    "session_settings",
    "states_as_of",
    "table_writer",
    "topic_writer",
]
