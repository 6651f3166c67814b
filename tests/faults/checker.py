"""What must be true of a run, as pure functions over its history; tests prove that each can fail.

The kinds of problem:

lost        acknowledged and not stored
doubled     stored or produced more than once where once is promised
reordered   events of one key out of order
phantom     stored or delivered, and never sent
claimed     a receipt, position or refusal says what is not so
corrupt     stored or delivered with other bytes than were sent
skipped     stored and never delivered
overlapped  two owners handled one key at the same time
repeated    handed out again to the process that had acked it
given up    dead-lettered, though no handler failed that often
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

from tests.faults.history import Record

__all__ = [
    "Findings",
    "Stored",
    "check_deliveries",
    "check_group",
    "check_once_awake",
    "check_outputs",
    "check_publishes",
    "check_writer",
    "seen_events",
]

EXAMPLES: Final = 20  # problems of one kind that are described; all are counted


class Stored(NamedTuple):
    """One event as it was read back; `id` is None if its bytes belong to no event that was sent."""

    id: str | None
    key: str | None
    partition: int
    offset: int
    row: int = 0  # its index in a pack

    @property
    def position(self) -> tuple[int, int, int]:
        return self.partition, self.offset, self.row


@dataclass
class Findings:
    """Counts of what happened, and what should not have."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    facts: dict[str, str] = field(default_factory=dict)  # what the seed chose

    @property
    def sound(self) -> bool:
        return not self.problems

    def problem(self, kind: str, text: str) -> None:
        self.problems[kind] += 1
        if len(self.examples[kind]) < EXAMPLES:
            self.examples[kind].append(text)

    def add(self, other: Findings) -> Findings:
        self.counts.update(other.counts)
        self.problems.update(other.problems)
        for kind, texts in other.examples.items():
            self.examples[kind].extend(texts)
        self.facts.update(other.facts)
        return self


def seen_events(records: Iterable[Record]) -> list[Stored]:
    """The events that were acknowledged or delivered: for topics that keep no others."""
    seen = {
        (record["id"], record["partition"], record["offset"])
        for record in records
        if record["what"] in ("ok", "delivered", "start") and record.get("id") is not None
    }
    return [Stored(name, name.split(":")[1], *position) for name, *position in sorted(seen)]


def _positions(found: Findings, stored: Iterable[Stored], once: bool) -> dict[str, Stored]:
    """Where each event is; one that is stored twice or was never sent is a problem."""
    positions: dict[str, Stored] = {}
    for event in stored:
        found.counts["events"] += 1
        if event.id is None:
            found.problem("corrupt", f"offset {event.offset} has other bytes than were sent")
        elif event.id in positions:
            if once:
                found.problem(
                    "doubled", f"{event.id} at {positions[event.id].position}, {event.position}"
                )
        else:
            positions[event.id] = event
    return positions


def check_publishes(records: Iterable[Record], stored: Sequence[Stored]) -> Findings:
    """Awaited publishes: every acknowledged event once, in order, at its receipt's offset."""
    found = Findings()
    positions = _positions(found, stored, once=True)
    invoked: set[str] = set()
    refused: set[str] = set()
    acked: dict[str, Record] = {}
    for record in records:
        what, name = record["what"], record.get("id")
        if what == "invoke":
            invoked.add(str(name))
        elif what == "ok":
            acked[str(name)] = record
        elif what == "refused":
            refused.add(str(name))
        elif what == "unknown":
            found.counts["unknown"] += 1
    found.counts["operations"] += len(invoked)
    found.counts["acked"] += len(acked)
    for name, record in acked.items():
        event = positions.get(name)
        if event is None:
            found.problem(
                "lost", f"{name} was acknowledged at offset {record['offset']} and is not stored"
            )
        elif (event.partition, event.offset) != (record["partition"], record["offset"]):
            found.problem("claimed", f"{name}: receipt {record['offset']}, is at {event.position}")
    for name in positions.keys() - invoked:
        found.problem("phantom", f"{name} is stored and was never sent")
    for name in positions.keys() & refused:
        found.problem("claimed", f"{name} was refused and is stored")
    _check_order(found, (name for name in acked if name in positions), positions)
    return found


def _check_order(found: Findings, acked: Iterable[str], positions: Mapping[str, Stored]) -> None:
    """Ids are sender:number; a sender sends each event after the ack of the one before."""
    senders: dict[str, list[tuple[int, Stored]]] = defaultdict(list)
    for name in acked:
        sender, number = name.rsplit(":", 1)
        senders[sender].append((int(number), positions[name]))
    for sender, events in senders.items():
        events.sort(key=lambda pair: pair[0])
        for (before, one), (after, two) in pairwise(events):
            if one.partition != two.partition or one.position >= two.position:
                found.problem(
                    "reordered", f"{sender}: {after} at {two.position}, {before} {one.position}"
                )


def check_writer(records: Iterable[Record], stored: Sequence[Stored]) -> Findings:
    """Exactly-once writers: positions 1 to the last, each once, in order within a key."""
    found = Findings()
    positions = _positions(found, stored, once=True)
    numbers: dict[str, dict[int, Stored]] = defaultdict(dict)
    for name, event in positions.items():
        writer, number = name.split(":")[0], int(name.rsplit(":", 1)[1])
        numbers[writer][number] = event
    given: dict[str, int] = defaultdict(int)
    reported: dict[str, int] = defaultdict(int)  # the highest position that was reported as stored
    for record in records:
        if record["what"] == "given":
            given[record["writer"]] = max(given[record["writer"]], record["position"])
        elif record["what"] in ("flushed", "opened"):
            found.counts[record["what"]] += 1
            reported[record["writer"]] = max(reported[record["writer"]], record["position"])
    for writer, position in reported.items():
        for number in range(max(numbers[writer], default=0) + 1, position + 1):
            found.problem("lost", f"{writer}: position {position} reported, {number} not stored")
    for writer, events in numbers.items():
        found.counts["operations"] += given[writer]
        if max(events, default=0) > given[writer]:
            found.problem("phantom", f"{writer}: {max(events)} is stored, given {given[writer]}")
        for number in range(1, max(events, default=0) + 1):
            if number not in events:
                found.problem("lost", f"{writer}: {number} of {max(events)} is missing")
    _check_key_order(found, numbers)
    return found


