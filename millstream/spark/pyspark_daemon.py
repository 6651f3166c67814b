"""Forks Spark's Python processes from one that has imported what they need.

A query needs eight of them: for the source, its plan, its reader, the writer, its plan, the commit
and more. Importing PySpark, PyArrow and this package takes each about a second of a core; a fork
takes milliseconds, and forked processes share the memory of the imports. This process imports while
the JVM starts. Spark starts `python_stand_in.py` as its Python, which asks here for a fork.

What a fork cannot give is refused, and the stand-in then starts Python itself. So it is if this
process has ended: it is never needed, only faster.
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import selectors
import shutil
import signal
import socket
import sys
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from millstream.settings import child_environment
from millstream.spark.worker_python import OWN_VARIABLES, become_environment

__all__ = ["Daemon", "ForkRequest", "main"]

WORD_BYTES: Final = 4
REQUEST_BYTES_MAX: Final = 8 * 1024 * 1024
REQUEST_SECONDS: Final = 10.0
# Not those that are run with -m, and not the one that offers filters (see datasource.py).
PREPARED: Final = (
    "pyspark.worker",
    "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.plan_data_source_read",
    "pyspark.sql.worker.write_into_data_source",
    "pyspark.sql.worker.python_streaming_sink_runner",
    "pyspark.sql.worker.commit_data_source_write",
    "pyspark.sql.worker.lookup_data_sources",
    "pyspark.sql.streaming.datasource",
    "pyspark.sql.pandas.serializers",
    "pyarrow.compute",
    "millstream.spark.datasource",
    "pandas",  # PyArrow imports it, where it is installed, when it first makes an array
)


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """What a stand-in asks for: `python ARGUMENTS` in a folder, with an environment."""

    folder: str
    arguments: list[str]
    environment: dict[str, str]
    files: list[int]  # stdin, stdout, stderr

    @classmethod
    def parse(cls, body: bytes, files: list[int]) -> ForkRequest:
        """From the bytes that a stand-in sent."""
        folder, count, *words = map(os.fsdecode, body.split(b"\0"))
        arguments, pairs = words[: int(count)], words[int(count) :]
        return cls(folder, arguments, dict(pair.split("=", 1) for pair in pairs), files)

    @property
    def is_possible(self) -> bool:
        """Whether a fork of this process is what a new one would be."""
        wanted, own = self.environment, child_environment()
        names = {name for name in {*wanted, *own} if _is_of_interpreter(name)}
        return (
            self.arguments[:1] == ["-m"]
            and len(self.arguments) > 1
            and wanted.get("OMP_NUM_THREADS", "1") == OWN_VARIABLES["OMP_NUM_THREADS"]
            and all(wanted.get(name, OWN_VARIABLES.get(name)) == own.get(name) for name in names)
        )

    def become(self, path: list[str]) -> None:
        """Make this process the one that was asked for, and run its module."""
        for number, file in enumerate(self.files):
            os.dup2(file, number)
            os.close(file)
        os.chdir(self.folder)
        become_environment(self.environment)
        time.tzset()
        given = filter(None, self.environment.get("PYTHONPATH", "").split(os.pathsep))
        sys.path[:] = [*given, *path] if sys.flags.safe_path else [self.folder, *given, *path]
        importlib.invalidate_caches()
        _, module, *rest = self.arguments
        sys.argv = [module, *rest]
        sys.orig_argv = [sys.executable, *self.arguments]
        sys.modules.pop(module, None)  # run as the main module, it is another one
        _draw_own_numbers(forks_too=module == "pyspark.daemon")
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def _is_of_interpreter(name: str) -> bool:
    """Whether a variable is read when Python starts; those of Spark have an underscore."""
    return name.startswith("PYTHON") and name != "PYTHONPATH" and not name.startswith("PYTHON_")


def _draw_own_numbers(forks_too: bool) -> None:
    """Have NumPy draw other random numbers here than in the other forks.

    Python's own module does so after every fork; NumPy seeds itself when it is imported.
    `forks_too`: and in the forks of this process, which are Spark's workers; theirs are the user's.
    """
    numbers = sys.modules.get("numpy.random")
    if numbers is None:
        return
    numbers.seed()
    if forks_too:
        parent = os.getpid()
        os.register_at_fork(after_in_child=lambda: os.getppid() == parent and numbers.seed())


def _fork() -> int:
    with warnings.catch_warnings():
        # From Python 3.12 on, because of a thread of PyArrow's memory allocator, which allows it.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


class Daemon:
    """Listens for stand-ins, forks, and tells each how its process ended."""

    def __init__(self, listener: socket.socket, folder: str) -> None:
        self._listener: socket.socket | None = listener
        self._folder = folder  # of the socket and the stand-in; removed at the end
        self._clients: dict[socket.socket, int] = {}  # processes
        self._waiting = selectors.DefaultSelector()
        self._wake, self._woken = os.pipe()

    def serve(self) -> ForkRequest | None:
        """Work until the driver has ended and the last process too; in a fork, what it is to do."""
        os.set_blocking(self._wake, False)
        os.set_blocking(self._woken, False)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by the forks, as from Spark's JVM
        if self._listener is not None:
            self._waiting.register(self._listener, selectors.EVENT_READ)
        self._waiting.register(sys.stdin.fileno(), selectors.EVENT_READ)
        self._waiting.register(self._wake, selectors.EVENT_READ)
        while self._listener is not None or self._clients:
            for key, _ in self._waiting.select():
                file = key.fileobj
                if file is self._listener:
                    job = self._accept()
                    if job is not None:
                        return job
                elif file == self._wake:
                    self._reap()
                elif isinstance(file, socket.socket):
                    self._hang_up(file)
                else:
                    self._end_of_driver()
        return None

    def _accept(self) -> ForkRequest | None:
        if self._listener is None:
            return None
        client, _ = self._listener.accept()
        try:
            job = self._receive(client)
        except (OSError, ValueError):
            client.close()
            return None
        process = _fork() if job.is_possible else 0
        if job.is_possible and process == 0:
            self._leave(client)
            return job
        for file in job.files:
            os.close(file)
        with suppress(OSError):
            client.sendall(process.to_bytes(WORD_BYTES, "big", signed=True))
        if process == 0:
            client.close()
        else:
            self._clients[client] = process
            self._waiting.register(client, selectors.EVENT_READ)
        return None

    @staticmethod
    def _receive(client: socket.socket) -> ForkRequest:
        client.settimeout(REQUEST_SECONDS)
        first, files, _, _ = socket.recv_fds(client, WORD_BYTES, 3)
        size = int.from_bytes(first, "big")
        if len(first) != WORD_BYTES or len(files) != 3 or size > REQUEST_BYTES_MAX:
            raise ValueError("not a stand-in")
        body = bytearray()
        while len(body) < size:
            part = client.recv(size - len(body))
            if not part:
                raise ValueError("it has ended")
            body += part
        return ForkRequest.parse(bytes(body), files)

    def _reap(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._wake, 4096)
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if process == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            for client in [one for one, pid in self._clients.items() if pid == process]:
                with suppress(OSError):
                    client.sendall(code.to_bytes(WORD_BYTES, "big", signed=True))
                self._forget(client)

    def _hang_up(self, client: socket.socket) -> None:
        """Spark ended the stand-in: it means the process."""
        process = self._clients.get(client)
        if process is not None:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGTERM)
            self._forget(client)

    def _forget(self, client: socket.socket) -> None:
        self._waiting.unregister(client)
        del self._clients[client]
        client.close()

    def _end_of_driver(self) -> None:
        self._waiting.unregister(sys.stdin.fileno())
        if self._listener is not None:
            self._waiting.unregister(self._listener)
            self._listener.close()
            self._listener = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _leave(self, client: socket.socket) -> None:
        """In a fork: close what belongs to the daemon."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._waiting.close()
        for file in (self._wake, self._woken):
            os.close(file)
        for one in (self._listener, client, *self._clients):
            if one is not None:
                one.close()


def main(listener: int, folder: str) -> None:
    """Import, listen on the socket, and be what was asked for in the forks."""
    own = {str(Path.cwd()), *child_environment().get("PYTHONPATH", "").split(os.pathsep)}
    path = [entry for entry in sys.path if entry not in own]
    gc.disable()
    for name in PREPARED:
        # Not installed, broken, or of another Spark: who needs it imports it, or fails.
        with suppress(Exception):
            importlib.import_module(name)
    gc.enable()
    gc.collect()
    gc.freeze()  # Spark's workers collect garbage after every task
    job = Daemon(socket.socket(fileno=listener), folder).serve()
    if job is not None:
        job.become(path)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
