"""A running capture is asked and stopped over the broker, by whoever may."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

import millstream
from millstream import Mill
from millstream.broker import Broker, Role
from millstream.cdc.control import Control, ask_status, ask_stop
from millstream.cdc.status import CaptureStatus, TableStatus
from millstream.errors import (
    CaptureBusy,
    CaptureError,
    CaptureNotRunning,
    PermissionDenied,
)
from millstream.testing import running_broker

PATIENCE = 30.0


def of(name: str) -> Callable[[], CaptureStatus]:
    table = TableStatus("public.orders", "orders", "streaming", 5, None, 7, "12:1")
    return lambda: CaptureStatus(name, "streaming", "postgresql://***@db", "now", [table])


async def test_a_running_capture_answers_and_only_one_of_its_name(mill: Mill) -> None:
    stop = asyncio.Event()
    with pytest.raises(CaptureNotRunning, match="'shop' is not running"):
        await ask_status(mill, "shop")
    async with Control(mill, "shop", of("shop"), stop):
        assert await ask_status(mill, "shop") == of("shop")()
        with pytest.raises(CaptureBusy, match="'shop' is running"):
            async with Control(mill, "shop", of("shop"), asyncio.Event()):
                pass
        async with Control(mill, "other", of("other"), asyncio.Event()):
            assert (await ask_status(mill, "other")).name == "other"
        assert (await ask_status(mill, "shop")).name == "shop"
        assert not stop.is_set()
    with pytest.raises(CaptureNotRunning):
        await ask_stop(mill, "shop")


async def test_a_stop_returns_when_the_capture_has_ended(mill: Mill) -> None:
    stop, stored = asyncio.Event(), asyncio.Event()

    async def capture() -> None:
        async with Control(mill, "shop", of("shop"), stop):
            await stop.wait()
            for _ in range(20):  # what it still has to store
                await mill.flush()
            stored.set()

    running = asyncio.create_task(capture())
    async with asyncio.timeout(PATIENCE):
        while not running.done():
            try:
                await ask_stop(mill, "shop")
                break
            except CaptureNotRunning:
                await asyncio.sleep(0)  # it has not begun
    assert stored.is_set()
    await running


async def test_a_capture_that_does_not_stop_is_an_error(mill: Mill) -> None:
    async with Control(mill, "shop", of("shop"), asyncio.Event()):
        with pytest.raises(CaptureError, match=r"still runs after 0\.2 s"):
            await ask_stop(mill, "shop", timeout=0.2)


@asynccontextmanager
async def as_user(running: Broker, role: Role) -> AsyncIterator[Mill]:
    who = running.credentials(role)
    async with millstream.connect(running.url, user=who.user, password=who.password) as mill:
        yield mill


async def test_applications_may_ask_and_readers_may_not() -> None:
    async with running_broker(auth=True) as running, as_user(running, Role.TRUSTED) as own:
        stop = asyncio.Event()
        async with Control(own, "shop", of("shop"), stop):
            async with as_user(running, Role.READER) as reader:
                with pytest.raises((PermissionDenied, CaptureNotRunning)):
                    await ask_status(reader, "shop")
            async with as_user(running, Role.APP) as application:
                assert (await ask_status(application, "shop")).name == "shop"
                await application.request("_cdc.shop.stop")
            assert stop.is_set()