def _check_key_order(found: Findings, numbers: Mapping[str, Mapping[int, Stored]]) -> None:
    for writer, events in numbers.items():
        last: dict[str | None, tuple[int, Stored]] = {}
        for number in sorted(events):
            event = events[number]
            before = last.get(event.key)
            if before is not None and (
                before[1].partition != event.partition or before[1].position >= event.position
            ):
                found.problem("reordered", f"{writer}: {number} is before {before[0]}")
            last[event.key] = (number, event)


def check_deliveries(records: Iterable[Record], stored: Sequence[Stored]) -> Findings:
    """A durable subscription: every stored event delivered at least once, none invented."""
    found = Findings()
    known = {event.id for event in stored}
    delivered: Counter[str] = Counter()
    for record in records:
        if record["what"] == "delivered":
            found.counts["deliveries"] += 1
            if record["id"] is None:
                found.problem(
                    "corrupt", f"offset {record['offset']} was delivered with other bytes"
                )
            else:
                delivered[record["id"]] += 1
        elif record["what"] == "settled":
            found.counts["acks"] += 1
    found.counts["redelivered"] += sum(count - 1 for count in delivered.values())
    for name in known - delivered.keys() - {None}:
        found.problem("skipped", f"{name} is stored and was never delivered")
    for name in delivered.keys() - known:
        found.problem("phantom", f"{name} was delivered and is not stored")
    return found


def check_once_awake(records: Iterable[Record], dead: Iterable[str]) -> Findings:
    """After a pause longer than its lease a process repeats nothing, and nothing is given up.

    Only while no server dies and no connection is lost: either may cost an ack.
    """
    found = Findings()
    acked: set[tuple[str, str]] = set()
    for record in records:
        if record["what"] == "settled":
            acked.add((record["who"], record["id"]))
        elif record["what"] == "delivered" and (record["who"], record["id"]) in acked:
            found.problem("repeated", f"{record['id']} came again to {record['who']}")
    for name in dead:
        found.problem("given up", f"{name} is a dead letter")
    return found


def check_group(records: Iterable[Record], stored: Sequence[Stored]) -> Findings:
    """An ordered group: nothing skipped, each key in order, one owner at a time by epoch.

    A repeated event is allowed (at least once), but never one that leaves out an earlier event of
    its key, and nothing by an owner after its successor started: such calls carry an older epoch,
    which a system that the handler writes to can refuse, as this check does.
    """
    found = Findings()
    order: dict[str | None, list[str]] = defaultdict(list)
    for event in sorted(stored, key=lambda event: event.position):
        if event.id is not None:
            order[event.key].append(event.id)
    rank = {name: n for names in order.values() for n, name in enumerate(names)}
    done: dict[str | None, int] = defaultdict(lambda: -1)  # the last finished event of a key
    epochs: dict[int, int] = defaultdict(int)
    ended: Counter[str] = Counter()
    running: dict[str | None, Record] = {}
    for record in records:
        what = record["what"]
        if what not in ("start", "end", "stopped"):
            continue
        key, name = record["key"], record["id"]
        if record["epoch"] < epochs[record["partition"]]:
            found.counts["refused by epoch"] += 1
            continue
        if record["epoch"] > epochs[record["partition"]]:
            epochs[record["partition"]] = record["epoch"]
            running = {k: r for k, r in running.items() if r["partition"] != record["partition"]}
        if name not in rank:
            found.problem("phantom", f"{name} was handed out and is not stored")
        elif what == "start":
            found.counts["deliveries"] += 1
            if rank[name] > done[key] + 1:
                found.problem("reordered", f"{name} before {order[key][done[key] + 1]}")
            if key in running:
                found.problem("overlapped", f"{name} started while {running[key]['id']} ran")
            running[key] = record
        elif what == "stopped":  # its owner was not sure of its lease; the event is redelivered
            running.pop(key, None)
        else:
            running.pop(key, None)
            ended[name] += 1
            done[key] = max(done[key], rank[name])
    found.counts["redelivered"] += sum(count - 1 for count in ended.values())
    for name in rank.keys() - ended.keys():
        found.problem("skipped", f"{name} is stored and was never handled completely")
    return found


def check_outputs(
    inputs: Sequence[Stored], outputs: Sequence[Stored], function: Callable[[str], list[str]]
) -> Findings:
    """Consume, transform, produce: the outputs are a function of the inputs, each once.

    Within a key of one input partition outputs have the order of their inputs.
    """
    found = Findings()
    positions = _positions(found, outputs, once=True)
    wanted: set[str] = set()
    last: dict[str | None, tuple[int, int, int]] = {}
    for event in sorted(inputs, key=lambda event: event.position):
        for name in [] if event.id is None else function(event.id):
            wanted.add(name)
            output = positions.get(name)
            if output is None:
                found.problem(
                    "lost", f"{name} was not produced from {event.id} at {event.position}"
                )
                continue
            if output.key in last and last[output.key] >= output.position:
                found.problem("reordered", f"{name} at {output.position} after {last[output.key]}")
            last[output.key] = output.position
    for name in positions.keys() - wanted:
        found.problem("phantom", f"{name} is an output of no input")
    return found
