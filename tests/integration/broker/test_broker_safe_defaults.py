"""Safe defaults, each checked on a real server."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nats.js.errors
import pytest

from millstream.broker import (
    Broker,
    BrokerSettings,
    Durability,
    LeafRemote,
    LeafSettings,
    Limits,
)
from millstream.broker.monitoring import ask_server
from millstream.settings import Secret
from millstream.testing import running_broker
from tests.integration.broker.clients import (
    PATIENCE,
    answered,
    client,
    login,
    publish,
    small_disk,
    stored,
    wait_until,
    wait_until_async,
)


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with running_broker() as running:
        yield running


def ask(broker: Broker, path: str) -> dict[str, Any]:
    code, body = ask_server({"http": broker.monitor}, path, 1 << 20, PATIENCE)
    assert code == 200
    answer: dict[str, Any] = json.loads(body)
    return answer


def test_events_are_on_disk_before_the_ack(broker: Broker) -> None:
    assert broker.settings.durability is Durability.FSYNC
    assert ask(broker, "/jsz?config=true")["config"]["sync_always"] is True
    with running_broker(durability="periodic", sync_interval=2.5) as relaxed:
        config = ask(relaxed, "/jsz?config=true")["config"]
        assert not config.get("sync_always")
        assert config["sync_interval"] == 2_500_000_000


def test_a_delayed_client_can_log_in_late(broker: Broker) -> None:
    """The server's default of two seconds disconnected clients on a busy machine too early."""
    assert ask(broker, "/varz")["auth_timeout"] == 10


def test_the_broker_listens_on_loopback_only(broker: Broker) -> None:
    facts = ask(broker, "/varz")
    assert facts["host"] == "127.0.0.1"
    assert facts["http_host"] == "127.0.0.1"
    assert facts.get("cluster", {}).get("cluster_port", 0) == 0


async def test_a_message_of_eight_megabytes_is_accepted(broker: Broker) -> None:
    async with client(broker.url) as connection:
        assert connection.max_payload == 8 * 1024 * 1024
    assert await publish(broker.url, b"x" * (8 * 1024 * 1024 - 1024), stream="large") == [1]


def test_the_store_limit_is_below_the_free_disk(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    with running_broker(data=tmp_path) as broker:
        (node,) = broker.health().nodes
    # Other programs use the disk too: before or after, more than the limit was free.
    assert 0 < node.store_limit < max(free, shutil.disk_usage(tmp_path).free)
    assert node.memory_store_limit > 0


async def test_more_than_a_thousand_consumers_fit_on_a_stream(broker: Broker) -> None:
    async with client(broker.url) as connection:
        await connection.jetstream().add_stream(name="many", subjects=["many.>"], storage="memory")

        async def consumer(number: int) -> bool:
            name = f"c{number}"
            config = {"name": name, "mem_storage": True, "ack_policy": "none"}
            body = {"stream_name": "many", "config": config | {"inactive_threshold": 60 * 10**9}}
            answer = await connection.request(
                f"$JS.API.CONSUMER.CREATE.many.{name}",
                json.dumps(body).encode(),
                timeout=2 * PATIENCE,
            )
            return "error" not in json.loads(answer.data)

        assert all(await asyncio.gather(*(consumer(number) for number in range(1050))))


async def test_raw_settings_reach_the_server() -> None:
    with running_broker(raw="max_subscriptions: 77") as broker:
        assert ask(broker, "/varz")["max_subscriptions"] == 77


# -- disks that fill up -------------------------------------------------------------------


async def publish_until_refused(broker: Broker, size: int) -> tuple[int, str]:
    """Publish until the server refuses; returns how many were acknowledged, and the error.

    When its disk is full it says nothing. Neither does one that is held up: that one is well
    afterwards, and the id makes a repetition harmless.
    """
    acked = 0
    async with client(broker.url) as connection:
        await connection.jetstream().add_stream(name="orders", subjects=["orders.>"])
        jetstream = connection.jetstream(timeout=2)
        while True:
            body, headers = acked.to_bytes(4) + bytes(size - 4), {"Nats-Msg-Id": str(acked)}
            try:
                await jetstream.publish("orders.x", body, headers=headers)
            except nats.js.errors.APIError as error:
                return acked, str(error)
            except TimeoutError as error:
                if not broker.health().ok:
                    return acked, str(error)
            else:
                acked += 1


async def test_a_full_store_fails_publishes_clearly_and_recovers_when_space_is_freed() -> None:
    with running_broker(limits=Limits(max_file_store=3_000_000)) as broker:
        acked, words = await publish_until_refused(broker, 100_000)
        assert 20 <= acked < 31
        assert "insufficient resources" in words
        assert "10023" in words
        assert broker.health().ok
        assert len(await stored(broker.url)) == acked
        async with client(broker.url) as connection:
            await connection.jetstream().purge_stream("orders", keep=5)
            ack = await connection.jetstream().publish("orders.x", b"again")
            assert ack.seq == acked + 1


async def test_the_limit_keeps_a_small_disk_from_filling_up(tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "disk", "24m") as folder,
        Broker(BrokerSettings(data=folder / "data")) as broker,
    ):
        acked, words = await publish_until_refused(broker, 200_000)
        assert acked > 20
        assert "insufficient resources" in words
        assert shutil.disk_usage(folder).free > 1_000_000
        assert broker.health().ok


