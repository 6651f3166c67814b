"""A process with tables that is cut off or killed: nothing is lost, doubled or half done."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import millstream
from millstream import Mill, Table
from millstream.deadline import Deadline
from millstream.messaging.processing import commits
from millstream.messaging.publishing.fenced_lane import FencedLane
from millstream.settings import Reconnect
from millstream.testing import running_broker
from tests.integration.messaging.process_table_child import make, slowly
from tests.integration.messaging.process_table_kit import check_all, check_totals, create, fill

CHILD = Path(__file__).with_name("process_table_child.py")


class _CutOff(BaseException):
    """The process ends here."""


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Ends the process at the n-th unit that it stores: before it is sent, or after that."""
    left = {"units": 1 << 60, "after": 0}
    store = FencedLane.store

    async def counted(self: FencedLane, *arguments: Any, **named: Any) -> Any:
        left["units"] -= 1
        last = left["units"] == 0
        if last and not left["after"]:
            raise _CutOff
        result = await store(self, *arguments, **named)
        if last:
            raise _CutOff
        return result

    monkeypatch.setattr(FencedLane, "store", counted)
    return left


async def test_a_process_cut_off_between_any_two_units_continues(
    mill: Mill, cut: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commits, "ROWS_MAX", 4)  # rows of its own do not fit beside the record
    parts = await create(mill)
    number = 0
    for units in range(1, 8):
        for after in (0, 1):
            await fill(parts[0], number, number + 40)
            number += 40
            cut.update(units=units, after=after)
            with pytest.raises(_CutOff):
                await (await make(mill, "two")).run(once=True)
    cut["units"] = 1 << 60
    await (await make(mill, "two")).run(once=True)
    await check_all(*parts)


async def test_a_killed_broker_loses_no_commit() -> None:
    with running_broker() as broker:
        quick = Reconnect(wait=0.02, wait_max=0.1)
        async with millstream.connect(broker.url, reconnect=quick, request_timeout=30) as mill:
            parts = await create(mill)
            await fill(parts[0], 0, 600)
            process = await make(mill, "two", slowly)
            running = asyncio.create_task(process.run(once=True))
            deadline = Deadline(60)
            while process.produced < 300:
                assert not deadline.passed
                if running.done():
                    running.result()
                await asyncio.sleep(0.01)
            await asyncio.to_thread(broker.kill)
            await asyncio.to_thread(broker.start)
            await running
            await check_all(*parts)


async def stored(totals: Table) -> int:
    return sum([entry.value["count"] async for entry in totals.entries()])


@pytest.mark.parametrize("how", ["one", "two"])
async def test_a_killed_program_does_everything_once(millstream_url: str, how: str) -> None:
    chance = random.Random(how)
    async with millstream.connect(millstream_url) as mill:
        parts = await create(mill)
        deadline = Deadline(100)
        for number in range(3):
            await fill(parts[0], 200 * number, 200 * (number + 1))
            goal = await stored(parts[1]) + chance.randrange(1, 180)
            program = await asyncio.create_subprocess_exec(
                sys.executable, str(CHILD), millstream_url, how, "follow"
            )
            while await stored(parts[1]) < goal:
                assert program.returncode is None, "the program ended before it was killed"
                assert not deadline.passed
                await asyncio.sleep(chance.uniform(0.005, 0.05))
            program.kill()
            assert await program.wait() == -signal.SIGKILL
        await (await make(mill, how)).run(once=True)
        if how == "one":
            await check_totals(parts[0], parts[1])
        else:
            await check_all(*parts)
