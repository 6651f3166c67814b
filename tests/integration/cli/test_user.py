"""`millstream user`: users of a folder, with the broker running and stopped."""

from __future__ import annotations

import json
import os
import signal
import stat
from pathlib import Path

import pytest

import millstream
from millstream.broker import (
    Broker,
    BrokerSettings,
    Encryption,
    Role,
    User,
    add_user,
    down,
    list_users,
    read_state,
    remove_user,
    up,
)
from millstream.errors import AuthenticationFailed, ConfigError, NotRunning, PermissionDenied
from millstream.settings import Secret
from millstream.testing import running_cluster
from tests.integration.broker.clients import PATIENCE, client, wait_until_async
from tests.integration.cli.conftest import Cli
from tests.integration.security.test_operator_mode import Operator


def text(cli: Cli, *arguments: str) -> str:
    return cli(*arguments).stdout


async def logs_in(url: str, user: str) -> bool:
    try:
        async with millstream.connect(url, user=user, password=user, connect_timeout=PATIENCE):
            return True
    except AuthenticationFailed:
        return False


async def test_a_change_that_one_node_refuses_is_made_on_none() -> None:
    with running_cluster(3, auth=True) as cluster:
        nodes = cluster.url.split(",")
        add_user(cluster.data, User("ann", Secret("ann")))
        assert [await logs_in(url, "ann") for url in nodes] == [True] * 3
        with (cluster.data / "nodes/n3/server.conf").open("a") as conf:
            conf.write('http: "127.0.0.1:1"\n')  # valid, but not while the server runs
        with pytest.raises(ConfigError, match="HTTP"):
            add_user(cluster.data, User("bob", Secret("bob")))
        with pytest.raises(ConfigError, match="HTTP"):
            remove_user(cluster.data, "ann")
        assert [user.name for user in list_users(cluster.data) if user.added] == ["ann"]
        assert [await logs_in(url, "bob") for url in nodes] == [False] * 3
        assert [await logs_in(url, "ann") for url in nodes] == [True] * 3


async def test_a_server_that_dies_during_a_change_starts_with_it(tmp_path: Path) -> None:
    def server_pid() -> int:
        """Of the server that runs; 0 while it is started again."""
        try:
            return read_state(tmp_path).nodes[0].server_pid
        except NotRunning:
            return 0

    async def restarted(killed: int) -> None:
        await wait_until_async(lambda: server_pid() not in (0, killed))

    state = up(BrokerSettings(data=tmp_path, auth=True, port=0), timeout=PATIENCE)
    try:
        for name in ("ann", "bob"):
            killed = server_pid()
            os.kill(killed, signal.SIGKILL)
            add_user(tmp_path, User(name, Secret(name)))
            await restarted(killed)
            assert await logs_in(state.url, name)
    finally:
        down(tmp_path)


async def test_a_user_is_added_and_removed_without_dropping_clients(cli: Cli) -> None:
    settings = BrokerSettings(
        data=cli.folder / ".millstream", auth=True, encryption=Encryption(key=Secret("k" * 32))
    )
    with Broker(settings) as broker:
        async with client(broker.url, broker.credentials(Role.ADMIN)) as admin:
            heard = await admin.subscribe("news")
            added = cli.json("user", "add", "ann", "--role", "app")
            assert (added["login"], added["account"], added["added"]) == ("nkey", "main", True)
            text(cli, "user", "add", "bob", "--password", "--role", "reader")
            ann, bob = (text(cli, "user", "creds", name).strip() for name in ("ann", "bob"))
            assert ann.startswith("SU")
            async with (
                millstream.connect(broker.url, nkey_seed=ann) as mill,
                millstream.connect(broker.url, user="bob", password=bob) as reader,
                client(broker.url, nkeys_seed_str=ann) as plain,
            ):
                await (await mill.create_topic("orders")).publish(b"1")
                assert [e.value async for e in (await reader.topic("orders")).read()] == [b"1"]
                with pytest.raises(PermissionDenied):
                    await reader.delete_topic("orders")
                await plain.publish("news", b"hello")
                assert (await heard.next_msg(PATIENCE)).data == b"hello"
                names = {user["name"]: user for user in cli.json("user", "ls")}
                assert {"admin", "app", "reader", "ann", "bob"} <= set(names)
                assert not names["admin"]["added"]
                assert ann not in json.dumps(names)
                text(cli, "user", "rm", "ann", "--yes")
            with pytest.raises(AuthenticationFailed):
                await millstream.connect(broker.url, nkey_seed=ann)
        broker.restart()
        with pytest.raises(AuthenticationFailed):
            await millstream.connect(broker.url, nkey_seed=ann)
        async with millstream.connect(broker.url, user="bob", password=bob) as reader:
            await reader.flush()
        left = [user["name"] for user in cli.json("user", "ls")]
        assert "bob" in left
        assert "ann" not in left
        assert cli.json("user", "creds", "bob")["secret"] == bob


