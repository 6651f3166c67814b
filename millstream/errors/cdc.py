"""Errors of change data capture."""

from __future__ import annotations

from millstream.errors.base import MillstreamError

__all__ = [
    "BreakingChange",
    "CaptureBusy",
    "CaptureError",
    "CaptureNotRunning",
    "LogUnreadable",
    "RowRefused",
    "SinkError",
    "SinkTakenOver",
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


class SinkTakenOver(SinkError):
    """Another process applies the same topic to the same table under the same name."""

    def __init__(self, name: str, topic: str, table: str) -> None:
        self.name, self.topic, self.table = name, topic, table
        super().__init__(
            f"apply '{name}' (topic '{topic}' to table {table}) was taken over by another process. "
            f"Nothing was stored since; the other one continues from the stored position"
        )


class RowRefused(SinkError):
    """The database refused a row; nothing of its group was stored."""

    def __init__(self, table: str, key: dict[str, object], place: str, message: str) -> None:
        self.table, self.key, self.place, self.message = table, key, place, message
        named = ", ".join(f"{column} {value!r:.100}" for column, value in key.items())
        super().__init__(
            f"table {table} refused the row with {named} ({place}): {message}. Everything before "
            f"its group is stored, nothing of the group is. Change the table so that it takes the "
            f"row, and start again"
        )
