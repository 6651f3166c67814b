"""up, down and the ways in which they are refused."""

from __future__ import annotations

import signal
import socket

import nats
import pytest

from millstream.broker import read_health, read_state
from millstream.errors import NotRunning
from tests.integration.cli.conftest import Cli, alive, until


async def test_up_is_ready_when_it_returns_and_what_was_acked_is_there_after_down_and_up(
    cli: Cli,
) -> None:
    state = cli.json("up", "--port", "0")
    assert {"url", "pid", "data", "nodes"} <= state.keys()
    assert state["data"] == str(cli.folder / ".millstream")
    assert state["durability"] == "fsync"
    assert [node["running"] for node in state["nodes"]] == [True]

    client = await nats.connect(state["url"])
    stream = client.jetstream()
    await stream.add_stream(name="orders", subjects=["orders.>"])
    assert (await stream.publish("orders.1", b"first")).seq == 1
    await client.close()

    stopped = cli.json("down")
    assert not any(alive(node["server_pid"]) for node in stopped["nodes"])
    again = cli.json("up", "--port", "0")
    assert again["url"] == state["url"], "a folder keeps its port"
    client = await nats.connect(again["url"])
    kept = await client.jetstream().get_msg("orders", 1)
    assert kept.data == b"first"
    await client.close()


def test_without_a_broker_commands_say_so_with_exit_code_3(cli: Cli) -> None:
    for command in ("status", "down", "env", "context", "logs"):
        assert "millstream up" in cli.error(command, code=3)
    assert "millstream up" in cli.error("node", "ls", code=3)
    assert list(cli.folder.iterdir()) == []


def test_a_second_up_on_the_folder_says_who_holds_it(cli: Cli) -> None:
    state = cli.json("up", "--port", "0")
    message = cli.error("up", "--port", "0")
    assert str(state["pid"]) in message
    assert "--standby" in message
    assert cli.json("status")["ok"]


def test_a_taken_port_is_named(cli: Cli) -> None:
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


def test_encryption_makes_a_private_key_and_another_key_is_refused(cli: Cli) -> None:
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
    assert process.wait(20) == code
    assert "Traceback" not in process.communicate()[1]
    assert not alive(server)
    cli("status", code=3)


def test_the_foreground_fails_when_its_server_dies(cli: Cli) -> None:
    process = cli.start("up", "--port", "0", "--foreground", "--json")
    until(lambda: (cli.folder / ".millstream/broker.json").exists())
    cli("node", "kill", "n1")
    assert process.wait(20) == 1
    assert "error: the server is gone" in process.communicate()[1]


def test_a_service_manager_is_told(cli: Cli) -> None:
    address = str(cli.folder / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        manager.settimeout(20)
        cli.environment["NOTIFY_SOCKET"] = address
        process = cli.start("up", "--port", "0", "--foreground")
        assert manager.recv(1000).startswith(b"READY=1")
        process.terminate()
        assert manager.recv(1000) == b"STOPPING=1"
        assert process.wait(20) == 0


async def test_a_standby_takes_over_with_every_acked_event(cli: Cli) -> None:
    owner = cli.json("up", "--port", "0")
    client = await nats.connect(owner["url"])
    await client.jetstream().add_stream(name="orders", subjects=["orders.>"])
    await client.jetstream().publish("orders.1", b"kept")
    await client.close()
    waiting = cli.json("up", "--port", "0", "--standby")
    assert waiting["url"] == owner["url"]
    assert len(waiting["standby"]) == 1
    cli("node", "kill", "n1")
    until(lambda: cli.folder.joinpath(".millstream/nodes/n1/node.json").exists() and taken(cli))
    client = await nats.connect(owner["url"])
    assert (await client.jetstream().get_msg("orders", 1)).data == b"kept"
    await client.close()
    assert cli.json("status")["pid"] == waiting["standby"][0]


def taken(cli: Cli) -> bool:
    try:
        return not read_state(cli.folder / ".millstream").standby
    except NotRunning:
        return False


def test_a_cluster_is_run_by_node_name(cli: Cli) -> None:
    state = cli.json("up", "--port", "0", "--nodes", "3")
    assert [node["name"] for node in state["nodes"]] == ["n1", "n2", "n3"]
    assert cli.json("status")["meta_leader"]
    cli("node", "kill", "n2")
    sick = [True, False, True]  # once the others have a leader, should it have been that one
    until(lambda: [node["ok"] for node in cli.json("status", code=4)["nodes"]] == sick)
    assert cli.json("node", "start", "n2")["running"]
    cli("node", "stop", "n3")
    assert [node["running"] for node in cli.json("node", "ls")] == [True, True, False]
    assert "n4" in cli.error("node", "kill", "n4")
    assert "Stopped n1" in cli("down").stdout


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


async def test_nodes_that_join_from_several_folders_make_one_cluster(cli: Cli) -> None:
    (cli.folder / "secret").write_text("0123456789abcdef0123456789abcdef\n")
    ports = free_ports(3)
    joins = [part for port in ports for part in ("--join", f"127.0.0.1:{port}")]
    urls = []
    for name, port in zip("abc", ports, strict=True):
        node = ["--data", name, "--node-name", name, "--cluster-port", str(port)]
        state = cli.json(
            "up", "--port", "0", "--auth", *node, *joins, "--cluster-secret-file", "secret"
        )
        urls.append(state["url"])
    until(lambda: read_health(cli.folder / "a").ok)
    assert cli.json("status", "--data", "a")["meta_leader"]
    # The users are the same on every node, so a client may move from one to the other.
    users = [cli.json("env", "--data", name) for name in "abc"]
    assert len({user["NATS_PASSWORD"] for user in users}) == 1
    client = await nats.connect(
        urls[2], user=users[0]["NATS_USER"], password=users[0]["NATS_PASSWORD"]
    )
    stream = client.jetstream(timeout=20)
    await stream.add_stream(name="orders", subjects=["orders.>"], num_replicas=3)
    assert (await stream.publish("orders.1", b"x")).seq == 1
    await client.close()
