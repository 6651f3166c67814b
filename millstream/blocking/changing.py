"""The block of `store.change(id)` in plain code."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

from millstream.blocking.twin import Twin

if TYPE_CHECKING:
    from millstream.event_store.change import AggregateChange

__all__ = ["Changing"]


class Changing(Twin):
    """A change of one aggregate; its commands run in the caller's thread, repeated ones too."""

    __slots__ = ()

    _inner: AggregateChange

    def __enter__(self) -> Any:
        return self._loop.call(self._inner.__aenter__())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            while not self._loop.call(self._inner.try_append()):
                self._inner.repeat()
        else:
            self._inner.abandon()
