"""The settings of a topic as options, defined once for `create` and `edit`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from millstream.errors import ConfigError

if TYPE_CHECKING:
    from millstream.messaging import Origin

__all__ = ["OPTIONS", "settings_from"]

LIMITS: Final = "Limits (of each partition; 'none' for no limit)"
COPIES: Final = "Copies of other topics"
RULES: Final = "Rules"

RetentionOption = Annotated[
    str | None,
    typer.Option(
        help="limits, interest (while a subscription wants it) or workqueue (until one took it)."
    ),
]
ReplicasOption = Annotated[int | None, typer.Option(help="Nodes that keep a copy: 1 to 5.")]
StorageOption = Annotated[str | None, typer.Option(help="file or memory.")]
CompressionOption = Annotated[str | None, typer.Option(help="none or s2.")]
DescriptionOption = Annotated[str | None, typer.Option(help="What it is for.")]
MetadataOption = Annotated[
    list[str] | None, typer.Option(metavar="NAME=TEXT", help="A note; repeat it for more.")
]
MaxAgeOption = Annotated[
    str | None, typer.Option(help="How old events get, such as 7d.", rich_help_panel=LIMITS)
]
MaxBytesOption = Annotated[
    str | None, typer.Option(help="How much is kept, such as 10GiB.", rich_help_panel=LIMITS)
]
MaxMessagesOption = Annotated[
    str | None, typer.Option(help="How many messages are kept.", rich_help_panel=LIMITS)
]
HistoryOption = Annotated[
    str | None, typer.Option(help="How many events of each key.", rich_help_panel=LIMITS)
]
MaxMessageSizeOption = Annotated[
    str | None, typer.Option(help="Size of the largest message.", rich_help_panel=LIMITS)
]
MaxSubscriptionsOption = Annotated[
    str | None, typer.Option(help="How many subscriptions there may be.", rich_help_panel=LIMITS)
]
DiscardOption = Annotated[
    str | None,
    typer.Option(
        help="What gives way at a limit: old or new (then it is refused).", rich_help_panel=LIMITS
    ),
]
DiscardNewPerKeyOption = Annotated[
    bool | None,
    typer.Option(
        "--discard-new-per-key/--no-discard-new-per-key",
        help="A key with a full history refuses its next event.",
        rich_help_panel=LIMITS,
    ),
]
DuplicateWindowOption = Annotated[
    str | None,
    typer.Option(help="How long ids are remembered, such as 2m.", rich_help_panel=RULES),
]
MarkerTtlOption = Annotated[
    str | None,
    typer.Option(
        help="How long a marker says that a key's last event expired.", rich_help_panel=RULES
    ),
]
MessageTtlOption = Annotated[
    bool | None,
    typer.Option(
        "--message-ttl/--no-message-ttl",
        help="An event may bring its own time to live.",
        rich_help_panel=RULES,
    ),
]
DenyDeleteOption = Annotated[
    bool | None,
    typer.Option("--deny-delete", help="No event can be deleted, for ever.", rich_help_panel=RULES),
]
DenyPurgeOption = Annotated[
    bool | None,
    typer.Option("--deny-purge", help="Nothing can be purged, for ever.", rich_help_panel=RULES),
]
EarlyAckOption = Annotated[
    bool | None,
    typer.Option(
        "--early-ack/--no-early-ack",
        help="Ack before it is written: faster, a killed broker loses events.",
        rich_help_panel=RULES,
    ),
]
PrefixOption = Annotated[
    str | None,
    typer.Option(help="What its subjects begin with. (default: its name)", rich_help_panel=RULES),
]
_ORIGIN_METAVAR: Final = "TOPIC[,domain=D][,start=OFFSET|TIME][,filter=PATTERN]"
MirrorOption = Annotated[
    str | None,
    typer.Option(metavar=_ORIGIN_METAVAR, help="Be an exact copy of it.", rich_help_panel=COPIES),
]
SourceOption = Annotated[
    list[str] | None,
    typer.Option(
        "--source",
        metavar=_ORIGIN_METAVAR,
        help="Collect its events; repeat it for more.",
        rich_help_panel=COPIES,
    ),
]


def settings_from(options: Mapping[str, Any]) -> dict[str, Any]:
    """What was given of a topic's settings, in the forms that TopicSettings takes."""
    given = {
        name: value
        for name, value in options.items()
        if name in _READERS and value not in (None, (), [])
    }
    return {name: _READERS[name](name, value) for name, value in given.items()}


def _as_is(name: str, value: Any) -> Any:
    return value


def _limit(name: str, text: str) -> str | None:
    return None if text == "none" else text


def _count(name: str, text: str) -> int | None:
    if text == "none":
        return None
    if not text.isdigit():
        option = f"--{name.replace('_', '-')}"
        raise ConfigError(f"{option}: {text!r} is not a number. Give one, or 'none'")
    return int(text)


def _metadata(name: str, notes: list[str]) -> dict[str, str]:
    pairs = {}
    for note in notes:
        key, equals, text = note.partition("=")
        if not equals or not key:
            raise ConfigError(f"--metadata: {note!r} is not of the form NAME=TEXT")
        pairs[key] = text
    return pairs


def origin(name: str, text: str) -> Origin | None:
    """A topic to copy from: `orders`, `orders,domain=edge,start=17,filter=eu`."""
    from millstream.cli.options.positions import moment
    from millstream.messaging import Origin

    if text == "none":
        return None
    topic, *details = text.split(",")
    values: dict[str, Any] = {}
    for detail in details:
        key, equals, value = detail.partition("=")
        if not equals or key not in ("domain", "start", "filter"):
            raise ConfigError(f"--{name}: {detail!r} is none of domain=, start=, filter=")
        if key == "start":
            values[key] = int(value) if value.isdigit() else moment(value)
        else:
            values[key] = value
    return Origin(topic, **values)


def _origins(name: str, texts: list[str]) -> list[Origin]:
    found = (origin("source", text) for text in texts)
    return [item for item in found if item is not None]


# Every setting that has an option, and how its text is read.
_READERS: Final[Mapping[str, Callable[[str, Any], Any]]] = {
    "partitions": _as_is,
    "retention": _as_is,
    "replicas": _as_is,
    "storage": _as_is,
    "compression": _as_is,
    "description": _as_is,
    "metadata": _metadata,
    "max_age": _limit,
    "max_bytes": _limit,
    "max_messages": _count,
    "history": _count,
    "max_message_size": _limit,
    "max_subscriptions": _count,
    "discard": _as_is,
    "discard_new_per_key": _as_is,
    "duplicate_window": _limit,
    "marker_ttl": _limit,
    "message_ttl": _as_is,
    "deny_delete": _as_is,
    "deny_purge": _as_is,
    "early_ack": _as_is,
    "prefix": _limit,
    "mirror": origin,
    "sources": _origins,
}
OPTIONS: Final = frozenset(_READERS)
