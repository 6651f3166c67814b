"""What a function returned: which events, for which target, and the packs they become."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from millstream.errors import ConfigError, MillstreamError, Unfit
from millstream.events.event import Event, NewEvent
from millstream.events.packs.pack import EncodedPack
from millstream.events.packs.packing import Packing
from millstream.events.row_buffer import RowBuffer
from millstream.messaging.processing.settings import ProcessTarget
from millstream.messaging.publishing.target import PackTarget

__all__ = ["Made", "Router", "UnfitOutput", "outputs_of", "packs_of"]


class Made(NamedTuple):
    """One output that waits for its commit, and the event it came from."""

    new: NewEvent
    event: Event


class UnfitOutput(Exception):
    """An output cannot be written to its topic."""

    def __init__(self, event: Event, error: MillstreamError) -> None:
        self.event, self.error = event, error
        super().__init__(str(error))


def outputs_of(result: Any) -> list[NewEvent]:
    """The events that a function returned: none, one or several."""
    if result is None:
        return []
    if isinstance(result, NewEvent):
        return [result]
    # Cheap checks, because they are made for every event.
    if isinstance(result, list) or hasattr(result, "__next__"):
        return [item if isinstance(item, NewEvent) else NewEvent(item) for item in result]
    return [NewEvent(result)]


class Router:
    """Finds the target of an output and its partition there."""

    def __init__(self, outputs: Sequence[ProcessTarget]) -> None:
        self._by_name = {output.name: output for output in outputs}
        self._only = outputs[0] if len(outputs) == 1 else None

    def of(self, new: NewEvent) -> ProcessTarget:
        """The target that an output names; it need not when there is only one."""
        if new.topic is None and self._only is not None:
            return self._only
        found = self._by_name.get(new.topic or "")
        if found is not None:
            return found
        names = ", ".join(repr(name) for name in self._by_name)
        if not names:
            raise ConfigError(
                "the function returned an output, and the process has no target: give it one, or "
                "change its tables only and return nothing"
            )
        asked = "names no target" if new.topic is None else f"is for {new.topic!r}"
        raise ConfigError(
            f"an output {asked}: the targets are {names}. Say which with NewEvent(..., topic=NAME)"
        )

    @staticmethod
    def partition(output: ProcessTarget, new: NewEvent, event: Event, number: int) -> int:
        """The output's partition; without a key by its input, so the same after a restart."""
        shape = output.target.shape
        if shape.partitions == 1:
            return 0
        if new.key is None:
            return (event.offset + event.index + number) % shape.partitions
        return shape.route(new.key)[0]


def packs_of(waiting: Sequence[Made], target: PackTarget, packing: Packing) -> list[EncodedPack]:
    """Outputs for one partition as packs; one that does not fit is named with its event."""
    if not waiting:
        return []
    buffer = RowBuffer(target.value_type)
    for new, event in waiting:
        try:
            if new.headers is None and new.timestamp is None and new.id is None:
                buffer.add(new.value, new.key)
            else:
                buffer.add_event(new.value, new.key, new.headers, new.timestamp, new.id)
        except MillstreamError as error:
            raise UnfitOutput(event, error) from error
    try:
        batch = buffer.build(buffer.drain())
    except Unfit as error:
        raise UnfitOutput(waiting[error.row or 0].event, error) from error
    return [target.encode(piece, packing) for piece in target.split(batch, packing)]
