"""Where in a cluster the partitions of a topic are: spread over the nodes, as are their leaders.

On its own the server puts each new stream of one copy on the node with the most free space, so that
all partitions of a topic end up on one node; leaders of replicated streams it chooses at random.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from millstream.deadline import Deadline
from millstream.errors import NoResponders, NotReplicated, PermissionDenied, RequestTimeout
from millstream.messaging.topics.durability import own_server
from millstream.messaging.topics.lookup import side_by_side
from millstream.settings import node_tag
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.api import ClusterInfo, ErrorCode, StreamInfo

__all__ = ["create_spread", "leader_moves", "spread_leaders", "without_placement"]

_EXCLUDED: Final = f"!{node_tag('')}"
SETTLE_SECONDS: Final = 1.0  # for new replicas to catch up, before leaders are moved
LEADER_SECONDS: Final = 5.0  # for the elections after that
PAUSE_SECONDS: Final = 0.02

Create = Callable[[dict[str, Any]], Awaitable[StreamInfo]]
T = TypeVar("T")


async def create_spread(
    js: JetStream, create: Create, configs: Sequence[dict[str, Any]], there: Iterable[StreamInfo]
) -> list[StreamInfo]:
    """Create the streams of a topic, as many on each node as on the others.

    The streams that are `there` count. A stream of one copy names the nodes it must not be on, by
    the tags that a Millstream broker gives its nodes; other servers have none and choose
    themselves.
    """
    if not configs or configs[0].get("num_replicas", 1) > 1 or not await _has_tags(js):
        return await side_by_side(lambda config: _coroutine(create(config)), configs)
    counts = Counter(_leader(info) for info in there)
    created: list[StreamInfo] = []
    # One after the other until no node is left without a stream: then all nodes are known.
    for number, config in enumerate(configs):
        full = [node for node in counts if node]
        try:
            info = await create({**config, "placement": {"tags": _tags(full)}} if full else config)
        except NotReplicated as error:
            if error.err_code != ErrorCode.NO_SUITABLE_PEERS or not full:
                raise
            homes = least_used(counts, len(configs) - number)
            rest = [
                (config, [node for node in full if node != home])
                for config, home in zip(configs[number:], homes, strict=True)
            ]
            return created + await side_by_side(lambda pair: _create_at(create, *pair), rest)
        created.append(info)
        counts[_leader(info)] += 1
    return created


def least_used(counts: Counter[str], number: int) -> list[str]:
    """The nodes for that many new streams: each goes to the one that has the fewest by then.

    >>> least_used(Counter(n1=2, n2=1, n3=1), 4)
    ['n2', 'n3', 'n1', 'n2']
    """
    used = Counter({node: count for node, count in counts.items() if node})
    homes = []
    for _ in range(number):
        home = min(sorted(used), key=lambda node: used[node])
        used[home] += 1
        homes.append(home)
    return homes


async def _create_at(create: Create, config: dict[str, Any], excluded: list[str]) -> StreamInfo:
    try:
        return await create({**config, "placement": {"tags": _tags(excluded)}})
    except NotReplicated:
        return await create(config)  # that node is down now


async def _coroutine(awaitable: Awaitable[T]) -> T:
    return await awaitable


def _tags(excluded: Iterable[str]) -> list[str]:
    return [f"!{node_tag(node)}" for node in sorted(excluded)]


def _leader(info: StreamInfo) -> str:
    return (info.cluster or ClusterInfo()).leader


async def _has_tags(js: JetStream) -> bool:
    """Whether the server is a cluster node of a Millstream broker, in the same domain."""
    if js.domain or js.connection.info.cluster in (None, ""):
        return False
    try:
        server = await own_server(js)
    except (NoResponders, PermissionDenied, RequestTimeout):
        return False
    return node_tag(server.name) in server.tags


def without_placement(config: Mapping[str, Any]) -> dict[str, Any]:
    """A stream's configuration without what `create_spread` added, which has done its work.

    More replicas need the other nodes.
    """
    result = dict(config)
    placement = dict(config.get("placement") or {})
    tags = [tag for tag in placement.pop("tags", ()) if not tag.startswith(_EXCLUDED)]
    if tags:
        placement["tags"] = tags
    result.pop("placement", None)
    return {**result, "placement": placement} if placement else result


# -- leaders ------------------------------------------------------------------------------


def leader_moves(streams: Sequence[StreamInfo]) -> dict[str, str]:
    """Which streams need another leader so that each node leads as many as the others.

    A leader stays where it is unless its node leads too many. Only replicas that are current are
    chosen: another one would first have to catch up.
    """
    leads = Counter(_leader(info) for info in streams)
    moves: dict[str, str] = {}
    # Those of the busiest nodes first: one of another node might move in vain.
    for info in sorted(streams, key=lambda info: -leads[_leader(info)]):
        peers, leader = (info.cluster or ClusterInfo()).replicas, _leader(info)
        others = [peer.name for peer in peers if peer.current and not peer.offline]
        if not leader or not others:
            continue
        target = min(sorted(others), key=lambda node: leads[node])
        if leads[leader] - leads[target] > 1:
            moves[info.config["name"]] = target
            leads[leader] -= 1
            leads[target] += 1
    return moves


async def spread_leaders(js: JetStream, streams: Sequence[StreamInfo]) -> int:
    """Move leaders so that each node leads as many of these streams as the others; how many.

    Only admins may. Events are stored meanwhile: a publish that finds no leader is sent again.
    """
    names = [info.config["name"] for info in streams]
    if not _uneven(streams):
        return 0
    deadline = Deadline(SETTLE_SECONDS)
    while not deadline.passed and not all(map(_settled, streams)):
        await asyncio.sleep(PAUSE_SECONDS)
        streams = await side_by_side(js.stream_info, names)
    moves = leader_moves(streams)
    for stream, target in moves.items():
        await js.ask(f"STREAM.LEADER.STEPDOWN.{stream}", {"placement": {"preferred": target}})
    await side_by_side(lambda stream: _led(js, stream), list(moves))
    return len(moves)


def _uneven(streams: Sequence[StreamInfo]) -> bool:
    leads = Counter(_leader(info) for info in streams)
    nodes = {peer.name for info in streams for peer in (info.cluster or ClusterInfo()).replicas}
    counts = [leads[node] for node in nodes | leads.keys() if node]
    return bool(counts) and max(counts) - min(counts) > 1


def _settled(info: StreamInfo) -> bool:
    """Whether it has a leader and replicas that have caught up, unless they are down."""
    peers = (info.cluster or ClusterInfo()).replicas
    return bool(_leader(info)) and all(peer.current or peer.offline for peer in peers)


async def _led(js: JetStream, stream: str) -> None:
    """Wait until a stream has a leader again."""
    deadline = Deadline(LEADER_SECONDS)
    while not deadline.passed:
        if _leader(await js.stream_info(stream)):
            return
        await asyncio.sleep(PAUSE_SECONDS)
