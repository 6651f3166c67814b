"""What a client can learn about the server of a topic: its health, how durable an ack is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from millstream.errors import (
    NoResponders,
    NotDurable,
    PermissionDenied,
    RequestTimeout,
    Unhealthy,
)
from millstream.events.event import Durability
from millstream.messaging.topics.demand import (
    ALL_SERVERS,
    ALL_SERVERS_BODY,
    OWN_SERVER,
    Server,
    ServerAnswer,
    by_settings,
    nodes_to_ask,
    published_by,
    shortfall_among,
)
from millstream.messaging.topics.info import PartitionInfo, TopicInfo
from millstream.messaging.topics.lookup import side_by_side
from millstream.wire.aio.connection import Connection
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.protocol import status_of, unique_token

__all__ = [
    "check_health",
    "durabilities_of",
    "durability_of",
    "is_clustered",
    "own_server",
    "shortfall_of",
]

ASK_SECONDS: Final = 1.0  # the server answers these requests itself, or never
# In a cluster that has just formed, a server may miss the first request.
ASK_TRIES: Final = 4
_HEALTH_SUBJECT: Final = "$SYS.REQ.SERVER.PING.HEALTHZ"


class _Health(msgspec.Struct):
    status_code: int = 200
    error: str = ""


class _Answer(ServerAnswer):
    data: _Health = msgspec.field(default_factory=_Health)  # the rest is ignored


async def check_health(js: JetStream) -> None:
    """Raise Unhealthy if the server reports that it could not read what it has stored.

    A server with a wrong encryption key looks empty, and creating a stream there deletes the old
    files. An embedded broker refuses to start then. Elsewhere an account's users may ask only
    if the operator exports the service `$SYS.REQ.SERVER.PING.HEALTHZ` from $SYS and the account
    imports it; without an answer the health is unknown and nothing is raised. In a cluster another
    node's copy would be used, and a node that is catching up is unhealthy for a while: no check.
    """
    connection = js.connection
    if is_clustered(connection) or js.domain:
        return
    try:
        answer = await _ask(connection, _HEALTH_SUBJECT, _is_own(connection))
    except (NoResponders, PermissionDenied, RequestTimeout):
        return
    health = answer.data
    if health.status_code != 200:
        raise Unhealthy(connection.url, health.error or f"status {health.status_code}")


async def durability_of(
    js: JetStream, config: Mapping[str, Any], leader: str | None = None
) -> Durability:
    """What holds for an event when its ack arrives, of a stream that `leader` leads.

    `replicated`: a majority of nodes has it. `memory`: it is lost when the broker stops. `fsync`
    and `periodic` depend on the server's own settings, which users cannot ask for; a Millstream
    broker publishes them as server metadata. Where it is not published, it is `unknown`. A server
    can change it only by a restart, so an answer holds until the connection is lost.
    """
    return by_settings(config) or await _published(js, leader)


async def _published(js: JetStream, node: str | None) -> Durability:
    try:
        return published_by(await _server(js, node))
    except (NoResponders, PermissionDenied, RequestTimeout):
        return "unknown"


async def durabilities_of(js: JetStream, info: TopicInfo) -> list[Durability]:
    """What an ack of each partition guarantees; each node is asked once."""
    parts = {_asked(part): part for part in info.partitions}
    found = await side_by_side(
        lambda part: durability_of(js, part.config, part.leader), parts.values()
    )
    known = dict(zip(parts, found, strict=True))
    return [known[_asked(part)] for part in info.partitions]


def _asked(part: PartitionInfo) -> tuple[Any, ...]:
    """What the durability of a partition depends on."""
    return part.leader, *map(part.config.get, ("num_replicas", "storage", "persist_mode"))


async def shortfall_of(js: JetStream, info: TopicInfo) -> NotDurable | None:
    """What is missing of the durability that a topic demands; None: nothing."""
    nodes = list(nodes_to_ask(info))
    found = await side_by_side(lambda node: _published(js, node), nodes)
    return shortfall_among(info, dict(zip(nodes, found, strict=True)))


async def own_server(js: JetStream) -> Server:
    """The server that this client is connected to."""
    connection = js.connection
    return (await _ask(connection, OWN_SERVER, _is_own(connection))).server


async def _server(js: JetStream, leader: str | None) -> Server:
    """The server that stores a stream; an empty value if it is unknown."""
    connection = js.connection
    own = await own_server(js)
    domain = js.domain or own.domain
    if leader is None:
        alone = domain == own.domain and not is_clustered(connection)
        return own if alone else Server()
    if (leader, domain) == (own.name, own.domain):
        return own

    def leads(server: Server) -> bool:
        return (server.name, server.domain) == (leader, domain)

    return (await _ask(connection, ALL_SERVERS, leads, ALL_SERVERS_BODY)).server


def is_clustered(connection: Connection) -> bool:
    """Whether the server is one of several; a leaf node calls itself a cluster of its own name."""
    return connection.info.cluster not in (None, "", connection.info.server_name)


def _is_own(connection: Connection) -> Callable[[Server], bool]:
    return lambda server: server.id == connection.info.server_id


async def _ask(
    connection: Connection, subject: str, wanted: Callable[[Server], bool], body: bytes = b""
) -> _Answer:
    """The first answer of a wanted server; servers beyond leaf nodes answer these requests too."""
    found: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()

    def answered(_subject: bytes, _reply: bytes, headers: bytes, payload: bytes) -> None:
        if found.done():
            return
        try:
            answer = msgspec.json.decode(payload, type=_Answer)
        except msgspec.DecodeError:
            if status_of(headers)[0] == 503:
                found.set_exception(NoResponders(subject))
            return
        if wanted(answer.server):
            found.set_result(answer)

    def denied(error: PermissionDenied) -> None:
        if error.subject == subject and not found.done():
            found.set_exception(error)

    inbox = f"{connection.settings.inbox_prefix}.{unique_token()}"
    interest = connection.subscribe(inbox, answered)
    connection.on_denied.append(denied)
    try:
        for _ in range(ASK_TRIES):
            connection.publish(subject.encode(), body, inbox.encode())
            await asyncio.wait([found], timeout=ASK_SECONDS)
            if found.done():
                return found.result()
        raise RequestTimeout(subject, ASK_TRIES * ASK_SECONDS)
    finally:
        connection.on_denied.remove(denied)
        connection.unsubscribe(interest)
