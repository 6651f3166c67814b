"""Options of the commands that read events; the same words everywhere."""

from __future__ import annotations

from typing import Annotated, Final

import typer

__all__ = [
    "FORMAT_HELP",
    "PLACE_HELP",
    "VALUE_FORMS",
    "CountOption",
    "FormatOption",
    "KeyOption",
    "PartitionOption",
    "RawOption",
    "SubjectOption",
    "TopicArgument",
    "ValueOption",
]

PLACE_HELP: Final = (
    "beginning, end, an offset, -N (the last N of each partition), keys (the last of each key), "
    "or @TIME (2026-01-31T12:00Z, or 10m: ten minutes ago)"
)
FORMAT_HELP: Final = (
    "%t topic, %p partition, %o offset, %k key, %s value, %S and %K their sizes, "
    "%T time in ms, %h headers, %i id, %%; \\n \\t \\r \\xHH"
)
VALUE_FORMS: Final = ("auto", "text", "json", "base64")

TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="Name of the topic.")]
CountOption = Annotated[
    int | None, typer.Option("--count", "-c", min=1, help="End after so many events.")
]
FormatOption = Annotated[
    str | None,
    typer.Option("--format", "-f", metavar="FORMAT", help=f"Format of each event: {FORMAT_HELP}."),
]
RawOption = Annotated[
    bool, typer.Option("--raw", "-r", help="Print the bare values, each with a line end.")
]
KeyOption = Annotated[
    list[str] | None,
    typer.Option("--key", "-k", help="Only events of this key; repeat it for more."),
]
SubjectOption = Annotated[
    list[str] | None,
    typer.Option("--subject", help="Only messages on this subject pattern; repeat it for more."),
]
PartitionOption = Annotated[
    list[int] | None,
    typer.Option("--partition", "-p", min=0, help="Only this partition; repeat it for more."),
]
ValueOption = Annotated[
    str,
    typer.Option(
        "--value",
        help="How a value is written in JSON: auto (text, else base64), text, json or base64.",
    ),
]
