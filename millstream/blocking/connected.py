"""How a connection of the blocking kind begins and ends."""

from __future__ import annotations

from types import TracebackType

from millstream.blocking.loop import LoopThread
from millstream.blocking.twin import Twin
from millstream.mill import Mill as AsyncMill

__all__ = ["Connected"]


class Connected(Twin):
    """A connection that is closed when the process ends, if nobody has closed it before."""

    __slots__ = ()

    _inner: AsyncMill

    def __init__(self, loop: LoopThread, inner: AsyncMill) -> None:
        super().__init__(loop, inner)
        loop.keep(inner)

    def close(self) -> None:
        """Wait for the acks of what is in flight, then close. Safe to call twice."""
        self._loop.call(self._inner.close())
        self._loop.forget(self._inner)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
