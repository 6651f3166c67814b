"""Topic settings with a few possible values. Pure."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Compression", "Discard", "Retention", "Storage"]


class Retention(StrEnum):
    """How long events are kept: up to the limits, while a subscription wants them, until acked."""

    LIMITS = "limits"
    INTEREST = "interest"
    WORK_QUEUE = "workqueue"


class Storage(StrEnum):
    """Where events are stored."""

    FILE = "file"
    MEMORY = "memory"


class Discard(StrEnum):
    """At a limit: drop the oldest event, or reject the new one (LimitReached)."""

    OLD = "old"
    NEW = "new"


class Compression(StrEnum):
    """How files are compressed."""

    NONE = "none"
    S2 = "s2"
