"""How durable an ack is, and whether that is what a topic demands. Pure.

Whether the disk is synced depends on the server's own settings, which users cannot ask for; a
Millstream broker publishes them as server metadata. The clients ask the nodes that
`nodes_to_ask` names, and what they answer is judged here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from millstream.errors import NotDurable
from millstream.settings import DURABILITY_METADATA

if TYPE_CHECKING:
    from millstream.events.event import Durability
    from millstream.messaging.topics.info import PartitionInfo, TopicInfo

__all__ = [
    "ALL_SERVERS",
    "ALL_SERVERS_BODY",
    "DEMANDS",
    "OWN_SERVER",
    "Server",
    "ServerAnswer",
    "by_settings",
    "nodes_to_ask",
    "published_by",
    "shortfall",
    "shortfall_among",
]

OWN_SERVER: Final = "$SYS.REQ.USER.INFO"
ALL_SERVERS: Final = "$SYS.REQ.ACCOUNT.PING.STATZ"
# Otherwise only those servers answer that have a client of the account.
ALL_SERVERS_BODY: Final = b'{"include_unused": true}'

# What satisfies each demand; a replicated event survives what a page cache does not.
DEMANDS: Final[dict[str, frozenset[Durability]]] = {
    "fsync": frozenset({"fsync"}),
    "replicated": frozenset({"replicated"}),
    "periodic": frozenset({"periodic", "fsync", "replicated"}),
}


class Server(msgspec.Struct):
    """What a server says about itself to any user."""

    id: str = ""
    name: str = ""
    domain: str = ""
    metadata: dict[str, str] = {}
    tags: list[str] = []


class ServerAnswer(msgspec.Struct):
    """An answer to `OWN_SERVER` or `ALL_SERVERS`; the rest of it is ignored."""

    server: Server = msgspec.field(default_factory=Server)


def published_by(server: Server) -> Durability:
    """What a server does with an event before its ack, as far as it says so."""
    published = server.metadata.get(DURABILITY_METADATA, "")
    known: dict[str, Durability] = {"fsync": "fsync", "periodic": "periodic", "memory": "memory"}
    return known.get(published, "unknown")


def by_settings(config: Mapping[str, Any]) -> Durability | None:
    """The durability that follows from a stream's own settings; None: it depends on the server."""
    if config.get("num_replicas", 1) > 1:
        return "replicated"
    if config.get("storage") == "memory" or config.get("persist_mode") == "async":
        return "memory"
    return None


def shortfall(topic: str, demanded: str | None, given: Sequence[Durability]) -> NotDurable | None:
    """The error for a topic whose servers do less than it demands; None: they do enough.

    >>> shortfall("orders", "fsync", ["fsync", "unknown"]).found
    'unknown'
    >>> shortfall("orders", "periodic", ["fsync", "replicated"])
    """
    if demanded is None:
        return None
    less = [one for one in given if one not in DEMANDS[demanded]]
    return NotDurable(topic, demanded, less[0]) if less else None


def nodes_to_ask(info: TopicInfo) -> set[str | None]:
    """The nodes that decide whether a topic's demand is met; None: the only one there is."""
    if info.settings.durability is None:
        return set()
    return {node for part in info.partitions for node in _nodes(part, info.settings.durability)}


def shortfall_among(
    info: TopicInfo, published: Mapping[str | None, Durability]
) -> NotDurable | None:
    """What is missing of what a topic demands, by what those nodes publish; None: nothing."""
    demanded = info.settings.durability
    if demanded is None:
        return None
    given: list[Durability] = []
    for part in info.partitions:
        found, nodes = by_settings(part.config), _nodes(part, demanded)
        if found is None:
            found = published.get(part.leader, "unknown")
        elif nodes:
            said = [published.get(node, "unknown") for node in nodes]
            found = of_majority(part.config.get("num_replicas", 1), said)
        given.append(found)
    return shortfall(info.name, demanded, given)


def _nodes(part: PartitionInfo, demanded: str) -> list[str | None]:
    found = by_settings(part.config)
    if found is None:
        return [part.leader]
    if found == "replicated" and demanded == "fsync" and part.config.get("storage") != "memory":
        replicas = [replica.node for replica in part.replicas if not replica.offline]
        return [node for node in (part.leader, *replicas) if node]
    return []


def of_majority(replicas: int, published: Sequence[Durability]) -> Durability:
    """What the nodes of a replicated stream do by themselves before the ack.

    A majority has to say so; a node that does not answer may be down.

    >>> of_majority(3, ["fsync", "fsync", "unknown"]), of_majority(3, ["fsync"])
    ('fsync', 'unknown')
    >>> of_majority(3, ["fsync", "fsync", "periodic"])
    'periodic'
    """
    weak: tuple[Durability, ...] = ("memory", "periodic")
    for one in weak:
        if one in published:
            return one
    return "fsync" if list(published).count("fsync") > replicas // 2 else "unknown"
