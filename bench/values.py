"""Typed JSON values: one event to bytes and back, no broker.

Ours checks with msgspec first; the peer is the Python checker alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any

from bench.harness import Result, Skipped, against
from millstream.schemas import declare, types
from millstream.schemas.formats.json_wire import JsonWire

__all__ = ["Order", "Side", "measure", "orders"]

PEER = "the checker alone"
MICROSECONDS = "us"


class Side(StrEnum):
    """Which side of a trade."""

    BUY = "BUY"
    SELL = "SELL"


@dataclass(frozen=True, slots=True)
class Line:
    """One article of an order."""

    article: str
    count: int
    price: float


@dataclass(frozen=True, slots=True)
class Flat:
    """An event of plain fields."""

    id: int
    symbol: str
    account: str
    price: float
    size: int
    open: bool
    note: str | None
    at: datetime


@dataclass(frozen=True, slots=True)
class Order:
    """An event with a decimal, an enum, lists, a map and records inside."""

    id: int
    customer: str
    side: Side
    total: Annotated[Decimal, types.Decimal(12, 2)]
    at: datetime
    tags: list[str]
    counts: dict[str, int]
    lines: list[Line]


def orders() -> tuple[Flat, Order]:
    """One event of each kind."""
    now = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    flat = Flat(7, "SYM7", "account-000000000007", 100.25, 12, True, None, now)
    lines = [Line(f"article-{n}", n, n * 1.5) for n in range(3)]
    counts = {"boxes": 2, "pallets": 1}
    return flat, Order(8, "ada", Side.BUY, Decimal("12.50"), now, ["new", "eu"], counts, lines)


def measure(quick: bool) -> Iterator[Result | Skipped]:
    """Encoding of dicts and objects, decoding to dicts."""
    flat, order = orders()
    yield from _one_event("flat event", flat, quick)
    yield from _one_event("nested event", order, quick)


def _one_event(label: str, event: Any, quick: bool) -> Iterator[Result | Skipped]:
    wire, plain = JsonWire(declare(type(event))), asdict(event)
    data = wire.dump(event)
    for name, ours, checker, given in (
        ("encode a dict", wire.dump, wire.dump_by_checker, plain),
        ("encode an object", wire.dump, wire.dump_by_checker, event),
        ("decode", wire.load, wire.load_by_checker, data),
    ):
        yield from against(
            f"JSON, {label} of {len(data)} bytes: {name}",
            MICROSECONDS,
            _cost(ours, given, quick),
            {PEER: _cost(checker, given, quick)},
            quick=quick,
            better="lower",
        )


def _cost(work: Callable[[Any], object], given: Any, quick: bool) -> Callable[[], float]:
    """A contestant: microseconds a call."""
    calls = 2_000 if quick else 20_000

    def round_() -> float:
        started = time.perf_counter()
        for _ in range(calls):
            work(given)
        return (time.perf_counter() - started) / calls * 1e6

    return round_
