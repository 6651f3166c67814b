"""The runner of continuous integration: forgives a flaky test, never a broken one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

FLAKY = """
from pathlib import Path

def test_flaky():
    ran = Path(__file__).with_name("ran")
    first = not ran.exists()
    ran.touch()
    assert not first
"""
BROKEN = "def test_broken():\n    assert False\n"
FINE = "def test_fine():\n    assert True\n"
INTERRUPTED = FLAKY + "\ndef test_stopped():\n    raise KeyboardInterrupt\n"


def rerun(folder: Path, source: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(source)
    (folder / "pytest.ini").write_text("[pytest]\n")
    return subprocess.run(
        [sys.executable, "-m", "tools.rerun_failed", *options, "--"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_test_that_passes_alone_is_named_at_the_end_and_forgiven(tmp_path: Path) -> None:
    done = rerun(tmp_path, FLAKY + FINE)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "flaky: test_it.py::test_flaky"


@pytest.mark.parametrize(
    ("source", "code"),
    [
        pytest.param(FLAKY + BROKEN, 1, id="one fails again"),
        pytest.param("import nothing_of_this_name\n", 2, id="cannot be collected"),
        pytest.param(INTERRUPTED, 2, id="interrupted"),
        pytest.param("", 5, id="no tests"),
    ],
)
def test_everything_else_stays_red(tmp_path: Path, source: str, code: int) -> None:
    done = rerun(tmp_path, source)
    assert done.returncode == code, done.stdout
    assert "flaky:" not in done.stdout


def test_many_failures_are_not_run_again(tmp_path: Path) -> None:
    several = "".join(FLAKY.replace("test_flaky", f"test_flaky_{n}") for n in range(3))
    done = rerun(tmp_path, several.replace('"ran"', "__name__"), "--at-most", "0")
    assert done.returncode == 1
    assert "at most 0 are run again" in done.stdout


def test_a_green_run_is_run_once(tmp_path: Path) -> None:
    done = rerun(tmp_path, FINE)
    assert done.returncode == 0
    assert done.stdout.count("1 passed") == 1
