"""Spark: topics and tables as DataFrames, read and written exactly once."""

from millstream.spark.session import session, session_settings

__all__ = ["session", "session_settings"]
