"""The health of a broker that is asked over a connection, and not through its data folder."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from millstream.broker.health import (
    NODE_REQUESTS,
    Health,
    NodeHealth,
    StreamHealth,
    cluster_health,
    cluster_names,
    read_stream,
)
from millstream.errors import NoResponders, PermissionDenied, RequestTimeout
from millstream.messaging.topics.demand import ALL_SERVERS, ALL_SERVERS_BODY, OWN_SERVER
from millstream.settings import DURABILITY_METADATA

if TYPE_CHECKING:
    from millstream.mill import Mill
    from millstream.wire.api import ConsumerInfo, StreamInfo

__all__ = ["AccountStatus", "NodeSeen", "account_status", "ask_cluster"]

QUIET_SECONDS: Final = 1.5  # without another answer; a node that runs answers at once
ANSWER_SECONDS: Final = 10.0
NODES_MAX: Final = 1000
_NOT_ALLOWED: Final = (NoResponders, PermissionDenied, RequestTimeout)


async def ask_cluster(mill: Mill, own: Iterable[NodeHealth] = ()) -> Health | None:
    """Ask every node of the cluster, as the user of the system account; None: this is another user.

    `own` are the nodes that were asked directly.
    """
    try:
        first = await mill.request("$SYS.REQ.SERVER.PING.JSZ", b"{}", timeout=ANSWER_SECONDS)
    except _NOT_ALLOWED:
        return None
    content = json.loads(first.data)
    names = {content["server"]["name"], *cluster_names(content.get("data", {}))}
    answers: dict[str, dict[str, Any]] = {}

    async def ask(kind: str) -> None:
        found = await mill.gather(
            f"$SYS.REQ.SERVER.PING.{kind}",
            json.dumps(NODE_REQUESTS[kind]),
            limit=len(names),
            quiet=QUIET_SECONDS,
            timeout=ANSWER_SECONDS,
        )
        for message in found:
            said = json.loads(message.data)
            answers.setdefault(said["server"]["name"], {})[kind] = said.get("data", {})

    await asyncio.gather(*map(ask, NODE_REQUESTS))
    return cluster_health(_durability(content["server"]), answers, own, names)


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """What any user learns about a node."""

    name: str
    ok: bool
    problem: str | None
    version: str


@dataclass(frozen=True, slots=True)
class AccountStatus:
    """What a user of an account that is not the system account learns about the broker."""

    ok: bool  # every node answers, and every stream has a leader
    account: str
    durability: str
    nodes: tuple[NodeSeen, ...]
    streams: tuple[StreamHealth, ...]


async def account_status(mill: Mill) -> AccountStatus:
    """The nodes, as far as they answer, and the streams and consumers of this user's account."""
    said = await _servers(mill)
    streams, away = [], set()
    account = await _account(mill)
    for info in await mill.jetstream.streams():
        consumers = await mill.jetstream.consumers(str(info.config["name"]))
        streams.append(read_stream(account, _as_detail(info, consumers)))
        peers = [] if info.cluster is None else info.cluster.replicas
        away |= {peer.name for peer in peers if peer.offline} - set(said)
    nodes = [NodeSeen(name, True, None, str(one.get("ver", ""))) for name, one in said.items()]
    nodes += [NodeSeen(name, False, "it does not answer", "") for name in away]
    led = not _clustered(mill) or all(stream.leader for stream in streams)
    published = {_durability(one) for one in said.values()}
    return AccountStatus(
        ok=led and not away,
        account=account,
        durability=", ".join(sorted(published)) or "unknown",
        nodes=tuple(sorted(nodes, key=lambda node: node.name)),
        streams=tuple(streams),
    )


def _as_detail(info: StreamInfo, consumers: list[ConsumerInfo]) -> dict[str, Any]:
    """A stream of the JetStream API in the form in which servers describe theirs."""
    state, cluster = info.state, info.cluster
    return {
        "name": info.config["name"],
        "config": info.config,
        "state": {name: getattr(state, name) for name in state.__struct_fields__},
        "cluster": None
        if cluster is None
        else {
            "leader": cluster.leader,
            "replicas": [{"name": peer.name} for peer in cluster.replicas],
        },
        "consumer_detail": [
            {name: getattr(one, name) for name in one.__struct_fields__} for one in consumers
        ],
    }


async def _servers(mill: Mill) -> dict[str, dict[str, Any]]:
    """What the servers say to any user, by name; at least the one that is connected to."""
    own = mill.connection.info
    said: dict[str, dict[str, Any]] = {own.server_name: {"ver": own.version}}
    limit = NODES_MAX if _clustered(mill) else 1
    try:
        answers = await mill.gather(
            ALL_SERVERS, ALL_SERVERS_BODY, limit=limit, quiet=QUIET_SECONDS, timeout=ANSWER_SECONDS
        )
    except _NOT_ALLOWED:
        return said
    servers = [json.loads(message.data)["server"] for message in answers]
    return said | {server["name"]: server for server in servers}


def _durability(server: Mapping[str, Any]) -> str:
    return str(server.get("metadata", {}).get(DURABILITY_METADATA, "unknown"))


def _clustered(mill: Mill) -> bool:
    """Whether the server is one of several; a leaf node calls itself a cluster of its own name."""
    info = mill.connection.info
    return info.cluster not in (None, "", info.server_name)


async def _account(mill: Mill) -> str:
    try:
        answer = json.loads((await mill.request(OWN_SERVER)).data)
    except _NOT_ALLOWED:
        return ""
    return str(answer.get("data", {}).get("account", ""))
