"""`millstream gateway` and `up --kafka`, with a toy protocol in the stead of Kafka's."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from typer.testing import CliRunner, Result

from millstream.broker import GatewayProcess, beside, read_state
from millstream.cli.app import app
from millstream.cli.commands import gateway as gateway_commands
from millstream.errors import (
    ConfigError,
    GatewayNotRunning,
    MillstreamError,
    MissingExtra,
    PortTaken,
)
from millstream.gateways import protocols
from tests.integration.cli.conftest import Cli, alive
from tests.integration.gateways import echo

T = TypeVar("T")

PATIENCE = 60.0


class Commands:
    """Commands in this process, which is quicker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def invoke(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, arguments)

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """What a command prints; errors included."""
        done = self.invoke(*arguments)
        assert done.exit_code == code, (arguments, done.output, done.exception)
        return str(done.output)

    def json(self, *arguments: str, code: int = 0) -> Any:
        done = self.invoke(*arguments, "--json")
        assert done.exit_code == code, (arguments, done.output, done.exception)
        return json.loads(done.stdout)

    def error(self, *arguments: str, kind: type[MillstreamError] = ConfigError) -> str:
        """The error of a command that fails."""
        done = self.invoke(*arguments)
        assert isinstance(done.exception, kind), (arguments, done.output, done.exception)
        return str(done.exception)

    def gateway(self) -> GatewayProcess:
        (found,) = read_state(self.folder / ".millstream").nodes[0].gateways
        return found


