"""Permissions: roles, tenants, listeners, certificates."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import nats.errors
import pytest

import millstream
from millstream.broker import (
    Account,
    Broker,
    BrokerSettings,
    Credentials,
    Permissions,
    Role,
    ServerTls,
    User,
)
from millstream.broker.monitoring import ALL_STREAMS, ask_server
from millstream.errors import ConfigError
from millstream.settings import Secret, Tls
from millstream.testing import running_broker
from tests.certificates import make_certificate
from tests.integration.broker.clients import (
    PATIENCE,
    client,
    login,
    publish,
    publish_guarded,
    stored,
    wait_until_async,
)

HOSTILE = """a"b\\c'd{e}f[g]h#i//j$k,l;m\tn\x01o\x7fpäq\nr include 'x' $2a$"""


REFUSED = "-ERR 'Authorization Violation'"


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    auditor = User("auditor", Secret("audit"), Role.READER, subscriptions=(("orders", "audit"),))
    narrow = User(
        "narrow",
        Secret("n"),
        permissions=Permissions(publish=("only.this",), subscribe=("_INBOX.>",)),
    )
    with running_broker(
        auth=True,
        accounts=(Account("acme", max_streams=1), Account("zeta")),
        users=(auditor, narrow),
    ) as running:
        yield running


@pytest.fixture(autouse=True)
async def orders(broker: Broker) -> None:
    """A stream with two events and a subscription, created by the admin."""
    async with client(broker.url, broker.credentials(Role.ADMIN)) as admin:
        jetstream = admin.jetstream()
        for info in await jetstream.streams_info():
            await jetstream.delete_stream(info.config.name)
        await jetstream.add_stream(name="orders", subjects=["orders.>"], allow_direct=True)
        await jetstream.publish("orders.x", b"1")
        await jetstream.publish("orders.x", b"2")
        await jetstream.add_consumer("orders", durable_name="audit", ack_policy="explicit")


async def refused(connection: Any, subject: str, body: object = None) -> bool:
    """Whether the server denies a publish to the subject."""
    before = len(connection.seen)
    payload = b"" if body is None else json.dumps(body).encode()
    await connection.publish(subject, payload)
    await connection.flush()
    return any("permissions violation" in words.lower() for words in connection.seen[before:])


def test_no_client_connects_without_a_password(broker: Broker) -> None:
    app = broker.credentials(Role.APP)
    assert login(broker.url, app.user, app.password.reveal()) == "PONG"
    for stranger in ({}, {"user": "app", "password": "guess"}, {"user": "anonymous"}):
        assert login(broker.url, **stranger) == REFUSED


async def test_a_reader_reads_everything_and_changes_nothing(broker: Broker) -> None:
    async with client(broker.url, broker.credentials(Role.READER)) as reader:
        jetstream = reader.jetstream()
        assert (await jetstream.stream_info("orders")).state.messages == 2
        assert (await jetstream.get_msg("orders", 1, direct=True)).data == b"1"
        assert (await jetstream.get_msg("orders", 2)).data == b"2"
        for subject, body in {
            "orders.x": None,
            "anything.else": None,
            "$JS.API.STREAM.CREATE.other": {"name": "other", "subjects": ["other"]},
            "$JS.API.STREAM.UPDATE.orders": {"name": "orders", "subjects": ["orders.>"]},
            "$JS.API.STREAM.DELETE.orders": None,
            "$JS.API.STREAM.PURGE.orders": None,
            "$JS.API.STREAM.MSG.DELETE.orders": {"seq": 1},
            "$JS.API.CONSUMER.CREATE.orders": {"stream_name": "orders", "config": {}},
            "$JS.API.CONSUMER.CREATE.orders.mine": {"stream_name": "orders", "config": {}},
            "$JS.API.CONSUMER.DURABLE.CREATE.orders.mine": {"stream_name": "orders"},
            "$JS.API.CONSUMER.DELETE.orders.audit": None,
            "$JS.API.CONSUMER.MSG.NEXT.orders.audit": None,
            "$JS.API.CONSUMER.PAUSE.orders.audit": None,
            "$JS.API.CONSUMER.RESET.orders.audit": None,
            "$JS.ACK.orders.audit.1.1.1.1.0": None,
            "$KV.bucket.key": None,
            "$JS.hub.API.STREAM.DELETE.orders": None,
        }.items():
            assert await refused(reader, subject, body), subject
    async with client(broker.url, broker.credentials(Role.ADMIN)) as admin:
        assert (await admin.jetstream().stream_info("orders")).state.messages == 2


