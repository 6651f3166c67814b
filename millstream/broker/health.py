"""Health of the servers, as typed values from what they tell about themselves."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from millstream.broker.folder import NodeFolder, read_json
from millstream.broker.log_ends import LogEnds, loss_text
from millstream.broker.monitoring import ALL_STREAMS_AND_CONSUMERS, NODE_REQUESTS, ask_server
from millstream.errors import BrokerError
from millstream.settings import parse_duration

__all__ = [
    "NODE_REQUESTS",
    "ConsumerHealth",
    "Health",
    "LogLoss",
    "NodeAddress",
    "NodeHealth",
    "StreamHealth",
    "broker_health",
    "cluster_health",
    "cluster_names",
    "losses_of",
    "node_address",
    "node_health",
    "read_stream",
]

# What nodes of a cluster say about themselves: server name -> kind of request -> answer.
Answers = Mapping[str, Mapping[str, dict[str, Any]]]

_ANSWER_BYTES: Final = 64 * 1024 * 1024  # about 100,000 streams and consumers in one answer
_ANSWER_SECONDS: Final = 10.0  # a stopped server refuses immediately; a busy one may take its time
_HELP: Final = {
    "no space left on device": "the disk is full and the stream accepts nothing; free some "
    "space, and the broker restarts itself within seconds",
    "write error": "the disk failed; the stream accepts nothing until the broker is restarted",
    "is not current": "this replica is catching up with the others. If it never does, after all "
    "nodes lost power under 'periodic': export the topic, then set its replicas to 1 and back, "
    "which keeps one replica, perhaps a shorter one",
    "recovered": "do not create it again: that would destroy the stored data",
}


@dataclass(frozen=True, slots=True)
class ConsumerHealth:
    """One consumer (subscription) of a stream."""

    name: str
    pending: int  # messages not delivered yet
    ack_pending: int  # delivered, not acknowledged
    redelivered: int


@dataclass(frozen=True, slots=True)
class StreamHealth:
    """One stream (a partition of a topic)."""

    account: str
    name: str
    messages: int
    bytes: int
    first: int  # sequence of the oldest message
    last: int  # sequence of the newest
    replicas: int
    leader: str | None  # server that leads it; None on a single node or while there is none
    nodes: tuple[str, ...]  # servers that keep a copy, by name; empty on a single node
    storage: str  # "file" or "memory"
    consumers: tuple[ConsumerHealth, ...]


@dataclass(frozen=True, slots=True)
class LogLoss:
    """A log that has become shorter; reported until its stream is deleted."""

    account: str
    stream: str
    last: int  # sequence where it ended when this was found
    marked: int | None  # last sequence at the checkpoint before, if there was one
    marked_at: str | None  # when; ISO 8601, UTC
    cut: bool  # the server truncated its file at a start
    found: str  # when; ISO 8601, UTC
    lost: tuple[int, int] | None  # first and last sequence that are gone; None: a torn write only
    accepted: str | None  # who accepted it, and when; None: nobody
    text: str  # all of this in words

    @property
    def open(self) -> bool:
        """Whether events are gone and no operator has accepted it."""
        return self.lost is not None and self.accepted is None


@dataclass(frozen=True, slots=True)
class NodeHealth:
    """One server."""

    name: str
    ok: bool
    problem: str | None  # in one sentence, with what to do
    version: str
    uptime: float  # seconds
    memory: int  # resident bytes
    cpu: float  # percent of one core
    connections: int
    store_used: int  # bytes of streams on disk
    store_limit: int
    memory_store_used: int  # bytes of streams in memory
    memory_store_limit: int
    disk_free: int  # bytes free on the disk of the data folder; 0 if it is on another machine
    meta_leader: str | None  # the cluster's leader, as this node sees it
    streams: tuple[StreamHealth, ...]
    losses: tuple[LogLoss, ...] = ()  # events lost to a damaged disk

    @property
    def open_losses(self) -> tuple[LogLoss, ...]:
        """Losses of events that no operator has accepted."""
        return tuple(loss for loss in self.losses if loss.open)

    @property
    def leads(self) -> int:
        """How many streams it leads; a single node leads all."""
        return sum(stream.leader in (None, self.name) for stream in self.streams)


@dataclass(frozen=True, slots=True)
class Health:
    """Health of all nodes."""

    ok: bool  # every node is ok, and every loss of events was accepted
    durability: str
    nodes: tuple[NodeHealth, ...]
    meta_leader: str | None  # server that leads the cluster; None on a single node

    @property
    def losses(self) -> tuple[LogLoss, ...]:
        """Logs that have become shorter, on any node."""
        return tuple(loss for node in self.nodes for loss in node.losses)

    @property
    def streams(self) -> tuple[StreamHealth, ...]:
        """Every stream once, as its leader sees it."""
        found: dict[tuple[str, str], StreamHealth] = {}
        for node in self.nodes:
            for stream in node.streams:
                key = (stream.account, stream.name)
                if key not in found or stream.leader == node.name:
                    found[key] = stream
        return tuple(found[key] for key in sorted(found))


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """Where to ask a node."""

    name: str
    monitor: dict[str, Any]  # see `ask_server`
    store: Path | None  # None: on another machine
    ends: Path | None = None  # the keeper's checkpoints of its logs


def node_address(folder: NodeFolder) -> NodeAddress:
    """Where to ask the node of this folder."""
    plan = read_json(folder.plan)
    store = Path(plan.get("store", folder.store))
    return NodeAddress(folder.name, plan.get("monitor", {}), store, folder.ends)


def broker_health(durability: str, nodes: Iterable[NodeAddress]) -> Health:
    """Ask every node; one that does not answer counts as not ok."""
    return _health(durability, tuple(node_health(node) for node in nodes))


def cluster_names(streams: Mapping[str, Any]) -> set[str]:
    """The nodes of a cluster besides the one that gave this answer to JSZ, running or not."""
    replicas = (streams.get("meta_cluster") or {}).get("replicas") or ()
    return {str(replica.get("name", "")) for replica in replicas}


def cluster_health(
    durability: str, answers: Answers, own: Iterable[NodeHealth] = (), wanted: Iterable[str] = ()
) -> Health:
    """All nodes of a cluster, from what those say that can be reached.

    `own` are nodes that were asked directly, which tells more; `wanted` the names of nodes that
    should have answered.
    """
    known = {node.name: node for node in own}
    names = {*known, *answers, *wanted}
    for said in answers.values():
        names |= cluster_names(said.get("JSZ", {}))
    for name in names.difference(known):
        known[name] = _answered(name, answers.get(name, {}))
    return _health(durability, tuple(known[name] for name in sorted(names)))


def _answered(name: str, said: Mapping[str, dict[str, Any]]) -> NodeHealth:
    node = NodeAddress(name, {}, None)
    if len(said) < len(NODE_REQUESTS):
        return _silent(node, "it does not answer the other nodes")
    health = said["HEALTHZ"]
    problem = None if health.get("status") == "ok" else _problem(json.dumps(health))
    return read_node(node, said["VARZ"], said["JSZ"], problem)


def _health(durability: str, nodes: tuple[NodeHealth, ...]) -> Health:
    leaders = [node.meta_leader for node in nodes if node.meta_leader]
    return Health(
        ok=bool(nodes) and all(node.ok and not node.open_losses for node in nodes),
        durability=durability,
        nodes=nodes,
        meta_leader=leaders[0] if leaders else None,
    )


def node_health(node: NodeAddress) -> NodeHealth:
    """Ask one node."""
    code, body = ask_server(node.monitor, "/healthz", wait=_ANSWER_SECONDS)
    if code == 0:
        return _silent(node, f"it does not answer on {_address(node)} ({body})")
    try:
        facts = _ask(node, "/varz")
        streams = _ask(node, ALL_STREAMS_AND_CONSUMERS)
    except BrokerError as error:
        return _silent(node, str(error))
    return read_node(node, facts, streams, None if code == 200 else _problem(body))


def read_node(
    node: NodeAddress, facts: dict[str, Any], streams: dict[str, Any], problem: str | None
) -> NodeHealth:
    """The answers of /varz and /jsz as one value (pure, except for the free disk space)."""
    jetstream = facts.get("jetstream", {})
    limits, used = jetstream.get("config", {}), jetstream.get("stats", {})
    return NodeHealth(
        name=str(facts.get("server_name", node.name)),
        ok=problem is None,
        problem=problem,
        version=str(facts.get("version", "")),
        uptime=_uptime(str(facts.get("uptime", "0s"))),
        memory=int(facts.get("mem", 0)),
        cpu=float(facts.get("cpu", 0.0)),
        connections=int(facts.get("connections", 0)),
        store_used=int(used.get("storage", 0)),
        store_limit=int(limits.get("max_storage", 0)),
        memory_store_used=int(used.get("memory", 0)),
        memory_store_limit=int(limits.get("max_memory", 0)),
        disk_free=_disk_free(node.store),
        meta_leader=streams.get("meta_cluster", {}).get("leader") or None,
        streams=tuple(
            read_stream(str(account.get("name", "")), stream)
            for account in streams.get("account_details") or ()
            for stream in account.get("stream_detail") or ()
        ),
        losses=() if node.ends is None else losses_of(node.ends),
    )


def losses_of(ends: Path) -> tuple[LogLoss, ...]:
    """The losses that a node's keeper has found; the node need not run."""
    try:
        known = LogEnds.read(str(ends)).losses
        return tuple(
            LogLoss(
                account=str(loss["stream"]).partition("/")[0],
                stream=str(loss["stream"]).partition("/")[2],
                last=int(loss["last"]),
                marked=loss["marked"],
                marked_at=loss["marked_at"],
                cut=bool(loss["cut"]),
                found=str(loss["found"]),
                lost=(loss["lost"][0], loss["lost"][1]) if loss.get("lost") else None,
                accepted=_accepted(loss.get("accepted")),
                text=loss_text(loss),
            )
            for loss in known
        )
    except (ValueError, KeyError, TypeError):
        return ()


