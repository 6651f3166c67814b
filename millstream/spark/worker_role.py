"""Which module of Spark this process runs: its processes have different rules."""

from __future__ import annotations

import sys
from typing import Final

__all__ = ["is_committing", "is_offering_filters", "is_planning", "worker_module"]

# Processes of these modules do nothing but plan; functions of users run elsewhere.
_PLANNING: Final = ("pyspark.sql.worker.", "pyspark.sql.streaming.python_streaming_source_runner")
_COMMITTING: Final = "pyspark.sql.worker.python_streaming_sink_runner"
_FILTERS: Final = "pyspark.sql.worker.data_source_pushdown_filters"


def worker_module() -> str:
    """The module that Spark runs here; empty if this is none of its processes.

    Its daemon forks the processes of a module and has the name as its argument.
    """
    name = getattr(getattr(sys.modules.get("__main__"), "__spec__", None), "name", None) or ""
    if name == "pyspark.daemon" and len(sys.argv) > 1:
        return sys.argv[1]
    return name if name.startswith("pyspark.") else ""


def is_planning() -> bool:
    """Whether Spark asks here for a plan, or for offsets."""
    return worker_module().startswith(_PLANNING)


def is_offering_filters() -> bool:
    """Whether Spark offers filters here to a reader."""
    return worker_module() == _FILTERS


def is_committing() -> bool:
    """Whether Spark commits or aborts batches of a streaming query here."""
    return worker_module() == _COMMITTING
