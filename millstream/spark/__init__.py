"""Spark: topics and tables as DataFrames, read and written exactly once."""

from millstream.spark.foreach import as_events, table_writer, topic_writer
from millstream.spark.offsets import lag
from millstream.spark.session import session, session_settings

__all__ = ["as_events", "lag", "session", "session_settings", "table_writer", "topic_writer"]
