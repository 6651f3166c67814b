"""Groups of events that become one transaction for each worker. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from millstream.cdc.sink.fold import Format, RowEvents, flatten, fold, worker_of
from millstream.cdc.sink.places import Place, Places

__all__ = ["Group", "Part", "part_of", "shared_out"]


@dataclass(slots=True)
class Group:
    """Events as they were read, and how far they reach."""

    events: list[pa.RecordBatch] = field(default_factory=list)
    places: dict[int, Place] = field(default_factory=dict)
    rows: int = 0
    bytes: int = 0

    def add(self, events: Sequence[pa.RecordBatch]) -> None:
        """More events, of the same version of the schema."""
        for batch in events:
            if batch.num_rows:
                self.events.append(batch)
                self.rows += batch.num_rows
                self.bytes += batch.nbytes


@dataclass(frozen=True, slots=True)
class Part:
    """What one worker applies of a group."""

    events: RowEvents | None  # None: nothing for it
    places: Places
    now: bool = False  # the places are to be stored even without events


def shared_out(
    group: Group, format: Format, key: Sequence[str], workers: int, now: bool
) -> list[Part]:
    """The parts of all workers: every event of a key goes to the same one."""
    if not group.events:
        return [Part(None, group.places, now)] * workers
    flat = flatten(group.events, format, key)
    if workers == 1:
        return [Part(flat, group.places, now)]
    numbers = worker_of(flat, key, workers)
    parts = [flat.filter(pc.equal(numbers, number)) for number in range(workers)]
    return [Part(part if len(part) else None, group.places, now) for part in parts]


def part_of(part: Part, applied: Mapping[int, Place], key: Sequence[str]) -> RowEvents | None:
    """What is left of a part after what was applied before a restart, one event for each key."""
    events = part.events
    if events is None:
        return None
    for partition, place in applied.items():
        events = events.after(partition, place.offset, place.index)
    return fold(events, key) if len(events) else None
