"""Options of the commands of event stores."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.cli.options.bodies import HeaderOption, body_bytes, header_pairs
from millstream.cli.options.reading import UndecodableOption
from millstream.errors import ConfigError

if TYPE_CHECKING:
    from datetime import datetime

    from millstream.event_store.event_types import EventTypes
    from millstream.event_store.events import Expected, NamedEvent

__all__ = [
    "AppendOptions",
    "ExpectedOption",
    "HistoryOptions",
    "IdArgument",
    "MomentOptions",
    "StateOption",
    "StoreArgument",
    "expected_of",
    "named_events",
]

StoreArgument = Annotated[str, typer.Argument(metavar="STORE", help="Name of the event store.")]
IdArgument = Annotated[str, typer.Argument(metavar="ID", help="Id of the aggregate.")]
StateOption = Annotated[
    str | None,
    typer.Option(
        "--state",
        metavar="MODULE:CLASS",
        help="Class of the states, with the classes of the events beside it. "
        "(default: the one that the store was opened with)",
    ),
]
ExpectedOption = Annotated[
    str,
    typer.Option(
        "--expected",
        "-e",
        metavar="N|new|any",
        help="Only if the aggregate has this version, or has no events yet (new).",
    ),
]


def expected_of(text: str) -> "Expected":
    """The version that an append expects."""
    from millstream.event_store.events import ANY, NEW

    if text.isascii() and text.isdigit():
        return int(text) or NEW
    if text not in ("new", "any"):
        raise ConfigError(f"--expected {text!r}: give a version, new or any")
    return NEW if text == "new" else ANY


def named_events(types: "EventTypes", words: Sequence[str]) -> "list[NamedEvent]":
    """The events of `EVENT JSON EVENT JSON ...`, checked against their schemas."""
    if len(words) % 2:
        raise ConfigError(f"after the event {words[-1]!r:.60} there is no JSON: write EVENT JSON")
    pairs = zip(words[::2], words[1::2], strict=True)
    return [types.parse(name, body_bytes(text)) for name, text in pairs]


@dataclass(frozen=True, slots=True)
class AppendOptions:
    """What an append has besides its events."""

    append_id: Annotated[
        str | None,
        typer.Option("--id", help="Id of the append; one that is stored already is not repeated."),
    ] = None
    correlation: Annotated[
        str | None, typer.Option("--correlation", help="Id of the work that it belongs to.")
    ] = None
    causation: Annotated[str | None, typer.Option("--causation", help="Id of what led to it.")] = (
        None
    )
    time: Annotated[
        str | None, typer.Option("--time", help="Time of the events, with time zone.")
    ] = None
    header: HeaderOption = None

    def details(self) -> dict[str, Any]:
        """The keywords of `store.append`."""
        from millstream.cli.options.times import nanoseconds

        return {
            "append_id": self.append_id,
            "correlation_id": self.correlation,
            "causation_id": self.causation,
            "timestamp": None if self.time is None else nanoseconds(self.time),
            "headers": dict(header_pairs(self.header)) or None,
        }


@dataclass(frozen=True, slots=True)
class HistoryOptions:
    """Which events are printed, and in which direction."""

    backward: Annotated[
        bool,
        typer.Option("--backward", "-b", help="The newest first; without an ID, with --limit."),
    ] = False
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, help="At most N events.")] = (
        None
    )
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue with new events, until Ctrl-C.")
    ] = False
    category: Annotated[
        str | None,
        typer.Option("--category", help="Only aggregates whose ids begin with this part."),
    ] = None
    undecodable: UndecodableOption = "fail"

    def check(self, id: str | None) -> None:
        """Refuse options that exclude each other."""
        if self.follow and self.backward:
            raise ConfigError("choose one of --backward and --follow")
        if id is not None and self.category is not None:
            raise ConfigError("give an ID, or --category")
        if id is None and self.backward and self.limit is None:
            raise ConfigError("--backward over all aggregates: say how many events, with --limit")


@dataclass(frozen=True, slots=True)
class MomentOptions:
    """At which moment an aggregate is shown."""

    at: Annotated[
        str | None,
        typer.Option(
            "--at",
            metavar="VERSION|TIME",
            help="As it was after this version, or at this time "
            "(2026-01-31T12:00Z, or 10m: ten minutes ago).",
        ),
    ] = None
    clock: Annotated[
        str,
        typer.Option(
            "--clock",
            metavar="stored|event",
            help="What a time means: when events were stored, or the time they were given.",
        ),
    ] = "stored"

    def arguments(self) -> "dict[str, int | datetime | str | None]":
        """The arguments of `store.load`."""
        from millstream.cli.options.times import moment

        if self.clock not in ("stored", "event"):
            raise ConfigError(f"--clock {self.clock}: choose stored or event")
        text = self.at
        if text is None:
            return {"at": None, "clock": self.clock}
        is_version = text.isascii() and text.isdigit()
        return {"at": int(text) if is_version else moment(text), "clock": self.clock}
