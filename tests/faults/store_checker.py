"""What must be true of an event store after a run, as pure functions over its history.

The model of an aggregate is the list of its events, and the log says in which order they were
stored; so every answer can be checked against it. Kinds of problem, besides those of `checker`:

gap         the versions of an aggregate do not count 1, 2, 3
torn        a part of an append, or of several that were to be stored together
overrun     stored, though the aggregate had another version than was expected
stale       a load or a conflict says what was no longer true
wrong state a state that is not the fold of the events up to its version
unbalanced  the money of all accounts is not what was paid in
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final, NamedTuple

from tests.faults.checker import Findings
from tests.faults.history import Record
from tests.faults.ledger import Deposited, Mark, amount_of, fold, is_true, read_mark

__all__ = ["Look", "Placed", "StoredMark", "check_order", "check_store"]

NEVER: Final = 1 << 62  # the end of an append that was never answered


class StoredMark(NamedTuple):
    """One event as it was read back."""

    id: str  # of the aggregate
    version: int
    offset: int
    event: Any


class Placed(NamedTuple):
    """An append that is stored, and when it may have happened."""

    first: int
    last: int
    start: int
    end: int
    name: str = ""


class Look(NamedTuple):
    """An answer that says an aggregate's version, and when it was asked for."""

    version: int
    start: int
    end: int
    name: str = ""


@dataclass
class _Intent:
    """An append, however often it was tried."""

    name: str
    kind: str
    parts: list[list[Any]]  # aggregate, expected version, number of events
    start: int
    end: int = NEVER
    latest: int = 0  # start of the latest try
    receipts: list[list[int]] | None = None
    refused: bool = False


@dataclass
class _Told:
    """What the writers were told."""

    intents: dict[str, _Intent] = field(default_factory=dict)
    looks: dict[str, list[Look]] = field(default_factory=lambda: defaultdict(list))
    states: list[tuple[str, int, list[int], str]] = field(default_factory=list)


def _told(records: Iterable[Record], found: Findings) -> _Told:
    told = _Told()
    reads: dict[str, Record] = {}
    for record in records:
        what, name, time = record["what"], str(record.get("op")), record["t"]
        if what == "append":
            intent = told.intents.setdefault(
                name, _Intent(name, record["kind"], record["parts"], time)
            )
            found.counts["repeated appends"] += intent.latest > 0
            intent.latest = time
        elif what == "read":
            reads[name] = record
        elif what == "read-ok":
            start = reads[name]
            told.looks[start["id"]].append(Look(record["version"], start["t"], time, name))
            told.states.append((start["id"], record["version"], record["state"], name))
            found.counts["loads"] += 1
        elif name in told.intents:
            _answer(told, told.intents[name], record, found)
    return told


def _answer(told: _Told, intent: _Intent, record: Record, found: Findings) -> None:
    what, time = record["what"], record["t"]
    found.counts[{"ok": "acked", "conflict": "refused"}.get(what) or str(what)] += 1
    if what == "ok":
        intent.receipts, intent.end = record["receipts"], time
        if "state" in record:
            version = record["receipts"][0][1]
            told.states.append((intent.parts[0][0], version, record["state"], intent.name))
    elif what == "conflict":
        intent.refused = True
        look = Look(record["actual"], intent.latest, time, intent.name)
        told.looks[record["id"]].append(look)


def check_store(
    records: Iterable[Record], stored: Sequence[StoredMark], *, copies: int = 1
) -> Findings:
    """The log against everything that its writers did and were told.

    With several replicas loads and conflicts may be stale for a moment; that is counted.
    """
    found = Findings()
    told = _told(records, found)
    found.counts["operations"] += len(told.intents) + found.counts["loads"]
    found.counts["events"] += len(stored)
    log: dict[str, list[StoredMark]] = defaultdict(list)
    for one in sorted(stored, key=lambda one: one.offset):
        log[one.id].append(one)
    places = _places(found, told.intents, log)
    for intent in told.intents.values():
        _check_intent(found, intent, [places.get((intent.name, n)) for n in _parts(intent)])
    _check_states(found, told, log)
    _check_money(found, told.intents, log)
    for id in log.keys() | told.looks.keys():
        placed = _placed(told.intents, places, id)
        problems = check_order(placed, told.looks[id])
        for kind, text in problems:
            if kind == "stale" and copies > 1:
                found.counts["stale answers"] += 1
            else:
                found.problem(kind, f"{id}: {text}")
        found.counts["aggregates linearizable"] += not problems
    return found


def _parts(intent: _Intent) -> range:
    return range(len(intent.parts))


def _places(
    found: Findings, intents: Mapping[str, _Intent], log: Mapping[str, Sequence[StoredMark]]
) -> dict[tuple[str, int], list[StoredMark]]:
    """Where the events of every part of an append are; each once, and no others."""
    places: dict[tuple[str, int], list[StoredMark]] = defaultdict(list)
    seen: set[Mark] = set()
    for id, events in log.items():
        for number, one in enumerate(events, 1):
            if one.version != number:
                found.problem("gap", f"{id}: event {number} has version {one.version}")
            mark = read_mark(one.event.mark)
            intent = None if mark is None else intents.get(mark.append)
            if mark is None or intent is None or mark.part >= len(intent.parts):
                found.problem("phantom", f"{id} {one.version}: {one.event} was never appended")
            elif not is_true(one.event, out=mark.part < len(intent.parts) - 1):
                found.problem("corrupt", f"{id} {one.version}: {one.event}")
            elif mark in seen:
                found.problem("doubled", f"{id} {one.version}: {one.event.mark} again")
            else:
                seen.add(mark)
                places[mark.append, mark.part].append(one)
    return places


