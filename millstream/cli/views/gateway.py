"""Gateways as tables and lines for people and objects for programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from millstream.cli.output import print_table, say, size

if TYPE_CHECKING:
    from millstream.gateways.status import GatewayStatus

__all__ = ["record", "show", "show_list"]


def record(status: GatewayStatus) -> dict[str, Any]:
    """A gateway as an object."""
    return status.to_json()


def show_list(found: Sequence[GatewayStatus]) -> None:
    """A line for each gateway."""
    if not found:
        say("No gateway is running.")
        return
    print_table(
        "Gateways",
        ["gateway", "protocol", "state", "address", "clients connect to", "#connections",
         "#requests", "host", "#pid", "since"],
        [
            (
                one.name,
                one.protocol,
                one.state,
                one.address,
                one.advertised,
                one.books.get("connections", {}).get("open", 0),
                f"{one.books.get('requests', 0):,}",
                one.host,
                one.pid,
                one.started,
            )
            for one in found
        ],
    )  # fmt: skip


def show(status: GatewayStatus) -> None:
    """All about one gateway."""
    books = status.books
    secured = ["login" if status.login else "no login", "TLS" if status.tls else "no TLS"]
    say(f"{status.name}: {status.protocol} gateway, {status.state}, {', '.join(secured)}")
    say(f"  listens on {status.address}, clients connect to {status.advertised}")
    say(f"  process {status.pid} on {status.host}, since {status.started}")
    connections = books.get("connections", {})
    counts = [f"{connections.get(key, 0):,} {key}" for key in ("open", "accepted")]
    for key in ("refused", "closed"):
        counts += [f"{key}: {number:,} {why}" for why, number in connections.get(key, {}).items()]
    say(f"  connections: {', '.join(counts)}")
    say(
        f"  requests: {books.get('requests', 0):,}, {books.get('in_flight', 0):,} in progress, "
        f"{books.get('waited', 0):,} waited; {size(books.get('bytes_in', 0))} in, "
        f"{size(books.get('bytes_out', 0))} out"
    )
    steps = books.get("steps", {})
    used = {"all": books.get("cpu_seconds", 0)}
    used |= {name: step.get("cpu_seconds", 0) for name, step in steps.items()}
    say(f"  CPU: {', '.join(f'{name} {seconds:.2f} s' for name, seconds in used.items())}")
    for line in _lines(status.details):
        say(f"  {line}")


def _lines(values: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """A line for each value of nested objects."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _lines(value, f"{before}{name}.")
        else:
            shown = f"{value:,}" if isinstance(value, int) else value
            yield f"{before}{name}: {shown}"
