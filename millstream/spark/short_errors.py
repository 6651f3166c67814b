"""Shows an error of ours in a notebook as one sentence, not at the end of a long traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from millstream.errors import MillstreamError

__all__ = ["short_errors"]

# Spark runs these modules in processes that do nothing but plan; functions of users run elsewhere.
_PLANNING: Final = (
    "pyspark.sql.worker.utils",
    "pyspark.sql.streaming.python_streaming_source_runner",
)
# Spark looks at it when a worker reports an error, and then leaves out the traceback.
_SWITCH: Final = "SPARK_HIDE_TRACEBACK"


@contextmanager
def short_errors() -> Iterator[None]:
    """Around what Spark calls to plan: our errors say what is wrong, a traceback adds nothing."""
    try:
        yield
    except MillstreamError:
        if any(name in sys.modules for name in _PLANNING):
            os.environ[_SWITCH] = "1"
        raise
