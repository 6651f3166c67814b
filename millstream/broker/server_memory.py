"""The memory of a server process. Standard library only: the keeper loads this file."""

# ruff: noqa: PTH123
from __future__ import annotations

import os

__all__ = ["soft_limit", "used_memory"]


def used_memory(pid: int) -> int:
    """Bytes of a process that are in RAM; 0 where the system has no /proc."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def soft_limit(limit: int) -> dict[str, str]:
    """Variables with which a server collects its garbage more often before it reaches the limit."""
    return {"GOMEMLIMIT": str(limit * 9 // 10)} if limit else {}
