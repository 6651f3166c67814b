"""Wrong settings are refused when they are created, not when a server reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millstream.broker import (
    Account,
    BrokerSettings,
    ClusterSettings,
    Durability,
    Encryption,
    LeafRemote,
    LeafSettings,
    Limits,
    Role,
    ServerTls,
    User,
)
from millstream.broker.config import is_loopback
from millstream.broker.jwt import new_key
from millstream.broker.launch import node_names
from millstream.errors import ConfigError
from millstream.settings import Secret

LONG = Secret("0123456789abcdef")


def user(name: str = "ann", **changes: Any) -> User:
    return User(name, Secret("pw"), **changes)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "broker.example.com"])
def test_an_open_listener_without_users_is_refused(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"opens the broker to the network.*--auth"):
        BrokerSettings(data=tmp_path, host=host)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_users(host: str, tmp_path: Path) -> None:
    assert is_loopback(host)
    assert not BrokerSettings(data=tmp_path, host=host).secured


def test_an_open_listener_with_users_is_accepted(tmp_path: Path) -> None:
    assert BrokerSettings(data=tmp_path, host="0.0.0.0", auth=True).secured
    assert BrokerSettings(data=tmp_path, host="0.0.0.0", users=(user(),)).secured


@pytest.mark.parametrize(
    "changes",
    [
        {"host": "a host"},
        {"host": "1.2.3.4\nport: 1", "auth": True},
        {"port": 70_000},
        {"port": -1},
        {"monitor_port": -1},
        {"name": "a.b"},
        {"name": ""},
        {"domain": "a b"},
        {"durability": "hope"},
        {"sync_interval": 0.0},
        {"users": (user(account="nobody"),)},
        {"users": (user(), user())},
        {"accounts": (Account("acme"), Account("acme"))},
        {"accounts": (Account("main"),)},
        {"durability": "memory", "encryption": Encryption(key=LONG)},
    ],
)
def test_a_wrong_setting_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        BrokerSettings(data=tmp_path, **changes)


@pytest.mark.parametrize("name", ["", "-a", "a b", 'a"b', "a\nb", "a.b", "a>", "x" * 64, "ä"])
def test_names_that_the_server_could_misread_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be the name"):
        user(name)
    with pytest.raises(ConfigError, match="cannot be the name"):
        Account(name)


@pytest.mark.parametrize("name", ["$SYS", "$G", "system"])
def test_the_servers_own_accounts_cannot_be_tenants(name: str) -> None:
    with pytest.raises(ConfigError):
        Account(name)


def test_other_values_are_checked_as_well(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="password"):
        User("ann", Secret(""))
    with pytest.raises(ConfigError, match="role"):
        User("ann", Secret("x"), role="king")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="64 MiB"):
        Limits(max_payload=65 * 1024 * 1024)
    with pytest.raises(ConfigError, match="max_file_store"):
        Limits(max_file_store=0)
    with pytest.raises(ConfigError, match="max_streams"):
        Account("acme", max_streams=0)
    with pytest.raises(ConfigError, match="16 characters"):
        Encryption(key=Secret("short"))
    with pytest.raises(ConfigError, match="not both"):
        Encryption(key=LONG, key_file=tmp_path / "key")
    with pytest.raises(ConfigError, match="no file"):
        ServerTls(tmp_path / "cert", tmp_path / "key")


def test_cluster_and_leaf_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="16 characters"):
        ClusterSettings("a", ("b:1",), Secret("short"))
    with pytest.raises(ConfigError, match="at least one"):
        ClusterSettings("a", (), LONG)
    with pytest.raises(ConfigError, match="host:port"):
        ClusterSettings("a", ("nats://u:p@b:1",), LONG)
    with pytest.raises(ConfigError, match="port to listen on"):
        LeafSettings()
    with pytest.raises(ConfigError, match="user and password apart"):
        LeafRemote("nats-leaf://me:secret@hub:7422")
    with pytest.raises(ConfigError, match="or neither"):
        LeafRemote("nats-leaf://hub:7422", user="me")


def test_strings_are_converted_and_defaults_are_safe(tmp_path: Path) -> None:
    settings = BrokerSettings(data=tmp_path, durability="periodic")  # type: ignore[arg-type]
    assert settings.durability is Durability.PERIODIC
    assert user(role="reader").role is Role.READER
    assert BrokerSettings(data=tmp_path).durability is Durability.FSYNC
    assert BrokerSettings(data=tmp_path).host == "127.0.0.1"


def test_secrets_do_not_show_in_any_repr(tmp_path: Path) -> None:
    secret = Secret("swordfish-swordfish")
    settings = BrokerSettings(
        data=tmp_path,
        users=(User("ann", secret),),
        encryption=Encryption(key=secret, previous=secret),
        cluster=ClusterSettings("a", ("b:1",), secret),
        leaf=LeafSettings(remotes=(LeafRemote("nats-leaf://h:1", "me", secret),)),
        raw="authorization { password: swordfish }",
    )
    assert "swordfish" not in repr(settings)
    assert "swordfish" not in str(settings)


def test_a_password_in_the_address_of_a_hub_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError) as refused:
        LeafRemote("nats-leaf://me:swordfish@hub:7422")
    assert "hub:7422" in str(refused.value)
    assert "swordfish" not in str(refused.value)


def test_nodes_have_names_and_a_local_cluster_stays_on_loopback(tmp_path: Path) -> None:
    settings = BrokerSettings(data=tmp_path)
    assert node_names(settings, 3) == ("n1", "n2", "n3")
    for wrong in (0, 10):
        with pytest.raises(ConfigError, match="nodes must be"):
            node_names(settings, wrong)
    with pytest.raises(ConfigError, match="--join"):
        node_names(BrokerSettings(data=tmp_path, host="0.0.0.0", auth=True), 3)
    joined = BrokerSettings(data=tmp_path, cluster=ClusterSettings("east", ("b:1",), LONG))
    assert node_names(joined, 1) == ("east",)
    with pytest.raises(ConfigError, match="one node"):
        node_names(joined, 3)


def test_a_user_logs_in_with_a_password_or_a_key() -> None:
    key = new_key("user")
    public, seed = key.public, key.seed
    assert User("ann", nkey=public).secret == ""
    assert public not in seed.reveal()
    typo = public[:20] + ("A" if public[20] != "A" else "B") + public[21:]
    for login in (
        {},
        {"nkey": public, "password": Secret("x")},
        {"nkey": seed.reveal()},
        {"nkey": typo},
    ):
        with pytest.raises(ConfigError):
            User("ann", **login)
