"""Stores with many aggregates, filled through a bare socket in the format of the store itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from bench.floor import RawSocket
from millstream.event_store.format import (
    PREVIOUS_HEADER,
    VERSIONS_HEADER,
    join_lines,
    next_previous,
    versions_text,
)
from millstream.event_store.ids import subject_of
from millstream.events.event import ID_HEADER
from millstream.wire.protocol import encode_headers, hpub, unique_token

__all__ = ["EVENTS", "Account", "Deposited", "Filler", "Opened", "one_each"]

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


def one_each(
    numbers: range, probes: Iterable[str], every: int, version: int = 1
) -> Iterator[tuple[str, int]]:
    """Appends to aggregates by number, and to probes among them: id and version of each."""
    for number in numbers:
        yield f"account-{number}", 1
        if number % every == 0:
            yield from ((probe, version) for probe in probes)
            version += 1


class Filler:
    """Fills one store that has a single partition."""

    def __init__(self, url: str, prefix: str) -> None:
        self._url, self._prefix = url, prefix
        # For each aggregate, what its next append says of those before it.
        self._previous: dict[str, str] = {}

    def fill(self, appends: Iterable[tuple[str, int]], offset: int, events: int = 1) -> int:
        """Store appends, given as aggregate and first version; returns the offset after them.

        `offset` is that of the first of them.
        """
        payload, word = join_lines([_LINE] * events), unique_token(12)
        left = iter(appends)
        raw = RawSocket(self._url)
        try:
            while some := list(islice(left, CHUNK)):
                frames = []
                for number, (id, first) in enumerate(some, offset):
                    headers = [(ID_HEADER, f"{word}{number:x}"), *self._headers(id, first, events)]
                    self._previous[id] = next_previous(self._previous.get(id, ""), number)
                    subject, reply = subject_of(self._prefix, id), f"{raw.inbox}.{number:x}"
                    frames.append(
                        hpub(subject.encode(), reply.encode(), encode_headers(headers), payload)
                    )
                raw.publish_rate(frames, IN_FLIGHT)
                offset += len(some)
        finally:
            raw.close()
        return offset

    def _headers(self, id: str, first: int, events: int) -> Iterator[tuple[str, str]]:
        yield VERSIONS_HEADER, versions_text(first, first + events - 1)
        if previous := self._previous.get(id):
            yield PREVIOUS_HEADER, previous
