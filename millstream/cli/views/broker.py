"""A running broker, in a few lines for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from millstream.broker import State

__all__ = ["describe", "report_gateways"]


def describe(state: State) -> str:
    """What is running, and how to stop it."""
    if state.standby:
        waiting = ", ".join(map(str, state.standby))
        return (
            f"{state.data} belongs to the broker at {state.url} (pid {state.pid}). "
            f"Waiting to take over when it is gone (pid {waiting})."
        )
    guards = [state.durability, *(["users"] if state.secured else []), *(["TLS"] * state.tls)]
    if state.joined:
        return (
            f"Node {state.nodes[0].name} runs at {state.url} ({', '.join(guards)}), "
            f"data in {state.data}\n{_gateways(state)}"
            f"It accepts events while most nodes of its cluster are connected: 'millstream status' "
            f"shows them. Stop it with 'millstream down'."
        )
    what = "Broker" if len(state.nodes) == 1 else f"Cluster of {len(state.nodes)} nodes"
    return (
        f"{what} ready at {state.url} ({', '.join(guards)}), data in {state.data}\n"
        f"{_gateways(state)}Stop it with 'millstream down', check it with 'millstream status'."
    )


def _gateways(state: State) -> str:
    """A line for each gateway that listens."""
    return "".join(
        f"{gateway.protocol.capitalize()} clients connect to {gateway.advertised}\n"
        for node in state.nodes
        for gateway in node.gateways
        if gateway.address
    )


def report_gateways(state: State) -> bool:
    """Whether all gateways of a broker listen; the others are named on stderr, with the reason."""
    absent = [one for node in state.nodes for one in node.gateways if not one.address]
    for gateway in absent:
        why = gateway.problem or "it is still starting"
        typer.echo(
            f"The {gateway.protocol} gateway does not listen yet: {why}. The broker tries again: "
            f"see 'millstream status' and 'millstream logs'",
            err=True,
        )
    return not absent
