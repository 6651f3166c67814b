"""The accounts of the event store's scenarios: events that name the append they belong to.

Nothing in an event is free to choose: its mark says which append it belongs to and at which place,
and its amount follows from that append. So whatever a store returns can be checked without
believing any id, header or version of the store.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

__all__ = [
    "EVENTS",
    "Account",
    "Deposited",
    "Mark",
    "Withdrawn",
    "amount_of",
    "events_of",
    "fold",
    "is_true",
    "read_mark",
]


@dataclass(frozen=True)
class Deposited:
    amount: int
    mark: str


@dataclass(frozen=True)
class Withdrawn:
    amount: int
    mark: str


@dataclass
class Account:
    """Small, however many events it has seen, and different for every order of them."""

    balance: int = 0
    count: int = 0
    digest: int = 0

    def apply(self, event: Any) -> None:
        self.balance += event.amount if isinstance(event, Deposited) else -event.amount
        self.count += 1
        self.digest = zlib.crc32(event.mark.encode(), self.digest)

    def deposit(self, events: list[Deposited]) -> list[Deposited]:
        return events

    @property
    def facts(self) -> list[int]:
        return [self.balance, self.count, self.digest]


EVENTS: Final = [Deposited, Withdrawn]


class Mark(NamedTuple):
    """Which event it is: of an append's parts, of a part's events."""

    append: str
    part: int
    place: int


def read_mark(text: str) -> Mark | None:
    """The mark in an event; None when it is none."""
    append, _, rest = text.rpartition("/")
    part, _, index = rest.partition(".")
    if not (append and part.isdigit() and index.isdigit()):
        return None
    return Mark(append, int(part), int(index))


def amount_of(append: str) -> int:
    return 1 + zlib.crc32(append.encode()) % 100


def events_of(append: str, part: int, count: int, out: bool) -> list[Any]:
    """The events of one part of an append; `out`: money that leaves."""
    cls = Withdrawn if out else Deposited
    return [cls(amount_of(append), f"{append}/{part}.{index}") for index in range(count)]


def is_true(event: Any, out: bool) -> bool:
    """Whether an event says what its append has written."""
    mark = read_mark(event.mark)
    return mark is not None and event == events_of(mark[0], mark[1], mark[2] + 1, out)[-1]


def fold(events: Iterable[Any]) -> Account:
    account = Account()
    for event in events:
        account.apply(event)
    return account