async def test_a_disk_filled_by_others_is_reported_and_the_broker_recovers_when_space_is_freed(
    tmp_path: Path,
) -> None:
    with (
        small_disk(tmp_path / "disk", "24m") as folder,
        Broker(BrokerSettings(data=folder / "data")) as broker,
    ):
        ballast = folder / "ballast"
        free = shutil.disk_usage(folder).free
        ballast.write_bytes(b"x" * (free - 3_000_000))
        acked, _ = await publish_until_refused(broker, 100_000)
        assert 5 < acked < 40
        (node,) = broker.health().nodes
        assert not node.ok
        assert "free some space, and the broker restarts itself" in str(node.problem)
        pid, url = broker.pid, broker.url
        ballast.unlink()
        await wait_until_async(lambda: broker.pid != pid and broker.health().ok)
        assert broker.running
        assert broker.url == url
        events = await stored(broker.url)
        assert [int.from_bytes(event[:4]) for event in events[:acked]] == list(range(acked))
        assert await publish(broker.url, b"again") == [len(events) + 1]


# -- leaf nodes and domains ---------------------------------------------------------------


async def test_a_leaf_node_with_its_own_domain_reaches_the_hub(tmp_path: Path) -> None:
    with running_broker(name="hub", domain="hub", leaf=LeafSettings(port=0)) as hub:
        port = json.loads((hub.data / "nodes/n1/plan.json").read_text())["ports"]["leaf"]
        leaf_user = hub.credentials("leaf")
        remote = LeafRemote(f"nats-leaf://127.0.0.1:{port}", leaf_user.user, leaf_user.password)
        with running_broker(
            name="edge", domain="edge", leaf=LeafSettings(remotes=(remote,))
        ) as edge:
            await wait_until_async(lambda: ask(hub, "/leafz")["leafs"])
            await publish(edge.url, b"from the edge", stream="readings")
            async with client(hub.url) as connection:
                # The hub learns the subscriptions of the edge a moment after the connection.
                names = "$JS.edge.API.STREAM.NAMES"
                answer = await answered(lambda: connection.request(names, b"", timeout=5))
                assert json.loads(answer.data)["streams"] == ["readings"]
                mirror = {
                    "name": "copy",
                    "mirror": {"name": "readings", "external": {"api": "$JS.edge.API"}},
                }
                answer = await connection.request(
                    "$JS.API.STREAM.CREATE.copy", json.dumps(mirror).encode(), timeout=PATIENCE
                )
                assert "error" not in json.loads(answer.data)

            def copied() -> bool:
                return any(s.name == "copy" and s.messages for s in hub.health().streams)

            await wait_until_async(copied)
            assert await stored(hub.url, "copy") == [b"from the edge"]
            assert leaf_user.password.reveal() not in edge.log.read_text()


def test_no_leaf_node_connects_without_credentials() -> None:
    with running_broker(name="hub", domain="hub", leaf=LeafSettings(port=0)) as hub:
        port = json.loads((hub.data / "nodes/n1/plan.json").read_text())["ports"]["leaf"]
        assert login(hub.url) == "PONG"
        stranger = LeafRemote(f"nats-leaf://127.0.0.1:{port}", "leaf", Secret("guess"))
        with running_broker(
            name="edge", domain="edge", leaf=LeafSettings(remotes=(stranger,))
        ) as edge:
            wait_until(lambda: "Authorization Violation" in edge.log.read_text())
            assert ask(hub, "/leafz")["leafnodes"] == 0


async def test_nothing_is_created_while_a_stream_is_unreadable(tmp_path: Path) -> None:
    """A stream with damaged metadata keeps the broker from starting."""
    settings = BrokerSettings(data=tmp_path)
    with Broker(settings) as broker:
        await publish(broker.url, b"1")
    meta = tmp_path / "nodes/n1/store/jetstream/main/streams/orders/meta.inf"
    sound = meta.read_bytes()
    meta.write_bytes(b"damaged" + sound)
    with pytest.raises(Exception, match="nothing overwrites them"):
        Broker(settings).start()
    meta.write_bytes(sound)
    with Broker(settings) as broker:
        assert await stored(broker.url) == [b"1"]
