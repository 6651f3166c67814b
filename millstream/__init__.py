"""Event streaming for Python: durable messaging and Spark pipelines.

The public names are listed in `__init__.pyi` and loaded when they are first used, so that
`import millstream` stays light: no pyspark and no pyarrow until something needs them.
"""

from millstream.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
