"""Stores with many aggregates, filled through a bare socket in the format of the store itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from bench.floor import RawSocket
from millstream.event_store.format import VERSIONS_HEADER, join_lines, versions_text
from millstream.event_store.ids import subject_of
from millstream.events.event import ID_HEADER
from millstream.wire.protocol import encode_headers, hpub, unique_token

__all__ = ["EVENTS", "Account", "Deposited", "Opened", "fill", "one_each"]

IN_FLIGHT = 2048
CHUNK = 20_000  # frames made at a time


@dataclass(frozen=True)
class Opened:
    """An account was opened."""

    owner: str


@dataclass(frozen=True)
class Deposited:
    """Money came in."""

    amount: int
    note: str


@dataclass
class Account:
    """The state of an account."""

    owner: str = ""
    balance: int = 0
    count: int = 0

    def apply(self, event: object) -> None:
        """Change it by an event."""
        self.count += 1
        if isinstance(event, Deposited):
            self.balance += event.amount
        elif isinstance(event, Opened):
            self.owner = event.owner


EVENTS = [Opened, Deposited]
_LINE = ("Deposited", b'{"amount":5,"note":"salary of November, as agreed"}')


def one_each(first: int, last: int, probe: str, every: int) -> Iterator[tuple[str, int]]:
    """Appends to aggregates by number, and to a probe among them: id and version of each."""
    version = 0
    for number in range(first, last):
        yield f"account-{number}", 1
        if number % every == 0:
            version += 1
            yield probe, version


def fill(url: str, prefix: str, appends: Iterable[tuple[str, int]], events: int = 1) -> int:
    """Store appends, given as aggregate and first version; returns how many that were."""
    payload, word = join_lines([_LINE] * events), unique_token(12)
    left, count = iter(appends), 0
    raw = RawSocket(url)
    try:
        while some := list(islice(left, CHUNK)):
            frames = []
            for number, (id, first) in enumerate(some, count):
                versions = versions_text(first, first + events - 1)
                pairs = [(ID_HEADER, f"{word}{number:x}"), (VERSIONS_HEADER, versions)]
                subject, reply = subject_of(prefix, id), f"{raw.inbox}.{number:x}"
                frames.append(
                    hpub(subject.encode(), reply.encode(), encode_headers(pairs), payload)
                )
            raw.publish_rate(frames, IN_FLIGHT)
            count += len(some)
    finally:
        raw.close()
    return count
