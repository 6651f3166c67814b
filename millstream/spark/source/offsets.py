"""What an offset of a query means, and its JSON. Pure.

A query's offset has one entry for each partition. `next` is the stream sequence of the next message
to read: a batch from `start` to `end` reads the sequences start.next <= s < end.next, whatever
happens meanwhile. Beside it stands which log that is (when its stream was made), when the message
before `next` was stored, and into how many tasks the range that ends here is cut: a batch that is
run again is the same rows in the same tasks.

Spark compares offsets as JSON text, so the order of keys is fixed here: topics by name, partitions
by number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from millstream.errors import ConfigError

__all__ = [
    "Offsets",
    "Position",
    "Where",
    "from_json",
    "lag",
    "to_json",
]

Where = tuple[str, int]  # topic, partition
Offsets = dict[Where, "Position"]
FIRST: Final = 1  # the first sequence of every stream


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the log of one partition."""

    next: int  # sequence of the next message to read
    log: str  # when the stream was made: another time is another log
    last: str = ""  # when the message before `next` was stored; empty: not known
    tasks: int = 1  # into how many tasks the range that ends here is cut


def to_json(offsets: Mapping[Where, Position]) -> dict[str, Any]:
    """The offset as Spark keeps it; equal offsets give equal text.

    >>> to_json({("b", 10): Position(3, "x"), ("b", 9): Position(2, "y", "z", 4)})
    {'b': {'9': {'next': 2, 'log': 'y', 'last': 'z', 'tasks': 4}, '10': {'next': 3, 'log': 'x'}}}
    """
    result: dict[str, Any] = {}
    for (topic, number), position in sorted(offsets.items()):
        entry: dict[str, Any] = {"next": position.next, "log": position.log}
        if position.last:
            entry["last"] = position.last
        if position.tasks != 1:
            entry["tasks"] = position.tasks
        result.setdefault(topic, {})[str(number)] = entry
    return result


def from_json(kept: Mapping[str, Any]) -> Offsets:
    """The offset that Spark kept."""
    try:
        return {
            (topic, int(number)): Position(
                int(entry["next"]), entry["log"], entry.get("last", ""), entry.get("tasks", 1)
            )
            for topic, numbers in kept.items()
            for number, entry in numbers.items()
        }
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"the checkpoint's offset is not one of this source ({error!r}): {kept!r}. Was it "
            f"written by another source? Use a new checkpoint location"
        ) from error


def lag(done: Mapping[str, Any] | str, latest: Mapping[str, Any] | str) -> int:
    """Messages between two offsets of a query's progress: `endOffset` and `latestOffset`.

    >>> lag('{"a": {"0": {"next": 5, "log": "x"}}}', {"a": {"0": {"next": 9, "log": "x"}}})
    4
    """
    reached = from_json(json.loads(done) if isinstance(done, str) else done)
    end = from_json(json.loads(latest) if isinstance(latest, str) else latest)
    total = 0
    for where, position in end.items():
        before = reached.get(where)
        start = before.next if before is not None and before.log == position.log else FIRST
        total += max(0, position.next - start)
    return total
