"""Leaving an ordered group from inside one of its handlers."""

from __future__ import annotations

import asyncio

from millstream.blocking.twin import ContextTwin, handling
from millstream.messaging.groups import group as async_group

__all__ = ["GroupLeaving"]


class GroupLeaving(ContextTwin):
    """A member that can be stopped by its own handler."""

    __slots__ = ("_leaving",)

    _inner: async_group.Group

    def stop(self) -> None:
        """Leave gracefully: running handlers finish, positions are committed, others take over.

        In a handler it returns immediately, and the member leaves when the handler has ended.
        """
        if handling.group is self._inner:
            self._loop.invoke(self._stop_later)
        else:
            self._loop.call(self._inner.stop())

    def _stop_later(self) -> None:
        self._leaving = asyncio.get_running_loop().create_task(self._inner.stop())
