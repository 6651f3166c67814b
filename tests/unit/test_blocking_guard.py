"""The guard of tests/conftest.py really guards."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from blockbuster import BlockBuster, BlockingError

from millstream.settings import ConnectionSettings, find_project_file


async def test_a_package_function_that_blocks_in_the_loop_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BlockingError):
        find_project_file(tmp_path)


async def test_the_same_call_in_a_thread_is_fine(tmp_path: Path) -> None:
    await asyncio.to_thread(find_project_file, tmp_path)


async def test_settings_may_be_read_when_a_connection_is_opened() -> None:
    assert ConnectionSettings.load("nats://h:1").urls == ("nats://h:1",)


def test_the_guard_is_active(no_blocking_calls_in_the_loop: BlockBuster) -> None:
    assert any(function.activated for function in no_blocking_calls_in_the_loop.functions.values())
