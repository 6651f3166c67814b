"""A standby waits for the folder and takes over; a background broker restarts its server."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import nats.errors
import pytest

from millstream.broker import (
    Account,
    Broker,
    BrokerSettings,
    Encryption,
    State,
    down,
    kill_node,
    read_health,
    read_state,
    reload_settings,
    start_node,
    up,
)
from millstream.errors import ConfigError, FolderLocked, NotRunning, PortTaken, WrongKey
from millstream.settings import ConnectionSettings, Secret
from tests.integration.broker.clients import (
    alive,
    client,
    line_of,
    login,
    owner,
    publish,
    stored,
    wait_until,
)


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    """A folder without running processes after the test."""
    yield tmp_path / "data"
    try:
        state = down(tmp_path / "data")
    except NotRunning:
        return
    wait_until(lambda: not any(alive(node.pid) for node in state.nodes))


def state_or_none(data: Path) -> State | None:
    try:
        return read_state(data)
    except NotRunning:
        return None


def taken_over(data: Path, owner: int) -> State | None:
    """The state once a process other than `owner` holds the folder."""
    state = state_or_none(data)
    return None if state is None or state.pid == owner else state


# -- standby ------------------------------------------------------------------------------


async def test_a_standby_takes_over_when_the_owner_dies_and_acked_events_survive(
    data: Path,
) -> None:
    settings = BrokerSettings(data=data)
    code = """
        import sys, time
        from pathlib import Path
        from millstream.broker import Broker, BrokerSettings
        broker = Broker(BrokerSettings(data=Path(sys.argv[1]))).start()
        print(broker.url, flush=True)
        time.sleep(600)
    """
    with owner(code, data) as active:
        url = line_of(active)
        acked = await publish(url, b"0")
        async with client(
            url, allow_reconnect=True, max_reconnect_attempts=-1, reconnect_time_wait=0.05
        ) as connection:
            with Broker(settings).start(standby=True) as standby:
                assert (standby.standing_by, standby.running) == (True, False)
                assert not standby.await_takeover(0.2)
                jetstream = connection.jetstream(timeout=0.5)
                sent = 0
                killed = False
                while not (killed and sent >= 60):
                    sent += 1
                    header = {"Nats-Msg-Id": str(sent)}
                    if sent == 30:
                        active.kill()
                        killed = True
                    while True:
                        try:
                            ack = await jetstream.publish(
                                "orders.x", str(sent).encode(), headers=header
                            )
                        except (nats.errors.Error, TimeoutError):
                            await asyncio.sleep(0.02)
                            continue
                        acked.append(ack.seq)
                        break
                assert standby.await_takeover(60)
                assert standby.url == url
                assert (standby.standing_by, standby.running) == (False, True)
                assert await stored(url) == [str(n).encode() for n in range(61)]


def test_a_standby_on_a_free_folder_simply_starts(data: Path) -> None:
    with Broker(BrokerSettings(data=data)).start(standby=True) as broker:
        assert broker.running
        assert not broker.standing_by


def test_a_waiting_standby_can_be_stopped_and_leaves_the_owner_alone(data: Path) -> None:
    settings = BrokerSettings(data=data)
    with Broker(settings) as active:
        standby = Broker(settings).start(standby=True)
        keeper = standby.keeper_pid
        assert read_state(data).standby == (keeper,)
        standby.stop()
        assert not alive(keeper)
        assert read_state(data).standby == ()
        assert active.health().ok


def test_a_standby_needs_the_right_key_and_something_to_take_over(data: Path) -> None:
    settings = BrokerSettings(data=data, encryption=Encryption(key=Secret("the right key 123")))
    with Broker(settings):
        wrong = replace(settings, encryption=Encryption(key=Secret("another key 12345")))
        with pytest.raises(WrongKey):
            Broker(wrong).start(standby=True)
        memory = replace(settings, encryption=None, durability="memory")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="nothing to take over"):
            Broker(memory).start(standby=True)


async def test_a_standby_in_the_background_takes_over_with_the_users_of_the_owner(
    data: Path,
) -> None:
    settings = BrokerSettings(data=data, auth=True)
    first = up(settings)
    credentials = Broker(settings).credentials()
    await publish(first.url, b"1", who=credentials)
    waiting = up(settings, standby=True)
    assert waiting.pid == first.pid
    (standby,) = waiting.standby
    kill_node(data, "n1")
    second = wait_until(lambda: taken_over(data, first.pid))
    assert second.pid == standby
    assert second.url == first.url
    assert second.standby == ()
    assert await stored(second.url, who=credentials) == [b"1"]
    assert ConnectionSettings.load(second.url).urls == (first.url,)


def test_down_ends_the_standbys_as_well(data: Path) -> None:
    settings = BrokerSettings(data=data)
    up(settings)
    (standby,) = up(settings, standby=True).standby
    stopped = down(data)
    wait_until(lambda: not alive(standby) and not alive(stopped.pid))
    with pytest.raises(NotRunning):
        read_state(data)


# -- in the background --------------------------------------------------------------------


async def test_a_broker_in_the_background_outlives_its_starter(data: Path) -> None:
    code = """
        import sys
        from pathlib import Path
        from millstream.broker import BrokerSettings, up
        print(up(BrokerSettings(data=Path(sys.argv[1]))).url, flush=True)
    """
    with owner(code, data) as starter:
        url = line_of(starter)
        assert starter.wait(60) == 0
    assert await publish(url, b"1") == [1]
    state = read_state(data)
    assert state.url == url
    assert state.durability == "fsync"
    assert (state.secured, state.tls, state.standby) == (False, False, ())
    (node,) = state.nodes
    assert node.running
    assert node.log.exists()
    assert stat.S_IMODE((data / "broker.json").stat().st_mode) == 0o600
    health = read_health(data)
    assert health.ok
    assert [stream.name for stream in health.streams] == ["orders"]
    assert down(data).pid == state.pid
    wait_until(lambda: not alive(state.pid) and not alive(node.server_pid))
    assert not (data / "broker.json").exists()
    with pytest.raises(NotRunning):
        down(data)
    assert up(BrokerSettings(data=data)).url == url


def test_a_second_up_names_the_running_broker(data: Path) -> None:
    state = up(BrokerSettings(data=data))
    with pytest.raises(FolderLocked, match=f"process {state.pid} since"):
        up(BrokerSettings(data=data))


def test_a_failed_up_leaves_nothing(data: Path, tmp_path: Path) -> None:
    with Broker(BrokerSettings(data=tmp_path / "other")) as other:
        port = int(other.url.rpartition(":")[2])
        with pytest.raises(PortTaken):
            up(BrokerSettings(data=data, port=port))
    assert state_or_none(data) is None
    assert up(BrokerSettings(data=data)).nodes[0].running


def test_new_settings_reach_a_broker_in_the_background(data: Path) -> None:
    settings = BrokerSettings(data=data)
    state = up(settings)
    assert login(state.url) == "PONG"
    after = reload_settings(replace(settings, auth=True))
    assert after.secured
    assert after.nodes[0].server_pid == state.nodes[0].server_pid
    assert "Authorization Violation" in login(state.url)
    with pytest.raises(ConfigError, match="keeps the old ones"):
        reload_settings(replace(settings, auth=True, raw="nonsense: 1"))
    with pytest.raises(NotRunning):
        reload_settings(BrokerSettings(data=data / "other"))


def test_a_file_left_by_a_killed_standby_is_ignored(data: Path) -> None:
    settings = BrokerSettings(data=data)
    up(settings)
    (standby,) = up(settings, standby=True).standby
    os.kill(standby, signal.SIGKILL)
    wait_until(lambda: read_state(data).standby == ())
    assert list((data / "nodes/n1").glob("standby.*.json"))


def test_a_crashed_server_in_the_background_is_restarted(data: Path) -> None:
    state = up(BrokerSettings(data=data))
    os.kill(state.nodes[0].server_pid, signal.SIGKILL)

    def repaired() -> bool:
        now = state_or_none(data)
        return now is not None and now.nodes[0].server_pid not in (0, state.nodes[0].server_pid)

    wait_until(repaired)
    assert read_state(data).url == state.url
    assert read_state(data).pid == state.pid
    assert read_health(data).ok


async def test_a_killed_node_is_started_again_as_it_was(data: Path, tmp_path: Path) -> None:
    encryption = Encryption(key_file=tmp_path / "mill.key")
    settings = BrokerSettings(data=data, encryption=encryption, accounts=(Account("acme"),))
    state = up(settings)
    await publish(state.url, b"1")
    kill_node(data, "n1")
    assert state_or_none(data) is None
    with pytest.raises(ConfigError, match="its nodes: n1"):
        start_node(data, "n7")
    assert start_node(data, "n1").url == state.url
    assert await stored(state.url) == [b"1"]
    with pytest.raises(ConfigError, match="the nodes are n1"):
        kill_node(data, "n7")
