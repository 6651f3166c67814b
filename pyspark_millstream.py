"""Registers `format("millstream")` with Spark wherever the package is installed.

Spark imports modules whose name starts with `pyspark_` automatically.
"""

from millstream.spark.datasource import MillstreamDataSource as DefaultSource

__all__ = ["DefaultSource"]
