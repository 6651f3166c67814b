"""Unmodified clients of Kafka log in: SASL PLAIN and SCRAM, with and without TLS."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import millstream
from millstream.broker import Broker, Role, User
from millstream.deadline import Deadline
from millstream.gateways import access as access_module
from millstream.gateways.access import Logins
from millstream.gateways.kafka.calls import Call, KafkaSession
from millstream.gateways.kafka.protocol import Api, ErrorCode, api_versions
from millstream.gateways.kafka.sasl_calls import SaslCalls
from millstream.gateways.kafka.server import KafkaConnection
from millstream.gateways.listener import Listener, Transport
from millstream.gateways.overload import Books
from millstream.gateways.settings import GatewaySettings
from millstream.settings import Secret
from millstream.testing import running_broker
from tests.certificates import make_certificate

MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
ANN = User("ann", Secret("ann-password"))
PATIENCE = 60.0  # seconds, for what takes milliseconds on a machine that is not busy


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with running_broker(auth=True, users=(ANN, User("rea", Secret("r"), Role.READER))) as running:
        yield running


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOK_SECONDS", "SOON_SECONDS"):
        monkeypatch.setattr(access_module, name, 0.02)


class Gateway:
    """A gateway that knows a client's login, and has no topics."""

    def __init__(self, listener: Listener, logins: Logins) -> None:
        self.listener = listener
        self.logins = logins
        self.sessions: list[KafkaSession] = []
        self.handlers = {
            Api.API_VERSIONS: self._versions,
            Api.METADATA: self._metadata,
            Api.DESCRIBE_CLUSTER: self._cluster,
            **SaslCalls(logins).handlers(),
        }

    def connected(self, transport: Transport) -> KafkaConnection:
        session = KafkaSession(transport.host)
        if not self.logins.required:
            session.access = self.logins.open_access()
        self.sessions.append(session)
        return KafkaConnection(transport, session, self.handlers)

    async def _versions(self, _call: Call) -> Mapping[str, Any]:
        return api_versions()

    async def _metadata(self, call: Call) -> Mapping[str, Any]:
        return {**self._about(call, "node_id"), "topics": []}

    async def _cluster(self, call: Call) -> Mapping[str, Any]:
        return {
            **self._about(call, "broker_id"),
            "error_code": ErrorCode.none,
            "error_message": None,
        }

    def _about(self, call: Call, number: str) -> dict[str, Any]:
        assert call.session.access is not None
        here = {number: 1, "host": "127.0.0.1", "port": self.listener.port, "rack": None}
        name = f"user-{call.session.access.user}"
        return {"brokers": [here], "cluster_id": name, "controller_id": 1}


@asynccontextmanager
async def gateway(broker: Broker, **values: Any) -> AsyncIterator[Gateway]:
    settings = await asyncio.to_thread(lambda: GatewaySettings(**values))
    who = broker.credentials(Role.ADMIN)
    made: list[Gateway] = []
    async with millstream.connect(broker.url, user=who.user, password=who.password) as mill:
        logins = Logins(mill, settings, broker.data)
        await logins.start()
        listener = Listener(settings, lambda transport: made[0].connected(transport), Books())
        made.append(Gateway(listener, logins))
        await listener.start()
        try:
            yield made[0]
        finally:
            await listener.stop()
            await logins.stop()


def librdkafka(port: int, mechanism: str, **more: Any) -> Any:
    """A client of librdkafka that logs in as ann."""
    admin = pytest.importorskip("confluent_kafka.admin")
    settings = {
        "bootstrap.servers": f"127.0.0.1:{port}",
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": mechanism,
        "sasl.username": "ann",
        "sasl.password": "ann-password",
    }
    return admin.AdminClient(settings | more)


def cluster_of(make: Callable[[], Any]) -> str:
    """What the gateway says to a client about itself; it has the user's name in it."""
    return str(make().list_topics(timeout=PATIENCE).cluster_id)


