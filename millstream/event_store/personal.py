"""The personal fields of a store: sealed when events are written, revealed when they are read.

Keys are looked up before events are decoded (`learn`), for all of a group at once, and each group
looks again: the key table remembers a key for a few seconds, so an erase takes effect within them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final

from millstream.errors import TopicNotFound
from millstream.event_store.keys import KeyTable
from millstream.event_store.privacy import (
    ERASED,
    Context,
    Personal,
    PersonKey,
    key_ids_in,
    open_blob,
    persons_in,
    reveal,
    seal,
    seal_blob,
)
from millstream.tables import Table

__all__ = ["PersonalData"]

# Keys that are at hand for decoding; more than the events of one group need.
KEYS_MAX: Final = 20_000
_SNAPSHOT: Final = "snapshot"  # in place of an event's name


class PersonalData:
    """Seals and reveals the personal fields of one store."""

    def __init__(self, store: str, open_table: Callable[[bool], Awaitable[Table]]) -> None:
        self._store = store
        self._open = open_table  # with True: create it if there is none
        self._keys: KeyTable | None = None
        self._known: dict[str, bytes] = {}

    async def _opened(self, create: bool) -> KeyTable:
        if self._keys is None:
            self._keys = KeyTable(await self._open(create))
        return self._keys

    async def _table(self) -> KeyTable | None:
        """The key table; None when no person has a key yet."""
        try:
            return await self._opened(create=False)
        except TopicNotFound:
            return None

    # -- events -----------------------------------------------------------------------------

    async def sealed(
        self, plain: dict[str, Any], marks: Mapping[str, Personal], event: str, aggregate: str
    ) -> dict[str, Any]:
        """An event with its personal fields sealed by the keys of their persons."""
        table = await self._opened(create=True)
        keys = {p: await table.key_for(p) for p in persons_in(plain, marks, aggregate)}
        return seal(plain, marks, Context(self._store, event), aggregate, keys.__getitem__)

    async def learn(self, bodies: Iterable[bytes]) -> None:
        """Look up the keys that some events need to be revealed."""
        ids = {id_ for body in bodies for id_ in key_ids_in(body)}
        if not ids:
            return
        if len(self._known) > KEYS_MAX:
            self._known.clear()
        table = await self._table()
        if table is not None:
            self._known.update(await table.by_ids(ids))

    def revealed(
        self, plain: dict[str, Any], marks: Mapping[str, Personal], event: str
    ) -> dict[str, Any]:
        """An event as it was written, or without what was erased since."""
        return reveal(plain, marks, Context(self._store, event), self._known)

    async def erase(self, person: str) -> bool:
        """Remove the key of a person; False when there is none."""
        table = await self._table()
        self._known.clear()
        return table is not None and await table.erase(person)

    # -- snapshots --------------------------------------------------------------------------

    async def sealed_state(self, data: bytes, ids: Iterable[str]) -> bytes:
        """A snapshot that nobody can read any more when one of its persons is erased."""
        wanted = set(ids)
        table = await self._table() if wanted else None
        if table is None:
            return data
        found = await table.by_ids(wanted)
        keys = [PersonKey(id_, key) for id_, key in found.items() if key != ERASED]
        return seal_blob(data, keys, Context(self._store, _SNAPSHOT))

    async def opened_state(self, data: bytes) -> bytes | None:
        """The snapshot; None when a person in it was erased."""
        ids = key_ids_in(data)
        table = await self._table() if ids else None
        if table is None:
            return None if ids else data
        return open_blob(data, await table.by_ids(ids), Context(self._store, _SNAPSHOT))
