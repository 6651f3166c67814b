"""Errors of pipelines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from millstream.errors.base import ConfigError, MillstreamError

__all__ = [
    "FlowsFailed",
    "PipelineBusy",
    "PipelineError",
    "PipelineInvalid",
    "PipelineNotRunning",
]


class PipelineInvalid(ConfigError):
    """The declarations of a pipeline project do not fit together; nothing was started."""


class PipelineError(MillstreamError, RuntimeError):
    """Base of errors about running pipelines."""


class PipelineBusy(PipelineError):
    """Another process runs the pipeline; nothing was changed."""

    def __init__(self, pipeline: str, holder: str) -> None:
        self.pipeline, self.holder = pipeline, holder
        super().__init__(
            f"the pipeline '{pipeline}' is running ({holder}). "
            f"Stop it first: 'millstream pipeline stop'"
        )


class PipelineNotRunning(PipelineError):
    """No process runs the pipeline."""

    def __init__(self, pipeline: str) -> None:
        self.pipeline = pipeline
        super().__init__(
            f"the pipeline '{pipeline}' is not running. Start it with 'millstream pipeline run'"
        )


class FlowsFailed(PipelineError):
    """Some flows kept failing and were stopped; `reasons` has the last error of each.

    `log` is the file with Spark's own account of them, if there is one.
    """

    def __init__(self, pipeline: str, reasons: Mapping[str, str], log: Path | None = None) -> None:
        self.pipeline, self.reasons, self.log = pipeline, dict(reasons), log
        text = "; ".join(f"'{name}': {reason}" for name, reason in self.reasons.items())
        more = "" if log is None else f" (Spark's stack traces are in {log})"
        super().__init__(
            f"these flows of the pipeline '{pipeline}' kept failing and were stopped: {text}{more}"
        )
