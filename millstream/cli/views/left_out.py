"""Events that a command cannot decode, or not write in the chosen format: named and left out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import typer

from millstream.cli.exits import Exit
from millstream.errors import ConfigError, Undecodable
from millstream.events.undecodable import reason_of

if TYPE_CHECKING:
    from millstream.messaging import Event

__all__ = ["LeftOut"]

NAMED_MAX: Final = 100  # events that are named one by one; the others are only counted
POLICIES: Final = ("fail", "drop")


class LeftOut:
    """Names the events that are left out, and decides at last whether the command has failed."""

    def __init__(self, policy: str) -> None:
        if policy not in POLICIES:
            raise ConfigError(f"--undecodable is one of {', '.join(POLICIES)}, not {policy!r}")
        self._fails = policy == "fail"
        self.count = 0

    def __call__(self, error: Undecodable) -> None:
        """Leave out an event."""
        self.count += 1
        if self.count <= NAMED_MAX:
            where = f"{error.topic}/{error.partition}, offset {error.offset}, index {error.index}"
            typer.echo(f"left out: {where}: {error.reason}", err=True)

    def unwritable(self, event: Event, error: Exception) -> None:
        """Leave out an event that the chosen format cannot hold."""
        self(Undecodable(event.topic, *event.position, reason_of(error)))

    def finish(self) -> None:
        """All others are written: report how many are not, and fail if that was chosen."""
        if self.count:
            typer.echo(f"{self.count:,} event(s) left out", err=True)
            if self._fails:
                raise typer.Exit(Exit.ERROR)
