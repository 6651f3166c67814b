"""Options of the commands that read events; the same names everywhere."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from millstream.cli.options.positions import POSITION_HELP, Position, parse_position
from millstream.errors import ConfigError

if TYPE_CHECKING:
    from datetime import datetime


__all__ = [
    "FORMAT_HELP",
    "VALUE_FORMS",
    "CountOption",
    "EventFormat",
    "RangeOptions",
    "Selection",
    "TopicArgument",
    "UndecodableOption",
    "ValueOption",
]

FORMAT_HELP: Final = (
    "%t topic, %p partition, %o offset, %k key, %s value, %S and %K their sizes, "
    "%T time in ms, %h headers, %i id, %%; \\n \\t \\r \\xHH"
)
VALUE_FORMS: Final = ("auto", "text", "json", "base64")

TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="Name of the topic.")]
CountOption = Annotated[
    int | None, typer.Option("--count", "-c", min=1, help="Stop after N events.")
]
ValueOption = Annotated[
    str,
    typer.Option(
        "--value",
        help="How a value is written in JSON: auto (text, else base64), text, json or base64.",
    ),
]

UndecodableOption = Annotated[
    str,
    typer.Option(
        "--undecodable",
        help="Events that cannot be decoded are named on stderr and left out; then the exit code "
        "is 1 (fail) or 0 (drop).",
    ),
]


@dataclass(frozen=True, slots=True)
class Selection:
    """Which events of a topic are read."""

    key: Annotated[
        list[str] | None,
        typer.Option("--key", "-k", help="Only events with this key; repeat it for more."),
    ] = None
    subject: Annotated[
        list[str] | None,
        typer.Option(
            "--subject", help="Only messages on this subject pattern; repeat it for more."
        ),
    ] = None
    partition: Annotated[
        list[int] | None,
        typer.Option("--partition", "-p", min=0, help="Only this partition; repeat it for more."),
    ] = None

    undecodable: UndecodableOption = "fail"

    def arguments(self) -> dict[str, Any]:
        """The arguments of `topic.read`."""
        keys, subjects = self.key or (), self.subject or ()
        return {"keys": keys, "subjects": subjects, "partitions": self.partition}


@dataclass(frozen=True, slots=True)
class RangeOptions:
    """From where to where a topic is read."""

    start: Annotated[
        str, typer.Option("--start", metavar="POSITION", help=f"Where to start: {POSITION_HELP}.")
    ] = "beginning"
    end: Annotated[
        str,
        typer.Option(
            "--end", metavar="POSITION", help="Where to end, exclusive: an offset, @TIME or end."
        ),
    ] = "end"

    def positions(self) -> "tuple[Position, int | datetime | None]":
        """The start, and the end, exclusive; None: everything that is stored now."""
        start, end = parse_position(self.start), parse_position(self.end)
        if end.name == "end":
            return start, None
        if end.offset is None and end.time is None:
            raise ConfigError(f"--end {self.end}: give an offset, @TIME or end")
        return start, end.offset if end.offset is not None else end.time


@dataclass(frozen=True, slots=True)
class EventFormat:
    """How events are printed."""

    form: Annotated[
        str | None,
        typer.Option(
            "--format", "-f", metavar="FORMAT", help=f"Format of each event: {FORMAT_HELP}."
        ),
    ] = None
    raw: Annotated[
        bool, typer.Option("--raw", "-r", help="Print only the values, one per line.")
    ] = False
    value: ValueOption = "auto"
