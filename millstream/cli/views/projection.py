"""The difference between two versions of a projection, for people and programs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from millstream.cli.output import say
from millstream.cli.views.event_text import json_line, shown, text_field, value_bytes, value_field

if TYPE_CHECKING:
    from millstream.projections.diff import RowDiff

__all__ = ["comparing", "print_rows", "show_rows"]


@contextmanager
def comparing() -> Iterator[None]:
    """A bar on stderr while two versions are compared, if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    quiet = not sys.stderr.isatty()
    with Progress(console=Console(stderr=True), transient=True, disable=quiet) as progress:
        progress.add_task("comparing", total=None)
        yield


def print_rows(rows: Sequence[RowDiff]) -> None:
    """The rows as objects, one per line; a row that is not there is null."""
    for row in rows:
        values = {"old": _value(row.active), "new": _value(row.other)}
        record = {"table": row.table, **text_field("key", row.key), **values}
        sys.stdout.write(json_line(record).decode())


def _value(value: Any) -> Any:
    """A value as JSON; bytes as text, or else in base64."""
    if isinstance(value, bytes):
        (found,) = value_field(value, "auto").values()
        return found
    return msgspec.to_builtins(value)


def show_rows(projection: str, versions: tuple[int, int], rows: Sequence[RowDiff]) -> None:
    """The rows for people, then how many there are."""
    several = len({row.table for row in rows}) > 1
    for row in rows:
        key = _shown(row.key.encode("utf-8", "surrogateescape"))
        where = f"{row.table}  {key}" if several else key
        if row.active is None:
            say(f"+ {where}  {_text(row.other)}")
        elif row.other is None:
            say(f"- {where}  {_text(row.active)}")
        else:
            say(f"~ {where}  {_text(row.active)} -> {_text(row.other)}")
    old, new = versions
    count = f"{len(rows):,} row{'s' * (len(rows) != 1)}"
    found = f"{count} differ{'s' * (len(rows) == 1)}" if rows else "no row differs"
    say(f"Projection '{projection}', versions {old} and {new}: {found}")


def _text(value: Any) -> str:
    return _shown(value_bytes(value))


def _shown(data: bytes) -> str:
    return shown(data).decode()
