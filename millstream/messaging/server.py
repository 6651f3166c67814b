"""What a client can learn about the server behind a topic: its health, how durable an ack is."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from millstream.errors import NoResponders, PermissionDenied, RequestTimeout, Unhealthy
from millstream.messaging.event import Durability
from millstream.settings import DURABILITY_METADATA
from millstream.wire.connection import Connection
from millstream.wire.jetstream import JetStream
from millstream.wire.protocol import unique_token

__all__ = ["check_health", "durability_of"]

ASK_SECONDS: Final = 1.0  # these questions are answered by the server itself, or never
_HEALTH_SUBJECT: Final = "$SYS.REQ.SERVER.PING.HEALTHZ"
_OWN_SERVER_SUBJECT: Final = "$SYS.REQ.USER.INFO"
_ALL_SERVERS_SUBJECT: Final = "$SYS.REQ.ACCOUNT.PING.STATZ"
_PUBLISHED: Final = frozenset({"fsync", "periodic", "memory"})


class _Health(msgspec.Struct):
    status_code: int = 200
    error: str = ""


class _HealthAnswer(msgspec.Struct):
    data: _Health = msgspec.field(default_factory=_Health)


class _Server(msgspec.Struct):
    name: str = ""
    domain: str = ""
    metadata: dict[str, str] = {}


class _ServerAnswer(msgspec.Struct):
    server: _Server = msgspec.field(default_factory=_Server)


async def check_health(js: JetStream) -> None:
    """Raise Unhealthy if the server says that it could not read what it has stored.

    A server with a wrong encryption key looks empty, and creating a stream there deletes the old
    files. An embedded broker refuses to start like that. Elsewhere an account's users may ask only
    if the operator exports the service `$SYS.REQ.SERVER.PING.HEALTHZ` from $SYS and the account
    imports it; where nobody answers, nothing is known and nothing is raised. In a cluster another
    node's copy would be used, and a node that is catching up is unhealthy for a while: no check.
    """
    connection = js.connection
    if connection.info.cluster or js.domain:
        return
    try:
        _, answer = await connection.request(_HEALTH_SUBJECT, timeout=ASK_SECONDS)
        health = msgspec.json.decode(answer, type=_HealthAnswer).data
    except (NoResponders, PermissionDenied, RequestTimeout, msgspec.DecodeError):
        return
    if health.status_code != 200:
        raise Unhealthy(connection.url, health.error or f"status {health.status_code}")


async def durability_of(
    js: JetStream, config: Mapping[str, Any], leader: str | None = None
) -> Durability:
    """What holds for an event when its ack arrives, of a stream that `leader` leads.

    `replicated`: a majority of nodes has it. `memory`: it is gone when the broker stops. `fsync`
    and `periodic` depend on the server's own settings, which no user can ask for; a Millstream
    broker publishes them as server metadata. Where it is not published, it is `unknown`. A server
    can change it only by a restart, so an answer holds until the connection is lost.
    """
    if config.get("num_replicas", 1) > 1:
        return "replicated"
    if config.get("storage") == "memory" or config.get("persist_mode") == "async":
        return "memory"
    try:
        server = await _server(js, leader)
    except (NoResponders, PermissionDenied, RequestTimeout, msgspec.DecodeError):
        return "unknown"
    published = server.metadata.get(DURABILITY_METADATA, "")
    return published if published in _PUBLISHED else "unknown"


async def _server(js: JetStream, leader: str | None) -> _Server:
    """The server that keeps a stream; an empty value when it does not answer this user."""
    _, answer = await js.connection.request(_OWN_SERVER_SUBJECT, timeout=ASK_SECONDS)
    own = msgspec.json.decode(answer, type=_ServerAnswer).server
    if js.domain and js.domain != own.domain:
        return _Server()
    if leader is None or leader == own.name:
        return own
    return await _server_of_cluster(js.connection, leader)


async def _server_of_cluster(connection: Connection, name: str) -> _Server:
    """The server of that name, out of the answers of all."""
    found: asyncio.Future[_Server] = asyncio.get_running_loop().create_future()

    def answered(_subject: bytes, _reply: bytes, _headers: bytes, payload: bytes) -> None:
        try:
            server = msgspec.json.decode(payload, type=_ServerAnswer).server
        except msgspec.DecodeError:
            return
        if server.name == name and not found.done():
            found.set_result(server)

    inbox = f"{connection.settings.inbox_prefix}.{unique_token()}"
    interest = connection.subscribe(inbox, answered)
    try:
        connection.publish(_ALL_SERVERS_SUBJECT.encode(), b"", inbox.encode())
        async with asyncio.timeout(ASK_SECONDS):
            return await found
    except TimeoutError as error:
        raise RequestTimeout(_ALL_SERVERS_SUBJECT, ASK_SECONDS) from error
    finally:
        connection.unsubscribe(interest)