def _accepted(accepted: dict[str, Any] | None) -> str | None:
    if not accepted:
        return None
    return f"{accepted.get('by') or 'unknown'}, {accepted.get('at')}"


def read_stream(account: str, detail: Mapping[str, Any]) -> StreamHealth:
    """One stream from what /jsz or the JetStream API says about it."""
    state, config = detail.get("state", {}), detail.get("config") or {}
    cluster = detail.get("cluster") or {}
    peers = [cluster.get("leader"), *(peer.get("name") for peer in cluster.get("replicas") or ())]
    return StreamHealth(
        account=account,
        name=str(detail.get("name", "")),
        messages=int(state.get("messages", 0)),
        bytes=int(state.get("bytes", 0)),
        first=int(state.get("first_seq", 0)),
        last=int(state.get("last_seq", 0)),
        replicas=int(config.get("num_replicas", 1)),
        leader=cluster.get("leader") or None,
        nodes=tuple(sorted(str(peer) for peer in peers if peer)),
        storage=str(config.get("storage", "file")),
        consumers=tuple(
            ConsumerHealth(
                name=str(consumer.get("name", "")),
                pending=int(consumer.get("num_pending", 0)),
                ack_pending=int(consumer.get("num_ack_pending", 0)),
                redelivered=int(consumer.get("num_redelivered", 0)),
            )
            for consumer in detail.get("consumer_detail") or ()
        ),
    )


