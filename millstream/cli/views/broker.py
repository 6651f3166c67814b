"""A running broker, in a few lines for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millstream.broker import State

__all__ = ["describe"]


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
            f"data in {state.data}\n"
            f"It accepts events while most nodes of its cluster are connected: 'millstream status' "
            f"shows them. Stop it with 'millstream down'."
        )
    what = "Broker" if len(state.nodes) == 1 else f"Cluster of {len(state.nodes)} nodes"
    return (
        f"{what} ready at {state.url} ({', '.join(guards)}), data in {state.data}\n"
        f"Stop it with 'millstream down', check it with 'millstream status'."
    )
