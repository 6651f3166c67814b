"""Brokers that outlive the process that started them: `millstream up`, `down`, `status`."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from millstream.broker.binary import find_binary
from millstream.broker.config import BrokerSettings, Encryption
from millstream.broker.folder import NodeFolder, node_folders, read_json, state_file
from millstream.broker.gateway_processes import GatewayProcess, await_gateways, gateways_of
from millstream.broker.health import Health, LogLoss, broker_health, losses_of, node_address
from millstream.broker.keys import resolve_key
from millstream.broker.launch import (
    StartOptions,
    launch_from_folder,
    node_names,
    start_again,
    start_nodes,
)
from millstream.broker.reload import reload_nodes
from millstream.broker.set_aside import AsideStream, aside_streams
from millstream.deadline import Deadline
from millstream.errors import BrokerError, ConfigError, NotRunning
from millstream.settings import Tls

__all__ = [
    "CaptureProcess",
    "GuardState",
    "NodeState",
    "State",
    "down",
    "kill_node",
    "read_health",
    "read_losses",
    "read_state",
    "reload_settings",
    "start_node",
    "stop_node",
    "up",
]

RESTARTS: Final = 5  # of a crashed server within a minute; then its keeper gives up


@dataclass(frozen=True, slots=True)
class GuardState:
    """The guard of an account's guarded topics, on one node."""

    account: str
    pid: int  # 0: it has ended and is started again soon
    restarts: int
    problem: str  # the last line that it printed before it ended


@dataclass(frozen=True, slots=True)
class CaptureProcess:
    """A capture of a database that one node runs."""

    file: str  # its settings
    pid: int  # 0: it does not run
    restarts: int
    problem: str  # why it last ended: the last line that it printed
    stopped: bool  # it was stopped, and runs again when the broker is started


@dataclass(frozen=True, slots=True)
class NodeState:
    """One server of a broker."""

    name: str
    url: str
    monitor: str  # http://127.0.0.1:port; empty: it has no monitoring port
    pid: int  # of the keeper, 0 if it does not run; SIGTERM to it stops the node gracefully
    server_pid: int  # of nats-server
    folder: Path
    log: Path
    running: bool
    guards: tuple[GuardState, ...] = ()  # one for each account with guarded topics here
    captures: tuple[CaptureProcess, ...] = ()  # those that run with this node
    gateways: tuple[GatewayProcess, ...] = ()  # those that run with this node


@dataclass(frozen=True, slots=True)
class State:
    """A broker on a data folder; holds no secrets."""

    url: str  # all nodes, separated by commas
    pid: int  # keeper of the first running node
    data: Path
    nodes: tuple[NodeState, ...]
    started: str  # ISO 8601, UTC; when the oldest running node was started
    durability: str
    secured: bool  # clients need credentials
    tls: bool
    client_tls: Tls | None = None  # how clients on this machine secure their connection
    tls_names: tuple[str, ...] = ()  # hosts and addresses that its certificate is for
    tls_trusted: str | None = None  # file of the authority, or certificate, for other clients
    joined: bool = False  # its one node belongs to a cluster that spans machines
    standby: tuple[int, ...] = ()  # process ids that wait to take over the folder
    set_aside: tuple[AsideStream, ...] = ()  # streams that it was started without


def up(
    settings: BrokerSettings,
    *,
    nodes: int = 1,
    standby: bool = False,
    timeout: float = 30.0,
    set_aside: tuple[str, ...] = (),
) -> State:
    """Start a broker in the background and return when it is ready, and its gateways listen.

    A gateway that does not start is no error: see `NodeState.gateways`. Its keeper tries again.
    With `standby`, a background process waits for a folder that another broker owns: the call
    returns the state of that other broker, with the waiting process in its `standby`.
    `set_aside` names streams to start without, as STREAM or ACCOUNT/STREAM; their files are kept.
    """
    names, deadline = node_names(settings, nodes), Deadline(timeout)
    start = StartOptions(
        embedded=False, standby=standby, timeout=timeout, restarts=RESTARTS, set_aside=set_aside
    )
    started = start_nodes(settings, names, start)
    await_gateways(tuple(n.folder for n in started if not n.waiting), deadline.left())
    return read_state(settings.data)


def down(data: Path, *, timeout: float = 30.0) -> State:
    """Stop the broker on this folder, its standbys first; returns what was stopped."""
    deadline = Deadline(timeout)
    state = read_state(data)
    folders = node_folders(data)
    for pid in state.standby:
        _signal(pid, signal.SIGTERM)
    while any(pid for folder in folders for pid in folder.standbys()) and not deadline.passed:
        time.sleep(0.01)
    for node in state.nodes:
        if node.running:
            _signal(node.pid, signal.SIGTERM)
    while any(folder.locked() for folder in folders):
        if deadline.passed:
            raise BrokerError(
                f"the broker on {data} did not stop within {timeout:g} s; its processes are "
                f"{', '.join(str(node.pid) for node in state.nodes if node.running)}"
            )
        time.sleep(0.01)
    state_file(data).unlink(missing_ok=True)
    return state