def _ask(node: NodeAddress, path: str) -> dict[str, Any]:
    code, body = ask_server(node.monitor, path, _ANSWER_BYTES, _ANSWER_SECONDS)
    if code != 200:
        raise BrokerError(f"{_address(node)} answered {path} with {code}: {body[:200]}")
    try:
        answer = json.loads(body)
    except ValueError as error:
        raise BrokerError(f"{_address(node)} did not answer with JSON: {error}") from error
    return answer if isinstance(answer, dict) else {}


def _address(node: NodeAddress) -> str:
    return str(node.monitor.get("http") or node.monitor.get("client"))


def _problem(body: str) -> str:
    try:
        text = str(json.loads(body).get("error", body))
    except (ValueError, AttributeError):
        text = body.strip()
    advice = next((help_ for words, help_ in _HELP.items() if words in text), None)
    return text if advice is None else f"{text}: {advice}"


def _silent(node: NodeAddress, problem: str) -> NodeHealth:
    free = _disk_free(node.store)
    lost = () if node.ends is None else losses_of(node.ends)
    return NodeHealth(
        node.name, False, problem, "", 0.0, 0, 0.0, 0, 0, 0, 0, 0, free, None, (), lost
    )


def _disk_free(store: Path | None) -> int:
    try:
        return 0 if store is None else shutil.disk_usage(store).free
    except OSError:
        return 0


def _uptime(text: str) -> float:
    """Seconds from the server's "1y2d3h4m5s"."""
    years = re.match(r"(\d+)y", text)
    rest = text[years.end() :] if years else text
    return (int(years[1]) * 365 * 86400 if years else 0) + (parse_duration(rest) if rest else 0.0)
