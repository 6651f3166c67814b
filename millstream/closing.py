"""Objects that are opened and closed with `with` and `async with`.

The two mixins define the context methods once. A class says what happens when the block is entered
(`_enter`, nothing by default) and when it is left (`_leave`).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TypeVar

__all__ = ["AsyncClosing", "Closing", "Opening", "leave"]


class Closing:
    """Used as `with`; ends when the block is left."""

    __slots__ = ()

    def _enter(self) -> None:
        """Open it; called when the block is entered."""

    def _leave(self, error: BaseException | None) -> None:
        """Close it; called when the block is left, with the error that ended it."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._enter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave(error)


class AsyncClosing:
    """Used as `async with`; ends when the block is left."""

    __slots__ = ()

    async def _enter(self) -> None:
        """Open it; called when the block is entered."""

    async def _leave(self, error: BaseException | None) -> None:
        """Close it; called when the block is left, with the error that ended it."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        await self._enter()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._leave(error)


async def leave(context: AsyncClosing, error: BaseException | None) -> None:
    """What the end of an `async with` block does, for a block that is not written as one."""
    await context.__aexit__(None if error is None else type(error), error, None)


T = TypeVar("T", bound=AsyncClosing)


class Opening(Generic[T]):
    """An object about to be opened: `await` it, or use it as `async with`.

    Nothing happens before that. A cancelled `await` leaves nothing open.
    """

    def __init__(self, open: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._open = open
        self._opened: list[T] = []  # innermost block last

    def __await__(self) -> Generator[Any, None, T]:
        return self._open().__await__()

    async def open(self) -> T:
        """Same as `await`, for code that needs a coroutine."""
        return await self._open()

    async def __aenter__(self) -> T:
        opened = await self._open()
        await opened.__aenter__()
        self._opened.append(opened)
        return opened

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._opened.pop().__aexit__(kind, error, trace)

    if not TYPE_CHECKING:  # a type checker finds these mistakes itself

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"nothing is open yet, so there is no {name!r}. Write 'await' before the call that "
                f"returned this, or use it as 'async with ... as'"
            )

        def __enter__(self) -> NoReturn:
            raise TypeError(
                "write 'async with' instead of 'with'; in code without asyncio use "
                "millstream.blocking"
            )

        def __exit__(self, *_: object) -> None: ...  # 'with' looks for it first