def refusal_of(make: Callable[..., Any]) -> str:
    """Why a client of librdkafka was refused."""
    from confluent_kafka import KafkaError, KafkaException

    errors: list[KafkaError] = []
    client = make(error_cb=errors.append)
    deadline = Deadline(PATIENCE)
    while not deadline.passed:
        with pytest.raises(KafkaException):
            client.list_topics(timeout=0.2)
        client.poll(0)
        found = [one.str() for one in errors if one.code() == KafkaError._AUTHENTICATION]
        if found:
            return found[0]
    return f"not refused: {errors}"


@pytest.mark.parametrize("mechanism", MECHANISMS)
async def test_librdkafka_logs_in(broker: Broker, mechanism: str) -> None:
    async with gateway(broker) as running:
        make = partial(librdkafka, running.listener.port, mechanism)
        assert await asyncio.to_thread(cluster_of, make) == "user-ann"


@pytest.mark.parametrize("mechanism", MECHANISMS)
async def test_librdkafka_is_refused_with_a_wrong_password(broker: Broker, mechanism: str) -> None:
    async with gateway(broker) as running:
        wrong = {"sasl.password": "wrong"}
        make = partial(librdkafka, running.listener.port, mechanism, **wrong)
        assert "wrong user or password" in await asyncio.to_thread(refusal_of, make)


@pytest.mark.parametrize("mechanism", MECHANISMS)
async def test_librdkafka_logs_in_over_tls(broker: Broker, mechanism: str, tmp_path: Path) -> None:
    cert = await asyncio.to_thread(make_certificate, tmp_path)
    files = {"tls_cert": cert, "tls_key": cert.with_suffix(".key")}
    async with gateway(broker, **files) as running:
        tls = {"security.protocol": "SASL_SSL", "ssl.ca.location": str(cert)}
        make = partial(librdkafka, running.listener.port, mechanism, **tls)
        assert await asyncio.to_thread(cluster_of, make) == "user-ann"


@pytest.mark.parametrize("mechanism", MECHANISMS)
async def test_aiokafka_logs_in(broker: Broker, mechanism: str) -> None:
    aiokafka = pytest.importorskip("aiokafka.admin")
    async with gateway(broker) as running:
        client = aiokafka.AIOKafkaAdminClient(
            bootstrap_servers=f"127.0.0.1:{running.listener.port}",
            security_protocol="SASL_PLAINTEXT",
            sasl_mechanism=mechanism,
            sasl_plain_username="ann",
            sasl_plain_password="ann-password",
        )
        await client.start()
        try:
            assert (await client.describe_cluster())["cluster_id"] == "user-ann"
        finally:
            await client.close()
    assert not running.sessions[0].access or not running.sessions[0].access.in_use


@pytest.mark.parametrize("mechanism", MECHANISMS)
async def test_kafka_python_logs_in(broker: Broker, mechanism: str) -> None:
    kafka = pytest.importorskip("kafka")

    def cluster(port: int) -> str:
        client = kafka.KafkaAdminClient(
            bootstrap_servers=f"127.0.0.1:{port}",
            security_protocol="SASL_PLAINTEXT",
            sasl_mechanism=mechanism,
            sasl_plain_username="ann",
            sasl_plain_password="ann-password",
        )
        try:
            return str(client.describe_cluster()["cluster_id"])
        finally:
            client.close()

    async with gateway(broker) as running:
        assert await asyncio.to_thread(cluster, running.listener.port) == "user-ann"


# -- on the wire ------------------------------------------------------------------------------


class Client:
    """A client that sends what it should not."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, api: Api, version: int, body: bytes) -> bytes:
        """The answer's body; `b""` if the connection is closed instead."""
        frame = struct.pack(">hhih", api, version, 7, -1) + body
        self.writer.write(struct.pack(">i", len(frame)) + frame)
        return await self.answer()

    async def answer(self) -> bytes:
        try:
            (size,) = struct.unpack(">i", await self.reader.readexactly(4))
            return (await self.reader.readexactly(size))[4:]
        except (asyncio.IncompleteReadError, ConnectionResetError):
            return b""

    async def handshake(self, mechanism: str = "PLAIN", version: int = 1) -> int:
        name = mechanism.encode()
        body = struct.pack(">h", len(name)) + name
        return code_of(await self.ask(Api.SASL_HANDSHAKE, version, body))

    async def token(self, token: bytes) -> int:
        body = struct.pack(">i", len(token)) + token
        return code_of(await self.ask(Api.SASL_AUTHENTICATE, 1, body))

    async def log_in(self, user: str = "ann", password: str = "ann-password") -> int:
        assert await self.handshake() == 0
        return await self.token(f"\0{user}\0{password}".encode())