async def test_a_reader_receives_live_events_but_joins_no_queue_group(broker: Broker) -> None:
    async with (
        client(broker.url, broker.credentials(Role.READER)) as reader,
        client(broker.url, broker.credentials(Role.APP)) as app,
    ):
        heard = await reader.subscribe("orders.>")
        stolen = await reader.subscribe("orders.>", queue="workers")
        await reader.flush()
        await app.publish("orders.x", b"live")
        await app.flush()
        assert (await heard.next_msg(PATIENCE)).data == b"live"
        await wait_until_async(lambda: "permissions violation" in str(reader.seen).lower())
        assert stolen.pending_msgs == 0


async def test_a_reader_may_be_given_subscriptions_to_pull_from(broker: Broker) -> None:
    who = Credentials("auditor", Secret("audit"), "reader", "main")
    async with client(broker.url, who) as auditor:
        subscription = await auditor.jetstream().pull_subscribe_bind("audit", "orders")
        (message,) = await subscription.fetch(1, timeout=PATIENCE)
        await message.ack_sync(timeout=PATIENCE)
        assert message.data == b"1"
        assert await refused(auditor, "orders.x")
        assert await refused(auditor, "$JS.API.CONSUMER.MSG.NEXT.orders.other")
        assert not auditor.seen or all("orders" in words for words in auditor.seen)


async def test_an_app_works_with_topics_but_cannot_destroy_them(broker: Broker) -> None:
    async with client(broker.url, broker.credentials(Role.APP)) as app:
        jetstream = app.jetstream()
        await jetstream.add_stream(name="apps", subjects=["apps.>"])
        assert (await jetstream.publish("orders.x", b"3")).seq
        subscription = await jetstream.pull_subscribe("orders.>", durable="apps-own")
        (message,) = await subscription.fetch(1, timeout=PATIENCE)
        await message.ack_sync(timeout=PATIENCE)
        await jetstream.delete_consumer("orders", "apps-own")
        for call in ("DELETE.orders", "PURGE.orders", "UPDATE.orders", "MSG.DELETE.orders"):
            assert await refused(app, f"$JS.API.STREAM.{call}"), call
            assert await refused(app, f"$JS.hub.API.STREAM.{call}"), call


async def test_own_permissions_replace_those_of_the_role(broker: Broker) -> None:
    who = Credentials("narrow", Secret("n"), "app", "main")
    async with client(broker.url, who) as narrow:
        await narrow.publish("only.this", b"")
        assert await refused(narrow, "only.that")
        assert not any("only.this" in words for words in narrow.seen)


async def test_tenants_do_not_see_each_other(broker: Broker) -> None:
    acme = broker.credentials(Role.ADMIN, "acme")
    zeta = broker.credentials(Role.ADMIN, "zeta")
    await publish(broker.url, b"acme's", stream="invoices", who=acme)
    async with client(broker.url, acme) as one, client(broker.url, zeta) as other:
        heard = await other.subscribe(">")
        await other.flush()
        await one.publish("invoices.x", b"secret")
        await one.publish("plain", b"secret")
        await one.flush()
        assert await other.jetstream().streams_info() == []
        with pytest.raises(nats.errors.Error, match="not found"):
            await other.jetstream().stream_info("invoices")
        await other.publish("marker", b"end")
        while (message := await heard.next_msg(PATIENCE)).subject != "marker":
            assert message.data != b"secret"
    async with client(broker.url, broker.credentials(Role.ADMIN)) as main:
        names = [info.config.name for info in await main.jetstream().streams_info()]
        assert "invoices" not in names


async def test_a_tenant_has_its_own_limits(broker: Broker) -> None:
    async with client(broker.url, broker.credentials(Role.ADMIN, "acme")) as acme:
        jetstream = acme.jetstream()
        await jetstream.add_stream(name="invoices", subjects=["invoices.>"])
        with pytest.raises(nats.errors.Error, match="maximum number of streams"):
            await jetstream.add_stream(name="more", subjects=["more.>"])


async def test_the_system_account_is_usable(broker: Broker) -> None:
    async with client(broker.url, broker.credentials("system")) as system:
        answer = await system.request("$SYS.REQ.SERVER.PING", b"", timeout=PATIENCE)
        assert json.loads(answer.data)["server"]["name"] == "millstream-n1"


