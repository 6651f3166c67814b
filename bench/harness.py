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
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

__all__ = [
    "OURS",
    "Better",
    "Contestant",
    "Figures",
    "PeerAbsent",
    "Result",
    "Skipped",
    "Spread",
    "Work",
    "against",
    "better_of",
    "interleave",
    "peers_wanted",
    "race",
    "raced",
    "select",
    "spread",
    "take_turns",
    "wanted",
]

OURS = "millstream"
QUICK_ROUNDS = 3  # the fewest that have a median which is not an extreme
ROUNDS = 7  # enough that two disturbed rounds do not move the median

Better = Literal["higher", "lower"]
Contestant = Callable[[], float | Awaitable[float]]
Figures = dict[str, float]  # several of one round, by name
Work = Callable[[], Figures | Awaitable[Figures]]
Spread = tuple[float, float]  # the lowest and the highest of the rounds
T = TypeVar("T")

_selection: list[str] = []  # texts; empty: everything
_peers_wanted = [True]


class PeerAbsent(Exception):
    """Raised by a peer that cannot run here; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class Result:
    """One figure. `ratio` is ours against the peer's and always better when it is higher.

    Figures are medians of the rounds. A spread is the lowest and the highest of them; that of the
    ratio is of the ratios of single rounds, in which both took turns.
    """

    name: str
    value: float
    unit: str
    peer: str | None = None
    peer_value: float | None = None
    ratio: float | None = None
    spread: Spread | None = None
    peer_spread: Spread | None = None
    ratio_spread: Spread | None = None

    def as_json(self) -> dict[str, Any]:
        """The fields that have a value, in their order."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class Skipped:
    """A measurement or a peer that was left out, and why."""

    name: str
    reason: str


def select(texts: Iterable[str], *, peers: bool = True) -> None:
    """From now on only measurements whose name contains one of the texts are made.

    Without `peers` only our own figures are taken, in half the time.
    """
    _selection[:] = [text.casefold() for text in texts]
    _peers_wanted[:] = [peers]


def peers_wanted() -> bool:
    """Whether others are measured as well."""
    return _peers_wanted[0]


def better_of(unit: str) -> Better:
    """Rates are better when higher, anything else (times, bytes, CPU) when lower."""
    return "higher" if unit.endswith("/s") else "lower"


def wanted(*names: str) -> bool:
    """Whether one of these measurements is to be made."""
    found = [name.casefold() for name in names]
    return not _selection or any(text in name for text in _selection for name in found)


def spread(figures: Sequence[float]) -> Spread | None:
    """The lowest and the highest; nothing for a single figure, which has no spread."""
    return (min(figures), max(figures)) if len(figures) > 1 else None


def interleave(
    contestants: Mapping[str, Contestant],
    rounds: int,
    runner: asyncio.Runner | None = None,
) -> dict[str, float | PeerAbsent]:
    """The median figure of each contestant over `rounds` rounds in which all take turns."""
    figures = take_turns(contestants, rounds, runner)
    return {
        name: taken if isinstance(taken, PeerAbsent) else statistics.median(taken)
        for name, taken in figures.items()
    }


def take_turns(
    contestants: Mapping[str, Callable[[], T | Awaitable[T]]],
    rounds: int,
    runner: asyncio.Runner | None = None,
) -> dict[str, list[T] | PeerAbsent]:
    """What each contestant returned in each of `rounds` rounds in which all take turns.

    One unmeasured round comes first. A different contestant starts each round. A contestant that
    raises PeerAbsent is left out, and the error is returned instead. Coroutines run on `runner`, so
    that a connection opened before is on the same loop.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be 1 or more, not {rounds}")
    figures: dict[str, list[T]] = {name: [] for name in contestants}
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
    return {name: absent.get(name, taken) for name, taken in figures.items()}


def _one_round(contestant: Callable[[], T | Awaitable[T]], runner: asyncio.Runner | None) -> T:
    figure = contestant()
    if not inspect.iscoroutine(figure):
        return figure  # type: ignore[return-value]
    if runner is None:
        figure.close()
        raise ValueError("an asynchronous contestant needs runner=asyncio.Runner()")
    done: T = runner.run(figure)
    return done


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
    if not wanted(name):
        return
    turns = rounds or (QUICK_ROUNDS if quick else ROUNDS)
    others = peers if peers_wanted() else {}
    figures = take_turns({OURS: ours, **others}, turns, runner)
    own = figures.pop(OURS)
    if isinstance(own, PeerAbsent):
        yield Skipped(name, str(own))
        return
    compared = 0
    for peer, taken in figures.items():
        if isinstance(taken, PeerAbsent):
            yield Skipped(f"{name} against {peer}", str(taken))
        else:
            compared += 1
            yield raced(name, unit, own, peer, taken, better=better)
    if not compared:
        yield Result(name, statistics.median(own), unit, spread=spread(own))


def race(
    names: Mapping[str, tuple[str, str]],
    works: Mapping[str, Work],
    pairs: Sequence[tuple[str, str, str]],
    rounds: int,
    runner: asyncio.Runner | None = None,
) -> Iterator[Result | Skipped]:
    """Contestants in turns; `pairs` are rows: name, our contestant, the other.

    `names` says for each figure that contestants return what follows the name of the row, and the
    unit. Rates are better when higher, anything else when lower.
    """
    rows = [pair for pair in pairs if wanted(*(pair[0] + text for text, _ in names.values()))]
    needed = {who for _, ours, other in rows for who in (ours, other)}
    taken = take_turns({who: works[who] for who in works if who in needed}, rounds, runner)
    for row, ours, other in rows:
        own, theirs = taken[ours], taken[other]
        if isinstance(own, PeerAbsent):
            yield Skipped(row, str(own))
            continue
        if isinstance(theirs, PeerAbsent):
            yield Skipped(f"{row} against {other}", str(theirs))
        for figure, (text, unit) in names.items():
            mine = [one[figure] for one in own]
            if isinstance(theirs, PeerAbsent):
                yield Result(row + text, statistics.median(mine), unit, spread=spread(mine))
                continue
            others = [one[figure] for one in theirs]
            yield raced(row + text, unit, mine, other, others, better=better_of(unit))


def raced(
    name: str,
    unit: str,
    own: Sequence[float],
    peer: str,
    theirs: Sequence[float],
    *,
    better: Better = "higher",
) -> Result:
    """The result of rounds in which both took turns, the figures of each in their order."""

    def ratio(ours: float, others: float) -> float | None:
        over, under = (ours, others) if better == "higher" else (others, ours)
        return over / under if over and under else None  # a 0 was rounded down

    value, peer_value = statistics.median(own), statistics.median(theirs)
    ratios = [one for one in map(ratio, own, theirs) if one is not None]
    return Result(
        name,
        value,
        unit,
        peer,
        peer_value,
        ratio(value, peer_value),
        spread(own),
        spread(theirs),
        spread(ratios),
    )
