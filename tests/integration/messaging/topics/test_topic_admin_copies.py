"""Mirrors and sources, also beyond a leaf node; replicas; what a server reports about itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from millstream.broker import (
    Broker,
    BrokerSettings,
    Durability,
    LeafRemote,
    LeafSettings,
    Permissions,
    User,
    find_binary,
    read_credentials,
)
from millstream.errors import ConfigError, NoResponders, TopicConflict, TopicNotFound, Unhealthy
from millstream.messaging.topics.admin import (
    declare,
    delete,
    edit,
    open_topic,
    promote,
)
from millstream.messaging.topics.durability import durability_of
from millstream.messaging.topics.settings import Origin, TopicSettings
from millstream.settings import ConnectionSettings, Secret
from millstream.testing import running_broker, running_cluster
from millstream.wire.aio.connection import Connection
from millstream.wire.aio.jetstream import JetStream
from tests.integration.messaging.topic_kit import eventually, offsets, put

Connect = Callable[..., Awaitable[Connection]]


@pytest.fixture
def js(connection: Connection) -> JetStream:
    return JetStream(connection)


async def subjects(js: JetStream, stream: str) -> list[str]:
    last = (await js.stream_info(stream)).state.last_seq
    found = [await js.get_message(stream, {"seq": number}) for number in range(1, last + 1)]
    return [message.subject for message in found if message is not None]


async def messages(js: JetStream, topic: str) -> int:
    return (await open_topic(js, topic)).messages


# -- mirrors ------------------------------------------------------------------------------


async def test_a_mirror_has_the_offsets_subjects_and_partitions_of_its_origin(
    js: JetStream,
) -> None:
    await declare(js, "orders", TopicSettings(partitions=2, prefix="shop.orders"))
    for partition in (0, 1, 1):
        await put(js.connection, f"shop.orders.{partition}.a")
    settings = TopicSettings(partitions=2, mirror="orders")
    info = await declare(js, "copy", settings)
    assert info.prefix == "shop.orders"
    assert info.partitions[1].prefix == "shop.orders.1"
    await eventually(lambda: offsets(js, "copy-1"), [1, 2])
    await eventually(lambda: subjects(js, "copy-0"), ["shop.orders.0.a"])

    async def lag() -> int | None:
        return (await open_topic(js, "copy")).lag

    await eventually(lag, 0)
    again = await declare(js, "copy", settings)
    assert again.created == info.created
    # What is removed at the origin stays in the copy, and nothing can be published to the copy.
    await js.purge_stream("orders-1")
    assert await offsets(js, "copy-1") == [1, 2]
    with pytest.raises(NoResponders):
        await put(js.connection, "copy.1.a")


async def test_a_mirror_needs_an_existing_origin_and_as_many_partitions(
    js: JetStream,
) -> None:
    with pytest.raises(TopicNotFound, match=r"no topic 'orders' to copy from\. Create it"):
        await declare(js, "copy", TopicSettings(mirror="orders"))
    await declare(js, "orders", TopicSettings(partitions=2))
    with pytest.raises(ConfigError, match="as many as its origin, 2, not 1"):
        await declare(js, "copy", TopicSettings(mirror="orders"))
    with pytest.raises(TopicNotFound, match="in the domain 'nowhere' cannot be reached"):
        await declare(js, "copy", TopicSettings(mirror=Origin("orders", domain="nowhere")))


async def test_a_copy_can_be_declared_before_its_origin(js: JetStream) -> None:
    await declare(js, "copy", TopicSettings(mirror=Origin("orders", partitions=1)))
    await declare(js, "orders")
    await put(js.connection, "orders.a")
    await eventually(lambda: offsets(js, "copy"), [1])


async def test_a_promoted_mirror_continues_under_the_same_subjects(
    js: JetStream,
) -> None:
    await declare(js, "orders", TopicSettings(partitions=2))
    await put(js.connection, "orders.1.a")
    await declare(js, "copy", TopicSettings(partitions=2, mirror="orders"))
    await eventually(lambda: offsets(js, "copy-1"), [1])
    with pytest.raises(TopicConflict, match=r"needs the subjects orders\.0\.>.*'orders-0'"):
        await promote(js, "copy")
    await delete(js, "orders")
    info = await promote(js, "copy")
    assert info.settings == TopicSettings(partitions=2, prefix="orders")
    assert await put(js.connection, "orders.1.b") == 2
    assert await subjects(js, "copy-1") == ["orders.1.a", "orders.1.b"]
    with pytest.raises(ConfigError, match="not a mirror"):
        await promote(js, "copy")
    wanted = TopicSettings(partitions=2, prefix="orders")
    assert (await declare(js, "copy", wanted)).created == info.created


@pytest.mark.parametrize("steps", [1, 2])
async def test_the_promoted_mirror_of_a_topic_without_packs_takes_none(
    js: JetStream, steps: int
) -> None:
    """Packs would make `expected_last` unsound, for which such a topic was created."""
    await declare(js, "orders", TopicSettings(packs=False))
    await declare(js, "copy", TopicSettings(mirror="orders"))
    if steps == 2:
        await declare(js, "far", TopicSettings(mirror="copy"))
        await delete(js, "copy")
    name = "copy" if steps == 1 else "far"
    await delete(js, "orders")
    info = await promote(js, name)
    assert info.settings == TopicSettings(packs=False, prefix="orders")
    assert not (await open_topic(js, name)).settings.takes_packs


async def test_a_mirror_that_lags_is_promoted_only_with_allow_lag(js: JetStream) -> None:
    # Written to memory in a moment, and synced to the mirror's disk one by one for many seconds.
    count = 50_000
    await declare(js, "orders", TopicSettings(storage="memory"))
    for _ in range(count):
        js.connection.publish(b"orders.a", b"x")
    await eventually(lambda: messages(js, "orders"), count)
    await declare(js, "copy", TopicSettings(mirror="orders"))

    async def behind() -> bool:
        return ((await open_topic(js, "copy")).lag or 0) > 0

    await eventually(behind, True)
    await delete(js, "orders")
    with pytest.raises(TopicConflict, match="messages behind its origin"):
        await promote(js, "copy")
    info = await promote(js, "copy", allow_lag=True)
    assert (info.lag, info.prefix) == (None, "orders")
    assert info.messages < count


async def test_any_stream_can_be_mirrored_and_keeps_its_subjects(js: JetStream) -> None:
    await js.create_stream({"name": "OLD", "subjects": ["ev.*", "audit"]})
    await put(js.connection, "ev.a")
    await put(js.connection, "audit")
    info = await declare(js, "copy", TopicSettings(mirror="OLD"))
    assert (info.prefix, info.partitions[0].prefix) == (None, None)
    await eventually(lambda: subjects(js, "copy"), ["ev.a", "audit"])
    with pytest.raises(ConfigError, match="its subjects are unknown"):
        await promote(js, "copy")
    with pytest.raises(TopicConflict, match=r"promote_topic\(\.\.\.\) makes it a topic"):
        await edit(js, "copy", {"mirror": None})


# -- sources ------------------------------------------------------------------------------


async def test_sources_collect_several_topics_under_own_subjects(js: JetStream) -> None:
    await declare(js, "eu", TopicSettings(partitions=2))
    await declare(js, "us")
    await js.create_stream({"name": "OLD", "subjects": ["ev.*"]})
    for subject in ("eu.0.a", "eu.1.b", "us.c", "us.d", "ev.x", "ev.y"):
        await put(js.connection, subject)
    settings = TopicSettings(
        sources=["eu", Origin("us", filter="c"), Origin("OLD", filter="ev.x", start=1)]
    )
    info = await declare(js, "all", settings)

    async def seen() -> set[str]:
        return set(await subjects(js, "all"))

    await eventually(seen, {"all.a", "all.b", "all.c", "ev.x"})
    info = await open_topic(js, "all")
    assert [copy.stream for copy in info.partitions[0].copies] == ["OLD", "eu-0", "eu-1", "us"]
    assert (await declare(js, "all", settings)).created == info.created
    with pytest.raises(TopicConflict, match="sources is"):
        await declare(js, "all", TopicSettings(sources=["eu"]))


async def test_a_key_stays_in_its_partition_when_both_have_the_same_number(js: JetStream) -> None:
    await declare(js, "eu", TopicSettings(partitions=2))
    await put(js.connection, "eu.1.a")
    await declare(js, "all", TopicSettings(partitions=2, sources=["eu"]))
    await eventually(lambda: subjects(js, "all-1"), ["all.1.a"])
    with pytest.raises(ConfigError, match="a key keeps its partition only if"):
        await declare(js, "three", TopicSettings(partitions=3, sources=["eu"]))


async def test_events_of_two_origins_with_the_same_id_are_both_kept(js: JetStream) -> None:
    await declare(js, "eu")
    await declare(js, "us")
    for name in ("eu", "us"):
        await put(js.connection, f"{name}.a", headers={"Nats-Msg-Id": "7"})
    await declare(js, "all", TopicSettings(sources=["eu", "us"]))
    await eventually(lambda: subjects(js, "all"), ["all.a", "all.a"])


async def test_sources_can_be_changed_and_without_any_events_can_be_published(
    js: JetStream,
) -> None:
    await declare(js, "eu")
    await declare(js, "us")
    await declare(js, "all", TopicSettings(sources=["eu"]))
    await put(js.connection, "eu.a")
    await eventually(lambda: subjects(js, "all"), ["all.a"])
    await edit(js, "all", {"sources": ["eu", "us"]})
    await put(js.connection, "us.b")
    await eventually(lambda: subjects(js, "all"), ["all.a", "all.b"])
    info = await edit(js, "all", {"sources": []})
    assert info.settings == TopicSettings()
    assert await put(js.connection, "all.c") == 3


# -- beyond a leaf node -------------------------------------------------------------------


@pytest.fixture(scope="module")
def domains(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Broker, Broker]]:
    """A hub and a leaf node that is connected to it, each with its own JetStream domain."""
    data = tmp_path_factory.mktemp("hub")
    hub_settings = BrokerSettings(
        data=data, domain="hub", leaf=LeafSettings(port=0), durability=Durability.PERIODIC
    )
    with (
        running_broker(hub_settings) as hub,
        running_broker(domain="edge", leaf=leaf_of(data, leaf_port(data))) as edge,
    ):
        yield hub, edge


def leaf_port(hub: Path) -> int:
    return int(json.loads(next(hub.rglob("plan.json")).read_text())["ports"]["leaf"])


def leaf_of(hub: Path, port: int) -> LeafSettings:
    """What a leaf node needs to connect to a hub with this data folder and port."""
    login = read_credentials(hub, "leaf")
    remote = LeafRemote(f"nats-leaf://127.0.0.1:{port}", login.user, login.password)
    return LeafSettings(remotes=(remote,))


async def test_a_topic_of_another_domain_is_mirrored_and_collected(
    domains: tuple[Broker, Broker], connect: Connect
) -> None:
    hub, edge = domains
    at_hub, at_edge = JetStream(await connect(hub.url)), JetStream(await connect(edge.url))
    await declare(at_edge, "orders", TopicSettings(partitions=2))
    await put(at_edge.connection, "orders.1.a")
    across = JetStream(at_hub.connection, "edge")

    async def reachable() -> int:
        return (await open_topic(across, "orders")).messages

    await eventually(reachable, 1)
    there = Origin("orders", domain="edge")
    mirror = await declare(at_hub, "orders", TopicSettings(partitions=2, mirror=there))
    assert mirror.prefix == "orders"
    both = TopicSettings(sources=[there, Origin("orders", domain="edge", filter="z")])
    await declare(at_hub, "all", both)
    await eventually(lambda: offsets(at_hub, "orders-1"), [1])
    await eventually(lambda: subjects(at_hub, "all"), ["all.a"])
    await put(at_edge.connection, "orders.1.b")
    await eventually(lambda: offsets(at_hub, "orders-1"), [1, 2])
    # Only the part of the origin that is asked for, which is possible beyond a domain.
    part = Origin("orders", domain="edge", filter="b")
    await declare(at_hub, "part", TopicSettings(partitions=2, mirror=part))
    await eventually(lambda: offsets(at_hub, "part-1"), [2])


async def test_a_server_beyond_a_leaf_node_does_not_answer_for_this_one(
    domains: tuple[Broker, Broker], connect: Connect
) -> None:
    """Both hear the question, and here both have the same name."""
    hub, edge = domains
    at_hub, at_edge = JetStream(await connect(hub.url)), JetStream(await connect(edge.url))
    (here,) = (await declare(at_hub, "here")).partitions
    (there,) = (await declare(at_edge, "there")).partitions
    for _ in range(10):
        assert await durability_of(at_hub, here.config, here.leader) == "periodic"
        assert await durability_of(at_edge, there.config, there.leader) == "fsync"
    across = JetStream(at_hub.connection, "edge")
    assert await durability_of(across, there.config) == "unknown"


# -- replicas and durability --------------------------------------------------------------


async def test_a_cluster_replicates_and_reports_it(connect: Connect) -> None:
    async with running_cluster() as cluster:
        nodes = [JetStream(await connect(url)) for url in cluster.url.split(",")]
        js = nodes[0]
        info = await declare(js, "orders", TopicSettings(replicas=3))
        (part,) = info.partitions
        info = await open_topic(js, "orders")
        assert len(info.partitions[0].replicas) == 2
        assert info.partitions[0].leader is not None
        assert await durability_of(js, part.config, part.leader) == "replicated"
        # A single copy is stored on one node, and clients of the others learn what it reports.
        (part,) = (await declare(js, "alone")).partitions
        assert part.leader in {f"millstream-{node}" for node in cluster.nodes}
        asked = [await durability_of(node, part.config, part.leader) for node in nodes]
        assert asked == ["fsync", "fsync", "fsync"]
        assert await durability_of(js, part.config, "nobody") == "unknown"
        with pytest.raises(ConfigError):
            await edit(js, "orders", {"replicas": 7})
        info = await edit(js, "orders", {"replicas": 1})
        assert info.settings.replicas == 1


@pytest.mark.parametrize("durability", ["fsync", "periodic", "memory"])
async def test_a_client_learns_how_durable_an_ack_is(connect: Connect, durability: str) -> None:
    async with running_broker(durability=durability) as broker:
        js = JetStream(await connect(broker.url))
        file = await declare(js, "file")
        memory = await declare(js, "memory", TopicSettings(storage="memory"))
        early = await declare(js, "early", TopicSettings(early_ack=True))
        found = [
            await durability_of(js, info.partitions[0].config) for info in (file, memory, early)
        ]
        assert found == [durability, "memory", "memory"]


async def test_without_permission_to_ask_the_durability_is_unknown(connect: Connect) -> None:
    may = Permissions(publish=("$JS.API.>",))
    user = User("u", Secret("p"), permissions=may)
    async with running_broker(users=(user,)) as broker:
        js = JetStream(await connect(broker.url, user="u", password=Secret("p")))
        info = await declare(js, "orders")
        assert await durability_of(js, info.partitions[0].config) == "unknown"


# -- health -------------------------------------------------------------------------------

FOREIGN_SERVER = """
listen: "127.0.0.1:-1"
ports_file_dir: "{folder}"
jetstream {{ store_dir: "{folder}/js", cipher: aes, key: "{key}" }}
accounts {{
  app {{
    jetstream: enabled
    users: [{{ user: u, password: p }}]
    imports: [{{ service: {{ account: "$SYS", subject: "$SYS.REQ.SERVER.PING.HEALTHZ" }} }}]
  }}
  $SYS {{
    users: [{{ user: s, password: s }}]
    exports: [{{ service: "$SYS.REQ.SERVER.PING.HEALTHZ" }}]
  }}
}}
"""


async def run_foreign(folder: Path, key: str) -> tuple[asyncio.subprocess.Process, str]:
    """A server that was configured elsewhere; its address is read from its ports file."""
    config = folder / "server.conf"
    config.write_text(FOREIGN_SERVER.format(folder=folder, key=key))
    process = await asyncio.create_subprocess_exec(
        str(find_binary().path), "-c", str(config), "-l", str(folder / "log")
    )
    ports = folder / f"nats-server_{process.pid}.ports"

    async def written() -> bool:
        return ports.exists() and ports.read_text().endswith("}")

    await eventually(written, True)
    return process, json.loads(ports.read_text())["nats"][0]


async def test_nothing_is_created_on_a_server_that_could_not_read_its_data(
    connect: Connect, tmp_path: Path
) -> None:
    login = {"user": "u", "password": Secret("p")}

    async def on_server(key: str, work: Callable[[JetStream], Awaitable[None]]) -> None:
        process, url = await run_foreign(tmp_path, key)
        try:
            connection = await connect(url, **login)
            await work(JetStream(connection))
            await connection.close()
        finally:
            process.terminate()
            await process.wait()

    async def fill(js: JetStream) -> None:
        await declare(js, "orders")
        await put(js.connection, "orders.a", b"precious")

    async def refuse(js: JetStream) -> None:
        for name in ("orders", "other"):
            with pytest.raises(Unhealthy, match="could not be recovered"):
                await declare(js, name)

    async def check(js: JetStream) -> None:
        info = await declare(js, "orders")
        assert info.messages == 1

    await on_server("the right key", fill)
    await on_server("a wrong key", refuse)
    await on_server("the right key", check)


async def test_connection_settings_name_the_domain_to_talk_to(
    domains: tuple[Broker, Broker],
) -> None:
    hub, _ = domains
    connection = Connection(ConnectionSettings(urls=(hub.url,), domain="edge"))
    await connection.open()
    try:
        js = JetStream(connection)

        async def works() -> bool:
            return (await declare(js, "remote")).managed

        await eventually(works, True)
        local = JetStream(connection, "hub")
        with pytest.raises(TopicNotFound):
            await open_topic(local, "remote")
    finally:
        await connection.close()
