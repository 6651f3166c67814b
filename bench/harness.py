"""What every family of measurements is built from: results, and fair turns between contestants.

A family is a module `bench/<name>.py` with

    def measure(quick: bool) -> Iterator[Result | Skipped]: ...

Contestants are functions that do one round of work and return its figure. They take turns within
one run, each round in another order, because a shared machine changes its speed from minute to
minute: only figures that were taken side by side may be divided by each other.
"""

from __future__ import annotations

import asyncio
import inspect
import statistics
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = [
    "OURS",
    "Better",
    "Contestant",
    "PeerAbsent",
    "Result",
    "Skipped",
    "against",
    "interleave",
]

OURS = "millstream"
QUICK_ROUNDS = 3  # the fewest that have a median which is not an extreme
ROUNDS = 7  # enough that two disturbed rounds do not move the median

Better = Literal["higher", "lower"]
Contestant = Callable[[], float | Awaitable[float]]


class PeerAbsent(Exception):
    """Raised by a peer that cannot run here; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class Result:
    """One figure. `ratio` is ours against the peer's and always better when it is higher."""

    name: str
    value: float
    unit: str
    peer: str | None = None
    peer_value: float | None = None
    ratio: float | None = None

    def as_json(self) -> dict[str, Any]:
        """The fields that have a value, in their order."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class Skipped:
    """A measurement or a peer that was left out, and why."""

    name: str
    reason: str


def interleave(
    contestants: Mapping[str, Contestant],
    rounds: int,
    runner: asyncio.Runner | None = None,
) -> dict[str, float | PeerAbsent]:
    """The median figure of each contestant over `rounds` rounds in which all take turns.

    One unmeasured round comes first. A different contestant starts each round. A contestant that
    raises PeerAbsent is left out, and the error is returned instead. Coroutines run on `runner`, so
    that a connection opened before is on the same loop.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be 1 or more, not {rounds}")
    figures: dict[str, list[float]] = {name: [] for name in contestants}
    absent: dict[str, PeerAbsent] = {}
    for turn in range(rounds + 1):
        present = [name for name in contestants if name not in absent]
        first = turn % len(present) if present else 0
        for name in present[first:] + present[:first]:
            try:
                figure = _one_round(contestants[name], runner)
            except PeerAbsent as error:
                absent[name] = error
                continue
            if turn > 0:
                figures[name].append(figure)
    medians = {name: statistics.median(list_) for name, list_ in figures.items() if list_}
    return {name: absent[name] if name in absent else medians[name] for name in contestants}


def _one_round(contestant: Contestant, runner: asyncio.Runner | None) -> float:
    figure = contestant()
    if not inspect.iscoroutine(figure):
        return float(figure)  # type: ignore[arg-type]
    if runner is None:
        figure.close()
        raise ValueError("an asynchronous contestant needs runner=asyncio.Runner()")
    return float(runner.run(figure))


@dataclass(frozen=True, slots=True)
class _Measure:
    """What a figure means."""

    name: str
    unit: str
    better: Better


def against(
    name: str,
    unit: str,
    ours: Contestant,
    peers: Mapping[str, Contestant],
    *,
    quick: bool,
    better: Better = "higher",
    runner: asyncio.Runner | None = None,
    rounds: int | None = None,
) -> Iterator[Result | Skipped]:
    """Our figure and each peer's, taken in turns; one result per peer, or one without a peer.

    `rounds` is for families whose rounds are so short that they can afford more of them.
    """
    if OURS in peers:
        raise ValueError(f"a peer cannot be named {OURS!r}")
    turns = rounds or (QUICK_ROUNDS if quick else ROUNDS)
    medians = interleave({OURS: ours, **peers}, turns, runner)
    value = medians.pop(OURS)
    if isinstance(value, PeerAbsent):
        yield Skipped(name, str(value))
        return
    measure = _Measure(name, unit, better)
    compared = 0
    for peer, peer_value in medians.items():
        if isinstance(peer_value, PeerAbsent):
            yield Skipped(f"{name} against {peer}", str(peer_value))
        else:
            compared += 1
            yield _compare(measure, value, peer, peer_value)
    if not compared:
        yield Result(name, value, unit)


def _compare(measure: _Measure, value: float, peer: str, peer_value: float) -> Result:
    over, under = (value, peer_value) if measure.better == "higher" else (peer_value, value)
    ratio = over / under if under else None
    return Result(measure.name, value, measure.unit, peer, peer_value, ratio)
