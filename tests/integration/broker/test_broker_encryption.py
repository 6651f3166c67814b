"""Encryption at rest: nothing readable on disk, and a wrong key does no harm."""

from __future__ import annotations

import hashlib
import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from millstream.broker import Broker, BrokerSettings, Encryption
from millstream.errors import WrongKey
from millstream.settings import Secret
from tests.integration.broker.clients import alive, command_line, content, publish, stored

RIGHT = Secret('the "right" key $1 \\ #')
WRONG = Secret("some other long key")
PAYLOAD = b"plaintext-that-must-not-be-found"


def settings(folder: Path, encryption: Encryption | None) -> BrokerSettings:
    return BrokerSettings(data=folder, encryption=encryption)


def fingerprint(folder: Path) -> str:
    """Every stored byte."""
    total = hashlib.sha256()
    for file in sorted((folder / "nodes/n1/store").rglob("*")):
        total.update(str(file).encode())
        if file.is_file():
            total.update(file.read_bytes())
    return total.hexdigest()


def found_in_files(folder: Path, text: bytes) -> list[str]:
    return [str(f) for f in folder.rglob("*") if f.is_file() and text in content(f)]


async def fill(folder: Path, encryption: Encryption | None) -> None:
    with Broker(settings(folder, encryption)) as broker:
        await publish(broker.url, PAYLOAD, PAYLOAD, stream="orders")


async def test_plaintext_and_key_are_in_no_file(tmp_path: Path) -> None:
    await fill(tmp_path / "plain", None)
    assert found_in_files(tmp_path / "plain", PAYLOAD), "the search itself must work"
    with Broker(settings(tmp_path / "secret", Encryption(key=RIGHT))) as broker:
        await publish(broker.url, PAYLOAD)
        key = RIGHT.reveal().encode()
        assert found_in_files(tmp_path / "secret", PAYLOAD) == []
        assert found_in_files(tmp_path / "secret", key) == []
        for pid in (broker.pid, broker.keeper_pid):
            assert key not in command_line(pid)
    assert found_in_files(tmp_path / "secret", PAYLOAD) == []
    with Broker(settings(tmp_path / "secret", Encryption(key=RIGHT))) as broker:
        assert await stored(broker.url) == [PAYLOAD]


@pytest.mark.parametrize(
    ("given", "words"),
    [(Encryption(key=WRONG), "another key"), (None, "start it with its key")],
    ids=["wrong", "missing"],
)
async def test_a_wrong_key_is_refused_before_a_server_runs_and_changes_nothing(
    given: Encryption | None, words: str, tmp_path: Path
) -> None:
    await fill(tmp_path, Encryption(key=RIGHT))
    before = fingerprint(tmp_path)
    log = (tmp_path / "nodes/n1/server.log").read_bytes()
    with pytest.raises(WrongKey, match=words):
        Broker(settings(tmp_path, given)).start()
    assert fingerprint(tmp_path) == before
    assert (tmp_path / "nodes/n1/server.log").read_bytes() == log, "a server was started"
    with Broker(settings(tmp_path, Encryption(key=RIGHT))) as broker:
        assert await stored(broker.url) == [PAYLOAD, PAYLOAD]


@pytest.mark.parametrize("given", [Encryption(key=WRONG), None], ids=["wrong", "missing"])
async def test_streams_of_unknown_origin_are_opened_without_clients_first(
    given: Encryption | None, tmp_path: Path
) -> None:
    """Without a fingerprint only a server can check the key; no client may reach it then."""
    await fill(tmp_path, Encryption(key=RIGHT))
    plan = json.loads((tmp_path / "nodes/n1/plan.json").read_text())
    (tmp_path / "nodes/n1/key.json").unlink()
    before = fingerprint(tmp_path)
    with pytest.raises(WrongKey, match="nothing was changed"):
        Broker(replace(settings(tmp_path, given), port=plan["ports"]["client"])).start()
    assert fingerprint(tmp_path) == before
    log = (tmp_path / "nodes/n1/server.log").read_text()
    tried = log[log.rindex("Starting nats-server") :]
    assert f"client connections on 127.0.0.1:{plan['ports']['client']}" not in tried
    with Broker(settings(tmp_path, Encryption(key=RIGHT))) as broker:
        assert await stored(broker.url) == [PAYLOAD, PAYLOAD]
    assert (tmp_path / "nodes/n1/key.json").exists()


async def test_a_key_is_rotated_with_the_previous_one(tmp_path: Path) -> None:
    await fill(tmp_path, Encryption(key=RIGHT))
    with Broker(settings(tmp_path, Encryption(key=WRONG, previous=RIGHT))) as broker:
        assert await stored(broker.url) == [PAYLOAD, PAYLOAD]
    with Broker(settings(tmp_path, Encryption(key=WRONG))) as broker:
        assert await stored(broker.url) == [PAYLOAD, PAYLOAD]
    with pytest.raises(WrongKey):
        Broker(settings(tmp_path, Encryption(key=RIGHT))).start()


async def test_plain_data_is_encrypted_when_a_key_is_given(tmp_path: Path) -> None:
    await fill(tmp_path, None)
    with Broker(settings(tmp_path, Encryption(key=RIGHT))) as broker:
        assert await stored(broker.url) == [PAYLOAD, PAYLOAD]
    assert found_in_files(tmp_path / "nodes/n1/store", PAYLOAD) == []
    with pytest.raises(WrongKey):
        Broker(settings(tmp_path, None)).start()


async def test_a_key_file_is_created_once_and_never_replaced(tmp_path: Path) -> None:
    key_file = tmp_path / "keys" / "mill.key"
    encryption = Encryption(key_file=key_file)
    await fill(tmp_path / "data", encryption)
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    with Broker(settings(tmp_path / "data", encryption)) as broker:
        assert await stored(broker.url) == [PAYLOAD, PAYLOAD]
    assert found_in_files(tmp_path / "data", key_file.read_bytes().strip()) == []
    key_file.rename(tmp_path / "saved")
    with pytest.raises(WrongKey, match="is missing"):
        Broker(settings(tmp_path / "data", encryption)).start()
    assert not key_file.exists()


async def test_the_default_key_is_stored_in_the_data_folder(tmp_path: Path) -> None:
    await fill(tmp_path, Encryption())
    assert stat.S_IMODE((tmp_path / "encryption.key").stat().st_mode) == 0o600
    with Broker(settings(tmp_path, Encryption())) as broker:
        assert await stored(broker.url) == [PAYLOAD, PAYLOAD]
        pid = broker.pid
    assert not alive(pid)