def _check_intent(
    found: Findings, intent: _Intent, places: Sequence[list[StoredMark] | None]
) -> None:
    """An append is stored as a whole, where its receipts say, or not at all."""
    name = intent.name
    if not any(places):
        if intent.receipts is not None:
            found.problem("lost", f"{name} was acknowledged ({intent.receipts}) and is not stored")
        return
    if intent.refused and intent.receipts is None:
        found.problem("claimed", f"{name} was called a conflict and is stored")
    for part, (place, (id, expected, count)) in enumerate(zip(places, intent.parts, strict=True)):
        versions = [] if place is None else [one.version for one in place]
        marks = [] if place is None else [(one.id, read_mark(one.event.mark)) for one in place]
        first = versions[0] if versions else 0
        whole = [(id, Mark(name, part, index)) for index in range(count)]
        if marks != whole or versions != list(range(first, first + count)):
            found.problem("torn", f"{name}: of {whole} there is {marks} at {versions}")
            continue
        wanted = {"new": 0, "any": None}.get(expected, expected)
        if wanted is not None and first != wanted + 1:
            found.problem("overrun", f"{name} expected {id} at {expected}, is at {versions}")
        if intent.receipts is not None and place:
            is_at = [versions[0], versions[-1], place[0].offset]
            if intent.receipts[part] != is_at:
                found.problem("claimed", f"{name}: {intent.receipts[part]}, is at {is_at}")


def _check_states(found: Findings, told: _Told, log: Mapping[str, Sequence[StoredMark]]) -> None:
    folded: dict[str, list[list[int]]] = {}
    for id, version, state, name in told.states:
        if id not in folded:
            account = fold([])
            folded[id] = [account.facts]
            for one in log.get(id, ()):
                account.apply(one.event)
                folded[id].append(account.facts)
        true = folded[id][version] if version < len(folded[id]) else None
        if state != true:
            found.problem("wrong state", f"{name}: {id} at {version}: {state}, not {true}")


def _check_money(
    found: Findings, intents: Mapping[str, _Intent], log: Mapping[str, Sequence[StoredMark]]
) -> None:
    """Transfers move money and make none: the accounts hold what was paid in."""
    paid = 0
    for events in log.values():
        for one in events:
            mark = read_mark(one.event.mark)
            intent = None if mark is None else intents.get(mark.append)
            if intent is not None and len(intent.parts) == 1:
                paid += amount_of(intent.name)
            elif intent is not None and isinstance(one.event, Deposited):
                found.counts["transferred events"] += 1
    held = sum(fold(one.event for one in events).balance for events in log.values())
    if held != paid:
        found.problem("unbalanced", f"the accounts hold {held}, paid in was {paid}")


# -- linearizability ------------------------------------------------------------------------


def _placed(
    intents: Mapping[str, _Intent],
    places: Mapping[tuple[str, int], Sequence[StoredMark]],
    id: str,
) -> list[Placed]:
    found = []
    for (name, _), events in places.items():
        if events[0].id == id:
            intent = intents[name]
            versions = events[0].version, events[-1].version
            found.append(Placed(*versions, intent.start, intent.end, name))
    return sorted(found)


def check_order(appends: Sequence[Placed], looks: Sequence[Look]) -> list[tuple[str, str]]:
    """Why an aggregate is not linearizable; nothing if it is.

    The order of its appends is known, that of the log, and every answer names the version it saw.
    So only one order remains, except among answers with the same version: it is the right one
    unless something in it ended before something earlier in it had begun.
    """
    problems: list[tuple[str, str]] = []
    begun = 0
    for one in appends:
        if one.end < begun:
            problems.append(("reordered", f"{one} ended before an earlier one began"))
        begun = max(begun, one.start)
    rank = {0: 0, **{one.last: number for number, one in enumerate(appends, 1)}}
    # For each rank: when the last of the appends up to it began, and the first after it ended.
    starts = list(accumulate((one.start for one in appends), max, initial=0))
    ends = [*accumulate((one.end for one in reversed(appends)), min, initial=NEVER)][::-1]
    levels: dict[int, list[Look]] = defaultdict(list)
    for look in looks:
        if look.version not in rank:
            problems.append(("torn", f"{look}: no append ends with this version"))
            continue
        level = rank[look.version]
        levels[level].append(look)
        if look.end < starts[level]:
            problems.append(("claimed", f"{look} before it was appended"))
        elif look.start > ends[level]:
            problems.append(("stale", f"{look} after a later append was acknowledged"))
    newest = 0  # start of the latest answer with an earlier version
    for level in sorted(levels):
        problems += [
            ("stale", f"an earlier version was seen after {look}")
            for look in levels[level]
            if look.end < newest
        ]
        newest = max(newest, *(look.start for look in levels[level]))
    return problems
