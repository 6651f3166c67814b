"""The new position of a reader: options of `subscription seek` and `group seek`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.errors import ConfigError

if TYPE_CHECKING:
    from millstream.messaging import Start

__all__ = ["SeekOptions"]


@dataclass(frozen=True, slots=True)
class SeekOptions:
    """Where a subscription or group continues."""

    offset: Annotated[int | None, typer.Option("--offset", min=1, help="Move to this offset.")] = (
        None
    )
    time: Annotated[
        str | None,
        typer.Option("--time", help="Move to this time: a date, or 10m for ten minutes ago."),
    ] = None
    start: Annotated[bool, typer.Option("--start", help="Move to the first event.")] = False
    end: Annotated[bool, typer.Option("--end", help="Move after the last event.")] = False

    def position(self) -> "Start":
        """The position that was given."""
        from millstream.cli.options.times import moment
        from millstream.messaging import Start

        if (self.offset is not None) + (self.time is not None) + self.start + self.end != 1:
            raise ConfigError("give one of --offset, --time, --start and --end")
        if self.offset is not None:
            return Start.at_offset(self.offset)
        if self.time is not None:
            return Start.at_time(moment(self.time))
        return Start.ALL if self.start else Start.NEW
