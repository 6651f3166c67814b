"""Errors of change data capture."""

from __future__ import annotations

from millstream.errors.base import MillstreamError

__all__ = [
    "BreakingChange",
    "CaptureBusy",
    "CaptureError",
    "CaptureNotRunning",
    "LogUnreadable",
    "SinkError",
    "SourceLost",
    "SourceUnreachable",
]


class CaptureError(MillstreamError, RuntimeError):
    """A capture cannot go on; what is stored so far stays right."""


class CaptureBusy(CaptureError):
    """The capture is running somewhere; nothing was changed."""

    def __init__(self, capture: str) -> None:
        self.capture = capture
        super().__init__(
            f"the capture '{capture}' is running. Stop it first: 'millstream cdc stop'"
        )


class CaptureNotRunning(CaptureError):
    """No process runs the capture."""

    def __init__(self, capture: str) -> None:
        self.capture = capture
        super().__init__(
            f"the capture '{capture}' is not running. Start it with 'millstream cdc run'"
        )


class SourceUnreachable(CaptureError):
    """The database could not be reached, or the connection to it was lost."""


class LogUnreadable(CaptureError, ValueError):
    """What the database sent cannot be decoded; nothing of it was stored."""


class SourceLost(CaptureError):
    """The source no longer has the changes that follow what is stored: a gap."""

    def __init__(self, capture: str, reason: str) -> None:
        self.capture = capture
        super().__init__(
            f"capture '{capture}': {reason}. Changes may be missing between what is stored and "
            f"what the source still has. Begin again with a new snapshot: "
            f"'millstream cdc reset --yes', then 'millstream cdc run'"
        )


class BreakingChange(CaptureError):
    """A table was changed in a way that readers of its topic could not follow."""

    def __init__(self, table: str, column: str, change: str, fix: str = "") -> None:
        self.table, self.column, self.change = table, column, change
        super().__init__(
            f"table {table}, column '{column}': {change}. Nothing after it was captured. "
            + (
                fix
                or f"Undo it, or begin the table again with a new topic: "
                f"'millstream cdc reset --table {table} --yes', then 'millstream cdc run'"
            )
        )


class SinkError(MillstreamError, RuntimeError):
    """Events of a topic could not be applied to a table of a database."""
