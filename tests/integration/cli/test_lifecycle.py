"""up, down and the ways in which they are refused."""

from __future__ import annotations

import json
import shlex
import signal
import socket

import pytest

import millstream
from millstream.broker import read_state
from millstream.broker.folder import free_port
from millstream.errors import NotRunning, RequestTimeout
from tests.integration.broker.clients import client, declare, publish, publish_until, stored
from tests.integration.cli.conftest import Cli, alive, until


async def test_up_is_ready_when_it_returns_and_acked_events_survive_down_and_up(
    cli: Cli,
) -> None:
    state = cli.json("up", "--port", "0")
    assert {"url", "pid", "data", "nodes"} <= state.keys()
    assert state["data"] == str(cli.folder / ".millstream")
    assert state["durability"] == "fsync"
    assert [node["running"] for node in state["nodes"]] == [True]

    assert await publish(state["url"], b"first") == [1]

    stopped = cli.json("down")
    until(lambda: not any(alive(node["server_pid"]) for node in stopped["nodes"]))
    again = cli.json("up", "--port", "0")
    assert again["url"] == state["url"], "a folder keeps its port"
    assert await stored(again["url"]) == [b"first"]


def test_without_a_broker_commands_end_with_exit_code_3(cli: Cli) -> None:
    for command in ("status", "down", "env", "context", "logs"):
        assert "millstream up" in cli.error(command, code=3)
    assert "millstream up" in cli.error("node", "ls", code=3)
    assert list(cli.folder.iterdir()) == []


def test_a_second_up_on_the_folder_reports_its_owner(cli: Cli) -> None:
    state = cli.json("up", "--port", "0")
    message = cli.error("up", "--port", "0")
    assert str(state["pid"]) in message
    assert "--standby" in message
    assert cli.json("status")["ok"]


def test_the_error_names_a_port_that_is_in_use(cli: Cli) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert f"127.0.0.1:{port} is in use" in cli.error("up", "--port", str(port))
        failed = cli.json("doctor", "--port", str(port), code=4)
    (ports,) = [check for check in failed["checks"] if check["name"] == "ports"]
    assert ports["state"] == "failed"
    assert "--port" in ports["fix"]
    cli("status", code=3)


def test_an_open_listener_without_users_is_refused_and_leaves_nothing(cli: Cli) -> None:
    assert "--auth" in cli.error("up", "--host", "0.0.0.0", "--port", "0")
    assert list(cli.folder.iterdir()) == []


def test_the_project_file_is_read_from_a_folder_below(cli: Cli) -> None:
    (cli.folder / "millstream.toml").write_text(
        '[broker]\nport = 0\ndurability = "periodic"\ndata = "store"\n'
    )
    below = Cli(cli.folder / "deep")
    below.folder.mkdir()
    state = below.json("up")
    assert state["data"] == str(cli.folder / "store")
    assert state["durability"] == "periodic"
    assert cli.json("status")["url"] == state["url"]


def test_encryption_creates_a_private_key_and_another_key_is_refused(cli: Cli) -> None:
    cli("up", "--port", "0", "--encrypt")
    key = cli.folder / ".millstream" / "encryption.key"
    assert key.stat().st_mode & 0o777 == 0o600
    cli("down")
    (cli.folder / "other").write_text("0123456789abcdef0123456789abcdef\n")
    assert "key" in cli.error("up", "--port", "0", "--key-file", "other")
    cli("up", "--port", "0", "--encrypt")


def test_a_node_whose_key_is_in_the_environment_starts_again(cli: Cli) -> None:
    cli.environment["MILLSTREAM_ENCRYPTION_KEY"] = "0123456789abcdef0123456789abcdef"
    cli("up", "--port", "0")
    cli("node", "stop", "n1")
    cli("status", code=3)
    assert cli.json("node", "start", "n1")["running"]
    assert not (cli.folder / ".millstream/encryption.key").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_the_foreground_ends_cleanly_with_its_server(
    cli: Cli, number: signal.Signals, code: int
) -> None:
    process = cli.start("up", "--port", "0", "--foreground")
    assert process.stdout is not None
    assert "ready at nats://" in process.stdout.readline()
    server = cli.json("node", "ls")[0]["server_pid"]
    process.send_signal(number)
    assert process.wait(60) == code
    assert "Traceback" not in process.communicate()[1]
    assert not alive(server)
    cli("status", code=3)


