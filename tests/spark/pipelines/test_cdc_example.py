"""The example with PostgreSQL: captured, joined with a stream, and written back."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from examples.flights_cdc.__main__ import main
from tests.spark.pipelines.project_kit import PATIENCE_SECONDS

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "examples.flights_cdc"]
ABSENT = "PostgreSQL is not installed"


@pytest.fixture
def folder() -> Iterator[Path]:
    """For all temporary files of the example; those of pytest are closed to other users."""
    with TemporaryDirectory(prefix="millstream-example-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.long
def test_the_tables_that_the_example_writes_back_are_those_of_sql(folder: Path) -> None:
    done = subprocess.run(
        COMMAND,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    if ABSENT in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    found = re.findall(r"results\.(\w+) +([\d,]+) rows, 0 missing, 0 wrong", done.stdout)
    rows = {name: int(count.replace(",", "")) for name, count in found}
    assert rows["departures"] == 3473, done.stdout
    assert rows["fleet"] > 500, done.stdout
    # The names that were given while the flights were sent.
    assert "Southwest Airlines Co." in done.stdout
    assert list(folder.iterdir()) == []


def test_the_example_ends_on_ctrl_c_and_leaves_nothing(folder: Path) -> None:
    process = subprocess.Popen(
        COMMAND,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    printed = ""
    try:
        while "Spark starts" not in printed and (line := process.stdout.readline()):
            printed += line
        os.killpg(process.pid, signal.SIGINT)
        rest, errors = process.communicate(timeout=PATIENCE_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if ABSENT in errors:
        pytest.skip(errors.strip())
    assert process.returncode == 130, printed + rest + errors
    assert errors == ""
    assert "Stopped on request; nothing is left running." in rest
    assert list(folder.iterdir()) == []
    assert running_in(folder) == []


def running_in(folder: Path) -> list[str]:
    """Commands of processes that name the folder, or work in it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().decode(errors="replace")
            place = str((process / "cwd").readlink())
        except OSError:
            continue  # it has ended, or is not ours
        if str(folder) in command or place.startswith(str(folder)):
            found.append(command)
    return found


def test_the_example_says_that_there_is_no_postgresql(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.postgres_server.PROGRAMS", "/nowhere")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "argv", ["flights_cdc"])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit, match=rf"{ABSENT} \(initdb\): make system-deps"):
            main()
    finally:
        signal.signal(signal.SIGTERM, before)
