"""A connection that is drained when the process ends."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from millstream.blocking.loop import LoopThread
from millstream.blocking.twin import ContextTwin
from millstream.closing import leave
from millstream.errors import ConnectionClosed
from millstream.mill import Mill as AsyncMill

__all__ = ["Connected", "close_anywhere"]

_closing: Final[set[asyncio.Task[None]]] = set()  # the loop alone would let them be collected


class Connected(ContextTwin):
    """A connection that is drained when the process ends, if it was not closed before."""

    __slots__ = ()

    _inner: AsyncMill

    def __init__(self, loop: LoopThread, inner: AsyncMill) -> None:
        super().__init__(loop, inner)
        loop.keep(inner)

    def _leave(self, error: BaseException | None) -> None:
        self._loop.call_last(leave(self._inner, error))


def close_anywhere(mill: Connected) -> None:
    """Close a connection, from `__del__` too: the garbage collector may run on the loop itself.

    There it is closed soon, without waiting. Not an error when the process ends.
    """
    loop, inner = mill._loop, mill._inner

    def start() -> None:
        task = asyncio.get_running_loop().create_task(inner.close())
        _closing.add(task)
        task.add_done_callback(_closing.discard)

    with contextlib.suppress(ConnectionClosed):
        if loop.is_current:
            loop.post(start)
        else:
            loop.call_last(inner.close())
