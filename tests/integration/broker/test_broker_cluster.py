"""A local three-node cluster, and nodes that join from other machines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from millstream.broker import (
    Broker,
    BrokerSettings,
    Cluster,
    ClusterSettings,
    Health,
    Role,
    User,
    down,
    kill_node,
    read_health,
    read_state,
    start_node,
    up,
)
from millstream.broker.folder import free_port
from millstream.cli.app import app
from millstream.errors import ConfigError, FolderLocked, NotRunning
from millstream.settings import Secret
from millstream.testing import running_cluster
from tests.integration.broker.clients import (
    PATIENCE,
    alive,
    answered,
    client,
    declare,
    login,
    publish_until,
    stored,
    wait_until,
    wait_until_async,
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster() as running:
        yield running


def well(cluster: Cluster) -> Health | None:
    """The health, once every node is ok: a delayed one catches up first."""
    health = cluster.health()
    return health if health.ok else None


async def leader_of(cluster: Cluster, jetstream: Any, stream: str) -> str:
    """The node that leads a stream."""

    async def leader() -> str:
        leader = (await jetstream.stream_info(stream)).cluster.leader
        for name in cluster.nodes:
            if cluster.server_name(name) == leader:
                return name
        raise TimeoutError(f"{stream} has no leader")

    return await answered(leader)


def test_a_cluster_is_ready_with_a_leader_and_every_node_healthy(cluster: Cluster) -> None:
    health = wait_until(lambda: well(cluster))
    assert len(health.nodes) == 3
    assert health.meta_leader in [cluster.server_name(name) for name in cluster.nodes]
    assert len({cluster.node_url(name) for name in cluster.nodes}) == 3
    assert cluster.url.count(",") == 2


async def test_acked_events_survive_when_the_leader_is_killed(cluster: Cluster) -> None:
    async with client(
        cluster.url, allow_reconnect=True, max_reconnect_attempts=-1, reconnect_time_wait=0.05
    ) as connection:
        await declare(connection, "orders")
        jetstream = connection.jetstream(timeout=0.5)
        name = await leader_of(cluster, jetstream, "orders")
        url, pid = cluster.node_url(name), cluster.pid(name)
        for number in range(100):
            if number == 30:
                await asyncio.to_thread(cluster.kill, name)
            await publish_until(jetstream, number)
        assert not alive(pid)
        health = cluster.health()
        assert not health.ok
        # The others may be catching up; the dead one does not answer.
        silent = [node.name for node in health.nodes if "does not answer" in str(node.problem)]
        assert silent == [name]
        await asyncio.to_thread(cluster.restart, name)
        assert cluster.node_url(name) == url
        await wait_until_async(lambda: complete(cluster) == (3, 100))
    events = await answered(lambda: stored(url, timeout=5))
    assert events == [str(number).encode() for number in range(100)]


def complete(cluster: Cluster) -> tuple[int, int] | None:
    """Replicas and messages of `orders`, once every node is ok."""
    health = cluster.health()
    (stream,) = [stream for stream in health.streams if stream.name == "orders"]
    return (stream.replicas, stream.messages) if health.ok else None


async def hand_over(cluster: Cluster, number: int) -> float:
    """Stop the node that leads `gentle`; seconds until another one has acknowledged an event."""
    async with client(cluster.url) as connection:
        await declare(connection, "gentle")
        leader = await leader_of(cluster, connection.jetstream(timeout=0.5), "gentle")
    others = [cluster.node_url(name) for name in cluster.nodes if name != leader]
    async with client(",".join(others)) as connection:
        started = time.monotonic()
        await asyncio.to_thread(cluster.stop, leader)
        await publish_until(connection.jetstream(timeout=0.5), number, subject="gentle.x")
        took = time.monotonic() - started
    assert not cluster.health().ok
    await asyncio.to_thread(cluster.start)
    # A healthy node may report once more that it is catching up.
    await wait_until_async(lambda: cluster.health().ok)
    return took


async def test_a_node_stopped_gracefully_hands_over_quickly(cluster: Cluster) -> None:
    # An election after a kill never takes less than three seconds. A stalled machine can
    # make one handover as slow, but not all five.
    for number in range(5):
        if await hand_over(cluster, number) < 3:
            return
    raise AssertionError("the others waited for an election each time")


async def test_a_reload_reaches_every_node_without_dropping_connections() -> None:
    ann, bob = User("ann", Secret("a"), Role.ADMIN), User("bob", Secret("b"), Role.APP)
    with running_cluster(users=(ann,)) as cluster:
        before = cluster.settings
        async with client(cluster.node_url("n2"), user="ann", password="a") as connection:
            await asyncio.to_thread(cluster.reload, replace(before, users=(ann, bob)))
            await connection.flush()
        assert {login(cluster.node_url(n), "bob", "b") for n in cluster.nodes} == {"PONG"}
        await asyncio.to_thread(cluster.reload, before)
        answers = {login(cluster.node_url(n), "bob", "b") for n in cluster.nodes}
        assert answers == {"-ERR 'Authorization Violation'"}


def test_a_wrong_node_name_is_refused(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="the nodes are n1, n2, n3"):
        cluster.kill("n9")


def test_a_folder_of_a_cluster_is_locked_and_keeps_its_nodes(cluster: Cluster) -> None:
    with pytest.raises(FolderLocked):
        Broker(cluster.settings).start()
    with pytest.raises(FolderLocked):
        Cluster(cluster.settings).start()


def guess(port: int) -> bytes:
    """What a node answers to a client that guesses the secret."""
    answer = b""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as stranger,
        contextlib.suppress(OSError),
    ):
        stranger.recv(65536)
        stranger.sendall(b'CONNECT {"user":"route","pass":"guess","name":"evil"}\r\nPING\r\n')
        while part := stranger.recv(4096):
            answer += part
    return answer


def test_no_node_joins_a_cluster_without_its_secret(cluster: Cluster, tmp_path: Path) -> None:
    plan = json.loads((cluster.data / "nodes/n1/plan.json").read_text())
    # A slow client gets a timeout error instead.
    wait_until(lambda: b"Authorization Violation" in guess(plan["ports"]["cluster"]))
    secret = json.loads((cluster.data / "credentials.json").read_text())["cluster"]
    logs = "".join(path.read_text() for path in cluster.data.glob("nodes/*/server.log"))
    assert secret not in logs


def test_a_cluster_needs_two_nodes_and_a_start(tmp_path: Path) -> None:
    settings = BrokerSettings(data=tmp_path)
    with pytest.raises(ConfigError, match="use Broker for one"):
        Cluster(settings, nodes=1)
    with pytest.raises(NotRunning):
        Cluster(settings).health()


def test_a_failed_start_of_one_node_leaves_no_node(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1] - 1  # so the second node gets the taken one
        cluster = Cluster(BrokerSettings(data=tmp_path, port=port))
        with pytest.raises(Exception, match="is in use by another process"):
            cluster.start()
    for name in ("n1", "n2", "n3"):
        assert not (tmp_path / "nodes" / name / "node.json").exists()
    with pytest.raises(NotRunning):
        read_state(tmp_path)


def test_nodes_of_a_background_cluster_are_controlled_by_name(tmp_path: Path) -> None:
    state = up(BrokerSettings(data=tmp_path), nodes=3)
    try:
        assert [node.name for node in state.nodes] == ["n1", "n2", "n3"]
        kill_node(tmp_path, "n2")
        after = read_state(tmp_path)
        assert [node.running for node in after.nodes] == [True, False, True]
        assert after.url == state.url
        with pytest.raises(NotRunning):
            kill_node(tmp_path, "n2")
        again = start_node(tmp_path, "n2")
        assert all(node.running for node in again.nodes)
        wait_until(lambda: read_health(tmp_path).ok)
    finally:
        stopped = down(tmp_path)
    wait_until(lambda: not any(alive(node.server_pid) for node in stopped.nodes))


async def servers(system: Any, least: int) -> set[str]:
    """Who answers; asked again until there are this many, and no other for half a second."""
    answers = await system.subscribe("answers")
    names: set[str] = set()
    end = time.monotonic() + 2 * PATIENCE
    while len(names) < least and time.monotonic() < end:
        await system.publish("$SYS.REQ.SERVER.PING", b"", reply="answers")
        with contextlib.suppress(TimeoutError):
            while True:
                message = await answers.next_msg(0.5)
                names.add(json.loads(message.data)["server"]["name"])
    return names


async def test_nodes_of_several_machines_join_with_a_shared_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: set[int] = set()
    ports = [free_port("127.0.0.1", 0, taken) for _ in range(3)]
    routes = tuple(f"127.0.0.1:{port}" for port in ports)
    secret = Secret("a secret that all nodes share")
    with contextlib.ExitStack() as stack:
        brokers = []
        for name, port in zip(("east", "west", "north"), ports, strict=True):
            membership = ClusterSettings(name, routes, secret, port=port)
            settings = BrokerSettings(data=tmp_path / name, cluster=membership, auth=True)
            brokers.append(stack.enter_context(Broker(settings)))
        wait_until(lambda: all(broker.health().ok for broker in brokers))
        east, west, north = brokers
        who = east.credentials()
        assert who == north.credentials()
        async with client(east.url, who) as connection:
            await declare(connection, "orders")
            await publish_until(connection.jetstream(timeout=0.5), 1)
        read = partial(stored, west.url, timeout=5, who=west.credentials())
        assert await answered(read) == [b"1"]
        stranger = replace(
            north.settings,
            data=tmp_path / "evil",
            cluster=ClusterSettings("evil", routes, Secret("another secret, guessed"), port=0),
        )
        with Broker(stranger) as evil:
            wait_until(lambda: "Route Error 'Authorization Violation'" in evil.log.read_text())
            assert not evil.health().ok
            assert len(east.health().nodes) == 1
            async with client(east.url, east.credentials("system")) as system:
                names = await servers(system, 3)
        assert names == {"millstream-east", "millstream-west", "millstream-north"}
        await asyncio.to_thread(check_status, (east, west, north), monkeypatch)


def status(*options: str) -> Any:
    done = CliRunner().invoke(app, ["status", "--json", *options])
    assert done.exit_code in (0, 4), done.output
    return json.loads(done.stdout)


def whole_status(url: str) -> Any:
    """The status as seen over a connection, once all three nodes answer in time."""
    seen = status("--server", url)
    return seen if len([node for node in seen["nodes"] if node["ok"]]) == 3 else None


def check_status(brokers: tuple[Broker, Broker, Broker], monkeypatch: pytest.MonkeyPatch) -> None:
    """`status` of one node shows the whole cluster, from its folder and over a connection."""
    east, west, north = brokers
    data = str(east.settings.data)
    monkeypatch.delenv("NATS_URL", raising=False)
    monkeypatch.chdir(data)  # no broker is found from there

    def all_ok() -> Any:
        found = status("--data", data)
        return found if found["ok"] and len(found["nodes"]) == 3 else None

    found = wait_until(all_ok)
    nodes = {node["server"]: node for node in found["nodes"]}
    assert list(nodes) == ["millstream-east", "millstream-north", "millstream-west"]
    assert nodes["millstream-east"]["pid"]
    assert nodes["millstream-west"]["memory"] > 0
    assert [stream["name"] for stream in found["streams"]] == ["orders"]
    assert found["streams"][0]["leader"] in nodes
    for role, view in (("system", "system"), ("admin", "account")):
        who = east.credentials(role)
        monkeypatch.setenv("NATS_USER", who.user)
        monkeypatch.setenv("NATS_PASSWORD", who.password.reveal())
        seen = wait_until(partial(whole_status, west.url))
        assert seen["view"] == view
        assert [stream["name"] for stream in seen["streams"]] == ["orders"]
    text = CliRunner().invoke(app, ["status", "--server", west.url]).output
    assert "millstream-west" in text
    assert "only shown to a user of the system account" in " ".join(text.split())
    north.stop()
    found = status("--data", data)
    assert not found["ok"]
    problems = {node["server"]: node["problem"] for node in found["nodes"]}
    assert problems["millstream-north"] == "it does not answer the other nodes"
