"""Contexts are left whatever ends the block, and a cancelled opening leaves nothing open."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millstream.closing import AsyncClosing, Closing, Opening


class Door(Closing):
    def __init__(self) -> None:
        self.seen: list[object] = []

    def _enter(self) -> None:
        self.seen.append("entered")

    def _leave(self, error: BaseException | None) -> None:
        self.seen.append(error)


class AsyncDoor(AsyncClosing):
    def __init__(self) -> None:
        self.seen: list[object] = []

    async def _enter(self) -> None:
        self.seen.append("entered")

    async def _leave(self, error: BaseException | None) -> None:
        self.seen.append(error)


def test_a_block_is_entered_and_left() -> None:
    door = Door()
    with door as entered:
        assert entered is door
    assert door.seen == ["entered", None]


def test_an_error_ends_the_block_and_is_passed_on() -> None:
    door, error = Door(), ValueError("no")
    with pytest.raises(ValueError, match="no"), door:
        raise error
    assert door.seen == ["entered", error]


async def test_an_async_block_is_entered_and_left() -> None:
    door, error = AsyncDoor(), ValueError("no")
    async with door as entered:
        assert entered is door
    with pytest.raises(ValueError, match="no"):
        async with door:
            raise error
    assert door.seen == ["entered", None, "entered", error]


def opening(doors: list[AsyncDoor], wait: asyncio.Event | None = None) -> Opening[AsyncDoor]:
    async def open() -> AsyncDoor:
        if wait is not None:
            await wait.wait()
        doors.append(AsyncDoor())
        return doors[-1]

    return Opening(open)


async def test_nothing_is_opened_before_it_is_awaited_or_entered() -> None:
    doors: list[AsyncDoor] = []
    about = opening(doors)
    assert doors == []
    door = await about
    assert (doors, door.seen) == ([door], [])
    async with about as other:
        assert other.seen == ["entered"]
    assert doors == [door, other]
    assert other.seen == ["entered", None]
    assert (await about.open()).seen == []


async def test_nested_blocks_of_one_opening_close_their_own() -> None:
    doors: list[AsyncDoor] = []
    about = opening(doors)
    async with about as outer:
        async with about as inner:
            pass
        assert (outer.seen, inner.seen) == (["entered"], ["entered", None])
    assert outer.seen == ["entered", None]


async def test_a_cancelled_opening_opens_nothing() -> None:
    doors: list[AsyncDoor] = []
    blocked = asyncio.Event()

    async def use() -> None:
        async with opening(doors, blocked):
            pass

    task = asyncio.create_task(use())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert doors == []


async def test_a_forgotten_await_and_a_plain_with_are_answered_with_what_to_write() -> None:
    about: Any = opening([])
    with pytest.raises(AttributeError, match=r"no 'publish'\. Write 'await' before the call"):
        await about.publish("flour")
    plain_with = pytest.raises(TypeError, match=r"'async with' instead.*use millstream\.blocking")
    with plain_with, about:
        pass
