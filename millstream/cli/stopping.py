"""Commands that run until they are stopped: SIGTERM ends them with exit code 0, Ctrl-C with 130."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

__all__ = ["stopped_by_signals", "until_stopped"]


def stopped_by_signals() -> asyncio.Event:
    """An event of the running loop that SIGTERM and Ctrl-C set: work that ends by itself then."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    return stopped


async def until_stopped(
    work: Coroutine[Any, Any, None],
    stop: Callable[[], Awaitable[None]] | None = None,
    stopped: asyncio.Event | None = None,
) -> None:
    """Do the work until SIGTERM, or until `stopped` is set; an error of the work is raised.

    With `stop` the work is asked to end, also by Ctrl-C, and waited for; else it is cancelled.
    """
    stopped = stopped or asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    doing = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(stopped.wait())
    try:
        done, _ = await asyncio.wait((doing, waiting), return_when=asyncio.FIRST_COMPLETED)
        if doing in done:
            doing.result()
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        waiting.cancel()
        if stop is not None and not doing.done():
            await stop()
        else:
            doing.cancel()
        await asyncio.gather(doing, waiting, return_exceptions=True)
