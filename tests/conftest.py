"""What every test runs under."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from blockbuster import BlockBuster
from hypothesis import HealthCheck, settings

# Rooms whose public calls block by design: they run processes, read files or are the blocking twin.
BLOCKING_ROOMS = [
    "millstream.broker",
    "millstream.cli",
    "millstream.testing",
    "millstream.blocking",
]

# Where the event loop may wait for the disk all the same: settings are read once for a connection,
# a module and a time zone once for a process.
MAY_BLOCK = [
    ("millstream/settings.py", {"load", "data_folder", "read_project_file"}),
    ("millstream/events/packs/types.py", {"time_zone"}),
    ("<frozen importlib._bootstrap>", {"_find_and_load"}),
]


# A machine that stands still for a while is no fault of the code: no example has a time limit of
# its own, nor has the drawing of its data. What hangs is ended by pytest. `make test` draws the
# same examples every time, `make test-all` (`--hypothesis-profile new`) and `make fuzz` new ones.
settings.register_profile(
    "new",
    settings.default,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=False,
)
settings.register_profile("same", settings.get_profile("new"), derandomize=True)
settings.load_profile("same")

# Folders whose tests start a JVM or break things for a while.
SLOW_FOLDERS = {"spark", "faults", "docs"}
# What takes minutes: `make test` leaves it out, `make test-all` and `make faults` run it.
LONG_FILES = {"test_killed.py", "test_speculation.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Files are given to processes in this order: no long one may be left for the end.
    items.sort(key=lambda item: not SLOW_FOLDERS & set(item.path.parts))
    for item in items:
        if item.path.name in LONG_FILES:
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session", autouse=True)
def no_blocking_calls_in_the_loop() -> Iterator[BlockBuster]:
    """A package function that blocks inside a running event loop raises BlockingError."""
    excluded = [room for room in BLOCKING_ROOMS if _exists(room)]
    buster = BlockBuster("millstream", excluded_modules=excluded)
    for function in buster.functions.values():
        for file, names in MAY_BLOCK:
            function.can_block_in(file, names)
    buster.activate()
    yield buster
    buster.deactivate()


@pytest.fixture(scope="module", autouse=True)
def nothing_left_open() -> Iterator[None]:
    """A socket or file that a test left open fails a test of the same file, not a later one."""
    yield
    gc.collect()


def _exists(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None
