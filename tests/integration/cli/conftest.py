"""The real command in its own folder, with an environment that holds nothing of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

MILLSTREAM = str(Path(sys.executable).with_name("millstream"))


class Cli:
    """Runs `millstream` in one folder; whatever it started is stopped by `clean_up`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("NATS_", "MILLSTREAM_"))
        }
        self.environment["XDG_CONFIG_HOME"] = str(folder / "config")
        self.environment["NATS_TIMEOUT"] = "30s"  # a broker that is held up answers late
        self.started: list[subprocess.Popen[str]] = []

    def __call__(self, *arguments: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Run to the end; the exit code must be the expected one if any, and never a traceback."""
        done = subprocess.run(
            [MILLSTREAM, *arguments],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert code in (None, done.returncode), (
            f"{arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
        )
        assert "Traceback" not in done.stderr
        return done

    def json(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(self(*arguments, "--json", code=code).stdout)

    def healthy(self, *options: str) -> Any:
        """The status once it is in order: a cluster that was held up catches up first."""
        end = time.monotonic() + 60
        while (done := self("status", "--json", *options, code=None)).returncode:
            assert time.monotonic() < end, done.stdout + done.stderr
        return json.loads(done.stdout)

    def error(self, *arguments: str, code: int = 1) -> str:
        """The one sentence on stderr of a command that fails."""
        done = self(*arguments, code=code)
        assert done.stdout == ""
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
        return done.stderr

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Run without waiting for the end."""
        return self.start_program(MILLSTREAM, *arguments)

    def start_program(self, *command: str) -> subprocess.Popen[str]:
        """The same of another program."""
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def clean_up(self) -> None:
        for process in self.started:
            with process:
                if process.poll() is None:
                    process.kill()
        for data in self.folder.glob("**/nodes"):
            self_down = [MILLSTREAM, "down", "--data", str(data.parent)]
            subprocess.run(self_down, env=self.environment, capture_output=True, check=False)


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    cli = Cli(tmp_path)
    yield cli
    cli.clean_up()


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for something that happens on its own."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"did not happen within {seconds} s"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
