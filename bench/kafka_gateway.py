"""The Kafka gateway in a process of its own, for benches and tests."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.kafka_peer import end_with_parent, free_ports

__all__ = ["Gateway"]

START_SECONDS = 60.0
STOP_SECONDS = 30.0


class Gateway:
    """`millstream gateway run kafka` on a port that stays the same when it is started again."""

    def __init__(self, url: str, folder: Path, *options: str, advertised: int = 0) -> None:
        self._url, self._folder, self._options = url, folder, options
        (self.port,) = free_ports(1)
        self._advertised = advertised or self.port
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def bootstrap(self) -> str:
        """Where clients begin: at the advertised port."""
        return f"127.0.0.1:{self._advertised}"

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid if self._process is not None else 0

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    def words(self) -> str:
        """The end of what it wrote to its log."""
        log = self._folder / "gateway.log"
        return log.read_text(errors="replace")[-3000:] if log.exists() else ""

    def start(self) -> None:
        """Start it and wait until it accepts connections."""
        command = [
            *(str(Path(sys.executable).with_name("millstream")), "gateway", "run", "kafka"),
            *("--server", self._url, "--port", str(self.port)),
            *("--advertise", f"127.0.0.1:{self._advertised}", *self._options),
        ]
        with (self._folder / "gateway.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, preexec_fn=end_with_parent
            )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if not self.alive:
                raise RuntimeError(f"the gateway ended while starting: {self.words()}")
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.05)
        raise RuntimeError(f"the gateway was not ready after {START_SECONDS:.0f} s: {self.words()}")

    def kill(self) -> None:
        """End it at once, as kill -9 does."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Ask it to end."""
        self._end(signal.SIGTERM)

    def send_signal(self, number: signal.Signals) -> None:
        """For pauses."""
        if self.alive:
            os.kill(self.pid, number)

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(number)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_SECONDS)
        self._process = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
