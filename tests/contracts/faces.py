"""The blocking API with an asynchronous face, so that one test body runs on both."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from millstream.blocking.twin import Twin
from millstream.closing import Opening
from tools.blocking_types import EXISTING

_END = object()


def face(value: Any) -> Any:
    """Anything the blocking API returns, as the asynchronous object would be."""
    if isinstance(value, Twin):
        return Face(value)
    if isinstance(value, list):
        return [face(item) for item in value]
    return _iterate(value) if isinstance(value, Iterator) else value


def bare(value: Any) -> Any:
    if isinstance(value, list):
        return [bare(item) for item in value]
    if isinstance(value, dict):
        return {name: bare(item) for name, item in value.items()}
    return value._twin if isinstance(value, Face) else value


class Face:
    """A twin whose calls run in a thread, awaited exactly where the original is asynchronous."""

    def __init__(self, twin: Twin) -> None:
        self._twin = twin
        plan = EXISTING.get(type(twin).__name__)
        home = __import__(plan.home, fromlist=["x"]) if plan else None
        self._original = getattr(home, type(twin).__name__, None)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._twin, name)
        if not inspect.ismethod(found):
            return face(found)
        if inspect.iscoroutinefunction(inspect.getattr_static(self._original, name)):

            async def awaited(*args: Any, **kwargs: Any) -> Any:
                return await _in_thread(found, *args, **kwargs)

            return awaited
        if _opens(inspect.getattr_static(self._original, name)):
            return lambda *args, **kwargs: Opening(lambda: _in_thread(found, *args, **kwargs))
        return lambda *args, **kwargs: face(found(*map(bare, args), **_bare(kwargs)))

    async def __aenter__(self) -> Any:
        return await _in_thread(self._twin.__enter__)  # type: ignore[attr-defined]

    async def __aexit__(self, *error: Any) -> None:
        await _in_thread(self._twin.__exit__, *error)  # type: ignore[attr-defined]

    def __aiter__(self) -> AsyncIterator[Any]:
        return _iterate(iter(self._twin))  # type: ignore[call-overload]


def _opens(method: Any) -> bool:
    """Whether the asynchronous method returns an object to await or to use as `async with`."""
    return str(inspect.signature(method).return_annotation).startswith("Opening[")


async def _in_thread(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return face(await asyncio.to_thread(call, *map(bare, args), **_bare(kwargs)))


def _bare(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: bare(value) for name, value in kwargs.items()}


async def _iterate(items: Iterator[Any]) -> AsyncIterator[Any]:
    while (item := await asyncio.to_thread(next, items, _END)) is not _END:
        yield face(item)
