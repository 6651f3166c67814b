"""A connection that is drained when the process ends."""

from __future__ import annotations

from millstream.blocking.loop import LoopThread
from millstream.blocking.twin import ContextTwin
from millstream.closing import leave
from millstream.mill import Mill as AsyncMill

__all__ = ["Connected"]


class Connected(ContextTwin):
    """A connection that is drained when the process ends, if it was not closed before."""

    __slots__ = ()

    _inner: AsyncMill

    def __init__(self, loop: LoopThread, inner: AsyncMill) -> None:
        super().__init__(loop, inner)
        loop.keep(inner)

    def _leave(self, error: BaseException | None) -> None:
        self._loop.call_last(leave(self._inner, error))
