"""What must be true of a topic that Kafka's clients write and read through the gateway. Pure.

Besides the kinds of problem of `checker.py`:

renamed     an offset names two different events
backwards   a reader got an offset that is not after the one before it
returned    a committed offset was taken back
fatal       an idempotent producer was told that it cannot go on
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tests.faults.checker import Findings
from tests.faults.history import Record

__all__ = [
    "Seen",
    "check_commits",
    "check_members",
    "check_names",
    "check_produced",
    "check_readers",
    "sightings",
    "skipped_by_members",
]


class Seen(NamedTuple):
    """An event at an offset; `id` is None if its bytes belong to no event that was sent."""

    partition: int
    offset: int
    id: str | None

    @property
    def place(self) -> tuple[int, int]:
        return self.partition, self.offset


def sightings(records: Iterable[Record]) -> Iterator[Seen]:
    """What was read at any time by anybody, and what producers were told."""
    for record in records:
        what = record["what"]
        if what in ("seen", "handled"):
            for offset, name in record["events"]:
                yield Seen(record["partition"], offset, name)
        elif what == "ok" and record.get("via") == "kafka" and record["offset"] >= 0:
            yield Seen(record["partition"], record["offset"], record["id"])


def _forgotten(records: Sequence[Record]) -> set[Seen]:
    """Places of events that were removed before anybody had told their producers of them.

    If the gateway was killed before it answered, and what it had stored was removed before another
    counted it, then no trace is left of it: it is stored again when it is sent again.
    """
    waiting: dict[str, set[int]] = {}  # where something was removed meanwhile
    places: dict[str, tuple[tuple[int, int], set[int]]] = {}
    for record in records:
        what = record["what"]
        if what == "removed":
            for partitions in waiting.values():
                partitions.add(record["partition"])
        elif record.get("via") == "kafka" and what == "invoke":
            waiting[record["id"]] = set()
        elif record.get("via") == "kafka" and what == "ok":
            place = record["partition"], record["offset"]
            places[record["id"]] = place, waiting.pop(record["id"], set())
    found = set()
    for seen in sightings(records):
        place, partitions = places.get(seen.id or "", (seen.place, set()))
        if seen.partition in partitions and seen.place < place:
            found.add(seen)
    return found


def check_names(records: Sequence[Record], final: Sequence[Seen]) -> Findings:
    """An offset never names two events, nor an event two offsets, in the whole run."""
    found = Findings()
    names: dict[tuple[int, int], str] = {}
    places: dict[str, tuple[int, int]] = {}
    forgotten = _forgotten(records)
    found.counts["stored again"] += len(forgotten)
    for seen in [*sightings(records), *final]:
        found.counts["sightings"] += 1
        if seen.id is None:
            found.problem("corrupt", f"{seen.place} has other bytes than were sent")
            continue
        other = names.setdefault(seen.place, seen.id)
        if other != seen.id:
            found.problem("renamed", f"{seen.place} is {other} and {seen.id}")
        place = seen.place if seen in forgotten else places.setdefault(seen.id, seen.place)
        if place != seen.place:
            found.problem("doubled", f"{seen.id} is at {place} and {seen.place}")
    return found


def check_produced(
    records: Sequence[Record], final: Sequence[Seen], starts: Mapping[int, int]
) -> Findings:
    """What was acknowledged is stored, once, in the order of its producer and key.

    `starts`: the first offsets of the partitions at the end; what was before is removed.
    """
    found = Findings()
    stored = Counter(seen.id for seen in final if seen.id is not None)
    read = {seen.id for seen in sightings(_reads(records))}
    kept = set(final)
    invoked: set[str] = set()
    for record in records:
        if record.get("via") != "kafka":
            continue
        what = record["what"]
        if what == "invoke":
            invoked.add(record["id"])
        elif what == "ok":
            found.counts["acked"] += 1
            _check_acked(found, record, stored, read, starts)
        elif what in ("unknown", "fatal"):
            found.counts[what] += 1
            if what == "fatal":
                found.problem("fatal", f"{record['who']}: {record['error']}")
    found.counts["operations"] += len(invoked)
    found.counts["events"] += len(final)
    for name, count in stored.items():
        if count > 1:
            found.problem("doubled", f"{name} is stored {count} times")
    senders = {name.split(":", 1)[0] for name in invoked}
    for name in stored:
        if name.split(":", 1)[0] in senders and name not in invoked:
            found.problem("phantom", f"{name} is stored and was never sent")
    for seen in {*sightings(records)} - kept:
        if seen.id is not None and seen.offset >= starts.get(seen.partition, 0):
            found.problem("lost", f"{seen.id} was at {seen.place} and is not there at the end")
    _check_order(found, {*kept, *sightings(records)} - _forgotten(records), senders)
    return found


def _reads(records: Iterable[Record]) -> Iterator[Record]:
    return (record for record in records if record["what"] in ("seen", "handled"))


def _check_acked(
    found: Findings,
    record: Record,
    stored: Mapping[str, int],
    read: set[str | None],
    starts: Mapping[int, int],
) -> None:
    name, offset = record["id"], record["offset"]
    if offset < 0:
        found.counts["receipts without offset"] += 1
    if name in stored or name in read:
        return
    start = starts.get(record["partition"], 0)
    if offset < start and start > 0:
        found.counts["removed unread"] += 1
    else:
        found.problem("lost", f"{name} was acknowledged at {offset} and is not stored")


def _check_order(found: Findings, seen: Iterable[Seen], senders: set[str]) -> None:
    """Ids are sender:key:number; all of a sender's events of a key are in one partition."""
    last: dict[str, tuple[int, Seen]] = {}
    for one in sorted(one for one in seen if one.id is not None):
        sender, number = str(one.id).rsplit(":", 1)
        if sender.split(":", 1)[0] not in senders:
            continue
        before = last.get(sender)
        if before is not None and (before[0] > int(number) or before[1].partition != one.partition):
            found.problem("reordered", f"{one.id} at {one.place} after {before[1]}")
        last[sender] = int(number), one


