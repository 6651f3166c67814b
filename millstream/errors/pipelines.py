"""Errors of pipelines."""

from __future__ import annotations

from collections.abc import Mapping

from millstream.errors.base import ConfigError, MillstreamError

__all__ = [
    "FlowsFailed",
    "PipelineBusy",
    "PipelineError",
    "PipelineInvalid",
    "PipelineNotRunning",
]


class PipelineInvalid(ConfigError):
    """What a pipeline project declares does not fit together; nothing was started."""


class PipelineError(MillstreamError, RuntimeError):
    """Something about running a pipeline."""


class PipelineBusy(PipelineError):
    """Another process runs the pipeline; nothing was changed."""

    def __init__(self, pipeline: str, holder: str) -> None:
        self.pipeline, self.holder = pipeline, holder
        super().__init__(
            f"the pipeline '{pipeline}' runs ({holder}). Stop it first: 'millstream pipeline stop'"
        )


class PipelineNotRunning(PipelineError):
    """No process runs the pipeline."""

    def __init__(self, pipeline: str) -> None:
        self.pipeline = pipeline
        super().__init__(
            f"the pipeline '{pipeline}' does not run. Start it with 'millstream pipeline run'"
        )


class FlowsFailed(PipelineError):
    """Some flows failed again and again and were given up; `reasons` has the last error of each."""

    def __init__(self, pipeline: str, reasons: Mapping[str, str]) -> None:
        self.pipeline, self.reasons = pipeline, dict(reasons)
        text = "; ".join(f"'{name}': {reason}" for name, reason in self.reasons.items())
        super().__init__(f"of the pipeline '{pipeline}' these flows were given up: {text}")
