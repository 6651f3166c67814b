"""The program that the broker runs for a capture of a database: DATA NODE FILE.

It captures until SIGTERM, or until `millstream cdc stop`, stores what it has and ends with 0. Its
keeper starts it again when it ends for another reason, so an error is one line and an exit.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from dataclasses import replace
from pathlib import Path

from millstream.broker.config import DEFAULT_ACCOUNT
from millstream.cdc.serving import serve_capture
from millstream.cdc.settings import CaptureSettings
from millstream.cdc.settings_file import load_capture
from millstream.cli.commands.guards import connection_settings
from millstream.cli.stopping import stopped_by_signals
from millstream.cli.views.cdc import CaptureLines
from millstream.errors import MillstreamError
from millstream.mill import connect
from millstream.settings import ConnectionSettings

__all__ = ["main"]

_log = logging.getLogger("millstream.cdc")


def main() -> None:
    """Run one capture."""
    data, node, file = sys.argv[1:]
    try:
        settings = load_capture(Path(file))
    except (MillstreamError, OSError) as error:
        sys.exit(f"[cdc] {error}")
    logging.basicConfig(level=logging.INFO, format=f"[cdc {settings.name}] %(message)s")
    logging.getLogger("millstream.wire").setLevel(logging.WARNING)
    try:
        # The user of the guard may do what a capture needs: create topics and write to all.
        who = connection_settings(Path(data), node, DEFAULT_ACCOUNT)
        asyncio.run(serve(settings, replace(who, name=f"millstream capture {settings.name}")))
    except (MillstreamError, OSError) as error:
        sys.exit(f"[cdc {settings.name}] {error}")


async def serve(settings: CaptureSettings, connection: ConnectionSettings) -> None:
    """Capture until a signal, or until it is asked to stop."""
    stop = stopped_by_signals()
    async with connect(settings=connection) as mill:
        await serve_capture(mill, settings, stop, CaptureLines(_log.info))


if __name__ == "__main__":
    main()
