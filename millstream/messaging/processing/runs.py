"""Messages of a process's input in runs: neighbours that the function is called for in one loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from millstream.events.event import Event, Partition, PlainEvent
from millstream.events.unpack import take_plain
from millstream.messaging.processing.settings import Transform
from millstream.wire.message import RawMessage

__all__ = ["GroupTransform", "RawMessages", "Run", "runs_of"]

RawMessages: TypeAlias = Sequence[RawMessage]


class GroupTransform(ABC):
    """A function of a process with tables that can read neighbouring messages together.

    That takes less time than one by one. For a message that it does not read like this it is
    called with the event, as any function.
    """

    at_once: int  # messages that are best read together

    @abstractmethod
    def __call__(self, event: Event, tables: Any) -> Any:
        """Handle an event."""

    @abstractmethod
    def read(self, partition: Partition, messages: RawMessages) -> Sequence[Any | None]:
        """What `apply` needs of each message; None: it may be no plain event, or needs the call."""

    @abstractmethod
    def apply(self, read: Any, tables: Any) -> None:
        """Do what a call with the event of a message does, with what was read of it."""


class Run(NamedTuple):
    """Neighbours in one partition."""

    function: Callable[..., Any]
    items: Sequence[Any]  # what the function is called with
    event: Callable[[int], Event]  # of an item, by its place
    packed: bool = False  # they are events of one message; else each has a message of its own


def runs_of(
    function: Transform, partition: Partition, messages: RawMessages
) -> Iterator[Run | RawMessage]:
    """Runs of plain events in some messages, and between them every other message."""
    if isinstance(function, GroupTransform):
        for first in range(0, len(messages), function.at_once):
            yield from _read_runs(function, partition, messages[first : first + function.at_once])
        return
    left = iter(messages)
    while True:
        plain: list[PlainEvent] = []
        other = take_plain(partition, left, plain)
        if plain:
            yield Run(function, plain, plain.__getitem__)
        if other is None:
            return
        yield other


def _read_runs(
    function: GroupTransform, partition: Partition, messages: RawMessages
) -> Iterator[Run | RawMessage]:
    read = function.read(partition, messages)
    start = 0
    gaps = [place for place, found in enumerate(read) if found is None]
    for gap in (*gaps, len(messages)):
        if gap > start:
            event_at = partial(_event_at, partition, messages[start:gap])
            yield Run(function.apply, read[start:gap], event_at)
        if gap < len(messages):
            yield messages[gap]
        start = gap + 1


def _event_at(partition: Partition, messages: RawMessages, place: int) -> Event:
    return PlainEvent(partition, messages[place])
