"""Fixtures and settings for all tests."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from blockbuster import BlockBuster
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).parents[1]

# Rooms whose public calls block by design: they run processes, read files or are the blocking twin.
BLOCKING_ROOMS = [
    "millstream.broker",
    "millstream.cli",
    "millstream.testing",
    "millstream.blocking",
    "millstream.closing",  # `with`, which those rooms use
]

# Where the event loop may still wait for the disk: settings are read once for a connection, a
# module and a time zone once for a process.
MAY_BLOCK = [
    ("millstream/settings.py", {"load", "data_folder", "read_project_file"}),
    ("millstream/events/packs/types.py", {"time_zone"}),
    ("<frozen importlib._bootstrap>", {"_find_and_load"}),
]


# A stalled machine is not a bug: no example has a time limit, nor has the generation of its data.
# Pytest ends tests that hang. `make test` uses the same examples every time, `make test-all`
# (`--hypothesis-profile new`) and `make fuzz` new ones.
settings.register_profile(
    "new",
    settings.default,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=False,
)
settings.register_profile("same", settings.get_profile("new"), derandomize=True)
settings.load_profile("same")

# What takes minutes: `make test` leaves it out, `make test-all` and `make faults` run it.
LONG_FILES = {"test_killed.py", "test_speculation.py", "test_scenarios_spark.py"}

# Roughly how long one test takes, by the beginning of its path; the first that fits counts.
SECONDS = {
    "tests/unit/": 0.0,
    "tests/contracts/": 0.1,
    "tests/faults/test_scenarios": 15.0,
    "tests/faults/test_disk": 30.0,
    "tests/faults/": 1.0,
    "tests/spark/pipelines/": 8.0,
    "tests/spark/": 4.0,
    "tests/docs/": 4.0,
    "tests/integration/test_demo": 30.0,
    "tests/integration/cdc/test_kills": 60.0,
    "tests/integration/test_examples": 10.0,
    "tests/integration/wire/": 0.1,
    "tests/integration/security/": 0.1,
}
QUICK_FOLDERS = ("tests/unit/", "tests/contracts/")
# The examples of the pages start and stop Spark with an environment of their own, so in the process
# that runs them no other test may have started Spark before.
DOCS_FOLDER = "tests/docs/"


def file_of(item: pytest.Item) -> str:
    return item.path.relative_to(ROOT).as_posix()


def seconds_of(path: str) -> float:
    return next((seconds for start, seconds in SECONDS.items() if path.startswith(start)), 1.0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Quick files first, so that most failures show within a minute; then docs, then the longest.

    Files are given to the processes in this order. A long one must not be left for the end, when
    the other processes have nothing to do any more.
    """
    tests = Counter(map(file_of, items))
    rank = {
        file: (
            not file.startswith(QUICK_FOLDERS),
            not file.startswith(DOCS_FOLDER),
            -count * seconds_of(file),
        )
        for file, count in tests.items()
    }
    items.sort(key=lambda item: rank[file_of(item)])
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
    gc.freeze()  # what is here already stays; searching it too would take half a second each time
    yield
    gc.collect()


def _exists(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None
