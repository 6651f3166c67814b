"""The server's trace reports: collected, and joined into one tree."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from millstream.deadline import Deadline
from millstream.errors import NoMessage, RequestTimeout
from millstream.wire.protocol import unique_token

if TYPE_CHECKING:
    from rich.tree import Tree

    from millstream.mill import Mill

__all__ = ["collect", "draw"]

DEST_HEADER: Final = "Nats-Trace-Dest"
ONLY_HEADER: Final = "Nats-Trace-Only"
HOP_HEADER: Final = "Nats-Trace-Hop"
REPORTS_MAX: Final = 1000  # servers on the path of a message; a larger number is a loop
# Kinds of connections, as the server numbers them.
KINDS: Final = ("client", "server of the cluster", "gateway", "system", "leaf node", "JetStream",
                "account")  # fmt: skip

Report = dict[str, Any]


async def collect(
    mill: Mill,
    message: tuple[str, bytes, list[tuple[str, str]]],
    deliver: bool,
    seconds: float,
) -> list[dict[str, object]]:
    """Publish the message with a trace; return the report of every server on its path."""
    subject, data, pairs = message
    inbox = f"{mill.connection.inbox}.trace.{unique_token(8)}"
    traced = [(DEST_HEADER, inbox), *pairs]
    if not deliver:
        traced.append((ONLY_HEADER, "true"))
    reports: list[dict[str, object]] = []
    deadline = Deadline(seconds)
    async with mill.subscribe(inbox) as subscriber:
        await mill.publish(subject, data, traced)
        # The first server's, and each says to how many servers it passed it on. They arrive in any
        # order: until the first one's has arrived, nothing is known of the others.
        expected, begun = 1, False
        while not begun or len(reports) < min(expected, REPORTS_MAX):
            try:
                answer = await subscriber.next(deadline.left())
            except NoMessage:
                break
            report: Report = msgspec.json.decode(answer.data)
            reports.append(report)
            begun = begun or not _hop(report)
            expected += int(report.get("hops", 0))
    if not reports:
        raise RequestTimeout(
            subject, seconds, ". The server sent no trace: it is older than 2.11, or this user may "
            "not publish there"
        )  # fmt: skip
    return reports


def draw(subject: str, reports: Sequence[Mapping[str, Any]], *, dry: bool) -> None:
    """The reports as one tree on stdout."""
    from rich.console import Console
    from rich.text import Text
    from rich.tree import Tree

    result = "dry run: nothing was delivered or stored" if dry else "delivered"
    tree = Tree(Text(f"{subject} ({result})"))
    by_hop = {_hop(report): report for report in reports}
    _add_server(tree, by_hop.get("") or reports[0], by_hop)
    Console(width=None if sys.stdout.isatty() else 160, highlight=False).print(tree)


def _hop(report: Mapping[str, Any]) -> str:
    headers = report.get("request", {}).get("header") or {}
    return str((headers.get(HOP_HEADER) or [""])[0])


def _add_server(tree: Tree, report: Mapping[str, Any], by_hop: Mapping[str, Any]) -> None:
    from rich.text import Text

    server = report.get("server", {})
    cluster = f", cluster {server['cluster']}" if server.get("cluster") else ""
    node = tree.add(Text(f"server {server.get('name', '?')}{cluster}"))
    events = report.get("events", [])
    for event in events:
        branch = node.add(Text(_words(event)))
        hop = event.get("hop")
        if hop and hop in by_hop:
            _add_server(branch, by_hop[hop], by_hop)
    if all(event.get("type") == "in" for event in events):
        node.add(Text("no subscriber and no topic"))


def _words(event: Mapping[str, Any]) -> str:
    number = int(event.get("kind", 0))
    kind = KINDS[number] if 0 <= number < len(KINDS) else f"connection of kind {number}"
    who = f"{kind} '{event['name']}'" if event.get("name") else f"{kind} {event.get('cid', '?')}"
    match event.get("type"):
        case "in":
            text = f"from {who}, account {event.get('acc', '?')}, as {event.get('subj', '?')}"
        case "sm":
            text = f"mapped to {event.get('to', '?')}"
        case "se":
            text = f"exported to account {event.get('acc', '?')} as {event.get('to', '?')}"
        case "si":
            text = (
                f"service of account {event.get('acc', '?')}: "
                f"{event.get('from', '?')} becomes {event.get('to', '?')}"
            )
        case "js":
            text = f"into stream '{event.get('stream', '?')}' as {event.get('subject', '?')}"
            if event.get("nointerest"):
                text += ": not kept, no subscription wants it"
        case "eg":
            queue = f", queue group '{event['queue']}'" if event.get("queue") else ""
            to = f", listening on {event['sub']}" if event.get("sub") else ""
            text = f"to {who}{to}{queue}"
        case other:
            text = f"{other}: {dict(event)}"
    return f"{text}: REFUSED, {event['error']}" if event.get("error") else text
