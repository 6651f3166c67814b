"""status, logs, doctor: what a running broker shows."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.broker.clients import client as connected
from tests.integration.cli.conftest import Cli


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    cli = Cli(tmp_path_factory.mktemp("broker"))
    cli("up", "--port", "0")
    yield cli
    cli.clean_up()


@pytest.fixture
async def client(cli: Cli) -> Any:
    async with connected(cli.json("status")["url"]) as client:
        yield client


async def test_status_shows_streams_and_consumers(cli: Cli, client: Any) -> None:
    stream = client.jetstream()
    await stream.add_stream(name="orders", subjects=["orders.>"])
    for number in range(3):
        await stream.publish(f"orders.{number}", b"x" * 100)
    await stream.pull_subscribe("orders.>", durable="billing")
    status = cli.json("status")
    assert status["ok"]
    (orders,) = status["streams"]
    assert (orders["name"], orders["messages"], orders["last"]) == ("orders", 3, 3)
    assert orders["consumers"] == [
        {"name": "billing", "pending": 3, "ack_pending": 0, "redelivered": 0}
    ]
    text = cli("status").stdout
    for word in ("orders", "billing", "fsync", status["url"], "millstream-n1"):
        assert word in text


def test_logs_show_the_output_of_the_servers(cli: Cli) -> None:
    assert "Server is ready" in cli("logs").stdout
    assert len(cli("logs", "-n", "2").stdout.splitlines()) == 2
    lines = [json.loads(line) for line in cli("logs", "--json").stdout.splitlines()]
    (ready,) = [line for line in lines if line["text"] == "Server is ready"]
    assert (ready["node"], ready["level"]) == ("n1", "info")
    assert "n1" in cli.error("logs", "--node", "n9")


def test_logs_follow_until_ctrl_c(cli: Cli) -> None:
    process = cli.start("logs", "--follow", "--lines", "1")
    assert process.stdout is not None
    assert process.stdout.readline()
    log = cli.json("node", "ls")[0]["log"]
    with open(log, "a") as stream:  # noqa: PTH123
        stream.write("a line that came later\n")
    while process.stdout.readline() != "a line that came later\n":
        assert process.poll() is None  # the server may have something to say as well
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert process.communicate()[1] == ""


def test_doctor_finds_the_running_broker(cli: Cli) -> None:
    found = cli.json("doctor")
    assert found["ok"]
    checks = {check["name"]: check for check in found["checks"]}
    assert cli.json("status")["url"] in checks["ports"]["found"]
    assert "python" in cli("doctor").stdout


def test_a_broken_pipe_is_no_error(cli: Cli) -> None:
    import subprocess

    from tests.integration.cli.conftest import MILLSTREAM

    done = subprocess.run(
        f"{MILLSTREAM} logs --data {cli.folder / '.millstream'} | head -1; exit ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.count("\n") == 1
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr
