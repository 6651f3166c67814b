"""`async with store.change(id) as account`: commands on an aggregate, appended when the block ends.

A command is a method of the state's class that returns the event it decides on, or a list of them.
The block works on a stand-in for the state that applies and collects those events.

The block runs once. When another append was faster, what the block did is repeated on the newer
state: the same calls with the same arguments. That is only right if the block would have done the
same, so everything it has seen is compared: if a call now returns something else, or an attribute
that was read has another value, the conflict is raised. A block that only calls commands is
repeated whatever the new state is; its commands check it themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from millstream.errors import ConfigError
from millstream.event_store.folding import Folding

__all__ = ["Changes", "Seen", "decided", "stand_in"]


@dataclass(slots=True)
class Seen:
    """One thing that a block did with the state, and what came of it."""

    name: str
    args: tuple[Any, ...] | None = None  # None: an attribute was read
    kwargs: dict[str, Any] = field(default_factory=dict)
    result: Any = None


class Changes:
    """The state that a block works on, the events it decided on, and what it has seen."""

    def __init__(self, state: Any, folding: Folding, is_event: Callable[[Any], bool]) -> None:
        self.state = state
        self.events: list[Any] = []
        self.seen: list[Seen] = []
        self._folding = folding
        self._is_event = is_event

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the state; the events that it returns are collected and applied."""
        seen = Seen(name, copy.deepcopy(args), copy.deepcopy(kwargs))
        result = getattr(self.state, name)(*args, **kwargs)
        if hasattr(result, "__await__"):
            raise ConfigError(
                f"command '{name}' is asynchronous: a command is a plain method that returns "
                f"events. Await what it needs before the block"
            )
        found = decided(result, self._is_event)
        if found is None:
            seen.result = copy.deepcopy(result)
        else:
            result = None
            for event in found:
                self.state = self._folding.fold(self.state, event)
            self.events += found
        self.seen.append(seen)
        return result

    def read(self, name: str) -> Any:
        """An attribute of the state; a method comes as a function that calls it here."""
        value = getattr(self.state, name)
        if callable(value):
            return lambda *args, **kwargs: self.call(name, args, kwargs)
        self.seen.append(Seen(name, result=copy.deepcopy(value)))
        return value

    def repeated_on(self, state: Any) -> Changes | None:
        """The same on a newer state; None when the block would have seen something else."""
        again = Changes(state, self._folding, self._is_event)
        for seen in self.seen:
            if seen.args is None:
                found = again.read(seen.name)
            else:
                found = again.call(seen.name, seen.args, seen.kwargs)
            if found != seen.result:
                return None
        return again


def decided(result: Any, is_event: Callable[[Any], bool]) -> list[Any] | None:
    """The events in what a command returned; None when it returned something else."""
    if is_event(result):
        return [result]
    if isinstance(result, list | tuple) and result and all(map(is_event, result)):
        return list(result)
    return None


class _StandIn:
    """What a block works on instead of the state."""

    __slots__ = ("_changes",)

    def __init__(self, changes: Changes) -> None:
        object.__setattr__(self, "_changes", changes)

    def __getattribute__(self, name: str) -> Any:
        changes: Changes = object.__getattribute__(self, "_changes")
        if name == "__class__":
            return type(changes.state)
        return changes.read(name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise ConfigError(
            f"attribute '{name}' was set in a block of store.change(...): only events change a "
            f"state. Call a method that returns the event"
        )

    def __repr__(self) -> str:
        return repr(object.__getattribute__(self, "_changes").state)


def stand_in(changes: Changes) -> Any:
    """The object that a block works on."""
    return _StandIn(changes)
