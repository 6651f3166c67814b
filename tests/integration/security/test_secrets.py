"""Nothing secret in logs, reprs, errors, the process list or files that others can read."""

from __future__ import annotations

import asyncio
import logging
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

import millstream
from millstream.broker import Broker, BrokerSettings, Encryption, Role, ServerTls, User
from millstream.errors import ConnectError, MillstreamError
from millstream.settings import ConnectionSettings, Secret, Tls
from tests.certificates import make_certificate
from tests.integration.broker.clients import content

PASSWORD = "correct-horse-battery-staple"
KEY = "a store key that nobody may see 0123456789"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("secrets") / "data"


@pytest.fixture(scope="module")
def broker(folder: Path) -> Iterator[Broker]:
    settings = BrokerSettings(
        data=folder,
        auth=True,
        users=(User("ann", Secret(PASSWORD), Role.ADMIN),),
        encryption=Encryption(key=Secret(KEY)),
    )
    with Broker(settings) as running:
        yield running


def secrets_of(broker: Broker) -> list[str]:
    made = [broker.credentials(role).password.reveal() for role in (*Role, "system")]
    return [PASSWORD, KEY, *made]


async def test_files_with_secrets_are_readable_by_their_owner_only(
    broker: Broker, folder: Path
) -> None:
    async with millstream.connect(broker.url, user="ann", password=PASSWORD) as mill:
        await (await mill.create_topic("orders")).publish(b"1")
    modes = await asyncio.to_thread(_modes, folder, secrets_of(broker))
    assert modes  # the search finds the files that must exist
    assert {name: mode for name, mode in modes.items() if mode & 0o077} == {}


def _modes(folder: Path, secrets: list[str]) -> dict[str, int]:
    """The modes of the files that contain a secret."""
    return {
        str(file): stat.S_IMODE(file.stat().st_mode)
        for file in folder.rglob("*")
        if file.is_file() and any(word.encode() in content(file) for word in secrets)
    }


def test_the_key_of_the_store_is_not_stored_next_to_it(broker: Broker, folder: Path) -> None:
    found = [f for f in folder.rglob("*") if f.is_file() and KEY.encode() in content(f)]
    assert found == []


def test_the_process_list_shows_no_secret(broker: Broker) -> None:
    lines = [_command(path) for path in Path("/proc").glob("[0-9]*/cmdline")]
    mine = [line for line in lines if b"nats-server" in line]
    assert mine
    for secret in secrets_of(broker):
        assert not any(secret.encode() in line for line in mine)


def _command(path: Path) -> bytes:
    """A command line as the process list shows it; nothing for a process that has ended."""
    try:
        return path.read_bytes().replace(b"\0", b" ")
    except OSError:
        return b""


async def test_logs_contain_no_secret_even_at_debug_level(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    address = broker.url.removeprefix("nats://")
    async with millstream.connect(f"nats://ann:{PASSWORD}@{address}") as mill:
        await mill.flush()
        assert PASSWORD not in repr(mill)
        assert PASSWORD not in mill.url
        assert PASSWORD not in repr(mill.connection)
    with pytest.raises(ConnectError) as wrong:
        await millstream.connect(f"nats://ann:{PASSWORD}wrong@{address}", connect_timeout=3.0)
    with pytest.raises(ConnectError) as nowhere:
        await millstream.connect(f"nats://ann:{PASSWORD}@127.0.0.1:1", connect_timeout=0.5)
    for text in (caplog.text, str(wrong.value), str(nowhere.value), broker.log.read_text()):
        for secret in secrets_of(broker):
            assert secret not in text


@pytest.mark.parametrize(
    "value",
    [
        Secret(PASSWORD),
        User("ann", Secret(PASSWORD)),
        Encryption(key=Secret(PASSWORD)),
        ConnectionSettings(user="ann", password=Secret(PASSWORD)),
        ConnectionSettings(token=Secret(PASSWORD), nkey_seed=Secret(PASSWORD)),
        ConnectionSettings(urls=(f"nats://ann:{PASSWORD}@host:4222",)),
    ],
)
def test_no_repr_shows_a_secret(value: object) -> None:
    for text in (repr(value), str(value), f"{value}"):
        assert PASSWORD not in text


def test_the_reprs_of_a_broker_and_its_settings_show_no_secret(broker: Broker) -> None:
    text = repr(broker) + repr(broker.settings) + repr(broker.credentials(Role.ADMIN))
    for secret in secrets_of(broker):
        assert secret not in text


async def test_a_client_without_tls_sends_no_password_to_a_broker_with_tls(tmp_path: Path) -> None:
    certificate = await asyncio.to_thread(make_certificate, tmp_path)
    tls = ServerTls(certificate, tmp_path / "server.key")
    user = User("ann", Secret(PASSWORD), Role.ADMIN)
    settings = BrokerSettings(data=tmp_path / "data", users=(user,), tls=tls)
    with Broker(settings) as broker:
        trusting = Tls(ca=str(certificate))
        async with millstream.connect(
            broker.url, user="ann", password=PASSWORD, tls=trusting
        ) as mill:
            await mill.flush()
        with pytest.raises(MillstreamError):  # the system does not trust this certificate
            await millstream.connect(broker.url, user="ann", password=PASSWORD, connect_timeout=3.0)
