"""The state folder: who runs a pipeline, its status, its checkpoints."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from millstream.errors import ConfigError, PipelineBusy, PipelineNotRunning
from millstream.pipelines import Project
from millstream.pipelines.state_folder import Place

HOLDER = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
from pathlib import Path
from millstream.pipelines import Project
from millstream.pipelines.state_folder import Place
place = Place(Project(Path("."), "p", state=Path(sys.argv[1])))
with place.running():
    print("held", flush=True)
    signal.sigwait({signal.SIGTERM})
"""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    state = tmp_path / ".pipeline"
    return Place(Project(tmp_path, "p", state=state, checkpoints=str(state / "checkpoints")))


def holder(place: Place) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(place.folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_one_process_runs_a_pipeline_and_can_be_stopped(place: Place) -> None:
    assert place.pid() is None
    with pytest.raises(PipelineNotRunning):
        place.stop(1)
    with holder(place) as process:
        assert place.pid() == process.pid
        with pytest.raises(PipelineBusy, match=f"process {process.pid} since"), place.running():
            pass
        with pytest.raises(PipelineBusy), place.idle():
            pass
        assert place.stop(60)
    assert place.pid() is None


def test_a_process_that_is_killed_holds_nothing(place: Place) -> None:
    with holder(place) as process:
        process.kill()
    assert place.pid() is None
    with place.running():
        assert place.pid() is not None


def test_who_only_looks_whether_a_pipeline_runs_keeps_nobody_from_running_it(place: Place) -> None:
    with place.idle():
        pass  # the file is there
    got = threading.Event()

    def run() -> None:
        with place.running():
            got.set()

    with (place.folder / "run.lock").open() as look:
        fcntl.flock(look, fcntl.LOCK_SH)  # a `status` that stands still in the middle
        thread = threading.Thread(target=run)
        thread.start()
        assert not got.wait(0.2)
    thread.join(60)
    assert got.is_set()


def test_the_status_is_what_was_written_last(place: Place) -> None:
    assert place.read_status() is None
    with place.running():
        place.write_status({"state": "running"})
        place.write_status({"state": "stopped"})
    assert place.read_status() == {"state": "stopped"}


def test_reset_keeps_old_checkpoints_aside(place: Place) -> None:
    for flow in ("a", "b"):
        Path(place.checkpoint(flow)).mkdir(parents=True)
        (Path(place.checkpoint(flow)) / "metadata").write_text(flow)
    with place.idle():
        (moved,) = place.reset(["a", "never-run"])
    assert (moved / "metadata").read_text() == "a"
    assert not place.has_checkpoint("a")
    assert place.has_checkpoint("b")


def test_checkpoints_elsewhere_are_not_touched(tmp_path: Path) -> None:
    place = Place(Project(tmp_path, "p", state=tmp_path, checkpoints="s3a://bucket/p"))
    with pytest.raises(ConfigError, match="s3a://bucket/p"):
        place.reset(["a"])
