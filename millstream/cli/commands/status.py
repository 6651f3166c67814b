"""`millstream status`: nodes, streams, consumers, disk, memory, durability."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from millstream.cli.exits import Exit
from millstream.cli.output import (
    DataOption,
    JsonOption,
    plain,
    print_json,
    print_table,
    say,
    size,
)
from millstream.cli.session import ServerOption, chosen_context, run
from millstream.errors import ConfigError, ConnectError, NotRunning
from millstream.settings import ConnectionSettings, data_folder, names_a_broker

if TYPE_CHECKING:
    from millstream.broker import (
        CaptureProcess,
        GatewayProcess,
        GuardState,
        Health,
        NodeHealth,
        NodeState,
        State,
        StreamHealth,
    )
    from millstream.mill import Mill

__all__ = ["app"]

app = typer.Typer()


@app.command()
def status(data: DataOption = None, server: ServerOption = None, json_: JsonOption = False) -> None:
    """Show the broker: nodes, streams, consumers, disk, memory, durability.

    On a cluster over several machines, all its nodes. With --server, --context, NATS_URL or
    NATS_CONTEXT a broker elsewhere: completely as a user of its system account, otherwise what a
    user may know of it. Exit code 3 if no broker is running, 4 if one is running but unhealthy, or
    has lost events and nobody has accepted it (millstream topic accept-loss).
    """
    from millstream import broker

    if _is_elsewhere(data, server):
        ok = run(lambda mill: _show_remote(mill, json_=json_), server)
    else:
        folder = data_folder(data)
        state = broker.read_state(folder)
        own = broker.read_health(folder)
        health = _whole_cluster(state, own) if state.joined else own
        known = dict(zip([node.name for node in own.nodes], state.nodes, strict=True))
        if json_:
            print_json({**plain(state), **_as_json(health, known)})
        else:
            _show(state, health)
        ok = health.ok
    if not ok:
        raise typer.Exit(Exit.UNHEALTHY)


def _is_elsewhere(data: Path | None, server: str | None) -> bool:
    """Whether another broker is meant than the one that runs on the data folder."""
    from millstream import broker

    context = chosen_context()
    if data is not None and (server or context):
        raise ConfigError("give --data for a broker on this machine, or --server or --context")
    if data is not None or not names_a_broker(server, context):
        return False
    try:
        state = broker.read_state(data_folder())
    except NotRunning:
        return True
    return state.url != ",".join(ConnectionSettings.load(server, context=context).urls)


def _whole_cluster(state: "State", own: "Health") -> "Health":
    """This node's health and that of the others, as the user of the system account sees them."""
    import asyncio

    from millstream import broker
    from millstream.cli.commands.remote_status import ask_cluster
    from millstream.mill import connect

    async def ask(settings: ConnectionSettings) -> "Health | None":
        async with connect(settings=settings) as mill:
            return await ask_cluster(mill, own.nodes)

    try:
        who = broker.read_credentials(state.data, "system")
        settings = ConnectionSettings(
            (state.url,), "millstream status", who.user, who.password, tls=state.client_tls
        )
        return asyncio.run(ask(settings)) or own
    except (ConnectError, ConfigError) as error:  # also in operator mode, which has other users
        typer.echo(f"The other nodes of the cluster are not shown: {error}", err=True)
        return own


async def _show_remote(mill: "Mill", *, json_: bool) -> bool:
    """Show the broker at the other end of a connection; whether it is healthy."""
    from millstream.cli.commands.remote_status import account_status, ask_cluster

    url = mill.url
    health = await ask_cluster(mill)
    if health is not None:
        if json_:
            print_json({"url": url, "view": "system", **_as_json(health, {})})
        else:
            say(f"{url}  durability {health.durability}")
            _show_nodes(health)
            _show_streams(health.streams)
        return health.ok
    seen = await account_status(mill)
    if json_:
        print_json({"url": url, "view": "account", **plain(seen)})
        return seen.ok
    say(f"{url}  durability {seen.durability}, account {seen.account or 'unknown'}")
    rows = [(n.name, "ok" if n.ok else n.problem, n.version) for n in seen.nodes]
    print_table("Nodes", ["node", "state", "version"], rows)
    _show_streams(seen.streams)
    say(
        "Disk, memory, clients and health of the nodes, and other accounts, are only shown to a "
        "user of the system account."
    )
    return seen.ok


def _as_json(health: "Health", known: "dict[str, NodeState]") -> dict[str, Any]:
    """Health in one object; each node with what is known about its process, each stream once."""
    nodes = []
    for asked in health.nodes:
        record = plain(asked)
        record["server"] = record.pop("name")
        record["streams"], record["leads"] = len(asked.streams), asked.leads
        own = plain(known[asked.name]) if asked.name in known else {"name": asked.name}
        nodes.append({**own, **record})
    return {
        **plain(health),
        "nodes": nodes,
        "streams": plain(health.streams),
        "losses": plain(health.losses),
    }


