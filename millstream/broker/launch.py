"""Starts nodes: everything that is decided and written between the settings and the keepers.

The steps, in this order, because each relies on the one before:
 1. lock every node of the folder (nothing is written to a folder that another process owns)
 2. check that the folder was created for these nodes and opens with this key
 3. create the users, choose the ports, write configuration and plan
 4. if streams were stored with an unknown key, open them first with a server closed to clients
 5. start the keepers and wait until every server is ready
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import select
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from millstream.broker import beside
from millstream.broker.binary import ServerBinary, find_binary
from millstream.broker.certificate import certificate_names, trusted_file
from millstream.broker.config import (
    BrokerSettings,
    Durability,
    ServerTls,
    is_loopback,
)
from millstream.broker.credentials import (
    ANONYMOUS,
    CREDENTIALS_FILE,
    GeneratedUsers,
    generate_users,
)
from millstream.broker.folder import (
    NodeFolder,
    check_layout,
    free_port,
    node_folders,
    read_json,
    state_file,
    store_limit,
    store_of,
)
from millstream.broker.folder_users import save_accounts, with_folder_users
from millstream.broker.keys import StoreKey, check_key, new_record, resolve_key
from millstream.broker.private_files import write_private
from millstream.broker.render import ClusterPlan, NodePlan, Ports, closed_text, config_text
from millstream.broker.server_process import Launch, ServerNode
from millstream.broker.set_aside import aside_streams, set_aside
from millstream.deadline import Deadline
from millstream.errors import ConfigError, FolderLocked, PortTaken, WrongKey
from millstream.settings import Secret

__all__ = [
    "StartOptions",
    "launch_from_folder",
    "node_facts",
    "node_names",
    "render_node",
    "start_again",
    "start_nodes",
    "state_text",
]

logger = logging.getLogger("millstream.broker")

_PORT_ROUNDS: Final = 5  # attempts with other ports, if a free one was taken before we used it
_TRIAL_SECONDS: Final = 120.0  # for a trial start, however large the streams are
_MOST_NODES: Final = 9  # of a local cluster; more than five voters only slow it down


@dataclass(frozen=True, slots=True)
class StartOptions:
    """How to start nodes."""

    embedded: bool = True
    standby: bool = False
    timeout: float = 30.0  # seconds until ready
    restarts: int = 0  # restarts of a crashed server, each minute
    set_aside: tuple[str, ...] = ()  # streams to start without, as STREAM or ACCOUNT/STREAM


def node_names(settings: BrokerSettings, nodes: int) -> tuple[str, ...]:
    """n1, n2, ... or the name given to this node of a cluster that spans machines."""
    if settings.cluster is not None:
        if nodes != 1:
            raise ConfigError("a process that joins a cluster runs one node; leave out nodes")
        return (settings.cluster.node,)
    if not 1 <= nodes <= _MOST_NODES:
        raise ConfigError(f"nodes must be 1 to {_MOST_NODES}, not {nodes}")
    if nodes > 1 and not is_loopback(settings.host):
        raise ConfigError(
            f"a local cluster listens on loopback, not on {settings.host}. For a cluster on "
            f"several machines start one node on each and join them (--join)"
        )
    return tuple(f"n{number}" for number in range(1, nodes + 1))


def start_nodes(
    settings: BrokerSettings, names: tuple[str, ...], start: StartOptions
) -> tuple[ServerNode, ...]:
    """Start these nodes of the folder; after an error nothing is left running."""
    binary = find_binary()
    folders = tuple(NodeFolder(settings.data, name) for name in names)
    for folder in folders:
        folder.create()
    settings = with_folder_users(settings)
    with contextlib.ExitStack() as held:
        try:
            locks = [held.enter_context(_locked(folder)) for folder in folders]
        except FolderLocked:
            if not start.standby:
                raise
            held.close()
            return _stand_by(settings, folders, binary, start)
        clustered = len(names) > 1 or settings.cluster is not None
        check_layout(settings.data, names, clustered=clustered)
        if start.set_aside:
            set_aside(folders, start.set_aside)
        for stream in aside_streams(settings.data):
            logger.warning("%s", stream.text)
        key = resolve_key(settings, folders)
        users = generate_users(settings)
        unknown = [f for f in folders if not check_key(f, key) and f.holds_streams()]
        if unknown and not clustered:
            _try_key(settings, folders[0], users, key, (binary, locks[0]))
        for _ in range(_PORT_ROUNDS):
            launches = _write_plans(settings, folders, users, (key, binary, start))
            try:
                return _spawn(folders, launches, locks)
            except PortTaken as error:
                if _asked_for(settings, error.address):
                    raise
                logger.info("%s was taken in the meantime, trying other ports", error.address)
                for folder in folders:
                    folder.plan.unlink(missing_ok=True)
        raise ConfigError(f"no free ports were found in {_PORT_ROUNDS} attempts")


def start_again(folder: NodeFolder, launch: Launch) -> ServerNode:
    """Start a node as it last was, from the files in its folder."""
    with _locked(folder) as lock:
        return _spawn((folder,), (launch,), [lock])[0]


def launch_from_folder(
    folder: NodeFolder, binary: ServerBinary, key: StoreKey, start: StartOptions
) -> Launch:
    """How to start a node whose configuration is already written."""
    plan = read_json(folder.plan)
    if not plan or not folder.conf.exists():
        raise ConfigError(f"node {folder.name} of {folder.data} was never started")
    check_key(folder, key)
    single = not plan["clustered"]
    state = str(state_file(folder.data))
    record = new_record(folder, key)
    return Launch(
        binary=binary.path,
        embedded=start.embedded,
        single=single,
        timeout=start.timeout,
        restarts=start.restarts,
        health="/healthz?js-enabled-only=true" if plan["joined"] else "/healthz",
        monitor=plan["monitor"],
        environment=key.environment(),
        on_ready={
            state: state_text(folder.data),
            **({} if record is None else {str(folder.key): record}),
        },
        on_stop=(state,) if single else (),
        store=str(plan["store"]),
        max_memory=int(plan.get("max_server_memory", 0)),
        guard=(*beside.GUARD, str(folder.data), folder.name),
        capture=(*beside.CAPTURE, str(folder.data), folder.name),
        gateway=(*beside.GATEWAY, str(folder.data), folder.name),
        remove=(plan["store"],) if plan["durability"] == Durability.MEMORY else (),
    )


def _stand_by(
    settings: BrokerSettings,
    folders: tuple[NodeFolder, ...],
    binary: ServerBinary,
    start: StartOptions,
) -> tuple[ServerNode, ...]:
    """Wait for the owner to stop, then take over: same ports, same users, same streams."""
    if settings.durability is Durability.MEMORY:
        raise ConfigError("a standby of a memory-only broker would have nothing to take over")
    key = resolve_key(settings, folders)
    launches = [launch_from_folder(folder, binary, key, start) for folder in folders]
    handles = [folder.open_lock() for folder in folders]
    try:
        return _spawn(folders, launches, handles)
    finally:
        for handle in handles:
            os.close(handle)


def render_node(
    settings: BrokerSettings, folder: NodeFolder, users: GeneratedUsers, ports: dict[str, Ports]
) -> NodePlan:
    """The plan of one node, given the ports of all."""
    names = tuple(ports)
    before = read_json(folder.plan)
    store = Path(before.get("store") or store_of(folder, settings.durability))
    limits = settings.limits
    return NodePlan(
        settings=settings,
        name=f"{settings.name}-{folder.name}",
        store=store,
        run=folder.run,
        ports=ports[folder.name],
        users=users.users,
        system=users.system,
        anonymous=None if settings.secured else ANONYMOUS,
        leaf_users=users.leaf,
        # Keep the limit while it runs: the server refuses a reload that lowers it.
        max_file_store=limits.max_file_store
        or before.get("max_file_store")
        or store_limit(store, len(names)),
        max_memory_store=limits.max_memory_store or _quarter_of_memory(),
        cluster=_cluster_plan(settings, users, ports),
    )


def _cluster_plan(
    settings: BrokerSettings, users: GeneratedUsers, ports: dict[str, Ports]
) -> ClusterPlan | None:
    joined = settings.cluster
    if joined is not None:
        return ClusterPlan(joined.host, joined.routes, joined.secret, joined.tls)
    if len(ports) == 1:
        return None
    routes = tuple(f"127.0.0.1:{one.cluster}" for one in ports.values())
    return ClusterPlan("127.0.0.1", routes, users.cluster_secret)


def _write_plans(
    settings: BrokerSettings,
    folders: tuple[NodeFolder, ...],
    users: GeneratedUsers,
    how: tuple[StoreKey, ServerBinary, StartOptions],
) -> list[Launch]:
    key, binary, start = how
    ports = choose_ports(settings, folders)
    for folder in folders:
        folder.plan.unlink(missing_ok=True)  # an earlier store must not be taken for this one
        plan = render_node(settings, folder, users, ports)
        write_private(str(folder.conf), config_text(plan))
        write_private(str(folder.closed), closed_text(plan))
        write_private(str(folder.plan), json.dumps(node_facts(settings, plan, len(folders))))
    save_accounts(settings, users)
    return [launch_from_folder(folder, binary, key, start) for folder in folders]


def node_facts(settings: BrokerSettings, plan: NodePlan, nodes: int) -> dict[str, object]:
    """What is needed to start the node again and to describe it to others; no secrets."""
    scheme = "nats" if settings.tls is None else "tls"
    host = settings.host if settings.host not in ("0.0.0.0", "::") else "127.0.0.1"
    bracketed = f"[{host}]" if ":" in host else host
    key_file = None if settings.encryption is None else settings.encryption.key_file
    return {
        "url": f"{scheme}://{bracketed}:{plan.ports.client}",
        "monitor": _monitor(settings, plan, f"{bracketed}:{plan.ports.client}"),
        "ports": asdict(plan.ports),
        "store": str(plan.store),
        "max_file_store": plan.max_file_store,
        "max_server_memory": settings.limits.max_server_memory or _memory() * 3 // 4,
        "durability": str(settings.durability),
        "clustered": nodes > 1 or settings.cluster is not None,
        "joined": settings.cluster is not None,
        "secured": settings.secured,
        "tls": settings.tls is not None,
        **beside.planned(settings, plan, nodes),
        "client_tls": None if settings.tls is None else _client_tls(settings.tls),
        "tls_names": [] if settings.tls is None else certificate_names(settings.tls),
        "tls_trusted": settings.tls and str(trusted_file(settings.tls).absolute()),
        "encrypted": settings.encryption is not None,
        "key_file": None if key_file is None else str(key_file),
    }


def _monitor(settings: BrokerSettings, plan: NodePlan, address: str) -> dict[str, object]:
    """How to ask the node about itself; see `ask_server`."""
    if plan.ports.monitor:
        return {"http": f"http://127.0.0.1:{plan.ports.monitor}"}
    tls = settings.tls
    files = None
    if tls is not None:
        cert, key = str(Path(tls.cert).absolute()), str(Path(tls.key).absolute())
        files = {"cert": cert, "key": key, "first": tls.handshake_first}
    if settings.operator is not None:
        return {"client": address, "creds": str(settings.operator.system_creds), "tls": files}
    return {"client": address, "credentials": str(settings.data / CREDENTIALS_FILE), "tls": files}


def _client_tls(tls: ServerTls) -> dict[str, object]:
    """How a client on this machine connects to the server: it trusts the server's certificate.

    Only that very one, whoever signed it, and under any name: the certificate of a server that
    others reach by its name is seldom for 127.0.0.1 as well.
    """
    return {
        "pin": str(Path(tls.cert).absolute()),
        "cert": str(Path(tls.cert).absolute()) if tls.verify else None,
        "key": str(Path(tls.key).absolute()) if tls.verify else None,
        "handshake_first": tls.handshake_first,
    }


def choose_ports(settings: BrokerSettings, folders: tuple[NodeFolder, ...]) -> dict[str, Ports]:
    """The ports of every node: as configured, else as last time, else free ones."""
    taken: set[int] = set()
    chosen: dict[str, Ports] = {}
    leaf = settings.leaf
    # The monitoring port asks for no password and shows the topics and users of every account.
    watched = settings.monitor_port is not None or not (settings.secured or settings.accounts)
    for index, folder in enumerate(folders):
        before = read_json(folder.plan).get("ports", {})

        def pick(
            kind: str, host: str, asked: int, before: dict[str, int] = before, index: int = index
        ) -> int:
            if asked:
                return asked + index
            return free_port(host, int(before.get(kind, 0)), taken)

        cluster = 0
        if settings.cluster is not None:
            cluster = pick("cluster", settings.cluster.host, settings.cluster.port)
        elif len(folders) > 1:
            cluster = pick("cluster", "127.0.0.1", 0)
        chosen[folder.name] = Ports(
            client=pick("client", settings.host, settings.port),
            monitor=pick("monitor", "127.0.0.1", settings.monitor_port or 0) if watched else 0,
            cluster=cluster,
            leaf=0 if leaf is None or leaf.port is None else pick("leaf", leaf.host, leaf.port),
            kafka=0 if index else beside.kafka_port(settings, before.get("kafka", 0), taken),
        )
    return chosen


def _asked_for(settings: BrokerSettings, address: str) -> bool:
    """Whether the settings ask for the taken port, so that no other will do."""
    asked = [settings.port, settings.monitor_port or 0]
    asked += [settings.leaf.port or 0] if settings.leaf is not None else []
    asked += [settings.cluster.port] if settings.cluster is not None else []
    port = int(address.rpartition(":")[2])
    return any(one and one <= port < one + _MOST_NODES for one in asked)


def _try_key(
    settings: BrokerSettings,
    folder: NodeFolder,
    users: GeneratedUsers,
    key: StoreKey,
    how: tuple[ServerBinary, int],
) -> None:
    """Open streams of unknown origin with a server that no client can use, to test the key.

    A server on the real port would be open to clients before a wrong key is noticed, and the
    first client that creates a stream of the same name would destroy the stored one.
    """
    binary, lock = how
    previous = folder.plan.read_text(encoding="utf-8") if folder.plan.exists() else None
    folder.plan.unlink(missing_ok=True)  # not on the ports that clients use
    closed = replace(
        settings,
        port=0,
        monitor_port=None,
        leaf=None,
        auth=settings.operator is None,  # its accounts are the names of the stored streams' folders
        users=(),
        callout=None,
        kafka=None,
        raw="",
    )
    locked_out = replace(
        users,
        users=tuple(replace(user, password=_random_password(), nkey=None) for user in users.users),
    )
    plan = render_node(closed, folder, locked_out, choose_ports(closed, (folder,)))
    write_private(str(folder.conf), config_text(plan))
    write_private(str(folder.plan), json.dumps(node_facts(closed, plan, 1)))
    node = ServerNode(folder)
    try:
        node.spawn(
            Launch(
                binary=binary.path,
                embedded=True,
                single=True,
                timeout=_TRIAL_SECONDS,
                monitor=read_json(folder.plan)["monitor"],
                environment=key.environment(),
            ),
            lock,
        )
        node.await_ready()
        node.stop(grace=10.0)
    except WrongKey:
        if settings.encryption is not None and settings.encryption.key is None:
            logger.warning("the stored key does not open %s", settings.data)
        raise
    finally:
        folder.conf.unlink(missing_ok=True)
        folder.plan.unlink(missing_ok=True)
        if previous is not None:
            write_private(str(folder.plan), previous)


def _random_password() -> Secret:
    return Secret(secrets.token_urlsafe(24))


def _spawn(
    folders: tuple[NodeFolder, ...], launches: list[Launch] | tuple[Launch, ...], locks: list[int]
) -> tuple[ServerNode, ...]:
    nodes = tuple(ServerNode(folder) for folder in folders)
    try:
        for node, launch, lock in zip(nodes, launches, locks, strict=True):
            node.spawn(launch, lock)
        _await_all(nodes, launches[0])
    except BaseException:
        for node in nodes:
            if node.keeper_pid and not launches[0].embedded:
                node.terminate()
            node.abandon()
        raise
    return nodes


def _await_all(nodes: tuple[ServerNode, ...], launch: Launch) -> None:
    """Wait for every node, in the order in which they report; the first failure ends the wait."""
    pending = {node.report_pipe: node for node in nodes}
    deadline = Deadline(launch.timeout + launch.grace)
    while pending:
        readable, _, _ = select.select(list(pending), [], [], deadline.left())
        for pipe in readable or list(pending):
            pending.pop(pipe).await_ready()


@contextlib.contextmanager
def _locked(folder: NodeFolder) -> Iterator[int]:
    handle = folder.lock()
    try:
        yield handle
    finally:
        os.close(handle)  # keeper and server have their own copies


def state_text(data: Path) -> str:
    """What clients on this machine need to find the broker."""
    plans = {folder.name: read_json(folder.plan) for folder in node_folders(data)}
    first = next(iter(plans.values()))
    state = {
        "url": ",".join(str(plan["url"]) for plan in plans.values() if plan),
        "data": str(data),
        "nodes": list(plans),
        "durability": first.get("durability"),
        "secured": first.get("secured"),
        "tls": first.get("tls"),
        "client_tls": first.get("client_tls"),
    }
    return json.dumps(state)


def _quarter_of_memory() -> int:
    """Streams in memory must leave room for applications and Spark on the same machine."""
    return _memory() // 4


def _memory() -> int:
    """Bytes of RAM of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