def code_of(answer: bytes) -> int:
    assert answer, "the connection was closed"
    return int(struct.unpack_from(">h", answer)[0])


@asynccontextmanager
async def client_of(running: Gateway) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", running.listener.port)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


METADATA = struct.pack(">i", 0) + b"\0"  # version 4, of no topics


async def test_a_client_that_is_not_logged_in_may_ask_for_nothing(broker: Broker) -> None:
    async with gateway(broker) as running, client_of(running) as client:
        assert await client.ask(Api.METADATA, 4, METADATA) == b""


async def test_a_failed_login_closes_the_connection(broker: Broker) -> None:
    async with gateway(broker) as running:
        for password in ("wrong", ""):
            async with client_of(running) as client:
                assert (
                    await client.log_in(password=password) == ErrorCode.sasl_authentication_failed
                )
                assert await client.answer() == b""


async def test_steps_in_the_wrong_order_are_refused(broker: Broker) -> None:
    async with gateway(broker) as running:
        async with client_of(running) as client:
            assert await client.token(b"\0ann\0ann-password") == ErrorCode.illegal_sasl_state
            assert await client.answer() == b""
        async with client_of(running) as client:
            assert await client.handshake() == 0
            assert await client.handshake() == ErrorCode.illegal_sasl_state
            assert await client.answer() == b""
        async with client_of(running) as client:
            assert await client.handshake("GSSAPI") == ErrorCode.unsupported_sasl_mechanism
            assert await client.answer() == b""
        async with client_of(running) as client:
            assert await client.handshake(version=0) == ErrorCode.unsupported_version
            assert await client.answer() == b""


async def test_a_client_may_log_in_again_as_the_same_user_only(broker: Broker) -> None:
    async with gateway(broker) as running:
        async with client_of(running) as client:
            assert await client.log_in() == 0
            assert await client.log_in() == 0
            assert await client.ask(Api.METADATA, 4, METADATA) != b""
            assert await client.log_in("rea", "r") == ErrorCode.sasl_authentication_failed
            assert await client.answer() == b""
        (session,) = running.sessions
        assert session.user == "ann"


async def test_a_request_before_the_login_is_small(broker: Broker) -> None:
    large = METADATA + bytes(65 * 1024)
    async with gateway(broker) as running:
        async with client_of(running) as client:
            client.writer.write(struct.pack(">i", 65 * 1024))
            assert await client.answer() == b""
        async with client_of(running) as client:
            assert await client.log_in() == 0
            assert await client.ask(Api.METADATA, 4, large) != b""


async def test_a_client_without_need_to_log_in_hears_that(broker: Broker) -> None:
    async with gateway(broker, auth=False) as running, client_of(running) as client:
        assert await client.ask(Api.METADATA, 4, METADATA) != b""
        assert await client.handshake() == ErrorCode.illegal_sasl_state
        assert await client.answer() == b""


async def test_connections_of_a_removed_user_are_closed() -> None:
    with running_broker(auth=True, users=(ANN,)) as broker:
        async with gateway(broker) as running, client_of(running) as client:
            assert await client.log_in() == 0
            without = replace(broker.settings, users=())
            await asyncio.to_thread(broker.reload, without)
            assert await client.answer() == b""


async def test_a_login_is_tried_again_while_the_broker_is_away() -> None:
    with running_broker(auth=True, users=(ANN,)) as broker:
        async with gateway(broker) as running:
            await asyncio.to_thread(broker.stop)
            async with client_of(running) as client:
                assert await client.handshake() == 0
                token = b"\0ann\0ann-password"
                body = struct.pack(">i", len(token)) + token
                assert await client.ask(Api.SASL_AUTHENTICATE, 1, body) == b""
            await asyncio.to_thread(broker.start)
            async with client_of(running) as client:
                assert await client.log_in() == 0
