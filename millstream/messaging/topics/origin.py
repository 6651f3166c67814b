"""The topics that a copy reads from. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from millstream.errors import ConfigError
from millstream.events.subject import check_subject
from millstream.messaging.topics.setting_forms import number_fault, short_repr

__all__ = ["PARTITIONS_MAX", "Origin", "read_origin", "read_origins"]

# A partition is a stream with its own files and threads; thousands of them make a start slow.
PARTITIONS_MAX = 1024


@dataclass(frozen=True, slots=True)
class Origin:
    """A topic (or any JetStream stream) that another one copies from.

    Fields that are None, and `packs`, are looked up when the copy is declared; give `partitions`
    (and `prefix`, `foreign` or `packs` if they apply) to declare a copy of a topic that cannot be
    reached yet.
    """

    topic: str
    domain: str | None = None  # JetStream domain beyond a leaf node; None: the same
    start: int | datetime | None = None  # first offset or time to copy; None: everything
    filter: str | None = None  # pattern of what follows the prefix, so of a key's token
    partitions: int | None = None  # None: looked up
    prefix: str | None = None  # what the subjects start with; None: the name
    foreign: bool = False  # not a Millstream topic: subjects are kept, `filter` is a full subject
    packs: bool = field(default=True, compare=False)  # a promoted mirror takes them then, too

    def __post_init__(self) -> None:
        for what, name in (("topic", self.topic), ("domain", self.domain)):
            if name is not None and not re.fullmatch(r"[^\s.*>/\\]{1,255}", name):
                raise ConfigError(f"origin: {name!r} cannot be the name of a {what}")
        if self.filter is not None:
            check_subject(self.filter, wildcards=True)
        if self.prefix is not None:
            check_subject(self.prefix, wildcards=False)
        if self.partitions is not None:
            fault = number_fault(self.partitions, PARTITIONS_MAX)
            if fault is not None:
                raise ConfigError(f"origin: partitions: {fault}")
        if self.foreign and self.partitions not in (None, 1):
            raise ConfigError("origin: a stream that is not a topic has one partition")
        if isinstance(self.start, datetime):
            if self.start.tzinfo is None:
                raise ConfigError(f"origin: the start time {self.start} needs a time zone")
        elif self.start is not None and (isinstance(self.start, bool) or self.start < 1):
            raise ConfigError(f"origin: offsets start at 1, so start cannot be {self.start!r}")

    def __repr__(self) -> str:
        return short_repr(self)


def read_origin(name: str, value: Origin | str | None) -> Origin | None:
    """An origin, however it was given."""
    if value is None or isinstance(value, Origin):
        return value
    if isinstance(value, str):
        return Origin(value)
    raise ConfigError(f"{name}: give the name of a topic or an Origin, not {value!r}")


def read_origins(name: str, value: Sequence[Origin | str]) -> tuple[Origin, ...]:
    """Origins, however they were given."""
    if isinstance(value, str | Origin):
        raise ConfigError(f"{name}: give a list of topics, not one")
    origins = (read_origin(name, item) for item in value)
    return tuple(origin for origin in origins if origin is not None)