def read_state(data: Path) -> State:
    """The broker that runs on this folder; raises NotRunning if there is none."""
    folders = node_folders(data)
    nodes = tuple(_node_state(folder) for folder in folders)
    running = [node for node in nodes if node.running]
    if not running:
        raise NotRunning(str(data))
    plan = read_json(folders[0].plan)
    started = [str(read_json(folder.state).get("started", "")) for folder in folders]
    return State(
        url=",".join(node.url for node in nodes),
        pid=running[0].pid,
        data=data,
        nodes=nodes,
        started=min((one for one in started if one), default=""),
        durability=str(plan.get("durability", "")),
        secured=bool(plan.get("secured")),
        tls=bool(plan.get("tls")),
        joined=bool(plan.get("joined")),
        tls_names=tuple(plan.get("tls_names", ())),
        tls_trusted=plan.get("tls_trusted"),
        client_tls=Tls(**files) if (files := plan.get("client_tls")) else None,
        standby=tuple(pid for folder in folders for pid in folder.standbys()),
        set_aside=aside_streams(data),
    )


def read_health(data: Path) -> Health:
    """Health of the broker that runs on this folder."""
    state = read_state(data)
    addresses = [node_address(NodeFolder(data, node.name)) for node in state.nodes]
    return broker_health(state.durability, addresses)


def read_losses(data: Path) -> tuple[LogLoss, ...]:
    """Logs on this folder that have become shorter; the broker need not run."""
    return tuple(loss for folder in node_folders(data) for loss in losses_of(folder.ends))


def kill_node(data: Path, name: str) -> None:
    """Kill one node (SIGKILL), as in a crash; the keeper first, so that it does not restart it."""
    node = _named(read_state(data), name)
    if not node.running:
        raise NotRunning(str(node.folder))
    for pid in (node.pid, node.server_pid):
        _signal(pid, signal.SIGKILL)
    folder, deadline = NodeFolder(data, name), Deadline(5.0)  # the kernel needs milliseconds
    # Do not wait for the lock to be free: a standby may hold it by then.
    while _node_state(folder).pid == node.pid and not deadline.passed:
        time.sleep(0.002)


def stop_node(data: Path, name: str, *, timeout: float = 30.0) -> None:
    """Stop one node gracefully; the streams it leads move to other nodes."""
    node = _named(read_state(data), name)
    if not node.running:
        raise NotRunning(str(node.folder))
    _signal(node.pid, signal.SIGTERM)
    folder, deadline = NodeFolder(data, name), Deadline(timeout)
    while folder.locked():
        if deadline.passed:
            raise BrokerError(
                f"node '{name}' did not stop within {timeout:g} s; its process is {node.pid}"
            )
        time.sleep(0.01)


def start_node(
    data: Path, name: str, *, encryption: Encryption | None = None, timeout: float = 30.0
) -> State:
    """Start a killed or stopped node again, as it was.

    `encryption` is needed only if the key was given as text, not as a file.
    """
    folder = next((one for one in node_folders(data) if one.name == name), None)
    if folder is None:
        known = ", ".join(one.name for one in node_folders(data)) or "none"
        raise ConfigError(f"{data} has no node '{name}'; its nodes: {known}")
    plan = read_json(folder.plan)
    if encryption is None and plan.get("encrypted"):
        file = plan.get("key_file")
        encryption = Encryption(key_file=None if file is None else Path(file))
    settings = BrokerSettings(data=data, encryption=encryption)
    key = resolve_key(settings, (folder,))
    start = StartOptions(embedded=False, timeout=timeout, restarts=RESTARTS)
    start_again(folder, launch_from_folder(folder, find_binary(), key, start))
    return read_state(data)


def reload_settings(settings: BrokerSettings, *, timeout: float = 10.0) -> State:
    """Apply new settings to the broker that runs on their folder, without dropping connections.

    Raises ConfigError if the servers refuse them; the old settings then stay.
    """
    read_state(settings.data)
    reload_nodes(node_folders(settings.data), settings, timeout)
    return read_state(settings.data)


def _node_state(folder: NodeFolder) -> NodeState:
    plan, facts = read_json(folder.plan), read_json(folder.state)
    # A file left by a killed owner does not describe the present holder of the lock.
    running = folder.locked() and facts.get("pid", 0) == read_json(folder.lock_file).get("pid")
    return NodeState(
        name=folder.name,
        url=str(plan.get("url", "")),
        monitor=str(plan.get("monitor", {}).get("http", "")),
        pid=int(facts.get("pid", 0)) if running else 0,
        server_pid=int(facts.get("server", 0)) if running else 0,
        folder=folder.root,
        log=folder.log,
        running=running,
        guards=_guards_of(folder) if running else (),
        captures=_captures_of(folder) if running else (),
        gateways=gateways_of(folder) if running else (),
    )


def _guards_of(folder: NodeFolder) -> tuple[GuardState, ...]:
    return tuple(
        GuardState(
            account=str(guard.get("account", "")),
            pid=int(guard.get("pid", 0)),
            restarts=int(guard.get("restarts", 0)),
            problem="" if guard.get("pid") else str(guard.get("problem", "")),
        )
        for guard in read_json(folder.guards).get("processes", ())
    )


def _captures_of(folder: NodeFolder) -> tuple[CaptureProcess, ...]:
    return tuple(
        CaptureProcess(
            file=str(one.get("file", "")),
            pid=int(one.get("pid", 0)),
            restarts=int(one.get("restarts", 0)),
            problem=str(one.get("problem", "")),
            stopped=bool(one.get("done")),
        )
        for one in read_json(folder.captures).get("processes", ())
    )


def _named(state: State, name: str) -> NodeState:
    for node in state.nodes:
        if node.name == name:
            return node
    names = ", ".join(node.name for node in state.nodes)
    raise ConfigError(f"there is no node '{name}'; the nodes are {names}")


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
