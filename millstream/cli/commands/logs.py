"""`millstream logs`: the log of the servers, even after they stopped."""

import os
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated, TextIO

import typer

from millstream.cli.output import DataOption, JsonOption, print_json, say
from millstream.errors import ConfigError, NotRunning
from millstream.settings import data_folder

__all__ = ["Tail", "app", "by_time", "last_lines", "parse_line"]

app = typer.Typer()

LOG_FILES = "nodes/*/server.log"  # of a stopped broker, below its data folder
POLL_SECONDS = 0.2  # too short for a person to notice
READ_LINES = 10_000  # of one read, so that one busy node does not hide the others

_LINE = re.compile(r"\[\d+\] (\d{4})/(\d\d)/(\d\d) (\S+) \[(\w+)\] (.*)")
_LEVELS = {"INF": "info", "WRN": "warning", "ERR": "error", "FTL": "fatal", "DBG": "debug"}


@app.command()
def logs(
    data: DataOption = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue as lines are written.")
    ] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="Number of lines from the end.")
    ] = 50,
    node: Annotated[str | None, typer.Option(help="Only this node.")] = None,
    json_: JsonOption = False,
) -> None:
    """Show the log of the broker, the newest lines last; those of several nodes by their time.

    With --json one object per line: node, time, level, text.
    """
    files = _chosen(log_files(data_folder(data)), node)
    named = len(files) > 1

    def show(name: str, line: str) -> None:
        if json_:
            print_json({"node": name, **parse_line(line)}, line=True)
        else:
            say(f"{name}: {line}" if named else line)

    with ExitStack() as opened:
        tails = {
            name: opened.enter_context(closing(Tail(file, from_end=True)))
            for name, file in files.items()
        }
        ends = {name: last_lines(file, lines) for name, file in files.items()}
        times: dict[str, str] = {}
        shown = by_time(ends, times)
        for name, line in shown[max(0, len(shown) - lines) :]:
            show(name, line)
        while follow:
            new = {name: list(tail.new_lines()) for name, tail in tails.items()}
            for name, line in by_time(new, times):
                show(name, line)
            time.sleep(POLL_SECONDS)


def log_files(folder: Path) -> dict[str, Path]:
    """Name and log file of every node that ever ran on the folder."""
    from millstream import broker

    try:
        return {node.name: node.log for node in broker.read_state(folder).nodes}
    except NotRunning:
        found = sorted(folder.glob(LOG_FILES))
        if not found:
            raise
        return {file.parent.name: file for file in found}


def _chosen(files: dict[str, Path], node: str | None) -> dict[str, Path]:
    if node is None:
        return files
    if node not in files:
        raise ConfigError(f"there is no node '{node}'. The nodes are: {', '.join(files)}")
    return {node: files[node]}


def parse_line(line: str) -> dict[str, str | None]:
    """Time, level and text of a server's line; any other line is text only.

    >>> parse_line("[7] 2026/01/02 03:04:05.678901 [WRN] Slow")
    {'time': '2026-01-02T03:04:05.678901Z', 'level': 'warning', 'text': 'Slow'}
    """
    match = _LINE.fullmatch(line)
    if match is None:
        return {"time": None, "level": None, "text": line}
    year, month, day, clock, level, text = match.groups()
    moment = f"{year}-{month}-{day}T{clock}Z"
    return {"time": moment, "level": _LEVELS.get(level, level.lower()), "text": text}


def last_lines(file: Path, count: int) -> list[str]:
    """The last lines, going back into the rotated file when the newest is short."""
    kept: deque[str] = deque(maxlen=count)
    for part in (file.with_name(f"{file.name}.1"), file):
        if part.exists():
            with part.open(encoding="utf-8", errors="replace") as stream:
                kept.extend(line.rstrip("\n") for line in stream)
    return list(kept)


def by_time(lines: Mapping[str, list[str]], times: dict[str, str]) -> list[tuple[str, str]]:
    """Node and text of the lines of several nodes in one order.

    A line without a time stays behind the line of its node before it, and lines of one node keep
    their order. `times` has the time of the last line of each node, from one call to the next.

    >>> by_time({"n1": ["[7] 2026/01/02 03:04:05.6 [INF] b", "more"],
    ...          "n2": ["[8] 2026/01/02 03:04:04.9 [INF] a"]}, {})[1:]
    [('n1', '[7] 2026/01/02 03:04:05.6 [INF] b'), ('n1', 'more')]
    """
    found = []
    for name, texts in lines.items():
        for text in texts:
            times[name] = max(times.get(name, ""), parse_line(text)["time"] or "")
            found.append((times[name], name, text))
    found.sort(key=lambda line: line[0])
    return [(name, text) for _, name, text in found]


class Tail:
    """New lines of a file that may be rotated away or not exist yet."""

    def __init__(self, path: Path, *, from_end: bool) -> None:
        self._path = path
        self._rest = ""
        self._stream = self._open()
        if from_end and self._stream is not None:
            self._stream.seek(0, os.SEEK_END)

    def _open(self) -> TextIO | None:
        try:
            return self._path.open(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return None

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()

    def new_lines(self) -> Iterator[str]:
        """Complete lines written since the last call, at most READ_LINES."""
        stream = self._stream = self._stream or self._open()
        if stream is None:
            return
        moved = self._moved_on(
            stream
        )  # checked first: what is read next is the rest of the old file
        for _ in range(READ_LINES):
            line = stream.readline()
            if not line:
                break
            self._rest += line
            if self._rest.endswith("\n"):
                yield self._rest[:-1]
                self._rest = ""
        else:
            return
        if moved:
            stream.close()
            self._stream = self._open()

    def _moved_on(self, stream: TextIO) -> bool:
        """Whether the path now names another file than the open one."""
        try:
            return not os.path.samestat(os.fstat(stream.fileno()), self._path.stat())
        except FileNotFoundError:
            return False