# -- readers ----------------------------------------------------------------------------------


def check_readers(records: Iterable[Record]) -> Findings:
    """Offsets of a partition grow, for each reader from its start to its end."""
    found = Findings()
    last: dict[tuple[str, int], int] = {}
    for record in records:
        if record["what"] == "seen":
            for offset, name in record["events"]:
                reader = record["who"], record["partition"]
                if offset <= last.get(reader, -1):
                    found.problem("backwards", f"{reader}: {name} at {offset}, had {last[reader]}")
                last[reader] = offset
                found.counts["read"] += 1
    return found


# -- groups -----------------------------------------------------------------------------------


def skipped_by_members(records: Iterable[Record], final: Iterable[Seen]) -> set[Seen]:
    """What is stored and no member has handled."""
    handled = {
        (record["partition"], offset)
        for record in records
        if record["what"] == "handled"
        for offset, _ in record["events"]
    }
    return {seen for seen in final if seen.place not in handled}


def check_members(records: Sequence[Record], final: Sequence[Seen]) -> Findings:
    """A group whose members commit: everything is handled, and again only if there is a reason.

    Once a member was given a partition it handles its offsets in order and none of them twice; and
    it begins not before what was committed when it was given the partition. So what is handled
    again was not committed yet when a member was lost, left, or had to share.
    """
    found = Findings()
    for seen in skipped_by_members(records, final):
        found.problem("skipped", f"{seen.id} at {seen.place} was never handled")
    committed: dict[int, int] = {}  # by partition, as far as a member was told
    given: dict[tuple[str, int], int] = {}  # what was committed when a member got a partition
    last: dict[tuple[str, int], int] = {}
    handled: Counter[tuple[int, int]] = Counter()
    for record in records:
        what, who = record["what"], record["who"]
        if what == "assigned":
            for partition in record["partitions"]:
                given[who, partition] = committed.get(partition, 0)
                last.pop((who, partition), None)
                found.counts["assignments"] += 1
        elif what == "handled":
            place = who, record["partition"]
            for offset, name in record["events"]:
                if place not in given:
                    found.problem("overlapped", f"{who} handled {name} and has not its partition")
                elif offset < given[place]:
                    found.problem(
                        "repeated", f"{name} at {offset}: {given[place]} was committed before"
                    )
                if offset <= last.get(place, -1):
                    found.problem("repeated", f"{who}: {name} at {offset} after {last[place]}")
                last[place] = offset
                handled[record["partition"], offset] += 1
        elif what == "settled" and "offsets" in record:
            for partition, offset in record["offsets"]:
                committed[partition] = max(committed.get(partition, 0), offset)
    found.counts["deliveries"] += sum(handled.values())
    found.counts["redelivered"] += sum(count - 1 for count in handled.values())
    return found


def check_commits(records: Sequence[Record], committed: Mapping[int, int]) -> Findings:
    """Committed offsets grow. `committed`: what the group has at the end.

    A commit counts as done when its member was told so, and as begun when it was asked for: an
    answer may be late.
    """
    found = Findings()
    told: dict[int, int] = {}
    begun: dict[str, dict[int, int]] = defaultdict(dict)  # what was told when a commit began
    for record in records:
        if record["what"] == "committing":
            begun[record["who"]] = dict(told)
        elif record["what"] == "settled" and "offsets" in record:
            found.counts["commits"] += 1
            for partition, offset in record["offsets"]:
                before = begun[record["who"]].get(partition, 0)
                if offset < before:
                    found.problem(
                        "returned", f"{record['who']}: {partition} to {offset}, was {before}"
                    )
                told[partition] = max(told.get(partition, 0), offset)
    for partition, offset in told.items():
        if committed.get(partition, 0) < offset:
            end = committed.get(partition)
            found.problem("returned", f"{partition} ends with {end}, {offset} was committed")
    return found