def test_the_foreground_fails_when_its_server_dies(cli: Cli) -> None:
    process = cli.start("up", "--port", "0", "--foreground", "--json")
    assert process.stdout is not None
    assert "url" in json.loads(process.stdout.readline())  # it serves, and says so
    cli("node", "kill", "n1")
    assert process.wait(60) == 1
    assert "error: the server is gone" in process.communicate()[1]


async def test_a_standby_takes_over_with_every_acked_event(cli: Cli) -> None:
    owner = cli.json("up", "--port", "0")
    await publish(owner["url"], b"kept")
    waiting = cli.json("up", "--port", "0", "--standby")
    assert waiting["url"] == owner["url"]
    assert len(waiting["standby"]) == 1
    cli("node", "kill", "n1")
    until(lambda: cli.folder.joinpath(".millstream/nodes/n1/node.json").exists() and taken(cli))
    assert await stored(owner["url"]) == [b"kept"]
    assert cli.json("status")["pid"] == waiting["standby"][0]


def taken(cli: Cli) -> bool:
    try:
        return not read_state(cli.folder / ".millstream").standby
    except NotRunning:
        return False


def test_a_cluster_is_run_by_node_name(cli: Cli) -> None:
    state = cli.json("up", "--port", "0", "--nodes", "3")
    assert [node["name"] for node in state["nodes"]] == ["n1", "n2", "n3"]
    assert cli.healthy()["meta_leader"]
    cli("node", "kill", "n2")
    sick = [True, False, True]  # once the others have a leader, should it have been that one
    until(lambda: [node["ok"] for node in cli.json("status", code=4)["nodes"]] == sick)
    assert cli.json("node", "start", "n2")["running"]
    cli("node", "stop", "n3")
    assert [node["running"] for node in cli.json("node", "ls")] == [True, True, False]
    assert "n4" in cli.error("node", "kill", "n4")
    assert "Stopped n1" in cli("down").stdout


async def test_nodes_that_join_from_several_folders_make_one_cluster(cli: Cli) -> None:
    (cli.folder / "secret").write_text("0123456789abcdef0123456789abcdef\n")
    taken: set[int] = set()
    ports = [free_port("127.0.0.1", 0, taken) for _ in range(3)]
    joins = [part for port in ports for part in ("--join", f"127.0.0.1:{port}")]
    urls: list[str] = []
    for name, port in zip("abc", ports, strict=True):
        node = ["--data", name, "--node-name", name, "--cluster-port", str(port)]
        up = cli("up", "--port", "0", "--auth", *node, *joins, "--cluster-secret-file", "secret")
        assert "accepts events while most nodes" in up.stdout  # one alone does not
        urls.append(read_state(cli.folder / name).url)
        if name == "a":
            app = cli.json("env", "--data", name)
            who = {"user": app["NATS_USER"], "password": app["NATS_PASSWORD"]}
            async with millstream.connect(urls[0], **who, request_timeout=0.5) as mill:
                with pytest.raises(RequestTimeout, match="most of its nodes"):
                    await mill.topics()
    assert cli.healthy("--data", "a")["meta_leader"]
    # The users are the same on every node, so a client may move from one to the other.
    users = [cli.json("env", "--data", name) for name in "abc"]
    assert len({user["NATS_PASSWORD"] for user in users}) == 1
    async with client(urls[2], **who) as connection:
        await declare(connection, "orders")
        await publish_until(connection.jetstream(timeout=5), 1)
    said = cli("user", "add", "ann", "--role", "reader", "--data", "a").stdout
    command = shlex.split(said.splitlines()[-1])[1:]
    cli(*command, "--data", "b")
    seed = cli("user", "creds", "ann", "--data", "a").stdout.strip()
    async with millstream.connect(urls[1], nkey_seed=seed) as mill:
        await mill.flush()
    said = cli("user", "add", "bob", "--password", "--data", "a").stdout
    assert "without --password" in said
