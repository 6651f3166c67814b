"""What must be true of a topic behind the Kafka gateway: pure functions over histories and its log.

The kinds of problem:

lost        acknowledged and not in the log
doubled     more than once in the log
reordered   values of a producer, or the offsets that a reader got, in another order
phantom     in the log or read, and never sent
corrupt     in the log or read with other bytes than were sent
repeated    an offset that names two values
claimed     an acknowledged offset that the value does not have
skipped     passed over by a reader, or never processed by the group
reverted    a committed offset of the group that went back
stuck       sent by a producer that came to its end, and never answered
unequal     in the log for Kafka clients and not for the SDK, or the other way round

Kafka producers note `sent` (the numbers first to last), `ok` with `kafka`, and `end`; readers note
`assigned` (from here on the offsets may be lower) and `seen`; the group notes `settled` (it has
committed offsets), and its observer `committed` (it has read them).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from tests.faults.checker import Findings
from tests.faults.history import Record

__all__ = [
    "MEMBER",
    "Logged",
    "check_answered",
    "check_commits",
    "check_group",
    "check_offsets",
    "check_produced",
    "check_readers",
    "check_same",
    "unprocessed",
]

MEMBER: Final = "m"  # the names of the group's members begin with it


class Logged(NamedTuple):
    """One event at its offset; `id` is None if its bytes belong to no event that was sent."""

    partition: int
    offset: int
    id: str | None


def _sent(records: Iterable[Record]) -> dict[str, int]:
    """The highest number that each life of a Kafka producer has sent; they begin with 1."""
    sent: dict[str, int] = defaultdict(int)
    for record in records:
        if record["what"] == "sent":
            sent[record["who"]] = max(sent[record["who"]], record["last"])
    return sent


def _acked(records: Iterable[Record]) -> dict[str, Record]:
    return {r["id"]: r for r in records if r["what"] == "ok" and r.get("kafka")}


def _split(name: str) -> tuple[str, int]:
    sender, number = name.rsplit(":", 1)
    return sender, int(number)


def _seen(records: Iterable[Record]) -> Iterable[tuple[Record, Logged]]:
    for record in records:
        if record["what"] == "seen":
            for offset, name in record["events"]:
                yield record, Logged(record["partition"], offset, name)


# -- the log ------------------------------------------------------------------------------


def check_produced(records: Sequence[Record], log: Sequence[Logged]) -> Findings:
    """Of idempotent producers: acknowledged values once, others at most once, all in order."""
    found = Findings()
    sent, acked = _sent(records), _acked(records)
    others = {r["id"] for r in records if r["what"] == "invoke"}  # of the SDK's producers
    found.counts["operations"] += sum(sent.values())
    found.counts["acked"] += len(acked)
    known = acked.keys() | others
    for name, count in Counter(event.id for event in log).items():
        if name is None:
            found.problem("corrupt", f"{count} events have other bytes than were sent")
            continue
        if count > 1:
            where = [event[:2] for event in log if event.id == name]
            found.problem("doubled", f"{name} is at {where}")
        if name not in known:
            sender, number = _split(name)
            if not 1 <= number <= sent.get(sender, 0):
                found.problem("phantom", f"{name} is in the log and was never sent")
        found.counts["events"] += name not in others
    logged = {event.id for event in log}
    for name, record in acked.items():
        if name not in logged:
            place = record["partition"], record["offset"]
            found.problem("lost", f"{name} was acknowledged at {place} and is not in the log")
    _check_order(found, log, sent)
    return found


def _check_order(found: Findings, log: Iterable[Logged], sent: Mapping[str, int]) -> None:
    """Per producer and partition, numbers grow with offsets; also those without an answer."""
    last: dict[tuple[str, int], int] = {}
    for event in sorted(log, key=lambda event: event[:2]):
        if event.id is None:
            continue
        sender, number = _split(event.id)
        if sender not in sent:
            continue
        before = last.get((sender, event.partition), 0)
        if number < before:
            found.problem("reordered", f"{event.id} at {event[:2]} comes after {before}")
        last[sender, event.partition] = max(before, number)


def check_answered(records: Sequence[Record]) -> Findings:
    """A producer that came to its end has an answer for everything."""
    found = Findings()
    sent = _sent(records)
    answered = Counter(
        r["who"] for r in records if r["what"] == "refused" or (r["what"] == "ok" and "kafka" in r)
    )
    for record in records:
        if record["what"] == "end" and answered[record["who"]] < sent[record["who"]]:
            left = sent[record["who"]] - answered[record["who"]]
            found.problem("stuck", f"{record['who']}: {left} values were never answered")
    return found


def check_offsets(records: Sequence[Record], log: Sequence[Logged]) -> Findings:
    """An offset names one value, for all readers and all answers to producers, at all times."""
    found = Findings()
    names: dict[tuple[int, int], str | None] = {}

    def name(event: Logged, source: str) -> None:
        known = names.setdefault(event[:2], event.id)
        if known != event.id:
            found.problem("repeated", f"{event[:2]} is {known}, and {event.id} for {source}")

    for event in log:
        name(event, "the last reader")
    for record, event in _seen(records):
        name(event, record["who"])
    found.counts["offsets"] += len(names)
    positions = {event.id: event[:2] for event in log}
    for sent, record in _acked(records).items():
        if record["offset"] < 0:  # of a batch that was stored already, and is not known any more
            found.counts["answers without an offset"] += 1
            continue
        place = record["partition"], record["offset"]
        name(Logged(*place, sent), "its producer")
        if sent in positions and positions[sent] != place:
            found.problem("claimed", f"{sent}: acknowledged at {place}, is at {positions[sent]}")
    return found


def check_same(log: Sequence[Logged], stored: Sequence[str | None]) -> Findings:
    """Kafka clients and the SDK read the same events."""
    found = Findings()
    kafka, native = Counter(event.id for event in log), Counter(stored)
    for name in kafka.keys() | native.keys():
        if kafka[name] != native[name]:
            text = f"{name}: {kafka[name]} times for Kafka clients, {native[name]} for the SDK"
            found.problem("unequal", text)
    return found


# -- readers --------------------------------------------------------------------------------


def check_readers(records: Sequence[Record], log: Sequence[Logged]) -> Findings:
    """Between two assignments the offsets of a partition grow, and nothing is passed over."""
    found = Findings()
    order: dict[int, list[int]] = defaultdict(list)
    for event in log:
        order[event.partition].append(event.offset)
    index = {
        (partition, offset): number
        for partition, offsets in order.items()
        for number, offset in enumerate(sorted(set(offsets)))
    }
    last: dict[tuple[str, int], int] = {}
    for record in records:
        if record["what"] == "assigned":
            for key in [key for key in last if key[0] == record["who"]]:
                del last[key]
        for _, event in _seen([record]):
            found.counts["reads"] += 1
            key, before = (record["who"], event.partition), None
            if key in last:
                before = last[key]
                text = f"{record['who']}: {event[:2]} after {before}"
                if event.offset <= before:
                    found.problem("reordered", text)
                elif _missing(index, event, before):
                    found.problem("skipped", text)
            last[key] = event.offset
            if event.id is None:
                found.problem("corrupt", f"{record['who']}: {event[:2]}")
            elif event[:2] not in index:
                found.problem("phantom", f"{record['who']}: {event} is not in the log")
    return found


def _missing(index: Mapping[tuple[int, int], int], event: Logged, before: int) -> bool:
    """Whether the log has events between the two."""
    one, two = index.get((event.partition, before)), index.get(event[:2])
    return one is not None and two is not None and two - one > 1


# -- the group ------------------------------------------------------------------------------


def check_commits(records: Sequence[Record]) -> Findings:
    """A committed offset is never below one whose commit or look-up had ended before."""
    found = Findings()
    ops: dict[int, list[tuple[int, int, int, str]]] = defaultdict(list)
    for record in records:
        if record["what"] in ("settled", "committed"):
            found.counts[record["what"]] += 1
            for partition, offset in record["offsets"]:
                op = record["start"], record["t"], offset, f"{record['who']} {record['what']}"
                ops[partition].append(op)
    for partition, several in ops.items():
        ended = sorted(several, key=lambda op: op[1])
        highest, text, at = -1, "", 0
        for start, _, offset, what in sorted(several):
            while at < len(ended) and ended[at][1] < start:
                if ended[at][2] > highest:
                    highest, text = ended[at][2], ended[at][3]
                at += 1
            if offset < highest:
                found.problem(
                    "reverted", f"{partition}: {what} {offset} at {start}, after {text} {highest}"
                )
    return found


def unprocessed(
    records: Iterable[Record], log: Iterable[Logged], who: str = MEMBER
) -> list[Logged]:
    """What no member of the group has seen, or no reader whose name begins with `who`."""
    seen = {event for record, event in _seen(records) if record["who"].startswith(who)}
    return [event for event in log if event not in seen]


def check_group(records: Sequence[Record], log: Sequence[Logged]) -> Findings:
    """The group has processed every event, and has committed no further than it has processed."""
    found = Findings()
    for event in unprocessed(records, log):
        found.problem("skipped", f"{event} was never processed")
    ends: dict[int, int] = defaultdict(int)
    last: dict[int, int] = {}
    processed: Counter[Logged] = Counter()
    for record in records:
        if record["who"].startswith(MEMBER):
            for _, event in _seen([record]):
                processed[event] += 1
                ends[event.partition] = max(ends[event.partition], event.offset + 1)
        if record["what"] == "settled":
            for partition, offset in record["offsets"]:
                last[partition] = max(last.get(partition, 0), offset)
    for partition, offset in last.items():
        if offset > ends[partition]:
            text = f"{partition}: committed {offset}, processed to {ends[partition]}"
            found.problem("claimed", text)
    found.counts["processed again"] += sum(count - 1 for count in processed.values())
    return found
