"""What a piece of work cost: time, and CPU of this process and of servers."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

__all__ = ["Effort", "cpu_seconds", "family_of"]

TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pids: Iterable[int]) -> float:
    """What these processes used up to now; 0 for those that /proc does not show."""
    total = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
        except OSError:
            continue
        fields = text.rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])  # user and system time
    return total / TICKS


def family_of(pid: int) -> list[int]:
    """This process and all that descend from it, such as Spark's JVM and its Python workers."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:  # it just ended
            continue
        parents.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found = [pid]
    for one in found:  # it grows meanwhile
        found.extend(parents.get(one, ()))
    return found


class Effort:
    """Measures from its creation to `done`."""

    def __init__(self, *servers: int) -> None:
        self._servers = servers
        self._server_cpu = cpu_seconds(servers)
        self._cpu = time.process_time()
        self._began = time.perf_counter()

    def done(self, events: int) -> dict[str, float]:
        """Events a second, and the CPU of an event in microseconds: here, and in the servers."""
        seconds = time.perf_counter() - self._began
        client = time.process_time() - self._cpu
        server = cpu_seconds(self._servers) - self._server_cpu
        return {
            "rate": events / seconds,
            "client": client / events * 1e6,
            "server": server / events * 1e6,
        }
