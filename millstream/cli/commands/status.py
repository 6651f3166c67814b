"""`millstream status`: nodes, streams, consumers, disk, memory, durability."""

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
from millstream.settings import data_folder

if TYPE_CHECKING:
    from millstream.broker import GuardState, Health, NodeHealth, State

__all__ = ["app"]

app = typer.Typer()


@app.command()
def status(data: DataOption = None, json_: JsonOption = False) -> None:
    """Show the broker: nodes, streams, consumers, disk, memory, durability.

    Exit code 3 if no broker is running, 4 if one is running but unhealthy, or has lost events and
    nobody has accepted it (millstream topic accept-loss).
    """
    from millstream import broker

    folder = data_folder(data)
    state = broker.read_state(folder)
    health = broker.read_health(folder)
    if json_:
        print_json(_as_json(state, health))
    else:
        _show(state, health)
    if not health.ok:
        raise typer.Exit(Exit.UNHEALTHY)


def _as_json(state: "State", health: "Health") -> dict[str, Any]:
    """State and health in one object; each node with both, each stream once."""
    nodes = []
    for known, asked in zip(state.nodes, health.nodes, strict=True):
        record = plain(asked)
        record["server"] = record.pop("name")
        record["streams"], record["leads"] = len(asked.streams), asked.leads
        nodes.append({**plain(known), **record})
    return {
        **plain(state),
        **plain(health),
        "nodes": nodes,
        "streams": plain(health.streams),
        "losses": plain(health.losses),
    }


def _show(state: "State", health: "Health") -> None:
    guards = ["users" if state.secured else "no users", "TLS" if state.tls else "no TLS"]
    say(f"{state.url}  durability {health.durability}, {', '.join(guards)}, since {state.started}")
    say(f"data in {state.data}")
    print_table(
        "Nodes",
        ["node", "state", "version", "#up", "#clients", "#memory", "#cpu", "disk used", "#free",
         "#streams", "#leads"],
        [_node_row(node, health.meta_leader) for node in health.nodes],
    )  # fmt: skip
    for node in health.nodes:
        if node.problem:
            say(f"{node.name}: {node.problem}")
    for known in state.nodes:
        for guard in known.guards:
            say(f"{known.name}: guard of account {guard.account}, {_guard_text(guard)}")
    for loss in health.losses:
        kind = "cut" if loss.lost is None else "lost" if loss.open else "lost, accepted"
        say(f"{kind}: {loss.text}")
    for stream in state.set_aside:
        say(f"missing: {stream.text}")
    if not health.streams:
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
            for s in health.streams
        ],
    )
    consumers = [
        (stream.name, one.name, f"{one.pending:,}", f"{one.ack_pending:,}", one.redelivered)
        for stream in health.streams
        for one in stream.consumers
    ]
    if consumers:
        columns = ["stream", "consumer", "#not delivered", "#not acked", "#redelivered"]
        print_table("Consumers", columns, consumers)


def _guard_text(guard: "GuardState") -> str:
    again = f", restarted {guard.restarts} times" if guard.restarts else ""
    if guard.pid:
        return f"pid {guard.pid}{again}"
    return f"not running{again}: {guard.problem or 'it ended'}"


def _node_row(node: "NodeHealth", leader: str | None) -> tuple[object, ...]:
    state = "ok" if node.ok else "unhealthy"
    return (
        node.name,
        f"{state}, leader" if node.name == leader else state,
        node.version,
        _age(node.uptime),
        node.connections,
        size(node.memory),
        f"{node.cpu:.0f} %",
        f"{size(node.store_used)} of {size(node.store_limit)}",
        size(node.disk_free),
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
