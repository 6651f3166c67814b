"""Schedules: when the server stores an event by itself, once or again and again. Pure.

A schedule is a message of a topic on a subject of its own, which no reader takes for an event. Its
headers say when it is due, and under which subject of the same stream a copy is stored then.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from millstream.errors import ConfigError
from millstream.settings import read_seconds
from millstream.wire.protocol import encode_headers

__all__ = [
    "NEXT_HEADER",
    "RULE_HEADER",
    "SCHEDULER_HEADER",
    "SCHEDULE_TOKEN",
    "TARGET_HEADER",
    "TTL_HEADER",
    "ZONE_HEADER",
    "Rule",
    "at_rule",
    "due_at",
    "named_subject",
    "read_rule",
    "with_headers",
]

SCHEDULE_TOKEN: Final = "_schedule"  # an event with a time, whose id follows, or a named schedule
NAMED_TOKEN: Final = "_named"  # no id starts with `_` there: they are escaped
RULE_HEADER: Final = "Nats-Schedule"
TARGET_HEADER: Final = "Nats-Schedule-Target"
TTL_HEADER: Final = "Nats-Schedule-TTL"  # of the event, from when it is due
ZONE_HEADER: Final = "Nats-Schedule-Time-Zone"
# In what a schedule has stored: the subject of the schedule, and when it is due again.
SCHEDULER_HEADER: Final = "Nats-Scheduler"
NEXT_HEADER: Final = "Nats-Schedule-Next"

_AT: Final = "@at "
_NAMED_TIMES: Final = (
    *("@yearly", "@annually", "@monthly", "@weekly", "@daily", "@midnight", "@hourly"),
)
_FIELDS: Final = "minute hour day month weekday, or with the second before them"


class Rule(NamedTuple):
    """When a schedule is due, as the server reads it."""

    text: str
    time_zone: str | None = None

    @property
    def headers(self) -> list[tuple[str, str]]:
        zone = [] if self.time_zone is None else [(ZONE_HEADER, self.time_zone)]
        return [(RULE_HEADER, self.text), *zone]

    @property
    def once(self) -> bool:
        return self.text.startswith(_AT)


def read_rule(
    every: str | float | timedelta | None,
    cron: str | None,
    at: datetime | None,
    time_zone: str | None,
) -> Rule:
    """The rule that exactly one of three ways gives.

    >>> read_rule("90m", None, None, None).text, read_rule(None, "0 3 * * *", None, None).text
    ('@every 1h30m', '0 0 3 * * *')
    """
    if sum(way is not None for way in (every, cron, at)) != 1:
        raise ConfigError("a schedule needs one of every, cron and at")
    if time_zone is not None and cron is None:
        raise ConfigError("time_zone: only a cron rule has one; give `at` a time with a zone")
    if every is not None:
        return Rule(f"@every {_interval(every)}")
    if at is not None:
        return at_rule(at)
    return Rule(_cron(str(cron)), time_zone)


def at_rule(moment: datetime) -> Rule:
    """The rule for one moment."""
    if moment.tzinfo is None:
        raise ConfigError(f"{moment!r} has no time zone: give one, such as tzinfo=datetime.UTC")
    return Rule(f"{_AT}{moment.astimezone(UTC).isoformat().replace('+00:00', 'Z')}")


def due_at(rule: str, fired: str | None) -> datetime | None:
    """When a schedule is due next, by its rule or by what it said when it was due last."""
    text = rule[len(_AT) :] if rule.startswith(_AT) else fired
    try:
        return None if text is None else datetime.fromisoformat(text)
    except ValueError:  # any client can write these headers
        return None


def named_subject(prefix: str, name: str) -> str:
    """The subject of a named schedule in a partition."""
    return f"{prefix}.{SCHEDULE_TOKEN}.{NAMED_TOKEN}.{name}"


def with_headers(block: bytes, pairs: list[tuple[str, str]]) -> bytes:
    """A header block with more headers."""
    more = encode_headers(pairs).partition(b"\r\n")[2]
    return block.removesuffix(b"\r\n") + more


def _interval(every: str | float | timedelta) -> str:
    seconds = read_seconds("every", every)
    if seconds < 1 or seconds != int(seconds):
        raise ConfigError(f"every {every!r}: give whole seconds, 1 or more, such as '90s' or '1h'")
    minutes, second = divmod(int(seconds), 60)
    hour, minute = divmod(minutes, 60)
    parts = ((hour, "h"), (minute, "m"), (second, "s"))
    return "".join(f"{count}{unit}" for count, unit in parts if count)


def _cron(text: str) -> str:
    fields = text.split()
    if len(fields) == 5:  # as in crontab: at second 0
        fields.insert(0, "0")
    if len(fields) != 6 and text not in _NAMED_TIMES:
        raise ConfigError(
            f"cron {text!r:.80}: give {_FIELDS}, as in '0 3 * * *', or {', '.join(_NAMED_TIMES)}"
        )
    return " ".join(fields)
