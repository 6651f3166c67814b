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
        self._details = details
        self._loaded: Loaded[Any] | None = None
        self._changes: Changes | None = None
        self.result: Loaded[Any] | None = None  # the aggregate after the block

    async def __aenter__(self) -> Any:
        self._loaded = await self._store.load_or_new(self._id)
        self._changes = self._store.changes_on(self._loaded)
        return stand_in(self._changes)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            await self._append()

    async def _append(self) -> None:
        loaded, changes = self._loaded, self._changes
        if loaded is None or changes is None:
            raise ConfigError("use `async with store.change(id) as ...`")
        for left in reversed(range(self._tries)):
            try:
                self.result = await self._store.append_to(loaded, changes.events, **self._details)
                return
            except VersionConflict:
                if not left:
                    raise
                loaded = await self._store.load_or_new(self._id)
                repeated = changes.repeated_on(self._store.changes_on(loaded).state)
                if repeated is None:
                    raise
                changes = repeated
