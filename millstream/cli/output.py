"""Output of commands: JSON for programs, tables for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = [
    "DataOption",
    "JsonOption",
    "plain",
    "print_json",
    "print_table",
    "say",
    "size",
]


JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
DataOption = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="DIR",
        help="Folder of the broker's data. (env: MILLSTREAM_DATA) (default: ./.millstream)",
    ),
]


def say(text: str) -> None:
    """A line for people on stdout."""
    typer.echo(text)


def plain(value: Any) -> Any:
    """A value as JSON can hold it; a dataclass becomes an object. Secrets are refused."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise TypeError(f"{type(value).__name__} is not meant to be printed")


def print_json(value: Any, *, line: bool = False) -> None:
    """One JSON document on stdout; with `line` on a single line."""
    text = json.dumps(plain(value), indent=None if line else 2, ensure_ascii=False)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table for people; a column whose heading starts with '#' is a number."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    for column in columns:
        number = column.startswith("#")
        table.add_column(column.removeprefix("#"), justify="right" if number else "left")
    for row in rows:
        table.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    # A pipe has no width of its own; a narrow default would cut names short.
    Console(width=None if sys.stdout.isatty() else 160, highlight=False).print(table)


def size(amount: float) -> str:
    """Bytes in the unit that fits.

    >>> size(0), size(1536), size(3 * 1024**3)
    ('0 B', '1.5 KiB', '3.0 GiB')
    """
    if amount < 1024:
        return f"{amount:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        amount /= 1024
        if amount < 1024:
            return f"{amount:.1f} {unit}"
    return f"{amount / 1024:.1f} TiB"
