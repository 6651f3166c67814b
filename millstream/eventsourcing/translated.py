"""Millstream's errors as those that the library's callers expect."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from eventsourcing.persistence import (
    DatabaseError,
    DataError,
    InternalError,
    OperationalError,
    PersistenceError,
    ProgrammingError,
)

from millstream.errors import (
    ConfigError,
    DataLoss,
    MillstreamError,
    PayloadTooLarge,
    TopicConflict,
    TopicNotFound,
    Undecodable,
)

__all__ = ["translated"]

# The first that fits counts.
_KINDS: Final[tuple[tuple[type[MillstreamError], type[DatabaseError]], ...]] = (
    (TopicNotFound, ProgrammingError),
    (TopicConflict, ProgrammingError),
    (PayloadTooLarge, DataError),
    (ConfigError, DataError),
    (DataLoss, InternalError),
    (Undecodable, InternalError),
    (MillstreamError, OperationalError),
)


@contextmanager
def translated() -> Iterator[None]:
    """Errors of this block as errors of the library; the original one is their cause."""
    try:
        yield
    except MillstreamError as error:
        raise _error_of(error) from error


def _error_of(error: MillstreamError) -> PersistenceError:
    return next(kind for found, kind in _KINDS if isinstance(error, found))(str(error))
