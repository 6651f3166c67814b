"""Python processes that a test starts, talks to over their output, and kills."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

PREAMBLE = """
import asyncio, os, signal, sys
import millstream
from millstream.messaging import *

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def say(text):
    sys.stdout.write(f"{text}\\n")
    sys.stdout.flush()
"""


@asynccontextmanager
async def python(code: str, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that runs `code` (its arguments in sys.argv[1:]); killed at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PREAMBLE + code, *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def line(process: asyncio.subprocess.Process, seconds: float = 60.0) -> str:
    """The next line that the process says."""
    if process.stdout is None:
        raise ValueError("the process has no output")
    async with asyncio.timeout(seconds):
        return (await process.stdout.readline()).decode().strip()


async def killed(process: asyncio.subprocess.Process, seconds: float = 60.0) -> None:
    """Wait until the process was killed."""
    async with asyncio.timeout(seconds):
        code = await process.wait()
    assert code == -signal.SIGKILL, f"ended with {code}, not by a kill"
