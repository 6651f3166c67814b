"""Groups of events that become one transaction for each worker. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from millstream.cdc.sink.fold import Format, RowEvents, flatten, worker_of
from millstream.cdc.sink.topic_positions import TopicPosition, TopicPositions

__all__ = ["EventGroup", "WorkerPart", "part_of", "shared_out"]


@dataclass(slots=True)
class EventGroup:
    """Events as they were read, and how far they reach."""

    events: list[pa.RecordBatch] = field(default_factory=list)
    positions: dict[int, TopicPosition] = field(default_factory=dict)
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
class WorkerPart:
    """What one worker applies of a group."""

    events: RowEvents | None  # None: nothing for it
    positions: TopicPositions
    now: bool = False  # the positions are to be stored even without events


def shared_out(
    group: EventGroup, format: Format, key: Sequence[str], workers: int, now: bool
) -> list[WorkerPart]:
    """The parts of all workers: every event of a key goes to the same one."""
    if not group.events:
        return [WorkerPart(None, group.positions, now)] * workers
    flat = flatten(group.events, format, key)
    if workers == 1:
        return [WorkerPart(flat, group.positions, now)]
    numbers = worker_of(flat, key, workers)
    parts = [flat.filter(pc.equal(numbers, number)) for number in range(workers)]
    return [WorkerPart(part if len(part) else None, group.positions, now) for part in parts]


def part_of(part: WorkerPart, applied: TopicPositions) -> RowEvents | None:
    """What is left of a part after what was applied before a restart; None: nothing."""
    events = part.events
    if events is None:
        return None
    for partition, position in applied.items():
        events = events.after(partition, position.offset, position.index)
    return events if len(events) else None
