"""`millstream backup` and `restore` of a broker with all its accounts and users."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path

import pytest

import millstream
from millstream.backups.broker import back_up_broker, restore_broker
from millstream.broker import DEFAULT_ACCOUNT, read_credentials, read_state
from millstream.errors import BackupError
from millstream.mill import Mill
from millstream.settings import ConnectionSettings
from millstream.testing import AccountPool
from tests.integration.cli.conftest import Cli

START = ("up", "--auth", "--port", "0")


@pytest.fixture
def old(tmp_path: Path) -> Iterator[Cli]:
    yield from _folder(tmp_path / "old")


@pytest.fixture
def new(tmp_path: Path) -> Iterator[Cli]:
    yield from _folder(tmp_path / "new")


def _folder(path: Path) -> Iterator[Cli]:
    path.mkdir()
    cli = Cli(path)
    yield cli
    cli.clean_up()


def admin(cli: Cli, account: str = DEFAULT_ACCOUNT) -> AbstractAsyncContextManager[Mill]:
    data = cli.folder / ".millstream"
    user = read_credentials(data, "admin", account)
    return millstream.connect(read_state(data).url, user=user.user, password=user.password.reveal())


async def contents(mill: Mill, topic: str) -> list[tuple[int, bytes]]:
    return [(e.offset, e.value) async for e in (await mill.topic(topic)).read()]


async def test_all_accounts_and_users_of_a_used_broker_come_back(
    old: Cli, new: Cli, tmp_path: Path
) -> None:
    old(*START, "--account", "tenant")
    old("user", "add", "ann", "--role", "reader")
    backup, started = tmp_path / "backup", asyncio.Event()
    stored: list[int] = []
    async with admin(old) as mill, admin(old, "tenant") as tenant:
        orders = await mill.create_topic("orders")
        theirs = await tenant.create_topic("orders")  # of the same name, with other events
        await theirs.publish(b"of the tenant")

        async def produce() -> None:
            while True:
                stored.append((await orders.publish(b"%d" % len(stored))).offset)
                started.set()

        producer = asyncio.create_task(produce())
        await asyncio.wait_for(started.wait(), 60)
        before = len(stored)
        report = await asyncio.to_thread(old.json, "backup", str(backup))
        assert not producer.done()
        producer.cancel()
        with suppress(asyncio.CancelledError):
            await producer
        written = await contents(mill, "orders")
        tenants = await contents(tenant, "orders")

    assert (report["covers"], report["encryption_key"]) == ("broker", None)
    assert [one["account"] for one in report["accounts"]] == [DEFAULT_ACCOUNT, "tenant"]
    assert report["files"] == ["accounts.json", "credentials.json", "users.json"]
    for name in report["files"]:
        assert (backup / "files" / name).stat().st_mode & 0o777 == 0o600

    new(*START)
    said = new.error("restore", str(backup))
    assert "no account 'tenant'" in said
    assert "millstream up --auth --account tenant" in said
    assert new.json("topic", "ls") == []
    new("down")
    for name in ("users.json", "credentials.json"):  # as the page says
        shutil.copy(backup / "files" / name, new.folder / ".millstream")
    new(*START, "--account", "tenant")

    damaged = tmp_path / "damaged"
    shutil.copytree(backup, damaged)
    archive = damaged / "accounts" / "tenant" / "orders.archive"
    archive.write_bytes(archive.read_bytes()[:-1])
    assert "account 'tenant'" in new.error("restore", str(damaged))
    assert new.json("topic", "ls") == [], "the first account was restored before the second check"

    restored = new.json("restore", str(backup))["accounts"]
    assert [one["account"] for one in restored] == [DEFAULT_ACCOUNT, "tenant"]
    assert all(stream["compared"] for one in restored for stream in one["streams"])
    async with admin(new) as mill, admin(new, "tenant") as tenant:
        found = await contents(mill, "orders")
        assert found == written[: len(found)]
        assert len(found) >= before
        assert await contents(tenant, "orders") == tenants
    assert "ann" in {user["name"] for user in new.json("user", "ls")}
    for account in (DEFAULT_ACCOUNT, "tenant"):
        folders = (cli.folder / ".millstream" for cli in (old, new))
        ours, copied = (read_credentials(data, "app", account) for data in folders)
        assert ours.password.reveal() == copied.password.reveal()


def test_one_account_is_backed_up_alone(old: Cli, tmp_path: Path) -> None:
    url = old.json(*START, "--account", "tenant")["url"]
    limited, single = str(tmp_path / "limited"), str(tmp_path / "single")
    report = old.json("backup", limited, "--account", "tenant")
    assert (report["covers"], report["files"]) == ("account", []), "others' passwords are not in it"
    assert [one["account"] for one in report["accounts"]] == ["tenant"]
    assert "no account 'nobody'" in old.error("backup", single, "--account", "nobody")
    assert "no account 'main'" in old.error("restore", limited, "--account", "main")

    password = read_credentials(old.folder / ".millstream", "admin", "tenant").password.reveal()
    server = ("--server", url.replace("//", f"//tenant-admin:{password}@"))
    assert "the user decides" in old.error("backup", single, "--account", "tenant", *server)
    assert "Only account 'tenant', that of your user" in old("backup", single, *server).stdout


async def test_a_failure_in_one_account_leaves_nothing_in_the_others(
    millstream_accounts: AccountPool, tmp_path: Path
) -> None:
    urls = {name: [millstream_accounts.url() for _ in range(2)] for name in ("one", "two")}
    ours, theirs = (
        {name: ConnectionSettings.load(pair[side]) for name, pair in urls.items()}
        for side in range(2)
    )
    for name in urls:
        async with millstream.connect(urls[name][0]) as mill:
            await (await mill.create_topic("orders")).publish(name.encode())
    folder = tmp_path / "b"
    await back_up_broker(ours, [], folder, lambda *_: None)
    async with millstream.connect(urls["one"][1]) as one, millstream.connect(urls["two"][1]) as two:
        # It has the subjects of 'orders', which the server says when the first one is restored.
        await two.jetstream.create_stream({"name": "else", "subjects": ["orders.>"]})
        with pytest.raises(BackupError, match="subjects overlap"):
            await restore_broker(theirs, folder, lambda *_: None)
        assert await one.topics() == []
        await two.jetstream.delete_stream("else")
        assert list(await restore_broker(theirs, folder, lambda *_: None)) == ["one", "two"]
        assert await contents(two, "orders") == [(1, b"two")]
