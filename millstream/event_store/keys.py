"""The keys of persons: one for each, in a table of the store, until it is erased.

The table has three kinds of keys:

- `id/<key id>`: the key itself, and whose it is. Written once, before anything is sealed with it.
- `person/<person>`: the id of the person's key. It is put on the condition that there is none: of
  several processes that make a key for one person, one succeeds, and all use its key.
- `erased/<key id>`: that the key was erased, and when. Written before the key is removed: after a
  crash the key counts as erased, and erasing again removes it.

To erase a key, its message is overwritten on the broker's disk, not only deleted. With replicas the
servers' replication logs have it until they compact them, which took three minutes when it was
measured. Copies outside of the broker are not reached: backups of the key table must be deleted.

A process remembers keys for a few seconds. After an erase, other processes may read the person's
fields, or seal new ones that nobody can read, for so long.
"""

from __future__ import annotations

import base64
import binascii
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, Generic, TypeVar

import msgspec

from millstream.deadline import Deadline, now_ns
from millstream.errors import ConfigError, DataLoss, WrongSequence
from millstream.event_store.privacy import ERASED, KEY_BYTES, PersonKey, new_key
from millstream.events.event import datetime_of
from millstream.events.subject import KEY_BYTES_MAX, partition_of
from millstream.tables import Entry, Table

__all__ = ["KEYS_SUFFIX", "KeyTable"]

KEYS_SUFFIX: Final = "-keys"
# How long a process uses a key without looking whether it was erased.
REMEMBERED_SECONDS: Final = 5.0
REMEMBERED_KEYS: Final = 10_000
# Making a key is tried again when another process made or erased one at the same time.
TRIES: Final = 20
_ID: Final = "id/"
_PERSON: Final = "person/"
_ERASED: Final = "erased/"

T = TypeVar("T")


class _KeyRecord(msgspec.Struct):
    """What is stored of a key."""

    person: str
    key: str  # base64


class _PersonRecord(msgspec.Struct):
    """What is stored of a person."""

    id: str  # of the key


class _ErasedRecord(msgspec.Struct):
    """What is left of a key."""

    at: str


