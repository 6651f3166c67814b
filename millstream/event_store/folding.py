"""States of aggregates: an initial state, and a function that an event changes it by."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

from millstream.errors import ConfigError
from millstream.schemas.codecs import make_codec
from millstream.schemas.declaration import declare
from millstream.schemas.formats.python import is_schema_class
from millstream.schemas.values.rows import object_maker

__all__ = ["Fold", "Folding", "StateCodec", "class_path", "make_folding"]

Fold: TypeAlias = Callable[[Any, Any], Any]  # state and event to the next state


@dataclasses.dataclass(frozen=True, slots=True)
class Folding:
    """How the state of an aggregate follows from its events."""

    make: Callable[[], Any]  # the initial state, a new object each time
    fold: Fold
    cls: type | None  # the class of the state, if it was given as one

    def state_codec(self, version: int) -> StateCodec:
        """How states are stored; refused for a class that has no schema."""
        if self.cls is None or not is_schema_class(self.cls):
            name = "a function's states" if self.cls is None else self.cls.__name__
            raise ConfigError(
                f"snapshots of {name}: they are stored by the schema of the state's class, so that "
                f"has to be a dataclass, a msgspec Struct or a Pydantic model"
            )
        return StateCodec(self.cls, version)


class StateCodec:
    """States to JSON and back, by the schema of their class."""

    def __init__(self, cls: type, version: int) -> None:
        schema = declare(cls)
        codec = make_codec(schema, "json")
        make = object_maker(cls, schema.record)
        # A snapshot is used only if it was made with the same fields and the same version.
        self.fingerprint = f"{schema.fingerprint}/{version}"
        self.encode: Callable[[object], bytes] = codec.encode
        self.decode: Callable[[bytes], Any] = lambda data: make(codec.decode(data))


def make_folding(state: type | None, fold: Fold | None, initial: Any = None) -> Folding | None:
    """The folding of a class with `apply`, or of a function; None: neither was given."""
    if fold is not None:
        if not callable(fold):
            raise ConfigError(f"fold: {fold!r:.60} is not a function of a state and an event")
        cls = state or (type(initial) if initial is not None else None)
        make = (lambda: copy.deepcopy(initial)) if initial is not None else (state or _nothing)
        return Folding(make, fold, cls)
    if state is None:
        return None
    if not isinstance(state, type):
        raise ConfigError(f"state: give the class of the states, found {state!r:.60}")
    apply = getattr(state, "apply", None)
    if not callable(apply):
        raise ConfigError(
            f"{state.__name__} has no method apply(event), so events cannot change it. Add one, or "
            f"give a function: fold=function, which takes a state and an event"
        )
    try:
        state()
    except TypeError as error:
        raise ConfigError(
            f"{state.__name__}() must be the state before the first event ({error}). Give every "
            f"field a default"
        ) from error
    return Folding(state, _apply, state)


def _nothing() -> None:
    return None


def _apply(state: Any, event: Any) -> Any:
    """What `apply` returns, or the state itself when it was changed in place."""
    changed = state.apply(event)
    return state if changed is None else changed


def class_path(cls: type | None) -> str | None:
    """Where another process can import a class from; None when it cannot.

    >>> class_path(StateCodec)
    'millstream.event_store.folding:StateCodec'
    """
    if cls is None or "<" in cls.__qualname__ or cls.__module__ == "builtins":
        return None
    return f"{cls.__module__}:{cls.__qualname__}"
