"""Where reading begins and ends, as the options say it: words, offsets or times. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

from millstream.errors import ConfigError

__all__ = ["Bound", "Place", "parse_bound", "parse_times", "parse_timestamp", "rfc3339"]

Word = Literal["earliest", "latest"]
Place = int | Word  # an offset (the next to read), or a word
_WORD_OF: Final[Mapping[int, Word]] = {-2: "earliest", -1: "latest"}  # as the Kafka source has them
TIME_MAX: Final = 2**63 // 1_000_000  # the server counts nanoseconds in 64 bits
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Bound:
    """One end of what is read. Offsets are those of the next message, so an end is exclusive."""

    word: Word = "earliest"  # for every partition, unless one of the others is given
    places: Mapping[tuple[str, int], Place] = field(default_factory=dict)
    time: int | None = None  # milliseconds since 1970, for every partition
    times: Mapping[tuple[str, int], int] = field(default_factory=dict)
    strategy: Literal["error", "latest"] = "error"  # when nothing was stored at or after a time


def parse_bound(text: str, default: str) -> Bound:
    """`earliest`, `latest`, or JSON: {"orders": {"0": 17, "1": -2}} (-2 earliest, -1 latest)."""
    word = text.strip().lower()
    if word == "earliest":
        return Bound("earliest")
    if word == "latest":
        return Bound("latest")
    if not word.startswith("{"):
        raise ConfigError(
            'choose earliest, latest, or offsets by partition: {"orders": {"0": 17}} '
            f"(not given: {default})"
        )
    places: dict[tuple[str, int], Place] = {}
    for where, given in _by_partition(text).items():
        if isinstance(given, str) and given in ("earliest", "latest"):
            places[where] = "earliest" if given == "earliest" else "latest"
        elif isinstance(given, int) and given in _WORD_OF:
            places[where] = _WORD_OF[given]
        elif isinstance(given, int) and given >= 1:
            places[where] = given
        else:
            raise ConfigError(
                f"offset {given!r} of {where[0]}/{where[1]}: offsets begin at 1; "
                f"-2 is earliest, -1 is latest"
            )
    return Bound("latest", places=places)


def parse_timestamp(text: str, strategy: Literal["error", "latest"]) -> Bound:
    """Milliseconds since 1970 for every partition."""
    if not re.fullmatch(r"\d{1,14}", text.strip()) or int(text) > TIME_MAX:
        raise ConfigError("give milliseconds since 1970, a whole number, up to the year 2262")
    return Bound(time=int(text), strategy=strategy)


def parse_times(text: str, strategy: Literal["error", "latest"]) -> Bound:
    """Milliseconds since 1970 by partition: {"orders": {"0": 1700000000000}}."""
    times: dict[tuple[str, int], int] = {}
    for where, given in _by_partition(text).items():
        if not isinstance(given, int) or not 0 <= given <= TIME_MAX:
            raise ConfigError(f"time {given!r} of {where[0]}/{where[1]}: give milliseconds")
        times[where] = given
    return Bound(times=times, strategy=strategy)


def _by_partition(text: str) -> dict[tuple[str, int], object]:
    try:
        found = json.loads(text)
        return {
            (str(topic), int(number)): value
            for topic, numbers in found.items()
            for number, value in numbers.items()
        }
    except (ValueError, AttributeError) as error:
        raise ConfigError('not JSON of the form {"orders": {"0": 17, "1": -2}}') from error


def rfc3339(milliseconds: int) -> str:
    """The moment as the server reads it.

    >>> rfc3339(1_700_000_000_123)
    '2023-11-14T22:13:20.123000Z'
    """
    moment = _EPOCH + timedelta(milliseconds=milliseconds)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%f") + "Z"
