"""Files of events: their format, their bytes, and the progress."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import IO, Annotated, Final, cast

import typer

from millstream.closing import Closing
from millstream.errors import ConfigError

__all__ = ["FileProgress", "FormatNameOption", "file_format", "open_input"]

SUFFIXES: Final = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".pq": "parquet",
}
FORMATS: Final = ("jsonl", "csv", "tsv", "parquet")

FormatNameOption = Annotated[
    str | None,
    typer.Option(
        "--format",
        "-f",
        help="jsonl, csv, tsv or parquet. (default: from the name; jsonl in a pipe)",
    ),
]


def file_format(file: str, given: str | None) -> str:
    """The format of a file: as given, or from its name.

    >>> file_format("a.jsonl.gz", None), file_format("a.parquet", None), file_format("-", "csv")
    ('jsonl', 'parquet', 'csv')
    """
    if given is not None:
        if given not in FORMATS:
            raise ConfigError(f"--format is one of {', '.join(FORMATS)}, not {given!r}")
        found = given
    elif file == "-":
        found = "jsonl"
    else:
        suffix = Path(file.removesuffix(".gz")).suffix.lower()
        if suffix not in SUFFIXES:
            known = ", ".join(FORMATS)
            raise ConfigError(f"the name {file!r} has no known ending: give --format, {known}")
        found = SUFFIXES[suffix]
    if found == "parquet" and (file == "-" or file.endswith(".gz")):
        raise ConfigError("Parquet is read and written as a plain file, not in a pipe or .gz")
    return found


def open_input(file: str) -> tuple[IO[bytes], IO[bytes]]:
    """The bytes of a file or of stdin, and the raw file below, whose position is the progress."""
    if file == "-":
        return sys.stdin.buffer, sys.stdin.buffer
    raw = Path(file).open("rb")  # noqa: SIM115 - the reader closes it
    if file.endswith(".gz"):
        import gzip

        return cast(IO[bytes], gzip.GzipFile(fileobj=raw)), raw
    return raw, raw


class FileProgress(Closing):
    """A progress bar on stderr if that is a terminal, otherwise nothing."""

    def __init__(self, what: str, total: int | None) -> None:
        self._bar = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TaskProgressColumn,
                TextColumn,
                TimeRemainingColumn,
            )

            count = TextColumn("{task.fields[events]:,} events")
            left = (TaskProgressColumn(), TimeRemainingColumn()) if total else (
                MofNCompleteColumn(),
            )  # fmt: skip
            title = TextColumn("[progress.description]{task.description}")
            console = Console(stderr=True)
            self._bar = Progress(title, BarColumn(), *left, count, console=console)
            self._task = self._bar.add_task(what, total=total, events=0)

    def _enter(self) -> None:
        if self._bar is not None:
            self._bar.start()

    def _leave(self, error: BaseException | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, done: int, events: int) -> None:
        """Show the progress, in the unit of the total, and the number of events."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, events=events)
