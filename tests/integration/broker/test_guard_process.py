"""The guards that a broker runs: started for guarded topics, watched, and ended with it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import millstream
from millstream import Mill, broker
from millstream.broker import Account, Broker, BrokerSettings, GuardState, Role
from millstream.broker.process_keeper import guarded_accounts
from millstream.cli.app import app
from millstream.guarded import GUARDED_TOKEN
from millstream.testing import running_broker, running_cluster
from tests.integration.broker.clients import (
    PATIENCE,
    alive,
    publish_guarded,
    wait_until,
    wait_until_async,
)

SCHEMA: dict[str, Any] = {
    "type": "record",
    "name": "Order",
    "fields": [{"name": "n", "type": "long"}],
}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guard is started in a second, but not on a busy machine; a writer waits for this long."""
    monkeypatch.setattr("millstream.wire.aio.publisher.GUARD_SECONDS", 2 * PATIENCE)


@asynccontextmanager
async def as_app(running: Broker, account: str = "main") -> AsyncIterator[Mill]:
    who = running.credentials(Role.APP, account)
    async with millstream.connect(
        running.url, user=who.user, password=who.password, request_timeout=PATIENCE
    ) as mill:
        yield mill


def guards_of(data: Path) -> tuple[GuardState, ...]:
    return broker.read_state(data).nodes[0].guards


async def test_a_guard_is_started_watched_and_ended_by_the_broker() -> None:
    async with running_broker(auth=True, accounts=(Account("acme"),)) as running:
        async with as_app(running) as mill:
            await (await mill.create_topic("open", schema=SCHEMA)).publish({"n": 0})
            assert guards_of(running.data) == ()
            topic = await mill.create_topic("orders", schema=SCHEMA, guarded=True)
            await publish_guarded(topic, {"n": 1})
            (first,) = guards_of(running.data)
            assert (first.account, first.restarts) == ("main", 0)
            async with topic.writer("loader") as writer:
                await writer.write({"n": 2}, position=1)
                os.kill(first.pid, signal.SIGKILL)
                await writer.write({"n": 3}, position=2)
            await publish_guarded(topic, {"n": 4})
            again = await wait_until_async(
                lambda: [one for one in guards_of(running.data) if one.pid not in (0, first.pid)]
            )
            assert again[0].restarts >= 1
            assert [event.value["n"] async for event in topic.read()] == [1, 2, 3, 4]
            # Another topic of the account needs no other process.
            more = await mill.create_topic("more", schema=SCHEMA, guarded=True)
            await publish_guarded(more, {"n": 1})
        async with as_app(running, "acme") as tenant:
            own = await tenant.create_topic("orders", schema=SCHEMA, guarded=True)
            await publish_guarded(own, {"n": 1})
        pids = [guard.pid for guard in guards_of(running.data)]
        assert len(pids) == 2
    wait_until(lambda: not any(alive(pid) for pid in pids))


async def test_a_topic_that_is_created_again_is_guarded_again() -> None:
    async with running_broker() as running, millstream.connect(running.url) as mill:
        for schema in (SCHEMA, {**SCHEMA, "fields": [{"name": "text", "type": "string"}]}):
            topic = await mill.create_topic("orders", schema=schema, guarded=True)
            name = schema["fields"][0]["name"]
            await publish_guarded(topic, {name: 1 if name == "n" else "x"})
            await mill.delete_topic("orders")


async def test_an_account_that_a_reload_adds_is_guarded(tmp_path: Path) -> None:
    settings = BrokerSettings(data=tmp_path, auth=True)
    with Broker(settings) as running:
        running.reload(replace(settings, accounts=(Account("acme"),)))
        async with as_app(running, "acme") as tenant:
            topic = await tenant.create_topic("orders", schema=SCHEMA, guarded=True)
            await publish_guarded(topic, {"n": 1})
        assert [guard.account for guard in guards_of(tmp_path)] == ["acme"]


async def test_a_guard_dies_with_a_keeper_that_is_killed(tmp_path: Path) -> None:
    state = broker.up(BrokerSettings(data=tmp_path))
    try:
        async with millstream.connect(state.url) as mill:
            topic = await mill.create_topic("orders", schema=SCHEMA, guarded=True)
            await publish_guarded(topic, {"n": 1})
        (guard,) = guards_of(tmp_path)
        shown = CliRunner().invoke(app, ["status", "--data", str(tmp_path)])
        assert f"guard of account main, pid {guard.pid}" in shown.output
        shown = CliRunner().invoke(app, ["status", "--data", str(tmp_path), "--json"])
        assert json.loads(shown.output)["nodes"][0]["guards"][0]["pid"] == guard.pid
    finally:
        broker.kill_node(tmp_path, "n1")
    wait_until(lambda: not alive(guard.pid))
    # Its folder is free, so nothing of the node is left running.
    broker.start_node(tmp_path, "n1")
    try:
        async with millstream.connect(broker.read_state(tmp_path).url) as mill:
            await publish_guarded(await mill.topic("orders"), {"n": 2})
    finally:
        broker.down(tmp_path)


@pytest.mark.long
async def test_every_node_of_a_cluster_guards_what_it_stores() -> None:
    with running_cluster(3) as cluster:
        async with millstream.connect(cluster.url, request_timeout=PATIENCE) as mill:
            topic = await mill.create_topic("orders", schema=SCHEMA, guarded=True, replicas=3)
            await publish_guarded(topic, {"n": 1})
            nodes = broker.read_state(cluster.data).nodes
            await wait_until_async(
                lambda: all(node.guards for node in broker.read_state(cluster.data).nodes)
            )
            gone = next(node for node in nodes if node.url != mill.url)
            cluster.kill(gone.name)
            for number in (2, 3):
                await publish_guarded(topic, {"n": number})
            assert [event.value["n"] async for event in topic.read()] == [1, 2, 3]


def test_the_keeper_knows_the_subjects_of_guarded_topics() -> None:
    def streams(*subjects: str) -> dict[str, Any]:
        return {"stream_detail": [{"config": {"subjects": [one]}} for one in subjects]}

    details = [
        {"name": "a", **streams("orders.>", f"{GUARDED_TOKEN}.orders.>")},
        {"name": "b", **streams("guarded.orders.>")},
        {"name": "c", "stream_detail": [{"config": None}]},
    ]
    assert guarded_accounts({"account_details": details}) == {"a"}
    assert guarded_accounts({}) == set()
