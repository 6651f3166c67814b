"""The base of every blocking class, and how plain functions become handlers."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from millstream.blocking.loop import LoopThread
from millstream.closing import Closing, leave
from millstream.errors import ConfigError

__all__ = [
    "NOT_GIVEN",
    "ContextTwin",
    "Twin",
    "collected",
    "given",
    "handling",
    "in_group",
    "in_thread",
    "unwrapped",
]

A = TypeVar("A")
B = TypeVar("B")

NOT_GIVEN: Any = type("NotGiven", (), {"__repr__": lambda self: "NOT_GIVEN"})()


def given(**arguments: Any) -> dict[str, Any]:
    """The arguments that were given; others keep the default of the asynchronous call."""
    return {name: value for name, value in arguments.items() if value is not NOT_GIVEN}


class Twin:
    """The blocking form of an asynchronous object, which lives on the loop thread."""

    __slots__ = ("_inner", "_loop")

    _loop: LoopThread
    _inner: Any  # each class declares its type

    def __init__(self, loop: LoopThread, inner: Any) -> None:
        self._loop = loop
        self._inner = inner

    def __repr__(self) -> str:
        return f"<blocking {self._inner!r}>"


class ContextTwin(Twin, Closing):
    """The blocking form of an object that is used with `async with`."""

    __slots__ = ()

    def _enter(self) -> None:
        self._loop.call(self._inner.__aenter__())

    def _leave(self, error: BaseException | None) -> None:
        self._loop.call(leave(self._inner, error))


def in_thread(
    handler: Callable[..., object], wrap: Callable[[A], B] | None = None
) -> Callable[..., Awaitable[Any]]:
    """A handler for the asynchronous call, that runs the plain function in a worker thread."""
    _check_plain(handler)

    def work(argument: Any, *others: Any) -> object:
        try:
            return handler(argument if wrap is None else wrap(argument), *others)
        except StopIteration as error:  # a future cannot hold it and would never be done
            raise RuntimeError("the handler raised StopIteration") from error

    async def call(*arguments: Any) -> object:
        context = contextvars.copy_context()
        try:
            loop = asyncio.get_running_loop()
            future = loop.run_in_executor(None, context.run, work, *arguments)
        except RuntimeError as error:
            # The process is ending and starts no more threads. Nothing is wrong with the event.
            raise asyncio.CancelledError from error
        return await future

    return call


def collected(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its results collected in its thread: a generator would run on the loop."""
    _check_plain(function)

    def work(*arguments: Any) -> Any:
        result = function(*arguments)
        return list(result) if isinstance(result, Iterator) else result

    return work


def unwrapped(given: Any) -> Any:
    """The asynchronous objects of one twin, of several, or of a dict of them."""
    if isinstance(given, Mapping):
        return {name: unwrapped(each) for name, each in given.items()}
    if isinstance(given, Sequence):
        return [unwrapped(each) for each in given]
    return getattr(given, "_inner", given)


class _Handling(threading.local):
    """The group whose handler runs in this thread."""

    group: object = None


handling = _Handling()


def in_group(handler: Callable[[A], object], group: object) -> Callable[[A], None]:
    """A handler for a group, which has its own worker threads."""
    _check_plain(handler)

    def work(event: A) -> None:
        handling.group = group
        try:
            handler(event)
        finally:
            handling.group = None

    return work


def _check_plain(handler: Callable[..., object]) -> None:
    if inspect.iscoroutinefunction(handler):
        raise ConfigError(
            f"{getattr(handler, '__qualname__', handler)} is an async function; give a plain one, "
            f"which is called in a thread, or use millstream.connect()"
        )
