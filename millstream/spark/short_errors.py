"""Shows an error of ours in a notebook as one sentence, not at the end of a long traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from millstream.errors import MillstreamError
from millstream.settings import export_environment

__all__ = ["short_errors"]

# Spark runs these modules in processes that do nothing but plan; functions of users run elsewhere.
_PLANNING: Final = (
    "pyspark.sql.worker.utils",
    "pyspark.sql.streaming.python_streaming_source_runner",
)


@contextmanager
def short_errors() -> Iterator[None]:
    """Around what Spark calls to plan: our errors say what is wrong, a traceback adds nothing."""
    try:
        yield
    except MillstreamError:
        if any(name in sys.modules for name in _PLANNING):
            # Spark looks at it when a worker reports an error, and then leaves out the traceback.
            export_environment(SPARK_HIDE_TRACEBACK="1")
        raise
