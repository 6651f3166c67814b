"""A connection that ends with the process."""

from __future__ import annotations

from millstream.blocking.loop import LoopThread
from millstream.blocking.twin import Twin
from millstream.mill import Mill as AsyncMill

__all__ = ["Connected"]


class Connected(Twin):
    """A connection that is drained when the process ends, if nobody has closed it before."""

    __slots__ = ()

    _inner: AsyncMill

    def __init__(self, loop: LoopThread, inner: AsyncMill) -> None:
        super().__init__(loop, inner)
        loop.keep(inner)