class KeyTable:
    """The keys of a store's persons: made when they are first needed, and erased for good."""

    def __init__(self, table: Table) -> None:
        if table.topic.settings.history != 1:
            raise ConfigError(
                f"the key table '{table.name}' must have a history of 1, or erased keys remain"
            )
        self._table = table
        self._by_person: _Remembered[PersonKey] = _Remembered()
        self._by_id: _Remembered[bytes] = _Remembered()

    async def key_for(self, person: str) -> PersonKey:
        """The key of a person; a new one if there is none, or if it was erased."""
        if (known := self._by_person.get(person)) is not None:
            return known
        name = _person_key(person)
        for _ in range(TRIES):
            entry = await self._table.get(name)
            if entry is not None:
                id_ = msgspec.json.decode(entry.value, type=_PersonRecord).id
                key = (await self._read([id_])).get(id_, ERASED)
                if key:
                    return self._remember(person, PersonKey(id_, key))
            try:
                revision = await self._table.revision(name) if entry is None else entry.revision
                return self._remember(person, await self._make(person, revision))
            except WrongSequence:
                continue  # another process made one, or erased it
        raise ConfigError(
            f"the key of a person in '{self._table.name}' was changed {TRIES} times while it was "
            f"looked up. Is it erased in a loop?"
        )

    async def by_ids(self, ids: Iterable[str]) -> dict[str, bytes]:
        """Keys by their ids: ERASED for those that were erased; others are left out."""
        wanted = set(ids)
        found = {id_: key for id_ in wanted if (key := self._by_id.get(id_)) is not None}
        missing = wanted - found.keys()
        if missing:
            read = await self._read(missing)
            for id_, key in read.items():
                self._by_id.put(id_, key)
            found |= read
        return found

    async def erase(self, person: str) -> bool:
        """Remove the key of a person for good; False if there is none. Admins only.

        What was sealed with it cannot be read any more, wherever it was copied to. The key is gone
        from the table, and overwritten on disk, when this returns; DataLoss is raised if it is not.
        """
        entry = await self._table.get(_person_key(person))
        if entry is None:
            self._by_person.forget(person)
            return False
        id_ = msgspec.json.decode(entry.value, type=_PersonRecord).id
        at = datetime_of(now_ns()).isoformat()
        await self._table.put(_ERASED + id_, msgspec.json.encode(_ErasedRecord(at)))
        self._by_person.forget(person)
        self._by_id.put(id_, ERASED)
        key = await self._table.get(_ID + id_)
        if key is not None:
            await self._remove(key)
        await self._remove(entry)
        return True

    # -- reading and writing ------------------------------------------------------------------

    async def _make(self, person: str, revision: int) -> PersonKey:
        """Store a new key of a person; WrongSequence if another one was stored."""
        key = new_key()
        record = _KeyRecord(person, base64.b64encode(key.key).decode())
        await self._table.put(_ID + key.id, msgspec.json.encode(record), revision=0)
        name = _person_key(person)
        try:
            named = msgspec.json.encode(_PersonRecord(key.id))
            await self._table.put(name, named, revision=revision)
        except WrongSequence:
            await self._table.delete(_ID + key.id)  # it was never used
            raise
        return key

    async def _read(self, ids: Iterable[str]) -> dict[str, bytes]:
        """Keys as the table has them now; an erased key is ERASED, even while it is removed."""
        names = [kind + id_ for id_ in ids for kind in (_ID, _ERASED)]
        found: dict[str, bytes] = {}
        erased: set[str] = set()
        async for entry in self._table.entries(names):
            kind, _, id_ = entry.key.partition("/")
            if kind == "erased":
                erased.add(id_)
            else:
                found[id_] = self._key_in(entry)
        return {**found, **dict.fromkeys(erased, ERASED)}

    def _key_in(self, entry: Entry) -> bytes:
        try:
            record = msgspec.json.decode(entry.value, type=_KeyRecord)
            key = base64.b64decode(record.key, validate=True)
        except (msgspec.DecodeError, binascii.Error):
            key = b""
        if len(key) != KEY_BYTES:
            raise DataLoss(
                f"'{self._table.name}', revision {entry.revision}: the key is damaged. Restore the "
                f"table from a backup"
            )
        return key

    async def _remove(self, entry: Entry) -> None:
        """Overwrite and delete one message, and make sure that it is gone."""
        topic = self._table.topic
        partition = partition_of(entry.key, topic.partitions)
        await topic.admin.erase(entry.revision, partition)
        if await topic.get(entry.revision, partition):
            raise DataLoss(
                f"'{self._table.name}', partition {partition}, offset {entry.revision}: the broker "
                f"did not remove it. Erase the person again"
            )

    def _remember(self, person: str, key: PersonKey) -> PersonKey:
        self._by_person.put(person, key)
        self._by_id.put(key.id, key.key)
        return key


class _Remembered(Generic[T]):
    """Values that are used for a few seconds; the oldest go first."""

    def __init__(self) -> None:
        self._values: OrderedDict[str, tuple[Deadline, T]] = OrderedDict()

    def get(self, name: str) -> T | None:
        found = self._values.get(name)
        if found is None or found[0].passed:
            return None
        return found[1]

    def put(self, name: str, value: T) -> None:
        self._values.pop(name, None)
        self._values[name] = Deadline(REMEMBERED_SECONDS), value
        while len(self._values) > REMEMBERED_KEYS:
            self._values.popitem(last=False)

    def forget(self, name: str) -> None:
        self._values.pop(name, None)


def _person_key(person: str) -> str:
    """The key of a person's record."""
    size = len(person.encode("utf-8", "surrogatepass")) if isinstance(person, str) else 0
    if not 0 < size <= KEY_BYTES_MAX - len(_PERSON):
        raise ConfigError(
            f"{person!r:.60} cannot be the id of a person: give a text of 1 to "
            f"{KEY_BYTES_MAX - len(_PERSON):,} bytes"
        )
    return f"{_PERSON}{person}"
