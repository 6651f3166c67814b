"""Makes `format("millstream")` known to Spark wherever the package is installed.

Spark looks for modules of this kind of name by itself; nothing has to be registered.
"""

from millstream.spark.datasource import MillstreamDataSource as DefaultSource

__all__ = ["DefaultSource"]
