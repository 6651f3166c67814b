"""How the messages of a range are asked for and handed on: one window at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from millstream.wire.message import RawMessage

__all__ = ["Collector", "Messages", "Window"]


@dataclass(frozen=True, slots=True)
class Window:
    """How much is asked for in one go, and how long a reader keeps trying without progress."""

    messages: int = 20_000
    bytes: int = 8 * 1024 * 1024  # at least one largest message is always asked for
    give_up_after: float = 60.0  # seconds without progress


class Messages(Protocol):
    """The messages of a window, in whatever form they are handed on."""

    def __len__(self) -> int: ...

    def reply_of(self, number: int) -> bytes:
        """The address of a message's ack."""

    def first(self: M, count: int) -> M:
        """The first `count` messages."""


M = TypeVar("M", bound=Messages)
MadeOf = TypeVar("MadeOf", bound=Messages, covariant=True)


class Collector(Protocol[MadeOf]):
    """Makes the messages of a window from what arrives."""

    @property
    def count(self) -> int:
        """Messages so far."""

    def begin(self, sid: bytes, wanted: int) -> None:
        """A new window: at most `wanted` messages of one subscription."""

    def feed(self, data: bytes, others: Callable[[bytes], None]) -> None:
        """Take bytes that arrived; what is not a message of the window goes to `others`."""

    def add(self, message: RawMessage) -> None:
        """Take a message that was among what went to `others`."""

    def end(self) -> tuple[MadeOf, bytes]:
        """The window, and the bytes of a frame that is not complete."""
