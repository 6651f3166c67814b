"""`async with store.change(id) as account`: commands on an aggregate, appended when the block ends.

A command is a method of the state's class that returns the event it decides on, or several. The
block works on a stand-in for the state that applies and collects those events.

The block runs once. When another append was faster, what the block did is repeated on the newer
state: the same calls with the same arguments. That is only right if the block would have done the
same, so everything it has seen is compared: what calls returned or raised, and the attributes that
were read. If anything is different now, the conflict is raised. A block that only calls commands is
repeated whatever the new state is; its commands check it themselves.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from millstream.errors import ConfigError, UnknownEvent
from millstream.event_store.event_types import EventTypes
from millstream.event_store.folding import Folding
from millstream.schemas.formats.python import is_schema_class

__all__ = ["Changes", "decided", "stand_in"]

Act = Callable[[Any], Any]  # what a block does with the state

_EVENTS: Final = object()  # what a command has returned: whatever the events are


@dataclass(frozen=True, slots=True)
class _Seen:
    """One thing that a block did with the state, and what it saw."""

    act: Act
    name: str
    outcome: Any


class Changes:
    """The state that a block works on, the events it decided on, and what it has seen."""

    def __init__(self, state: Any, folding: Folding, types: EventTypes) -> None:
        self.state = copy.deepcopy(state)
        self.events: list[Any] = []
        self.ended = False
        self._first = state
        self._seen: list[_Seen] = []
        self._folding = folding
        self._types = types

    def do(self, name: str, act: Act) -> Any:
        """Do something with the state; events that it returns are collected and applied."""
        if self.ended:
            raise ConfigError(
                f"'{name}' was used after the block of store.change(...) had ended. Begin another"
            )
        try:
            result = act(self.state)
        except Exception as error:
            self._seen.append(_Seen(act, name, (type(error), error.args)))
            raise
        if inspect.iscoroutine(result):
            result.close()
            raise ConfigError(
                f"command '{name}' is asynchronous: a command is a plain method that returns "
                f"events. Await what it needs before the block"
            )
        events = decided(result, self._types)
        if events is None:
            self._seen.append(_Seen(act, name, _copied(result)))
            return result
        self._seen.append(_Seen(act, name, _EVENTS))
        for event in events:
            self.state = self._folding.fold(self.state, event)
        self.events += events
        return None

    def attribute(self, name: str) -> Any:
        """An attribute of the state; a method comes as a function that calls it here."""
        if inspect.isroutine(getattr(self.state, name, None)):

            def call(*args: Any, **kwargs: Any) -> Any:
                return self.do(name, lambda state: getattr(state, name)(*args, **kwargs))

            return call
        return self.do(name, lambda state: getattr(state, name))

    def end(self) -> list[Any]:
        """No more from the block; its events. Refused if the state was changed without one."""
        self.ended = True
        expected = copy.deepcopy(self._first)
        for event in self.events:
            expected = self._folding.fold(expected, event)
        has_equality = "__eq__" in {
            name for cls in type(expected).__mro__[:-1] for name in vars(cls)
        }
        if has_equality and expected != self.state:
            raise ConfigError(
                f"{type(expected).__name__} was changed in a block of store.change(...) without an "
                f"event: only events change a state, in apply(). Let the method return the event, "
                f"and nothing else"
            )
        return self.events

    def repeated_on(self, state: Any) -> Changes | None:
        """The same on a newer state; None when the block would have seen something else."""
        again = Changes(state, self._folding, self._types)
        for seen in self._seen:
            count = len(again.events)
            try:
                found = again.do(seen.name, seen.act)
            except Exception as error:
                if seen.outcome is _EVENTS:
                    raise  # a command has refused: its reason is better than a conflict
                found = type(error), error.args
            found = _EVENTS if len(again.events) > count else found
            if found is not seen.outcome and found != seen.outcome:
                return None
        return again


def _copied(value: Any) -> Any:
    """What a block has seen, as it was then."""
    try:
        return copy.deepcopy(value)
    except Exception:  # anything can be in a state: then it must be the very same object
        return value


def decided(result: Any, types: EventTypes) -> list[Any] | None:
    """The events in what a command returned; None when it returned something else.

    A decision is never dropped: a mixture of events and other things is refused, and so is an
    object that looks like an event and is none of this store.
    """
    if inspect.isgenerator(result):
        result = list(result)
    found = list(result) if isinstance(result, list | tuple | set | frozenset) else [result]
    if any(map(types.is_event, found)):
        for one in found:
            _check_event(one, types)
        return found
    if not isinstance(result, type) and is_schema_class(type(result)):
        _check_event(result, types)
    return None


def _check_event(value: Any, types: EventTypes) -> None:
    if not types.is_event(value):
        raise UnknownEvent(types.store, type(value).__name__, types.classes)


class _StandIn:
    """What a block works on instead of the state."""

    __slots__ = ("_changes",)

    def __init__(self, changes: Changes) -> None:
        object.__setattr__(self, "_changes", changes)

    def __getattribute__(self, name: str) -> Any:
        changes = _changes_of(self)
        if name == "__class__":
            return type(changes.state)
        return changes.attribute(name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise ConfigError(
            f"attribute '{name}' was set in a block of store.change(...): only events change a "
            f"state. Call a method that returns the event"
        )

    # Python looks these up on the class.

    def __bool__(self) -> bool:
        return bool(_changes_of(self).do("bool", bool))

    def __len__(self) -> int:
        return int(_changes_of(self).do("len", len))

    def __contains__(self, item: object) -> bool:
        return bool(_changes_of(self).do("in", lambda state: item in state))

    def __iter__(self) -> Iterator[Any]:
        items: Iterable[Any] = _changes_of(self).do("iter", lambda state: [list(state)])
        return iter(next(iter(items)))

    def __getitem__(self, item: Any) -> Any:
        return _changes_of(self).do("item", lambda state: state[item])

    def __eq__(self, other: object) -> bool:
        return bool(_changes_of(self).do("==", lambda state: state == other))

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return str(_changes_of(self).do("str", str))

    def __repr__(self) -> str:
        return repr(_changes_of(self).state)


def _changes_of(stand_in: _StandIn) -> Changes:
    changes: Changes = object.__getattribute__(stand_in, "_changes")
    return changes


def stand_in(changes: Changes) -> Any:
    """The object that a block works on."""
    return _StandIn(changes)
