"""The state folder: which process runs a pipeline, its status, its checkpoints."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from millstream.errors import ConfigError, PipelineBusy, PipelineNotRunning
from millstream.pipelines import Project
from millstream.pipelines.state_folder import StateFolder

HOLDER = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
from pathlib import Path
from millstream.pipelines import Project
from millstream.pipelines.state_folder import StateFolder
state = StateFolder(Project(Path("."), "p", state=Path(sys.argv[1])))
with state.running():
    print("held", flush=True)
    signal.sigwait({signal.SIGTERM})
"""


@pytest.fixture
def state(tmp_path: Path) -> StateFolder:
    folder = tmp_path / ".pipeline"
    return StateFolder(
        Project(tmp_path, "p", state=folder, checkpoints=str(folder / "checkpoints"))
    )


def holder(state: StateFolder) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(state.folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_one_process_runs_a_pipeline_and_can_be_stopped(state: StateFolder) -> None:
    assert state.pid() is None
    with pytest.raises(PipelineNotRunning):
        state.stop(1)
    with holder(state) as process:
        assert state.pid() == process.pid
        with pytest.raises(PipelineBusy, match=f"process {process.pid} since"), state.running():
            pass
        with pytest.raises(PipelineBusy), state.idle():
            pass
        assert state.stop(60)
    assert state.pid() is None


def test_a_killed_process_frees_the_lock(state: StateFolder) -> None:
    with holder(state) as process:
        process.kill()
    assert state.pid() is None
    with state.running():
        assert state.pid() is not None


def test_asking_whether_a_pipeline_runs_does_not_keep_it_from_starting(state: StateFolder) -> None:
    with state.idle():
        pass  # it creates the file
    got = threading.Event()

    def run() -> None:
        with state.running():
            got.set()

    with (state.folder / "run.lock").open() as look:
        fcntl.flock(look, fcntl.LOCK_SH)  # a `status` that is stalled in the middle
        thread = threading.Thread(target=run)
        thread.start()
        assert not got.wait(0.2)
    thread.join(60)
    assert got.is_set()


def test_the_status_is_the_last_one_written(state: StateFolder) -> None:
    assert state.read_status() is None
    with state.running():
        state.write_status({"state": "running"})
        state.write_status({"state": "stopped"})
    assert state.read_status() == {"state": "stopped"}


def test_reset_keeps_old_checkpoints_aside(state: StateFolder) -> None:
    for flow in ("a", "b"):
        Path(state.checkpoint(flow)).mkdir(parents=True)
        (Path(state.checkpoint(flow)) / "metadata").write_text(flow)
    with state.idle():
        (moved,) = state.reset(["a", "never-run"])
    assert (moved / "metadata").read_text() == "a"
    assert not Path(state.checkpoint("a")).exists()
    assert Path(state.checkpoint("b")).exists()


def test_checkpoints_elsewhere_are_not_touched(tmp_path: Path) -> None:
    state = StateFolder(Project(tmp_path, "p", state=tmp_path, checkpoints="s3a://bucket/p"))
    with pytest.raises(ConfigError, match="s3a://bucket/p"):
        state.reset(["a"])
