"""A local three-node cluster, and nodes that join from other machines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import nats.errors
import pytest

from millstream.broker import (
    Broker,
    BrokerSettings,
    Cluster,
    ClusterSettings,
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
from millstream.errors import ConfigError, FolderLocked, NotRunning
from millstream.settings import Secret
from millstream.testing import running_cluster
from tests.integration.broker.clients import (
    alive,
    client,
    login,
    stored,
    wait_until,
    wait_until_async,
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster() as running:
        yield running


async def declare(connection: Any, stream: str) -> None:
    """Make a replicated stream; a request that meets an election is lost without a word."""
    for _ in range(40):
        try:
            await connection.jetstream(timeout=0.5).add_stream(
                name=stream, subjects=[f"{stream}.>"], num_replicas=3
            )
        except (nats.errors.Error, TimeoutError):
            continue
        return
    raise AssertionError(f"stream {stream} could not be made")


async def publish_until(jetstream: Any, number: int, subject: str = "orders.x") -> None:
    """Publish one event until it is acknowledged; the id makes a repetition harmless."""
    for _ in range(2000):
        try:
            await jetstream.publish(
                subject, str(number).encode(), headers={"Nats-Msg-Id": str(number)}
            )
        except (nats.errors.Error, TimeoutError):
            await asyncio.sleep(0.02)
            continue
        return
    raise AssertionError(f"event {number} was never acknowledged")


def test_a_cluster_is_ready_with_a_leader_and_every_node_healthy(cluster: Cluster) -> None:
    health = cluster.health()
    assert health.ok
    assert len(health.nodes) == 3
    assert health.meta_leader in [cluster.server_name(name) for name in cluster.nodes]
    assert len({cluster.node_url(name) for name in cluster.nodes}) == 3
    assert cluster.url.count(",") == 2


async def test_acked_events_survive_the_kill_of_the_leading_node(cluster: Cluster) -> None:
    async with client(
        cluster.url, allow_reconnect=True, max_reconnect_attempts=-1, reconnect_time_wait=0.05
    ) as connection:
        await declare(connection, "orders")
        jetstream = connection.jetstream(timeout=0.5)
        leader = (await jetstream.stream_info("orders")).cluster.leader
        (name,) = [one for one in cluster.nodes if cluster.server_name(one) == leader]
        url, pid = cluster.node_url(name), cluster.pid(name)
        for number in range(100):
            if number == 30:
                await asyncio.to_thread(cluster.kill, name)
            await publish_until(jetstream, number)
        assert not alive(pid)
        health = cluster.health()
        assert not health.ok
        # The others may be catching up; the dead one is the one that says nothing.
        silent = [node.name for node in health.nodes if "does not answer" in str(node.problem)]
        assert silent == [name]
        await asyncio.to_thread(cluster.restart, name)
        assert cluster.node_url(name) == url
        await wait_until_async(lambda: cluster.health().ok)
        (stream,) = cluster.health().streams
        assert (stream.replicas, stream.messages) == (3, 100)
    assert await stored(url) == [str(number).encode() for number in range(100)]


async def test_a_node_stopped_gently_hands_over_quickly(cluster: Cluster) -> None:
    others = ",".join(cluster.node_url(name) for name in ("n1", "n2"))
    async with client(others) as connection:
        await declare(connection, "gentle")
        await asyncio.to_thread(cluster.stop, "n3")
        assert not cluster.health().ok
        started = time.monotonic()
        await publish_until(connection.jetstream(timeout=0.5), 1, subject="gentle.x")
        assert time.monotonic() - started < 4  # an election after a kill takes longer
    await asyncio.to_thread(cluster.start)
    # A node that was healthy may report once more that it catches up with its streams.
    await wait_until_async(lambda: cluster.health().ok)


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


def test_a_wrong_node_name_is_told(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="the nodes are n1, n2, n3"):
        cluster.kill("n9")


def test_a_folder_of_a_cluster_is_locked_and_kept_as_it_was_made(cluster: Cluster) -> None:
    with pytest.raises(FolderLocked):
        Broker(cluster.settings).start()
    with pytest.raises(FolderLocked):
        Cluster(cluster.settings).start()


def test_nobody_joins_a_cluster_without_its_secret(cluster: Cluster, tmp_path: Path) -> None:
    plan = json.loads((cluster.data / "nodes/n1/plan.json").read_text())
    with socket.create_connection(("127.0.0.1", plan["ports"]["cluster"]), timeout=5) as stranger:
        stranger.recv(65536)
        stranger.sendall(b'CONNECT {"user":"route","pass":"guess","name":"evil"}\r\nPING\r\n')
        answer = b""
        with contextlib.suppress(OSError):
            while part := stranger.recv(4096):
                answer += part
    assert b"Authorization Violation" in answer
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
        port = listener.getsockname()[1] - 1  # the second node is to listen on the taken one
        cluster = Cluster(BrokerSettings(data=tmp_path, port=port))
        with pytest.raises(Exception, match="is in use by another process"):
            cluster.start()
    for name in ("n1", "n2", "n3"):
        assert not (tmp_path / "nodes" / name / "node.json").exists()
    with pytest.raises(NotRunning):
        read_state(tmp_path)


def test_a_cluster_in_the_background_is_driven_by_name(tmp_path: Path) -> None:
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
        wait_until(lambda: read_health(tmp_path).ok, 15)
    finally:
        stopped = down(tmp_path)
    wait_until(lambda: not any(alive(node.server_pid) for node in stopped.nodes))


async def test_nodes_of_several_machines_join_with_a_shared_secret(tmp_path: Path) -> None:
    taken: set[int] = set()
    ports = [free_port("127.0.0.1", 0, taken) for _ in range(3)]
    routes = tuple(f"127.0.0.1:{port}" for port in ports)
    secret = Secret("a secret that all nodes share")
    with contextlib.ExitStack() as stack:
        brokers = []
        for name, port in zip(("east", "west", "north"), ports, strict=True):
            place = ClusterSettings(name, routes, secret, port=port)
            settings = BrokerSettings(data=tmp_path / name, cluster=place, auth=True)
            brokers.append(stack.enter_context(Broker(settings)))
        wait_until(lambda: all(broker.health().ok for broker in brokers), 20)
        east, west, north = brokers
        who = east.credentials()
        assert who == north.credentials()
        async with client(east.url, who) as connection:
            await declare(connection, "orders")
            await publish_until(connection.jetstream(timeout=0.5), 1)
        assert await stored(west.url, who=west.credentials()) == [b"1"]
        stranger = replace(
            north.settings,
            data=tmp_path / "evil",
            cluster=ClusterSettings("evil", routes, Secret("another secret, guessed"), port=0),
        )
        with Broker(stranger) as evil:
            assert not evil.health().ok
            assert len(east.health().nodes) == 1
            async with client(east.url, east.credentials("system")) as system:
                await system.publish("$SYS.REQ.SERVER.PING", b"")
                answers = await system.subscribe("answers")
                await system.publish("$SYS.REQ.SERVER.PING", b"", reply="answers")
                names = set()
                with contextlib.suppress(TimeoutError):
                    while True:
                        message = await answers.next_msg(0.5)
                        names.add(json.loads(message.data)["server"]["name"])
        assert names == {"millstream-east", "millstream-west", "millstream-north"}
