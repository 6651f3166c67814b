"""Dead letters as tables for people and objects for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from millstream.cli.options.times import time_text
from millstream.cli.output import print_table, say
from millstream.cli.views.event_text import (
    header_fields,
    shown,
    text_field,
    value_bytes,
    value_field,
)
from millstream.cli.views.topic import age, simple
from millstream.errors import ConfigError
from millstream.messaging.dead_letters.store import default_dead_letter_topic

if TYPE_CHECKING:
    from millstream.messaging.dead_letters.letter import DeadLetter
    from millstream.mill import Mill

__all__ = ["count", "letter_record", "new_value", "show", "show_counts", "show_list"]

VALUE_CHARS: Final = 60  # of a value in the list; 'show' has all of it


def letter_record(letter: DeadLetter) -> dict[str, Any]:
    """A dead letter as an object."""
    return {
        "offset": letter.offset,
        "order": letter.order,
        "edited": letter.edited,
        "cause": letter.cause,
        "attempts": letter.attempts,
        "redrives": letter.redrives,
        "when": simple(letter.when),
        "topic": letter.topic,
        "partition": letter.partition,
        "origin_offset": letter.origin_offset,
        "origin_index": letter.origin_index,
        **text_field("subject", letter.subject),
        "subscription": letter.subscription,
        "timestamp": time_text(letter.timestamp_ns),
        **({"id": None} if letter.id is None else text_field("id", letter.id)),
        "headers": {},
        **header_fields(letter.headers),
        **text_field("key", letter.key),
        **msgspec.to_builtins(value_field(letter.value, "auto")),
    }


def show_list(letters: Sequence[DeadLetter]) -> None:
    """Dead letters as a table."""
    if not letters:
        say("No dead letters found")
        return
    print_table(
        "Dead letters",
        ["#offset", "dead-lettered", "key", "#attempts", "cause", "original event", "value"],
        [
            (
                letter.offset,
                age(letter.when),
                "-" if letter.key is None else _printable(letter.key),
                letter.attempts,
                letter.cause[:VALUE_CHARS],
                f"{letter.topic} {letter.partition}@{letter.origin_offset}",
                _short(letter.value),
            )
            for letter in letters
        ],
    )


def _short(value: Any) -> str:
    if value is None:
        return "(no value)"
    text = shown(value_bytes(value)).decode()
    return text if len(text) <= VALUE_CHARS else f"{text[:VALUE_CHARS]}..."


def _printable(text: str) -> str:
    return shown(text.encode("utf-8", "surrogateescape")).decode()


def show(letter: DeadLetter) -> None:
    """One dead letter in full."""
    for name, value in letter_record(letter).items():
        if name == "headers":
            for header, text in letter.headers.items():
                say(f"header {_printable(header)}: {_printable(text)}")
        elif name == "headers_base64":
            continue
        elif value is not None and not name.startswith("value"):
            say(f"{name.replace('_', ' ')}: {value}")
    say("")
    say("(no value)" if letter.value is None else shown(value_bytes(letter.value)).decode())


def new_value(letter: DeadLetter, data: bytes) -> Any:
    """A value from the command line, of the type that the letter has."""
    if letter.value is None or isinstance(letter.value, bytes):
        return data
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise ConfigError(f"the value is typed, so the new one must be JSON: {error}") from error


async def count(mill: Mill, topic: str | None) -> list[dict[str, Any]]:
    """How many messages each dead-letter topic holds, by subscription."""
    infos = {info.name: info for info in await mill.topics()}
    if topic is not None and topic not in infos:
        await mill.topic(topic)  # raises if it does not exist
    found = []
    for name in [topic] if topic else list(infos):
        if not infos[name].subscriptions:
            continue
        for item in await (await mill.topic(name)).subscriptions.list():
            dead = item.settings.dead_letter or default_dead_letter_topic(name, item.name)
            letters = infos[dead].messages if dead in infos else 0
            found.append(
                {"topic": name, "subscription": item.name, "queue": dead, "letters": letters}
            )
    return found


def show_counts(counts: Sequence[dict[str, Any]]) -> None:
    """Subscriptions with the number of their dead letters."""
    if not counts:
        say("There is no subscription, so there are no dead letters")
        return
    print_table(
        "Dead letters",
        ["topic", "subscription", "dead-letter topic", "#letters"],
        [tuple(row.values()) for row in counts],
    )
