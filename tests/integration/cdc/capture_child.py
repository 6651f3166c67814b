"""A program that captures a database and may be killed at any line.

python -m tests.integration.cdc.capture_child BROKER DATABASE
"""

from __future__ import annotations

import asyncio
import sys

import millstream
from millstream.cdc.capture import Capture
from millstream.cdc.mysql import snapshot as mysql
from millstream.cdc.settings import CaptureSettings
from millstream.cdc.sources import open_source
from millstream.cdc.sqlite import source as sqlite

__all__ = ["CAPTURE"]

CAPTURE = "kills"


async def main(broker: str, database: str) -> None:
    # So that a snapshot of few rows has many steps, between which it can be killed.
    mysql._FETCH = sqlite._FETCH = 50  # type: ignore[misc]
    mysql.BATCH_ROWS = sqlite.SNAPSHOT_ROWS = 50  # type: ignore[misc]
    settings = CaptureSettings(CAPTURE, database, tables=("rows_*",), heartbeat=0.5)
    async with millstream.connect(broker) as mill:
        await Capture(mill, open_source(settings), settings).run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
