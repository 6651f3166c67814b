"""Errors of event stores."""

from __future__ import annotations

from collections.abc import Iterable

from millstream.errors.base import MillstreamError
from millstream.errors.data import SchemaError

__all__ = [
    "AggregateDeleted",
    "AggregateNotFound",
    "NoUpcaster",
    "NotCaughtUp",
    "ProjectionNotFound",
    "UnknownEvent",
    "VersionConflict",
]


class VersionConflict(MillstreamError):
    """An append expected another version than the aggregate has; nothing was stored.

    `actual` is the version it has: load it, decide again, and append with that version.
    """

    def __init__(self, store: str, id: str, expected: object, actual: int, why: str = "") -> None:
        self.store, self.id, self.expected, self.actual = store, id, expected, actual
        found = f"it has version {actual}" if actual else "it does not exist"
        super().__init__(
            f"'{id}' of store '{store}': expected {expected}, but {found}{why}. Nothing was "
            f"stored. Load it again, decide again and append with that version"
        )


class AggregateNotFound(MillstreamError, LookupError):
    """The store has no events of that aggregate, or had none at the time asked for."""

    def __init__(self, store: str, id: str, when: str = "") -> None:
        self.store, self.id = store, id
        super().__init__(f"store '{store}' has no events of '{id}'{when}. Check the id")


class AggregateDeleted(AggregateNotFound):
    """The aggregate was deleted or archived: it takes no more events, and its id is used up."""

    def __init__(self, store: str, id: str) -> None:
        super().__init__(store, id)
        self.args = (
            f"'{id}' of store '{store}' was deleted or archived: it takes no more events, and its "
            f"id cannot be used again",
        )


class UnknownEvent(MillstreamError, LookupError):
    """A stored event, or one to be appended, is of a type that is not among the store's events."""

    def __init__(self, store: str, name: str, known: Iterable[str]) -> None:
        self.store, self.name = store, name
        names = ", ".join(sorted(known)) or "none"
        super().__init__(
            f"store '{store}': event '{name}' is not one of its events here ({names}). Add its "
            f"class: event_store({store!r}, ..., events=[...])"
        )


class ProjectionNotFound(MillstreamError, LookupError):
    """There is no projection of that name."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"there is no projection '{name}'. It is created when it is first opened: "
            f"mill.projection({name!r}, store, function)"
        )


class NotCaughtUp(MillstreamError):
    """A version of a projection lacks too much of the log to be made the active one."""

    def __init__(self, name: str, version: int, lag: int | None) -> None:
        self.name, self.version, self.lag = name, version, lag
        found = "was never run" if lag is None else f"lacks {lag:,} messages of the log"
        super().__init__(f"version {version} of projection '{name}' {found}. Run rebuild() first")


class NoUpcaster(SchemaError):
    """A stored version of an event cannot be read as the one that is used here."""

    def __init__(self, store: str, event: str, version: int, wanted: int, reason: str) -> None:
        self.store, self.event, self.version, self.wanted = store, event, version, wanted
        super().__init__(
            f"store '{store}': version {version} of event '{event}' cannot be read as version "
            f"{wanted}, which is used here: {reason}. Give a function that converts it to the next "
            f"version: upcasters={{({event!r}, {version}): function}}"
        )