async def test_loopback_needs_no_password_and_tenants_still_do() -> None:
    with running_broker(accounts=(Account("acme"),)) as open_broker:
        assert await publish(open_broker.url, b"1") == [1]
        acme = open_broker.credentials(Role.APP, "acme")
        await publish(open_broker.url, b"2", stream="own", who=acme)
        async with client(open_broker.url) as anonymous:
            names = [info.config.name for info in await anonymous.jetstream().streams_info()]
            assert names == ["orders"]
        async with client(open_broker.url, open_broker.credentials("system")) as system:
            assert (await system.request("$SYS.REQ.SERVER.PING", b"", timeout=PATIENCE)).data


async def test_passwords_and_paths_with_any_characters_reach_the_server(tmp_path: Path) -> None:
    folder = tmp_path / "a \"b\" 'c' {d} $e #f ä"
    user = User("ann", Secret(HOSTILE), Role.ADMIN)
    with Broker(BrokerSettings(data=folder, users=(user,))) as broker:
        who = Credentials("ann", Secret(HOSTILE), "admin", "main")
        assert await publish(broker.url, b"1", who=who) == [1]
        assert login(broker.url, "ann", HOSTILE[:-1]) == REFUSED


def listening(address: str) -> bool:
    """Whether the port accepts connections."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=PATIENCE).close()
    except ConnectionRefusedError:
        return False
    return True


async def test_an_open_broker_listens_to_the_network_and_its_monitor_does_not() -> None:
    with running_broker(host="0.0.0.0", auth=True, monitor_port=0) as broker:
        assert broker.url.startswith("nats://127.0.0.1:")
        # 127.0.0.2 represents any other address of this machine.
        assert listening(broker.url.replace("nats://127.0.0.1", "127.0.0.2"))
        assert listening(broker.monitor.removeprefix("http://"))
        assert not listening(broker.monitor.replace("http://127.0.0.1", "127.0.0.2"))
        await publish(broker.url, b"1", who=broker.credentials())
    with running_broker() as broker:
        assert not listening(broker.url.replace("nats://127.0.0.1", "127.0.0.2"))


# -- certificates -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for 127.0.0.1, and one for a client."""
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("server", "stranger"):
        make_certificate(folder, name)
    return folder


async def test_clients_connect_over_tls_and_unknown_ones_are_refused(certificates: Path) -> None:
    tls = ServerTls(
        certificates / "server.pem",
        certificates / "server.key",
        ca=certificates / "server.pem",
        verify=True,
    )
    trust = ssl.create_default_context(cafile=str(certificates / "server.pem"))
    with running_broker(tls=tls) as broker:
        assert broker.url.startswith("tls://")
        known = ssl.create_default_context(cafile=str(certificates / "server.pem"))
        known.load_cert_chain(certificates / "server.pem", certificates / "server.key")
        assert await publish(broker.url, b"1", tls=known) == [1]
        trust.load_cert_chain(certificates / "stranger.pem", certificates / "stranger.key")
        with pytest.raises(ssl.SSLError):
            login(broker.url, tls=trust)
        assert broker.health().ok
        assert await stored(broker.url, tls=known) == [b"1"]
        # The broker's own guard connects as well.
        pem, key = str(certificates / "server.pem"), str(certificates / "server.key")
        async with millstream.connect(broker.url, tls=Tls(pem, pem, key)) as mill:
            schema = {"type": "record", "name": "R", "fields": [{"name": "n", "type": "long"}]}
            topic = await mill.create_topic("guarded", schema=schema, guarded=True)
            await publish_guarded(topic, {"n": 1})
            assert [event.value["n"] async for event in topic.read()] == [1]


# -- new settings while it runs -----------------------------------------------------------


async def test_a_reload_adds_and_removes_users_without_dropping_connections(
    tmp_path: Path,
) -> None:
    ann = User("ann", Secret("a"), Role.ADMIN)
    bob = User("bob", Secret("b"), Role.READER)
    settings = BrokerSettings(data=tmp_path, users=(ann,))
    with Broker(settings) as broker:
        who = Credentials("ann", Secret("a"), "admin", "main")
        lost: list[str] = []

        async def note() -> None:
            lost.append("disconnected")

        async with client(broker.url, who, disconnected_cb=note) as connection:
            jetstream = connection.jetstream()
            await jetstream.add_stream(name="orders", subjects=["orders.>"])
            pid = broker.pid
            broker.reload(replace(settings, users=(ann, bob)))
            assert login(broker.url, "bob", "b") == "PONG"
            broker.reload(replace(settings, users=(ann, bob), accounts=(Account("acme"),)))
            assert (await jetstream.publish("orders.x", b"1")).seq == 1
            broker.reload(settings)
            assert login(broker.url, "bob", "b") == REFUSED
            assert (await jetstream.publish("orders.x", b"2")).seq == 2
            assert lost == []
            assert broker.pid == pid
        broker.restart()
        assert await stored(broker.url, who=who) == [b"1", b"2"]


