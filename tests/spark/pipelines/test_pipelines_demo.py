"""The demo on a sample: two days of flights, the pipeline killed once, all rows correct."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import termios
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from examples.flights.demo import _Quiet, claim
from tests.spark.pipelines.project_kit import PATIENCE_SECONDS, alive_in, wait_for

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "examples.flights", "--days", "2", "--seconds", "4"]


@pytest.mark.long
def test_the_demo_loses_duplicates_and_changes_no_row(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    done = subprocess.run(
        [*COMMAND, "--folder", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    check_answers(done.stdout)
    killed = re.search(r"SIGKILL after ([\d,]+) stored departures; started again", done.stdout)
    assert killed is not None
    assert int(killed[1].replace(",", "")) > 0  # in the middle, not at the start
    assert re.search(r"\] 0[12] January 2013: .* flights published, ", done.stdout)
    report = (folder / "report.html").read_text()
    assert report.count("<svg") == 7
    assert "No row was lost, duplicated or different." in report
    assert ">killed</text>" in report


def check_answers(printed: str) -> None:
    number = r"\s+([\d,]+)"
    rows = re.findall(rf"^ *(\w+ \(\w+\)){number * 5} *$", printed, re.MULTILINE)
    found = {name: [int(text.replace(",", "")) for text in texts] for name, *texts in rows}
    assert list(found) == [
        "departures (topic)",
        "departures (Parquet)",
        "delays (table)",
        "fleet (table)",
    ], printed
    flights = found["departures (topic)"][1]
    assert flights > 1000
    assert {name: row[2:] for name, row in found.items()} == {name: [0, 0, 0] for name in found}
    assert found["departures (Parquet)"][:2] == [flights, flights]


def test_the_demo_runs_on_a_terminal_until_ctrl_c_and_leaves_no_process(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "demo"
    claim(folder)
    (folder / "report.html").touch()  # from an earlier run
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 100))
    process = subprocess.Popen(
        [*COMMAND, "--folder", str(folder)],
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    printed = ""
    try:
        while "flights published" not in printed:
            printed += os.read(ours, 4096).decode(errors="replace")
        (pipeline,) = pipelines(folder)
        assert alive_in(pipeline)
        os.killpg(process.pid, signal.SIGINT)
        while part := _read(ours):
            printed += part
        assert process.wait(PATIENCE_SECONDS) == 130
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        os.close(ours)
    assert "Stopped on request; nothing is left running." in printed
    assert "Traceback" not in printed
    wait_for(lambda: not alive_in(pipeline) and not running(folder))
    assert not (folder / "report.html").exists()


def _read(terminal: int) -> str:
    try:
        return os.read(terminal, 4096).decode(errors="replace")
    except OSError:
        return ""  # the other side is closed


def running(folder: Path, *more: bytes) -> list[int]:
    """The processes whose command contains the folder and these words."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if all(words in command for words in (str(folder).encode(), *more)):
            found.append(int(process.name))
    return found


def pipelines(folder: Path) -> list[int]:
    """The leaders of sessions: a child has the same command until it executes its own."""
    return [pid for pid in running(folder, b"\0run\0") if pid in alive_in(pid)]


def test_a_stale_status_does_not_mean_that_all_is_read() -> None:
    flow = {"lag_messages": 0, "lag_time": "0"}
    pipeline: Any = SimpleNamespace(status=lambda: {"flows": [flow]})
    quiet = _Quiet(pipeline)
    assert not any(quiet(True) for _ in range(100))
    seen = []
    for number in range(8):
        flow["lag_time"] = str(number)
        flow["lag_messages"] = int(number == 2)  # a flow wrote what another one reads
        seen.append(quiet(True))
    assert seen == [False] * 6 + [True] * 2


def test_a_folder_that_is_not_the_demos_is_not_emptied(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(SystemExit, match="not a folder of this demo"):
        claim(tmp_path)
    assert (tmp_path / "thesis.txt").exists()
    claim(tmp_path / "new")
    (tmp_path / "new" / "old.txt").touch()
    claim(tmp_path / "new")
    assert not (tmp_path / "new" / "old.txt").exists()