async def test_users_added_to_a_stopped_broker_secure_it(cli: Cli, tmp_path: Path) -> None:
    settings = BrokerSettings(data=cli.folder / ".millstream")
    with Broker(settings) as broker:
        assert "open to everybody" in cli.error("user", "add", "ann")
        assert cli.json("user", "ls")[0]["name"] == "anonymous"
    text(cli, "user", "add", "ann", "--role", "admin")
    text(cli, "user", "add", "till", "--topic", "orders")
    file = tmp_path / "ann.nk"
    text(cli, "user", "creds", "ann", "--output", str(file))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "cannot write" in cli.error("user", "creds", "ann", "--output", str(file))
    for name in ("users.json", "accounts.json"):
        assert stat.S_IMODE((cli.folder / ".millstream" / name).stat().st_mode) == 0o600
    with Broker(settings) as broker:
        with pytest.raises(AuthenticationFailed):
            await millstream.connect(broker.url)
        async with millstream.connect(broker.url, nkey_seed=file.read_text().strip()) as ann:
            await ann.create_topic("orders")
            await ann.create_topic("money")
        seed = text(cli, "user", "creds", "till").strip()
        async with millstream.connect(broker.url, nkey_seed=seed) as till:
            assert (await (await till.topic("orders")).publish(b"1")).offset == 1
            with pytest.raises(PermissionDenied):
                await till.topic("money")


def test_what_cannot_be_a_user_is_refused(cli: Cli) -> None:
    with Broker(BrokerSettings(data=cli.folder / ".millstream", auth=True)):
        assert "exists already" in cli.error("user", "add", "admin")
        assert "no account 'acme'" in cli.error("user", "add", "ann", "--account", "acme")
        assert "--role" in cli.error("user", "add", "ann", "--role", "king")
        assert "public key" in cli.error("user", "add", "ann", "--nkey", "SUAB")
        assert "not both" in cli.error("user", "add", "ann", "--nkey", "U", "--password")
        assert "was not added" in cli.error("user", "rm", "admin", "--yes")
        assert "no secret of 'admin'" in cli.error("user", "creds", "admin")
        assert not (cli.folder / ".millstream" / "users.json").exists()


async def test_in_operator_mode_a_user_is_signed_by_its_account(cli: Cli, tmp_path: Path) -> None:
    operator = Operator(tmp_path)
    seed = tmp_path / "main.seed"
    seed.write_text(operator.accounts["main"].seed.reveal())
    sign = ("user", "creds", "ann", "--signing-key", str(seed))
    creds = tmp_path / "ann.creds"
    with Broker(
        BrokerSettings(data=cli.folder / ".millstream", operator=operator.settings)
    ) as broker:
        assert "--signing-key" in cli.error("user", "add", "ann")
        text(cli, *sign, "--output", str(creds))
        assert stat.S_IMODE(creds.stat().st_mode) == 0o600
        async with millstream.connect(broker.url, creds=str(creds)) as ann:
            await (await ann.create_topic("orders")).publish(b"1")
            with pytest.raises(PermissionDenied):
                await ann.delete_topic("orders")
        assert "account of its own" in cli.error(*sign, "--role", "reader")
        assert "not the seed" in cli.error(*sign[:-1], str(creds))
        other = tmp_path / "operator.seed"
        other.write_text(operator.key.seed.reveal())
        assert "seed of an account" in cli.error(*sign[:-1], str(other))
        assert cli.json("status")["ok"]


def test_names_of_the_broker_itself_are_refused(tmp_path: Path) -> None:
    for name in ("system", "anonymous"):
        with pytest.raises(ConfigError, match="exists already"):
            add_user(tmp_path, User(name, Secret("x")))
        with pytest.raises(ConfigError, match="taken by the broker"):
            BrokerSettings(data=tmp_path, users=(User(name, Secret("x")),))
    assert list_users(tmp_path) == ()
