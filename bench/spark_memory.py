"""Peak memory of Spark's Python workers, as Linux counts it; other systems do not show it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["forget_peaks", "largest_peak"]

_PROCESSES = Path("/proc")
_FORGET_THE_PEAK = "5"  # written to /proc/<pid>/clear_refs


def _workers() -> Iterator[Path]:
    """The Python processes below this one that are not its own."""
    parents: dict[int, int] = {}
    for folder in _PROCESSES.glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int(
                (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
            )
        except OSError:
            continue
    for pid in parents:
        above = parents.get(pid, 0)
        while above in parents and above != os.getpid():
            above = parents[above]
        if above == os.getpid() and b"pyspark" in _command(pid):
            yield _PROCESSES / str(pid)


def _command(pid: int) -> bytes:
    try:
        command = (_PROCESSES / str(pid) / "cmdline").read_bytes()
    except OSError:
        return b""
    return command if b"java" not in command[:200] else b""


def forget_peaks() -> None:
    """Reset: the peak of every worker becomes what it holds now."""
    for folder in _workers():
        try:
            (folder / "clear_refs").write_text(_FORGET_THE_PEAK)
        except OSError:
            continue  # it has ended


def largest_peak() -> float:
    """MiB of the worker that held the most since `forget_peaks`."""
    found = [0.0]
    for folder in _workers():
        try:
            lines = (folder / "status").read_text().splitlines()
        except OSError:
            continue
        found += [int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")]
    return max(found)
