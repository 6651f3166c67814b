"""Starting and stopping a broker, and every way in which a start can fail."""

from __future__ import annotations

import os
import signal
import socket
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from millstream.broker import Account, Broker, BrokerSettings, Limits
from millstream.broker.folder import free_port
from millstream.errors import (
    ConfigError,
    FolderLocked,
    NoSpace,
    NotRunning,
    PortTaken,
    StartFailed,
)
from millstream.testing import running_broker
from tests.integration.broker.clients import (
    PATIENCE,
    alive,
    client,
    command_line,
    exists,
    line_of,
    owner,
    publish,
    small_disk,
    store_of,
    stored,
    wait_until,
)


@pytest.fixture
def settings(tmp_path: Path) -> BrokerSettings:
    return BrokerSettings(data=tmp_path / "data")


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


async def test_acked_events_and_the_address_survive_restarts_of_every_kind(
    settings: BrokerSettings,
) -> None:
    with Broker(settings) as broker:
        url = broker.url
        assert await publish(url, b"1") == [1]
        broker.restart()
        assert broker.url == url
        assert await publish(url, b"2") == [2]
        broker.kill()
        assert not broker.running
        broker.start()
        assert broker.url == url
        assert await publish(url, b"3") == [3]
        assert await stored(url) == [b"1", b"2", b"3"]
    with Broker(settings) as broker:
        assert broker.url == url


def test_a_stopped_broker_leaves_no_process_and_no_address(settings: BrokerSettings) -> None:
    broker = Broker(settings).start()
    server, keeper = broker.pid, broker.keeper_pid
    assert (settings.data / "broker.json").exists()
    assert repr(broker) == f"<Broker on {settings.data}: {broker.url}>"
    broker.stop()
    assert not alive(server)
    assert not alive(keeper)
    assert not (settings.data / "broker.json").exists()
    assert not broker.running
    broker.stop()


def test_starting_twice_is_starting_once(settings: BrokerSettings) -> None:
    with Broker(settings) as broker:
        pid = broker.pid
        assert broker.start().pid == pid


def test_a_broker_that_was_never_started_raises_not_running(settings: BrokerSettings) -> None:
    with pytest.raises(NotRunning, match="millstream up"):
        _ = Broker(settings).url
    with pytest.raises(NotRunning):
        Broker(settings).health()


def test_the_error_names_a_port_that_is_in_use(settings: BrokerSettings, taken_port: int) -> None:
    with pytest.raises(PortTaken, match=f"127.0.0.1:{taken_port} is in use"):
        Broker(replace(settings, port=taken_port)).start()
    with pytest.raises(PortTaken, match=f"127.0.0.1:{taken_port} is in use"):
        Broker(replace(settings, monitor_port=taken_port)).start()
    with Broker(settings) as broker:
        assert broker.running


def test_a_remembered_port_that_is_now_in_use_is_replaced(settings: BrokerSettings) -> None:
    with Broker(settings) as broker:
        port = int(broker.url.rpartition(":")[2])
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
        with Broker(settings) as broker:
            assert int(broker.url.rpartition(":")[2]) != port