def _show(state: "State", health: "Health") -> None:
    guards = ["users" if state.secured else "no users", "TLS" if state.tls else "no TLS"]
    say(f"{state.url}  durability {health.durability}, {', '.join(guards)}, since {state.started}")
    say(f"data in {state.data}")
    _show_nodes(health)
    for known in state.nodes:
        for guard in known.guards:
            say(f"{known.name}: guard of account {guard.account}, {_guard_text(guard)}")
        for capture in known.captures:
            say(f"{known.name}: capture of {capture.file}, {_capture_text(capture)}")
        for gateway in known.gateways:
            say(f"{known.name}: {gateway.protocol} gateway, {_gateway_text(gateway)}")
    for loss in health.losses:
        kind = "cut" if loss.lost is None else "lost" if loss.open else "lost, accepted"
        say(f"{kind}: {loss.text}")
    for stream in state.set_aside:
        say(f"missing: {stream.text}")
    _show_streams(health.streams)


def _show_nodes(health: "Health") -> None:
    print_table(
        "Nodes",
        ["node", "state", "version", "#up", "#clients", "#memory", "#cpu", "disk used", "#free",
         "#streams", "#leads"],
        [_node_row(node, health.meta_leader) for node in health.nodes],
    )  # fmt: skip
    for node in health.nodes:
        if node.problem:
            say(f"{node.name}: {node.problem}")


def _show_streams(streams: "Sequence[StreamHealth]") -> None:
    if not streams:
        say("No streams yet.")
        return
    print_table(
        "Streams",
        [
            "account",
            "stream",
            "#messages",
            "#size",
            "#first",
            "#last",
            "#replicas",
            "leader",
            "nodes",
            "storage",
        ],
        [
            (
                s.account,
                s.name,
                f"{s.messages:,}",
                size(s.bytes),
                s.first,
                s.last,
                s.replicas,
                s.leader,
                ", ".join(s.nodes),
                s.storage,
            )
            for s in streams
        ],
    )
    consumers = [
        (stream.name, one.name, f"{one.pending:,}", f"{one.ack_pending:,}", one.redelivered)
        for stream in streams
        for one in stream.consumers
    ]
    if consumers:
        columns = ["stream", "consumer", "#not delivered", "#not acked", "#redelivered"]
        print_table("Consumers", columns, consumers)


def _guard_text(guard: "GuardState") -> str:
    again = _restarts(guard.restarts)
    if guard.pid:
        return f"pid {guard.pid}{again}"
    return f"not running{again}: {guard.problem or 'it ended'}"


def _restarts(number: int) -> str:
    return f", restarted {number} time{'s' * (number != 1)}" if number else ""


def _capture_text(capture: "CaptureProcess") -> str:
    again = _restarts(capture.restarts)
    last = f", last problem: {capture.problem}" if capture.restarts and capture.problem else ""
    if capture.stopped:
        return f"stopped{again}; it runs again when the broker is started"
    return f"{f'pid {capture.pid}' if capture.pid else 'not running'}{again}{last}"


def _gateway_text(gateway: "GatewayProcess") -> str:
    again = _restarts(gateway.restarts)
    last = f", last problem: {gateway.problem}" if gateway.restarts and gateway.problem else ""
    if not gateway.pid:
        return f"not running{again}{last}"
    where = f"listens on {gateway.address}" if gateway.address else "starting"
    return f"{where}, pid {gateway.pid}{again}{last}"


def _node_row(node: "NodeHealth", leader: str | None) -> tuple[object, ...]:
    state = "ok" if node.ok else "unhealthy"
    if not node.version:  # it did not answer: nothing is known, not even that it has no streams
        return (node.name, state, *["-"] * 9)
    return (
        node.name,
        f"{state}, leader" if node.name == leader else state,
        node.version,
        _age(node.uptime),
        node.connections,
        size(node.memory),
        f"{node.cpu:.0f} %",
        f"{size(node.store_used)} of {size(node.store_limit)}",
        size(node.disk_free) if node.disk_free else "-",
        len(node.streams),
        node.leads,
    )


def _age(seconds: float) -> str:
    """Seconds in the unit that fits.

    >>> _age(42), _age(7500), _age(200000)
    ('42s', '2h05m', '2d07h')
    """
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    if hours >= 24:
        return f"{hours // 24}d{hours % 24:02}h"
    if hours:
        return f"{hours}h{minutes % 60:02}m"
    return f"{minutes}m{int(seconds) % 60:02}s" if minutes else f"{int(seconds)}s"