@pytest.fixture
def run(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Commands:
    for name in [name for name in os.environ if name.startswith(("NATS_", "MILLSTREAM_"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(cli.folder)
    assert gateway_commands.app  # loaded with the options of the real protocol
    monkeypatch.setattr(beside, "GATEWAY", (sys.executable, echo.__file__, "kept"))
    monkeypatch.setitem(protocols.PROTOCOLS, "kafka", echo.ECHO)
    return Commands(cli.folder)


def until(found: Callable[[], T | None]) -> T:
    """What a question answers once it does; the test fails if it never does."""
    end = time.monotonic() + PATIENCE
    while not (answer := found()):
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.05)
    return answer


# -- without a gateway --------------------------------------------------------------------


def test_no_gateway_is_nothing_to_list_and_not_running(run: Commands) -> None:
    run("up", "--port", "0")
    assert run("gateway", "ls") == "No gateway is running.\n"
    assert run.json("gateway", "ls") == []
    assert run("gateway", "status", code=3) == "No gateway is running.\n"
    assert run.json("gateway", "status", code=3) == []
    error = run.error("gateway", "status", "kafka", kind=GatewayNotRunning)
    assert "the gateway 'kafka' is not running. Start it with 'millstream gateway run'" in error


def test_wrong_settings_are_named_before_anything_is_started(
    run: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = run.folder / "millstream.toml"
    file.write_text("[gateway.kafka]\nadvertize = 'a'\n")
    for command in (("up", "--port", "0", "--kafka", "0"), ("gateway", "run", "kafka")):
        said = run.error(*command)
        assert "[gateway.kafka] has no setting 'advertize': did you mean 'advertise'?" in said
    file.write_text("[gateway.kafka]\nhost = '0.0.0.0'\n")
    assert "Require a login (--auth)" in run.error("up", "--kafka", "0")
    file.write_text("")
    assert "70000 is not a port" in run.error("up", "--kafka", "70000")
    lacking = protocols.ProtocolEntry(
        "kafka", "Kafka", echo.ECHO.settings, echo.ECHO.gateway, "kafka", ("no_such_library",)
    )
    monkeypatch.setitem(protocols.PROTOCOLS, "kafka", lacking)
    missing = run.error("up", "--kafka", "0", kind=MissingExtra)
    assert "pip install 'millstream[kafka]'" in missing
    assert not (run.folder / ".millstream").exists()


# -- with the broker ----------------------------------------------------------------------


def test_the_broker_runs_a_gateway_and_restarts_it(run: Commands) -> None:
    (run.folder / "millstream.toml").write_text(
        "[broker]\nport = 0\nkafka = 0\n[gateway.kafka]\ngreeting = 'hi '\n"
    )
    said = run("up")
    first = run.gateway()
    assert f"Kafka clients connect to {first.address}\n" in said
    with echo.Client(first.address) as client:
        assert client.ask(b"you") == b"hi you"
        (found,) = run.json("gateway", "ls")
    assert (found["name"], found["pid"], found["address"]) == ("kafka", first.pid, first.address)
    assert found["books"]["requests"] == 1
    assert run.json("gateway", "status", "kafka")["state"] == "listening"
    assert [one["name"] for one in run.json("gateway", "status")] == ["kafka"]
    assert f"listens on {first.address}, clients connect to" in run("gateway", "status")
    listed = run("gateway", "ls")
    assert first.address in listed
    assert "listening" in listed
    assert f"n1: kafka gateway, listens on {first.address}, pid {first.pid}\n" in run("status")
    os.kill(first.pid, signal.SIGKILL)

    def restarted() -> GatewayProcess | None:
        one = run.gateway()
        return one if one.pid != first.pid and one.address else None

    again = until(restarted)
    shown = run("status")
    assert "restarted 1 time, last problem: it was killed by signal 9" in shown
    (node,) = run.json("status")["nodes"]
    assert node["gateways"][0]["address"] == first.address
    with echo.Client(first.address) as client:
        assert client.ask(b"you") == b"hi you"
    run("down")
    until(lambda: not alive(again.pid))


def test_variables_and_options_come_before_the_file(
    run: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.folder / "millstream.toml").write_text(
        "[gateway.kafka]\ngreeting = 'file '\nadvertise = 'file.example'\nport = 1\n"
    )
    monkeypatch.setenv("MILLSTREAM_KAFKA", "0")
    monkeypatch.setenv("MILLSTREAM_KAFKA_GREETING", "variable ")
    run("up", "--port", "0", "--auth")
    one = run.gateway()
    assert one.advertised == f"file.example:{one.address.rpartition(':')[2]}"
    with echo.Client(one.address) as client:
        assert client.ask(b"!") == b"variable !"
    status = run.json("gateway", "status", "kafka")
    assert status["login"] is True


def test_a_port_that_is_taken_is_said_and_nothing_runs(run: Commands) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = run.error("up", "--port", "0", "--kafka", port, kind=PortTaken)
    assert f"127.0.0.1:{port} is in use by another process" in said
    assert "--kafka N" in said
    assert "no broker runs" in str(run.invoke("status").exception)
    ready = run("up", "--port", "0", "--kafka", port)
    assert f"Kafka clients connect to 127.0.0.1:{port}\n" in ready


def test_a_gateway_that_does_not_start_is_said_and_the_broker_runs(run: Commands) -> None:
    (run.folder / "millstream.toml").write_text("[gateway.kafka]\nstart_fails = true\n")
    done = run.invoke("up", "--port", "0", "--kafka", "0")
    assert done.exit_code == 4, done.output
    assert "Broker ready at nats://127.0.0.1:" in done.stdout
    assert "The kafka gateway does not listen yet: [gateway] the toy does not start" in done.stderr
    assert run("topic", "create", "orders")
    assert "kafka gateway, " in run("status")


# -- on its own ---------------------------------------------------------------------------


def test_a_gateway_runs_on_its_own_as_admin_of_the_broker_here(run: Commands, cli: Cli) -> None:
    run("up", "--port", "0", "--auth")
    command = [sys.executable, echo.__file__, "cli", "gateway", "run", "kafka"]
    one = cli.start_program(*command, "--port", "0", "--json")
    assert one.stdout is not None
    status = json.loads(one.stdout.readline())
    assert (status["login"], status["tls"]) == (True, False)
    assert [found["name"] for found in run.json("gateway", "ls")] == ["kafka"]
    run("down")  # it must not wait for the broker
    one.send_signal(signal.SIGTERM)
    _, said = one.communicate(timeout=PATIENCE)
    assert one.returncode == 0, said
    assert "Traceback" not in said
