"""Commands act on the broker that was meant, never on another that happens to run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.integration.cli.conftest import Cli, until

COMMANDS = (["topic", "ls"], ["pub", "news", "x"], ["topic", "rm", "orders", "--yes"])


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: " ".join(words))
def test_a_named_data_folder_without_a_broker_is_not_replaced_by_another_broker(
    cli: Cli, tmp_path: Path, command: list[str]
) -> None:
    folder = tmp_path / "named"
    cli.environment["MILLSTREAM_DATA"] = str(folder)
    assert f"no broker runs on {folder}" in cli.error(*command, code=3)
    del cli.environment["MILLSTREAM_DATA"]
    (tmp_path / "millstream.toml").write_text('[broker]\ndata = "named"\n')
    assert f"no broker runs on {folder}" in cli.error(*command, code=3)


def test_a_folder_whose_broker_was_stopped_is_not_replaced_by_another_broker(
    cli: Cli, tmp_path: Path
) -> None:
    cli("up", "--port", "0")
    cli("topic", "create", "orders")
    cli("down")
    assert f"no broker runs on {tmp_path / '.millstream'}" in cli.error("topic", "ls", code=3)


def test_the_port_of_a_killed_broker_may_belong_to_another_one(cli: Cli, tmp_path: Path) -> None:
    cli("up", "--port", "0")
    state = cli.healthy()
    for node in state["nodes"]:
        os.kill(node["pid"], signal.SIGKILL)
    until(lambda: cli("status", code=None).returncode == 3)
    other = tmp_path / "other"
    port = state["url"].rpartition(":")[2]
    cli("up", "--port", port, "--data", str(other))
    cli("topic", "create", "theirs", "--server", state["url"])
    assert f"no broker runs on {tmp_path / '.millstream'}" in cli.error(
        "topic", "rm", "theirs", "--yes", code=3
    )
    assert [one["name"] for one in cli.json("topic", "ls", "--server", state["url"])] == ["theirs"]


def test_without_any_folder_the_command_says_which_broker_it_takes(cli: Cli) -> None:
    done = cli("topic", "ls", code=None)  # another broker may run there, or none
    assert "using nats://127.0.0.1:4222" in done.stderr.splitlines()[0]
    assert done.returncode in (0, 3)


def test_a_listed_address_is_used_though_the_folder_has_no_broker(cli: Cli, tmp_path: Path) -> None:
    cli("up", "--port", "0", "--data", str(tmp_path / "elsewhere"))
    url = cli.healthy("--data", str(tmp_path / "elsewhere"))["url"]
    (tmp_path / "millstream.toml").write_text(f'url = "{url}"\n[broker]\ndata = "mine"\n')
    assert cli.json("topic", "ls") == []
