"""Spark: topics and tables as DataFrames, read and written exactly once."""

from millstream.spark.dataframes import as_events, drop_undecodable, table_writer, topic_writer
from millstream.spark.session import session, session_settings
from millstream.spark.source.offsets import lag

__all__ = [
    "as_events",
    "drop_undecodable",
    "lag",
    "session",
    "session_settings",
    "table_writer",
    "topic_writer",
]
