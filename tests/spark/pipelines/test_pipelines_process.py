"""`millstream pipeline run` as a process: its status from outside, its end by signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from millstream.cli.app import app
from millstream.cli.exits import Exit
from millstream.pipelines import Pipeline, open_project
from millstream.pipelines.runner import Runner, stopped_by_signals
from tests.spark.pipelines.project_kit import HEAD, PATIENCE_SECONDS, QUICK, alive_in, wait_for

if TYPE_CHECKING:
    from tests.spark.conftest import Account

CODE = (
    HEAD
    + """
import time
from pathlib import Path

@f.udf("string")
def held(text):
    deadline = time.monotonic() + 600  # the test is over by then
    while text == "hold" and not Path(GO).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return text

@mp.topic
def slow():
    return mp.read("lines").select(held(f.col("value").cast("string")).alias("word"))

mp.sink("screen", "console", truncate="false")

@mp.flow("screen")
def printed():
    return mp.read("lines").select(f.upper(f.col("value").cast("string")).alias("word"))
"""
)
PATIENCE = f"{PATIENCE_SECONDS:.0f}s"
COMMAND = [sys.executable, "-c", "from millstream.cli.main import main; main()", "pipeline"]


class Process:
    """The pipeline in its own process group, as a shell would start it."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.output = folder / "output.txt"
        with self.output.open("wb") as output:
            self._process = subprocess.Popen(
                [*COMMAND, "run", str(folder), "--stop-within", PATIENCE],
                env={**os.environ, "NATS_URL": url},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def signal(self, number: int) -> None:
        """Signal the complete group, as a terminal does at Ctrl-C."""
        os.killpg(self._process.pid, number)

    def ended(self) -> int:
        """The exit code, once no process of the group is left."""
        code = self._process.wait(PATIENCE_SECONDS)
        wait_for(lambda: not alive_in(self._process.pid))
        return code

    def flow(self, name: str) -> dict[str, Any]:
        done = CliRunner().invoke(app, ["pipeline", "status", str(self.folder), "--json"])
        flows: list[dict[str, Any]] = json.loads(done.stdout)["flows"]
        none: dict[str, Any] = {"state": "", "rows_out": 0}
        return next((flow for flow in flows if flow["name"] == name), none)


def batches(folder: Path, flow: str, what: str) -> set[str]:
    found = folder / ".pipeline" / "checkpoints" / flow / what
    return {p.name for p in found.iterdir() if p.name.isdigit()} if found.is_dir() else set()


def in_flight(folder: Path) -> bool:
    return batches(folder, "slow", "offsets") > batches(folder, "slow", "commits")


def words(account: Account) -> list[str]:
    return [value["word"] for value in account.values("slow")]


@pytest.mark.long
def test_ctrl_c_and_sigterm_end_the_batch_and_the_process_and_lose_nothing(
    account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    go = tmp_path / "go"
    (tmp_path / "millstream.toml").write_text(f'[pipeline]\nname = "held"\n{QUICK}')
    (tmp_path / "pipeline.py").write_text(CODE.replace("GO", repr(str(go))))
    account.topic("lines")
    account.publish("lines", [b"first"])
    with Process(tmp_path, account.url) as process:
        wait_for(lambda: process.flow("slow")["rows_out"] == 1)
        account.publish("lines", [b"hold"])
        wait_for(lambda: in_flight(tmp_path))
        # While the batch hangs, another process sees how many events wait, and how long.
        account.publish("lines", [b"later"] * 7)
        wait_for(lambda: process.flow("slow").get("lag_events") == 8)
        assert process.flow("slow")["lag_seconds"] > 0
        assert process.flow("slow")["state"] == "running"
        wait_for(lambda: "LATER" in process.output.read_text())  # the console goes on
        process.signal(signal.SIGINT)
        wait_for(lambda: (tmp_path / ".pipeline" / "stop").exists())
        assert words(account) == ["first"]
        go.touch()
        assert process.ended() == 0
    assert not in_flight(tmp_path)
    assert words(account) == ["first", "hold"]  # its batch, and none after it
    printed = process.output.read_text()
    assert "FIRST" in printed
    assert "Batch: 0" in printed
    with Process(tmp_path, account.url) as process:
        wait_for(lambda: process.flow("slow")["rows_out"] == 7)
        # Started again with nothing left to read, it reports no lag.
        wait_for(lambda: process.flow("printed").get("lag_events") == 0)
        stop = ["pipeline", "stop", str(tmp_path), "--timeout", PATIENCE]
        done = CliRunner().invoke(app, stop)  # by SIGTERM
        assert done.exit_code == 0, done.output
        assert process.ended() == 0
    assert not in_flight(tmp_path)
    assert words(account) == ["first", "hold", *["later"] * 7]
    done = CliRunner().invoke(app, ["pipeline", "status", str(tmp_path), "--json"])
    assert json.loads(done.stdout)["state"] == "stopped"
    assert done.exit_code == Exit.OK


def test_a_second_signal_ends_the_process_immediately(tmp_path: Path) -> None:
    (tmp_path / "millstream.toml").write_text('[pipeline]\nname = "held"\n')
    spark: Any = None  # nothing is started
    runner = Runner(open_project(tmp_path), Pipeline("held"), spark)
    before = signal.getsignal(signal.SIGINT)
    with stopped_by_signals(runner):
        os.kill(os.getpid(), signal.SIGTERM)
        assert runner.stopping
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
