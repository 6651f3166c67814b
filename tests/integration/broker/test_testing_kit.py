"""Helpers for users' tests: context managers and fixtures that clean up."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from millstream.broker import Broker, BrokerSettings, Role, User
from millstream.errors import ConfigError, StartFailed
from millstream.settings import Secret
from millstream.testing import AccountPool, running_broker, running_cluster
from tests.integration.broker.clients import (
    alive,
    client,
    exists,
    publish,
    stored,
    wait_until_async,
)


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def left_in(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def test_a_broker_runs_for_a_block_and_leaves_nothing(tmp_path: Path) -> None:
    with running_broker() as broker:
        assert await publish(broker.url, b"1") == [1]
        pid = broker.pid
    assert not alive(pid)
    assert left_in(tmp_path) == []


async def test_a_broker_runs_for_an_async_block(tmp_path: Path) -> None:
    async with running_broker(durability="memory") as broker:
        assert await publish(broker.url, b"1") == [1]
        assert broker.settings.durability == "memory"
        pid = broker.pid
    assert not alive(pid)
    assert left_in(tmp_path) == []


def test_nothing_is_left_when_the_block_or_the_start_fails(tmp_path: Path) -> None:
    pids: list[int] = []

    def fail() -> None:
        with running_broker() as broker:
            pids.append(broker.pid)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [alive(pid) for pid in pids] == [False]
    with pytest.raises(StartFailed), running_broker(raw="nonsense: 1"):
        pass
    with pytest.raises(ConfigError), running_broker(host="0.0.0.0"):
        pass
    assert left_in(tmp_path) == []


async def test_a_given_folder_is_kept(tmp_path: Path) -> None:
    settings = BrokerSettings(data=tmp_path / "mine")
    with running_broker(settings) as broker:
        await publish(broker.url, b"1")
    with running_broker(data=tmp_path / "mine") as broker:
        assert await stored(broker.url) == [b"1"]
    assert exists(tmp_path / "mine")
    with pytest.raises(ConfigError, match="not both"):
        running_broker(settings, port=0)


async def test_a_cluster_runs_for_a_block(tmp_path: Path) -> None:
    async with running_cluster() as cluster:
        await wait_until_async(lambda: cluster.health().ok)
    assert left_in(tmp_path) == []
    with pytest.raises(ConfigError), running_cluster(nodes=1):
        pass


async def test_accounts_of_a_pool_are_empty_and_isolated_and_never_run_out(tmp_path: Path) -> None:
    with AccountPool(size=2) as pool:
        urls = [pool.url() for _ in range(5)]
        assert len(set(urls)) == 5
        for url in urls:
            assert await publish(url, b"1") == [1]
    assert left_in(tmp_path) == []
    with pytest.raises(ConfigError, match="not running"):
        pool.url()
    with pytest.raises(ConfigError, match="1 to"):
        AccountPool(size=0)


async def test_users_can_be_given(tmp_path: Path) -> None:
    ann = User("ann", Secret("pw"), Role.ADMIN)
    with running_broker(users=(ann,)) as broker:
        async with client(broker.url, user="ann", password="pw") as connection:
            assert connection.is_connected


def test_the_fixtures_work_in_a_users_project(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "import socket\n"
        "def reachable(url):\n"
        "    host, port = url.rpartition('://')[2].rpartition('@')[2].split(':')\n"
        "    socket.create_connection((host, int(port)), timeout=5).close()\n"
        "def test_one(millstream_broker):\n"
        "    reachable(millstream_broker.url)\n"
        "def test_two(millstream_url):\n"
        "    reachable(millstream_url)\n"
        "def test_three(millstream_url, millstream_accounts):\n"
        "    assert millstream_url != millstream_accounts.url()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


def test_a_broker_for_a_test_takes_a_fraction_of_a_second() -> None:
    """Hundreds of tests with a broker of their own stay within a minute or two."""
    for _ in range(20):  # a busy machine slows down many of them, but not all
        started = time.monotonic()
        with running_broker() as broker:
            assert isinstance(broker, Broker)
        if time.monotonic() - started < 1.0:
            return
    raise AssertionError("none of twenty brokers was there and gone within a second")
