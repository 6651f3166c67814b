"""docs/CONCURRENCY.md names every module that starts or locks something."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "millstream"
PAGE = (ROOT / "docs" / "CONCURRENCY.md").read_text()

STARTS = {"create_task", "ensure_future", "TaskGroup", "Thread", "ThreadPoolExecutor", "Popen"}
STARTS |= {"create_subprocess_exec", "create_subprocess_shell"}
LOCKS = {"Lock", "RLock", "Condition", "Semaphore", "flock", "lockf"}


def called(source: str) -> set[str]:
    """The last names of everything a module calls."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Attribute):
                names.add(function.attr)
            elif isinstance(function, ast.Name):
                names.add(function.id)
    return names


def test_every_module_that_starts_or_locks_something_is_on_the_page() -> None:
    missing = [
        name
        for path in sorted(PACKAGE.rglob("*.py"))
        if called(path.read_text()) & (STARTS | LOCKS)
        and (name := path.relative_to(PACKAGE).as_posix()) not in PAGE
    ]
    assert not missing


def test_every_module_on_the_page_exists() -> None:
    named = {word for word in PAGE.split("`") if word.endswith(".py") and "/" in word}
    named = {word for word in named if not word.startswith("tests/")}
    assert named
    assert not [word for word in named if not (PACKAGE / word).is_file()]


def test_a_start_is_seen() -> None:
    assert called("import asyncio\nx = asyncio.create_task(y())") == {"create_task", "y"}
