"""One capture in a process of its own, for its memory: python -m bench.cdc_process BROKER SOURCE

Writes a line of JSON once the snapshot is stored, and another when it was asked to end (SIGTERM).
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from pathlib import Path

from millstream import connect
from millstream.cdc import Capture, CaptureSettings, open_source

NAME = "memory"
POLL = 0.005
WAIT_SECONDS = 600.0


def peak_megabytes() -> float:
    """The most memory that this process has had."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (found,) = [line for line in lines if line.startswith("VmHWM")]
    return int(found.split()[1]) / 1024


async def started(capture: Capture, until: asyncio.Event) -> asyncio.Task[None]:
    """Run a capture; returns when its snapshot is stored, if it takes one."""
    running = asyncio.create_task(capture.run(until))
    late = time.monotonic() + WAIT_SECONDS
    while capture.status().state != "streaming":
        if running.done():
            await running  # raises what ended it
        if time.monotonic() > late:
            raise TimeoutError(f"the capture is still at its {capture.status().state}")
        await asyncio.sleep(POLL)
    return running


async def main(broker: str, source: str, table: str) -> None:
    until = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, until.set)
    settings = CaptureSettings(NAME, source, (f"public.{table}",), topic="memory")
    async with connect(broker) as mill:
        capture = Capture(mill, open_source(settings), settings)
        running = await started(capture, until)
        _say("snapshot")
        await running
        _say("changes")


def _say(after: str) -> None:
    sys.stdout.write(json.dumps({"after": after, "megabytes": peak_megabytes()}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
