"""What a protocol and the listener know of each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

__all__ = ["FrameHandler", "MakeHandler", "Piece", "Transport"]

Piece = bytes | bytearray | memoryview  # views of single bytes


class Transport(Protocol):
    """One connection, for the protocol that handles its requests.

    Every request that `FrameHandler.frame` got must be given back once, when it is answered:
    `send(answer, frees=len(request))`, or `release(len(request))` if it gets no answer. Requests
    that are not given back count as in progress, and at the limit the connection is not read.
    """

    max_frame: int  # bytes of a request; a protocol may ask for less before the login
    when_writable: Callable[[], None] | None  # called when `writable` becomes true again

    @property
    def peer(self) -> str:
        """The client's address, as host:port."""

    @property
    def host(self) -> str:
        """The client's host."""

    @property
    def writable(self) -> bool:
        """Whether the client reads what it is sent; better send no large answer while not."""

    @property
    def room(self) -> int:
        """Bytes that answers may take at the moment, of all connections; a hint."""

    def send(self, *pieces: Piece, frees: int = 0) -> None:
        """Write an answer, with its length; `frees` is the size of the request it answers."""

    def release(self, size: int) -> None:
        """A request of that size is done without an answer."""

    def pause(self) -> None:
        """Take no more requests until `resume`."""

    def resume(self) -> None:
        """Take requests again."""

    def close(self, reason: str) -> None:
        """Close it, because of what the client sent; what was sent before is still written."""


class FrameHandler(Protocol):
    """What a protocol does with one connection. Neither method may block."""

    def frame(self, data: bytes) -> None:
        """A whole request, without its length. An exception closes the connection."""

    def lost(self, reason: str) -> None:
        """The connection is gone; called once, nothing after it."""


MakeHandler = Callable[[Transport], FrameHandler]
