"""A gateway that the broker runs: started and ended with it, started again when it dies."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millstream import blocking
from millstream.broker import (
    Broker,
    BrokerSettings,
    Cluster,
    GatewayProcess,
    beside,
    read_credentials,
    read_state,
)
from millstream.errors import PortTaken
from millstream.gateways.status import ask_status
from millstream.mill import connect
from tests.integration.cli.conftest import alive
from tests.integration.gateways import echo

PATIENCE = 60.0


@pytest.fixture(autouse=True)
def runs_the_toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "GATEWAY", (sys.executable, echo.__file__, "kept"))


def gateway_of(data: Path, node: int = 0) -> GatewayProcess:
    (found,) = read_state(data).nodes[node].gateways
    return found


def until(found: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not found():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.02)


def broker_on(data: Path, **changes: Any) -> Broker:
    return Broker(BrokerSettings(data=data, **{"kafka": 0, **changes}))


def test_a_gateway_runs_with_the_broker_and_is_started_again(tmp_path: Path) -> None:
    with broker_on(tmp_path, kafka_settings={"greeting": "hi ", "name": "toy"}) as broker:
        address = broker.kafka
        first = gateway_of(tmp_path)
        assert (first.protocol, first.restarts, first.problem) == ("kafka", 0, "")
        assert first.address == first.advertised == address
        with echo.Client(address) as client:
            assert client.ask(b"you") == b"hi you"
        os.kill(first.pid, signal.SIGKILL)
        until(lambda: gateway_of(tmp_path).pid not in (0, first.pid) and bool(broker.kafka))
        again = gateway_of(tmp_path)
        assert (again.restarts, again.problem) == (1, "it was killed by signal 9")
        assert broker.kafka == address  # clients find it where it was
        with echo.Client(address) as client:
            assert client.ask(b"you") == b"hi you"
        broker.stop()
        assert not alive(again.pid)
        broker.start()
        assert broker.kafka == address
    assert "[gateway] kafka gateway 'toy' listens on " in broker_log(tmp_path)


def broker_log(data: Path) -> str:
    return (data / "nodes" / "n1" / "server.log").read_text()


def test_the_gateway_ends_before_its_server(tmp_path: Path) -> None:
    with broker_on(tmp_path) as broker, echo.Client(broker.kafka) as client:
        assert client.ask(b"one") == b"one"
        broker.stop()
        assert client.answer() == b""  # closed
    log = broker_log(tmp_path)
    assert log.index("kafka gateway 'kafka' has stopped") < log.index("Server Exiting")


async def test_it_is_its_own_user_of_a_broker_with_users(tmp_path: Path) -> None:
    with broker_on(tmp_path, auth=True) as broker:
        who = read_credentials(tmp_path, "gateway")
        async with connect(broker.url, user=who.user, password=who.password) as mill:
            await mill.create_topic("orders")
            await mill.delete_topic("orders")  # for a client that may
            status = await ask_status(mill, "kafka")
        assert status.login is True
        assert status.address == broker.kafka


def test_a_gateway_that_does_not_start_says_why_and_the_broker_runs(tmp_path: Path) -> None:
    with broker_on(tmp_path, kafka_settings={"start_fails": True}) as broker:
        found = gateway_of(tmp_path)
        assert found.restarts >= 2
        assert found.problem == "[gateway] the toy does not start"
        assert (found.address, broker.kafka) == ("", "")
        with blocking.connect(broker.url) as mill:
            mill.create_topic("orders")


def test_a_port_that_is_taken_is_an_error_and_nothing_is_left_running(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        broker = broker_on(tmp_path, kafka=port)
        with pytest.raises(PortTaken, match=rf"127.0.0.1:{port} is in use .*\(--kafka N"):
            broker.start()
        assert not broker.running
    with broker:
        assert broker.kafka == f"127.0.0.1:{port}"


def test_of_a_cluster_on_one_machine_the_first_node_runs_it(tmp_path: Path) -> None:
    with Cluster(BrokerSettings(data=tmp_path, kafka=0), nodes=3):
        first, *others = read_state(tmp_path).nodes
        assert [len(node.gateways) for node in others] == [0, 0]
        with echo.Client(first.gateways[0].address) as client:
            assert client.ask(b"you") == b"you"


def test_a_reload_starts_a_gateway_and_leaves_one_that_runs_alone(tmp_path: Path) -> None:
    with broker_on(tmp_path, kafka=None) as broker:
        assert broker.kafka == ""
        wanted = BrokerSettings(data=tmp_path, kafka=0)
        broker.reload(wanted)
        until(lambda: bool(broker.kafka))
        before = gateway_of(tmp_path)
        broker.reload(wanted)
        assert gateway_of(tmp_path) == before


def test_a_gateway_whose_keeper_was_killed_is_gone_and_starts_with_the_next(
    tmp_path: Path,
) -> None:
    broker = broker_on(tmp_path).start()
    first, server = gateway_of(tmp_path), broker.pid
    os.kill(broker.keeper_pid, signal.SIGKILL)
    until(lambda: not alive(first.pid) and not alive(server))
    broker.stop()
    with broker_on(tmp_path) as next_one:
        assert next_one.kafka == first.address
        assert gateway_of(tmp_path).pid != first.pid
