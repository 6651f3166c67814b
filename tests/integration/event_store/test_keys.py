"""The keys of persons on a real broker: one for each, and nothing left of an erased one."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import millstream
from millstream import Mill
from millstream.errors import ConfigError, DataLoss
from millstream.event_store import keys as keys_module
from millstream.event_store.keys import KeyTable
from millstream.event_store.privacy import ERASED, new_key
from millstream.tables import Table
from millstream.testing import running_broker


@pytest.fixture
async def mill(millstream_url: str) -> AsyncIterator[Mill]:
    async with millstream.connect(millstream_url, request_timeout=30) as mill:
        yield mill


@pytest.fixture(params=[1, 2], ids=["one partition", "two partitions"])
async def table(mill: Mill, request: pytest.FixtureRequest) -> Table:
    return await mill.create_table("accounts-keys", partitions=request.param)


async def persons(table: Table) -> list[str]:
    """The persons that have a key."""
    keys = [entry.key async for entry in table.entries()]
    return sorted(key.removeprefix("person/") for key in keys if key.startswith("person/"))


async def test_a_person_keeps_its_key(table: Table) -> None:
    keys = KeyTable(table)
    ann, bob = await keys.key_for("ann"), await keys.key_for("Bob / überall")
    assert ann.id != bob.id
    assert len(ann.key) == 32
    again = KeyTable(table)  # another process
    assert await again.key_for("ann") == ann
    assert await again.by_ids([ann.id, bob.id, "x" * 22]) == {ann.id: ann.key, bob.id: bob.key}
    assert await persons(table) == ["Bob / überall", "ann"]
    for wrong in ("", "x" * 1025, None, 5):
        with pytest.raises(ConfigError, match="id of a person"):
            await keys.key_for(wrong)  # type: ignore[arg-type]


async def test_processes_that_make_a_key_at_the_same_time_get_the_same(
    mill: Mill, table: Table, millstream_url: str
) -> None:
    async with millstream.connect(millstream_url, request_timeout=30) as other:
        tables = [table, await other.table(table.name)]
        found = await asyncio.gather(
            *(KeyTable(tables[number % 2]).key_for(f"p{number % 3}") for number in range(30))
        )
    assert len({key.id for key in found}) == 3
    kept = [entry async for entry in table.entries() if entry.key.startswith("id/")]
    assert {entry.key.removeprefix("id/") for entry in kept} == {key.id for key in found}


async def test_an_erased_key_is_gone_and_a_new_one_is_another(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, other = KeyTable(table), KeyTable(table)
    ann, bob = await keys.key_for("ann"), await keys.key_for("bob")
    assert await other.by_ids([ann.id]) == {ann.id: ann.key}
    assert await keys.erase("ann") is True
    assert await keys.by_ids([ann.id, bob.id]) == {ann.id: ERASED, bob.id: bob.key}
    assert await persons(table) == ["bob"]
    assert await keys.erase("ann") is False
    assert await keys.erase("nobody") is False
    # Another process remembers it for some seconds at most.
    monkeypatch.setattr(keys_module, "REMEMBERED_SECONDS", 0.0)
    assert await KeyTable(table).by_ids([ann.id]) == {ann.id: ERASED}
    new = await keys.key_for("ann")
    assert new.id != ann.id
    assert new.key != ann.key
    assert await keys.by_ids([ann.id, new.id]) == {ann.id: ERASED, new.id: new.key}


async def test_a_remembered_key_is_looked_up_again_after_its_time(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_module, "REMEMBERED_SECONDS", 0.0)
    keys, other = KeyTable(table), KeyTable(table)
    ann = await keys.key_for("ann")
    assert await other.key_for("ann") == ann
    await other.erase("ann")
    assert await keys.by_ids([ann.id]) == {ann.id: ERASED}
    assert (await keys.key_for("ann")).id != ann.id


async def test_only_so_many_keys_are_remembered(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_module, "REMEMBERED_KEYS", 3)
    keys = KeyTable(table)
    made = [await keys.key_for(f"p{number}") for number in range(6)]
    assert len(keys._by_id._values) == len(keys._by_person._values) == 3
    assert await keys.by_ids([key.id for key in made]) == {key.id: key.key for key in made}


async def test_an_interrupted_erase_counts_and_can_be_finished(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = KeyTable(table)
    ann = await keys.key_for("ann")

    async def killed(*_: object) -> None:
        raise ConnectionError("killed")

    with monkeypatch.context() as broken:
        broken.setattr(KeyTable, "_remove", killed)
        with pytest.raises(ConnectionError):
            await keys.erase("ann")
    other = KeyTable(table)
    assert await other.by_ids([ann.id]) == {ann.id: ERASED}
    assert await table.get(f"id/{ann.id}") is not None
    assert await other.erase("ann") is True
    assert await table.get(f"id/{ann.id}") is None


async def test_nothing_of_an_erased_key_is_on_the_disk(tmp_path: Path) -> None:
    async with (
        running_broker(data=tmp_path / "data") as broker,
        millstream.connect(broker.url, request_timeout=30) as mill,
    ):
        keys = KeyTable(await mill.create_table("accounts-keys"))
        ann, bob = await keys.key_for("ann"), await keys.key_for("bob")
        assert on_disk(tmp_path, ann.key)
        await keys.erase("ann")
        assert not on_disk(tmp_path, ann.key)
        assert on_disk(tmp_path, bob.key)
    assert not on_disk(tmp_path, ann.key)


def on_disk(folder: Path, key: bytes) -> bool:
    """Whether a key is in any file of a folder, as it is or as it is stored."""
    forms = (key, base64.b64encode(key))
    files = [path for path in folder.rglob("*") if path.is_file()]
    return any(form in path.read_bytes() for path in files for form in forms)


async def test_a_table_with_a_longer_history_or_a_damaged_key_is_refused(mill: Mill) -> None:
    with pytest.raises(ConfigError, match="history of 1"):
        KeyTable(await mill.create_table("long-keys", history=2))
    table = await mill.create_table("accounts-keys")
    name = new_key().id
    for wrong in (b"{}", b'{"person": "a", "key": "YQ=="}', b'{"person": "a", "key": "!"}'):
        await table.put(f"id/{name}", wrong)
        with pytest.raises(DataLoss, match="damaged"):
            await KeyTable(table).by_ids([name])
