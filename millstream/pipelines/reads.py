"""What functions of a pipeline read, by name. No pyspark here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from millstream.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["read", "read_changes", "read_events", "read_table", "reading"]

_reader: ContextVar[Callable[[str, str, Mapping[str, Any]], Any] | None] = ContextVar(
    "millstream_reader", default=None
)


@contextmanager
def reading(reader: Callable[[str, str, Mapping[str, Any]], Any]) -> Iterator[None]:
    """While this is open, `read` and its like call this function (how, name, options)."""
    token = _reader.set(reader)
    try:
        yield
    finally:
        _reader.reset(token)


def _ask(how: str, name: str, options: Mapping[str, Any]) -> Any:
    reader = _reader.get()
    if reader is None:
        raise ConfigError(
            f'read("{name}") works only in functions of a pipeline, which are called when it runs'
        )
    return reader(how, name, options)


def read(name: str, **options: Any) -> DataFrame:
    """A topic, view or files as a stream, by default from the first event (`startingOffsets`).

    A topic with a schema has its values' columns; with `envelope=True`, or without a schema, the
    columns of an event: key, value, topic, partition, offset, timestamp, subject, index. With
    `origin=True` the column `_origin` says where each row comes from, for rows that an attempt
    refuses. Other options are those of `format("millstream")`.
    """
    frame: DataFrame = _ask("stream", name, options)
    return frame


def read_table(name: str, **options: Any) -> DataFrame:
    """A table as it is now; joined with a stream, it is read again for every batch.

    Of a topic of changes, or of any other topic with keys, these are the latest rows of the keys
    that were not deleted. `asOf` is a time: the rows of then.
    """
    frame: DataFrame = _ask("table", name, options)
    return frame


def read_changes(name: str, *, before: bool = False, **options: Any) -> DataFrame:
    """The changes of a table as a stream: its columns, then `_key`, `_offset`, `_time`, `_deleted`.

    A deleted key comes with `_deleted` true and null in the columns of the value.

    Of a topic of changes the columns are those of the row after the change, or of a deleted row as
    far as the database sends it. `_time` is that of the commit, and these columns follow: `_index`
    (in the order of the topic after `_offset`), `_op`, `_commit`, `_transaction`, `_number`,
    `_total`, `_unchanged` (names of columns that are null because they were not sent: they have
    kept their value) and, with `before=True`, `_before`, the row before the change.
    """
    given = {**options, "before": before} if before else options
    frame: DataFrame = _ask("changes", name, given)
    return frame


def read_events(store: str, *, upcasters: Any = None, **options: Any) -> DataFrame:
    """The events of an event store as a stream, by default from the first one.

    One row an event, with a struct column for each type of event in its latest version: the columns
    of `format("millstream")` with the option `eventStore`, whose other options these are.
    `upcasters={("Deposited", 1): function}` convert old versions, as in `Mill.event_store`.
    """
    given = options if upcasters is None else {**options, "upcasters": upcasters}
    frame: DataFrame = _ask("events", store, given)
    return frame
