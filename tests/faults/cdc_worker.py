"""A process of a run with captures: python -m tests.faults.cdc_worker capture|sink PLAN"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from typing import Any, Final

import millstream
from millstream import Mill
from millstream.errors import ConnectError, MillstreamError
from millstream.settings import Reconnect
from tests.faults.cdc_load import AUDIT, KEYS, TABLES

__all__ = ["CAPTURE"]

CAPTURE: Final = "kills"  # the name of the capture
SMALL_BATCH: Final = 64 * 1024  # so that a snapshot of few rows takes long enough to be killed
CONNECT_TRIES: Final = 1000
RECONNECT: Final = Reconnect(wait=0.02, wait_max=0.2, give_up_after=120)


async def _capture(mill: Mill, plan: dict[str, Any], until: asyncio.Event) -> None:
    from millstream.cdc.capture import Capture
    from millstream.cdc.postgres import snapshot
    from millstream.cdc.settings import CaptureSettings
    from millstream.cdc.sources import open_source

    snapshot.BATCH_BYTES = SMALL_BATCH  # type: ignore[misc]
    tables = ("public.*", f"!public.{AUDIT}")
    settings = CaptureSettings(CAPTURE, plan["source"], tables, heartbeat=1.0)
    await Capture(mill, open_source(settings), settings).run(until)


async def _sink(mill: Mill, plan: dict[str, Any], until: asyncio.Event) -> None:
    """One table with one connection, the other with two."""
    async with asyncio.TaskGroup() as tasks:
        for workers, table in enumerate(TABLES, 1):
            tasks.create_task(_apply(mill, table, plan["target"], workers, until))


async def _apply(mill: Mill, table: str, target: str, workers: int, until: asyncio.Event) -> None:
    from millstream.cdc.sink.apply import Apply

    for left in reversed(range(CONNECT_TRIES)):
        try:
            await mill.topic(table)
            break
        except MillstreamError:  # not captured yet, or the broker is dead at this moment
            if not left:
                raise
            await asyncio.sleep(0.1)
    await Apply(mill, table, target, key=KEYS[table], workers=workers).run(until)


ROLES: Final = {"capture": _capture, "sink": _sink}


async def _until_there(url: str) -> None:
    """The broker may be dead at this moment: what starts processes would try again."""
    for left in reversed(range(CONNECT_TRIES)):
        try:
            async with millstream.connect(url):
                return
        except ConnectError:
            if not left:
                raise
            await asyncio.sleep(0.05)


async def _main(role: str, plan: dict[str, Any]) -> None:
    until = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, until.set)
    await _until_there(plan["url"])
    async with millstream.connect(plan["url"], reconnect=RECONNECT) as mill:
        await ROLES[role](mill, plan, until)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    asyncio.run(_main(sys.argv[1], json.loads(sys.argv[2])))
