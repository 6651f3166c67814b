"""Shows an error of ours in a notebook as one sentence, not at the end of a long traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from millstream.errors import MillstreamError
from millstream.settings import export_environment
from millstream.spark.worker_role import is_planning

__all__ = ["short_errors"]


@contextmanager
def short_errors() -> Iterator[None]:
    """Around what Spark calls to plan: our errors say what is wrong, a traceback adds nothing."""
    try:
        yield
    except MillstreamError:
        if is_planning():
            # Spark looks at it when a worker reports an error, and then leaves out the traceback.
            export_environment(SPARK_HIDE_TRACEBACK="1")
        raise
