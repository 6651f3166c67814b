"""The state folder of a pipeline: which process runs it, its status, its checkpoints.

.pipeline/
  run.lock        locked by the process that runs the pipeline; contains its process id
  spark.log       errors that Spark itself logs, with stack traces
  status.json     state and numbers of each flow, written every second
  stop            while this file exists, sources offer no new rows
  checkpoints/    one folder for each flow: Spark's offsets, commits and state
  reset/          checkpoints that `reset` moved away
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Final

from millstream.deadline import Deadline, now_ns
from millstream.errors import ConfigError, PipelineBusy, PipelineNotRunning
from millstream.pipelines.project import Project

__all__ = ["StateFolder"]

POLL_SECONDS: Final = 0.1
# How long to wait for processes that only check whether the pipeline runs: those take microseconds.
CHECK_SECONDS: Final = 30.0


class StateFolder:
    """The state folder of one pipeline."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.folder = project.state

    @property
    def stop_file(self) -> Path:
        """While this file exists, the sources of the pipeline offer no new rows."""
        return self.folder / "stop"

    @property
    def _lock(self) -> Path:
        return self.folder / "run.lock"

    @property
    def _status(self) -> Path:
        return self.folder / "status.json"

    def checkpoint(self, flow: str) -> str:
        """The folder or URL of a flow's checkpoint."""
        return f"{self.project.checkpoints}/{flow}"

    # -- the process that runs it ---------------------------------------------------------

    @contextmanager
    def running(self) -> Iterator[None]:
        """Lock the pipeline for this process; PipelineBusy if another process runs it."""
        with self._held() as file:
            self.stop_file.unlink(missing_ok=True)
            me = {"pid": os.getpid(), "since": datetime.now(UTC).isoformat(timespec="seconds")}
            file.write(json.dumps(me))
            file.flush()
            yield
            file.seek(0)
            file.truncate()

    @contextmanager
    def idle(self) -> Iterator[None]:
        """While this is open no process can run the pipeline; PipelineBusy if one does already."""
        with self._held():
            yield

    @contextmanager
    def _held(self) -> Iterator[Any]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._lock.open("a+", encoding="utf-8") as file:
            if not _taken(file):
                raise PipelineBusy(self.project.name, self._holder())
            file.seek(0)
            file.truncate()
            yield file

    def pid(self) -> int | None:
        """The process that runs the pipeline, or None."""
        try:
            with self._lock.open("r", encoding="utf-8") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return int(json.loads(file.read() or "{}").get("pid", 0)) or None
        except (FileNotFoundError, ValueError):
            return None
        return None

    def _holder(self) -> str:
        try:
            found = json.loads(self._lock.read_text(encoding="utf-8"))
            return f"process {found['pid']} since {found['since']}"
        except (OSError, ValueError, KeyError, TypeError):
            return "another process"

    def stop(self, seconds: float) -> bool:
        """Ask the running process to stop between two batches; whether it did within `seconds`."""
        pid = self.pid()
        if pid is None:
            raise PipelineNotRunning(self.project.name)
        os.kill(pid, signal.SIGTERM)
        deadline = Deadline(seconds)
        while self.pid() is not None:
            if deadline.passed:
                return False
            time.sleep(deadline.left(at_most=POLL_SECONDS))
        return True

    # -- status ---------------------------------------------------------------------------

    def write_status(self, status: dict[str, Any]) -> None:
        """Replace the status atomically: readers see the old one or the new one."""
        draft = self._status.with_name(f".status.{os.getpid()}")
        draft.write_text(json.dumps(status), encoding="utf-8")
        draft.replace(self._status)

    def read_status(self) -> dict[str, Any] | None:
        """The last status, or None if the pipeline never ran."""
        try:
            found: dict[str, Any] = json.loads(self._status.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        return found

    # -- checkpoints ----------------------------------------------------------------------

    def reset(self, flows: Sequence[str]) -> list[Path]:
        """Move the checkpoints of some flows to `reset/`; returns their new paths.

        The flows start from scratch at their next run and write their results again. Called while
        the pipeline is `idle`.
        """
        if "://" in self.project.checkpoints:
            raise ConfigError(
                f"the checkpoints are at {self.project.checkpoints}, which this command cannot "
                f"move. Remove the flows' folders there: {', '.join(flows)}"
            )
        target = self.folder / "reset" / str(now_ns())
        moved = []
        for flow in flows:
            checkpoint = Path(self.checkpoint(flow))
            if checkpoint.exists():
                target.mkdir(parents=True, exist_ok=True)
                shutil.move(checkpoint, target / flow)
                moved.append(target / flow)
        return moved

    def read_so_far(self, flow: str) -> list[str]:
        """The offsets of a flow's sources after its last completed batch, as Spark stores them.

        Empty for a flow that never ran, and for checkpoints that are not on a local disk.
        """
        folder = Path(self.checkpoint(flow))
        try:
            done = [int(p.name) for p in (folder / "commits").iterdir() if p.name.isdigit()]
            text = (folder / "offsets" / str(max(done))).read_text(encoding="utf-8")
        except (OSError, ValueError):
            return []
        return text.splitlines()[2:]  # after the version and the settings of the batch


def _taken(file: IO[str]) -> bool:
    """Take the lock; False if another process holds it, not if one only checks it.

    The kernel frees it when the process ends, even if it is killed.
    """
    deadline = Deadline(CHECK_SECONDS)
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # as a check does
        except BlockingIOError:
            return False
        fcntl.flock(file, fcntl.LOCK_UN)
        if deadline.passed:
            return False
        time.sleep(deadline.left(at_most=POLL_SECONDS))
