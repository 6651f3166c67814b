"""The block of `store.change(id)`: loads when it begins, appends when it ends."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

from millstream.errors import ConfigError, VersionConflict
from millstream.event_store.changing import Changes, stand_in
from millstream.event_store.events import Loaded

if TYPE_CHECKING:
    from millstream.event_store.store import EventStore

__all__ = ["AggregateChange"]


class AggregateChange:
    """A change of one aggregate; see `EventStore.change`."""

    def __init__(self, store: EventStore, id: str, tries: int, details: dict[str, Any]) -> None:
        if tries < 1:
            raise ConfigError(f"tries {tries!r}: give 1 or more")
        self._store = store
        self._id = id
        self._tries = tries
        self._left = tries
        self._details = details
        self._loaded: Loaded[Any] | None = None
        self._changes: Changes | None = None
        self._conflict: VersionConflict | None = None  # the last one
        self.result: Loaded[Any] | None = None  # the aggregate after the block

    async def __aenter__(self) -> Any:
        self._left = self._tries
        self._loaded = await self._store.load_or_new(self._id)
        self._changes = self._store.changes_on(self._loaded)
        return stand_in(self._changes)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._changes is None:
            return
        if error is None:
            while not await self.try_append():
                self.repeat()
        else:
            self.abandon()

    async def try_append(self) -> bool:
        """Internal: append what the block decided on; False: another append was faster."""
        loaded, changes = self._loaded, self._changes
        if loaded is None or changes is None:
            raise ConfigError("use `async with store.change(id) as ...`")
        self._left -= 1
        events = changes.end()
        try:
            self.result = await self._store.append_to(loaded, events, **self._details)
        except VersionConflict as conflict:
            if not self._left:
                raise
            self._conflict = conflict
            self._loaded = await self._store.load_or_new(self._id)
            return False
        return True

    def repeat(self) -> None:
        """Internal: do what the block did on the newer state, or raise the conflict.

        Apart from `try_append`, because commands belong to the caller: in its thread, they may do
        what blocks a loop.
        """
        if self._loaded is not None and self._changes is not None:
            self._changes = self._changes.repeated_on(self._loaded.state)
        if self._changes is None and self._conflict is not None:
            raise self._conflict

    def abandon(self) -> None:
        """Internal: the block has failed; its stand-in takes no more commands."""
        if self._changes is not None:
            self._changes.ended = True
