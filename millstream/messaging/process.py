"""Consume, transform, produce: results and input position in one atomic commit.

Outputs that go to topics only: each input partition has a worker of its own, which stores its
position with the outputs in each output partition (`processing/partition_worker.py`). With tables
one worker handles all input partitions, so that a row is never written by two, and a commit is one
record that holds everything (`processing/table_worker.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from millstream.errors import ConfigError
from millstream.messaging.processing.partition_worker import PartitionWorker
from millstream.messaging.processing.settings import ProcessParts, ProcessSettings, Transform
from millstream.messaging.processing.table_worker import TableWorker
from millstream.messaging.processing.work import Work
from millstream.nearest import settings_from

if TYPE_CHECKING:
    from millstream.messaging.topic import Topic

__all__ = [
    "Process",
    "ProcessSettings",
    "Sources",
    "StateTables",
    "Targets",
    "Transform",
    "make_process",
]


class _Table(Protocol):
    """A table, as far as a process needs it."""

    topic: Topic


Sources: TypeAlias = "Topic | Sequence[Topic]"
Targets: TypeAlias = "Topic | _Table | Sequence[Topic | _Table]"
StateTables: TypeAlias = "Mapping[str, _Table] | Sequence[_Table]"


class Process:
    """Applies a function to every event of topics and stores its results: exactly once.

    A crash at any point loses no result, and stores none twice or partially. The function may be
    called again for an event whose results were not committed; without tables it should depend only
    on the event. Order: outputs keep the order of their input partition.
    """

    def __init__(self, parts: ProcessParts, function: Transform, settings: ProcessSettings) -> None:
        self.settings = settings
        self._work = Work(parts, function, settings)

    @property
    def handled(self) -> int:
        """Events the function was called for."""
        return self._work.handled

    @property
    def produced(self) -> int:
        """Outputs stored, and rows of tables."""
        return self._work.produced

    def stop(self) -> None:
        """Commit what is done and return from `run`."""
        self._work.stopping.set()

    async def run(self, once: bool = False) -> None:
        """Process until `stop`; with `once`, until everything stored now is done.

        When one input partition fails the others commit what they have; then its error is raised.
        """
        work = self._work
        if work.parts.tables or any(output.is_table for output in work.parts.outputs):
            await TableWorker(work).run(once)
            return
        workers = [PartitionWorker(work, partition) for partition in work.parts.inputs]
        results = await asyncio.gather(*(w.run(once) for w in workers), return_exceptions=True)
        for error in results:
            if isinstance(error, BaseException):
                raise error


def make_process(
    source: Sources,
    target: Targets,
    function: Transform,
    settings: ProcessSettings | None,
    tables: StateTables | None,
    values: dict[str, Any],
) -> Process:
    """The process of these topics and tables; `values` are settings, one by one."""
    sources = _several(source)
    targets = _several(target)
    state = _named(tables or {})
    if not sources:
        raise ConfigError("a process needs a topic to read")
    if not targets and not state:
        raise ConfigError("a process needs a target, or tables that its function changes")
    _check_different(sources, "source")
    _check_different([*targets, *state.values()], "target")
    # With settings of its own, this name may be too long.
    name = f"{sources[0].name}-to-{[*targets, *state.values()][0].name}"
    if values and settings is None:
        values.setdefault("name", name)
    chosen = settings_from(ProcessSettings, settings, values, ("tables",)) or ProcessSettings(name)
    parts = ProcessParts(
        [
            partition
            for topic in sources
            for partition in topic.process_input()
            if chosen.partitions is None or partition.number in chosen.partitions
        ],
        [topic.process_output() for topic in targets],
        {name: topic.process_output(state=True) for name, topic in state.items()},
    )
    return Process(parts, function, chosen)


def _several(given: Any) -> list[Topic]:
    """The topics of what may be one topic or table, or several."""
    return [_topic_of(each) for each in (given if isinstance(given, Sequence) else [given])]


def _topic_of(given: Topic | _Table) -> Topic:
    # By what it is not: importing topics here would import them for a process's settings too.
    found: Any = given
    topic: Topic = getattr(found, "topic", found)
    return topic


def _named(tables: StateTables) -> dict[str, Topic]:
    if isinstance(tables, Mapping):
        return dict(zip(tables, _several(list(tables.values())), strict=True))
    return {topic.name: topic for topic in _several(tables)}


def _check_different(topics: Sequence[Topic], role: str) -> None:
    names = [topic.name for topic in topics]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"'{twice[0]}' is given twice as a {role} of a process. What the function changes "
            f"through `tables` is no target besides"
        )