def test_a_port_lost_between_choosing_and_listening_is_chosen_again(
    settings: BrokerSettings, taken_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([taken_port])
    monkeypatch.setattr(
        "millstream.broker.launch.free_port",
        lambda *asked: next(answers, None) or free_port(*asked),
    )
    with Broker(settings) as broker:
        assert not broker.url.endswith(f":{taken_port}")


def test_the_error_of_a_locked_folder_names_its_holder_and_nothing_is_changed(
    settings: BrokerSettings,
) -> None:
    with Broker(settings) as broker:
        before = broker.log.with_name("server.conf").read_bytes()
        with pytest.raises(FolderLocked, match=f"in use by process {broker.keeper_pid} since 20"):
            Broker(replace(settings, auth=True)).start()
        assert broker.log.with_name("server.conf").read_bytes() == before
        assert broker.health().ok


def test_a_configuration_that_the_server_refuses_is_explained(settings: BrokerSettings) -> None:
    with pytest.raises(StartFailed, match=r"unknown field.*nonsense"):
        Broker(replace(settings, raw="nonsense: 1")).start()
    with Broker(replace(settings, raw="ping_interval: 7s")) as broker:
        assert broker.running


def test_a_start_that_takes_too_long_leaves_nothing_behind(
    settings: BrokerSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = tmp_path / "nats-server"
    stuck.write_text(
        '#!/bin/sh\n[ "$1" = -v ] && echo "nats-server: v2.15.1" && exit\n'
        f"trap '' TERM\necho $$ > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid\n"
        "while :; do sleep 0.1; done\n"
    )
    stuck.chmod(0o755)
    monkeypatch.setenv("NATS_SERVER_BIN", str(stuck))
    broker = Broker(settings)
    for timeout in (0.5, 5.0, 30.0):  # more where it has not even started within the first
        with pytest.raises(StartFailed, match="not ready in time"):
            broker.start(timeout=timeout)
        if (tmp_path / "pid").exists():
            break
    assert not alive(int((tmp_path / "pid").read_text()))
    assert not broker.running
    monkeypatch.delenv("NATS_SERVER_BIN")
    with Broker(settings) as again:
        assert again.running


def test_a_tiny_disk_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "2m") as folder, pytest.raises(NoSpace, match="bytes free"):
        Broker(BrokerSettings(data=folder / "data")).start()


def test_a_folder_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        Broker(BrokerSettings(data=tmp_path / "file" / "data")).start()


async def test_files_with_secrets_are_private_and_no_secret_is_on_a_command_line(
    settings: BrokerSettings,
) -> None:
    with Broker(replace(settings, auth=True)) as broker:
        await publish(broker.url, b"1", who=broker.credentials())
        names = ("credentials.json", "nodes/n1/server.conf", "nodes/n1/server.log", "nodes/n1/lock")
        for name in names:
            assert stat.S_IMODE((settings.data / name).stat().st_mode) == 0o600, name
        for name in ("nodes", "nodes/n1", "nodes/n1/store", "nodes/n1/run"):
            assert stat.S_IMODE((settings.data / name).stat().st_mode) == 0o700, name
        password = broker.credentials().password.reveal().encode()
        for pid in (broker.pid, broker.keeper_pid):
            assert password not in command_line(pid)
        assert password not in broker.log.read_bytes()
        assert password not in (settings.data / "broker.json").read_bytes()
        assert password not in (settings.data / "nodes/n1/node.json").read_bytes()


def test_a_running_server_never_blocks_on_its_log(settings: BrokerSettings) -> None:
    with Broker(replace(settings, raw="trace: true\ndebug: true")) as broker:
        host, port = broker.url.removeprefix("nats://").split(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
            connection.sendall(b"CONNECT {}\r\n" + b"PUB a 100\r\n" + b"x" * 100 + b"\r\n")
            connection.sendall(b"PUB a 900\r\n" + b"x" * 900 + b"\r\n")
            for _ in range(3000):
                connection.sendall(b"PUB a 900\r\n" + b"x" * 900 + b"\r\n")
            connection.sendall(b"PING\r\n")
            answer = b""
            while b"PONG" not in answer:
                part = connection.recv(65536)
                assert part, "the server has closed the connection"
                answer = answer[-10:] + part
        wait_until(lambda: broker.log.stat().st_size > 2_000_000)
        assert broker.health().ok


async def test_durability_memory_forgets_and_leaves_nothing(settings: BrokerSettings) -> None:
    memory = replace(settings, durability="memory")  # type: ignore[arg-type]
    with Broker(memory) as broker:
        await publish(broker.url, b"1")
        store = store_of(broker)
        assert exists(store)
    assert not exists(store)
    with Broker(memory) as broker:
        assert broker.health().streams == ()


async def test_events_of_a_removed_account_keep_the_broker_from_starting(
    settings: BrokerSettings,
) -> None:
    tenant = replace(settings, auth=True, accounts=(Account("acme"),))
    with Broker(tenant) as broker:
        await publish(broker.url, b"1", who=broker.credentials(account="acme"))
    with pytest.raises(StartFailed, match=r"account.*'acme'.*Add the account again"):
        Broker(replace(settings, auth=True)).start()
    with Broker(tenant) as broker:
        who = broker.credentials(account="acme")
        assert await stored(broker.url, who=who) == [b"1"]


async def test_turning_authentication_on_keeps_the_events(settings: BrokerSettings) -> None:
    with Broker(settings) as broker:
        await publish(broker.url, b"open")
    with Broker(replace(settings, auth=True, accounts=(Account("acme"),))) as broker:
        assert await stored(broker.url, who=broker.credentials()) == [b"open"]


async def test_clients_learn_the_payload_limit() -> None:
    with running_broker(limits=Limits(max_payload=4096)) as broker:
        async with client(broker.url) as connection:
            assert connection.max_payload == 4096


# -- no process left running --------------------------------------------------------------

OWNER = """
    import sys, time
    from pathlib import Path
    from millstream.broker import Broker, BrokerSettings
    broker = Broker(BrokerSettings(data=Path(sys.argv[1]))).start()
    print(broker.pid, broker.keeper_pid, broker.url, flush=True)
    {then}
    time.sleep(600)
"""


def test_no_orphan_is_left_when_the_owner_is_killed(tmp_path: Path) -> None:
    with owner(OWNER.format(then=""), tmp_path) as process:
        server, keeper, _ = line_of(process).split()
        process.send_signal(signal.SIGKILL)
        wait_until(lambda: not alive(int(server)) and not alive(int(keeper)))
    with Broker(BrokerSettings(data=tmp_path)) as broker:
        assert broker.health().ok


def test_no_orphan_is_left_when_a_fork_of_the_killed_owner_survives(tmp_path: Path) -> None:
    """The fork has copies of all pipes, so the kill closes none of them."""
    fork = "import os\n    if forked := os.fork(): print(forked, flush=True)"
    with owner(OWNER.format(then=fork), tmp_path) as process:
        server, keeper, _ = line_of(process).split()
        forked = int(line_of(process))
        process.send_signal(signal.SIGKILL)
        try:
            wait_until(lambda: not alive(int(server)) and not alive(int(keeper)))
            assert alive(forked)
        finally:
            os.kill(forked, signal.SIGKILL)


def test_no_orphan_is_left_when_the_keeper_is_killed(settings: BrokerSettings) -> None:
    broker = Broker(settings).start()
    server = broker.pid
    os.kill(broker.keeper_pid, signal.SIGKILL)
    wait_until(lambda: not alive(server))
    assert broker.wait(PATIENCE)
    assert not broker.running
    with broker.start():
        assert broker.health().ok


def test_no_orphan_is_left_when_the_owner_dies_while_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "nats-server"
    slow.write_text(
        '#!/bin/sh\n[ "$1" = -v ] && echo "nats-server: v2.15.1" && exit\n'
        f"echo $$ > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid\nexec sleep 600\n"
    )
    slow.chmod(0o755)
    monkeypatch.setenv("NATS_SERVER_BIN", str(slow))
    with owner(OWNER.format(then=""), tmp_path / "data") as process:
        server = int(wait_until(lambda: _read(tmp_path / "pid")))
        assert alive(server)
        process.kill()
        wait_until(lambda: not alive(server))


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_keeper_stops_the_server_gracefully(
    number: signal.Signals, settings: BrokerSettings
) -> None:
    broker = Broker(settings).start()
    server = broker.pid
    os.kill(broker.keeper_pid, number)
    assert broker.wait(PATIENCE)
    assert not alive(server)
    assert "Server Exiting" in broker.log.read_text()
    broker.stop()


def test_a_crashed_server_ends_an_embedded_broker(settings: BrokerSettings) -> None:
    broker = Broker(settings).start()
    os.kill(broker.pid, signal.SIGKILL)
    assert broker.wait(PATIENCE)
    assert not broker.running
    broker.stop()


def test_a_stuck_server_is_killed_after_the_grace_period(settings: BrokerSettings) -> None:
    broker = Broker(settings).start()
    server = broker.pid
    os.kill(server, signal.SIGSTOP)
    broker.stop(grace=0.2)
    assert not alive(server)


def test_leaving_the_program_ends_the_broker(tmp_path: Path) -> None:
    code = OWNER.format(then="sys.exit(0)")
    with owner(code, tmp_path) as process:
        server, keeper, _ = line_of(process).split()
        process.wait(PATIENCE)
        wait_until(lambda: not alive(int(server)) and not alive(int(keeper)))