async def test_a_reload_that_the_server_refuses_leaves_the_old_settings(tmp_path: Path) -> None:
    settings = BrokerSettings(data=tmp_path)
    with Broker(settings) as broker:
        for wrong, words in (
            (replace(settings, raw="nonsense: 1"), "nonsense"),
            (replace(settings, durability="periodic"), "not supported"),  # type: ignore[arg-type]
            (replace(settings, port=1), "cannot change the port"),
            (replace(settings, data=tmp_path / "other"), "cannot move"),
        ):
            with pytest.raises(ConfigError, match=words):
                broker.reload(wrong)
            assert broker.settings == settings
        await publish(broker.url, b"1")
        broker.restart()
        assert await stored(broker.url) == [b"1"]


async def test_a_user_removed_by_a_reload_is_cut_off(tmp_path: Path) -> None:
    ann = User("ann", Secret("a"), Role.ADMIN)
    bob = User("bob", Secret("b"), Role.READER)
    settings = BrokerSettings(data=tmp_path, users=(ann, bob))
    with Broker(settings) as broker:
        async with client(broker.url, user="bob", password="b") as connection:
            broker.reload(replace(settings, users=(ann,)))
            await wait_until_async(lambda: connection.is_closed)


# -- the monitoring port -------------------------------------------------------------------


@pytest.mark.parametrize("accounts", [(), (Account("acme"),)], ids=["users", "tenants"])
def test_a_broker_with_users_has_no_monitoring_port_and_reports_its_health(
    accounts: tuple[Account, ...],
) -> None:
    with running_broker(auth=not accounts, accounts=accounts) as broker:
        assert broker.monitor == ""
        assert '"http"' not in (broker.data / "nodes/n1/plan.json").read_text()
        assert "http" not in (broker.data / "nodes/n1/server.conf").read_text()
        health = broker.health()
        (node,) = health.nodes
        assert health.ok
        assert node.version
        assert node.store_limit > 0
        assert node.uptime >= 0


async def test_health_of_a_broker_with_users_lists_the_streams_of_all_accounts(
    broker: Broker,
) -> None:
    await publish(broker.url, b"1", stream="bills", who=broker.credentials(Role.ADMIN, "zeta"))
    found = {(stream.account, stream.name) for stream in broker.health().streams}
    assert {("main", "orders"), ("zeta", "bills")} <= found
    async with client(broker.url, broker.credentials(Role.ADMIN, "zeta")) as zeta:
        await zeta.jetstream().delete_stream("bills")


def test_who_asks_a_server_gets_no_answer_of_another(broker: Broker) -> None:
    where = {"client": broker.url, "credentials": str(broker.data / "credentials.json")}
    asked = {"/healthz": '{"status":', "/varz": '{"server_id":', ALL_STREAMS: '{"memory":'}

    def ask(path: str) -> list[str]:
        answers = [ask_server(where, path, 1 << 24, PATIENCE) for _ in range(40)]
        return [f"{path}: {text[:80]}" for _, text in answers if not text.startswith(asked[path])]

    with ThreadPoolExecutor() as pool:
        assert [wrong for found in pool.map(ask, [*asked] * 2) for wrong in found] == []


def test_a_monitoring_port_that_was_asked_for_is_open() -> None:
    with running_broker(auth=True, monitor_port=0) as broker:
        code, _ = ask_server({"http": broker.monitor}, "/varz", 1 << 20, PATIENCE)
        assert code == 200
        assert broker.health().ok


def test_a_broker_without_users_has_a_monitoring_port() -> None:
    with running_broker() as broker:
        assert broker.monitor.startswith("http://127.0.0.1:")


def test_a_wrong_password_of_the_system_user_is_reported_as_such(broker: Broker) -> None:
    file = broker.data / "credentials.json"
    kept = file.read_text()
    file.write_text(json.dumps({**json.loads(kept), "system": "guess"}))
    try:
        (node,) = broker.health().nodes
        assert not node.ok
        assert "Authorization Violation" in str(node.problem)
    finally:
        file.write_text(kept)
    assert broker.health().ok


async def test_a_reader_that_a_reload_adds_can_read(broker: Broker) -> None:
    before = broker.settings
    broker.reload(replace(before, users=(*before.users, User("late", Secret("l"), Role.READER))))
    try:
        who = Credentials("late", Secret("l"), "reader", "main")
        async with client(broker.url, who) as late:
            assert (await late.jetstream().stream_info("orders")).state.messages == 2
    finally:
        broker.reload(before)
