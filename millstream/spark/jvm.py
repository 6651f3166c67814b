"""Starts Spark's JVM, and passes on what it prints except for what means nothing."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from millstream.errors import ConfigError

if TYPE_CHECKING:
    from pyspark import SparkConf

__all__ = ["Meaningful", "start_jvm"]

# Spark starts Java with an incubator module, and Java has no option that keeps this line away.
GREETING: Final = b"WARNING: Using incubator modules: jdk.incubator.vector\n"
STDERR: Final = 2
TRACEBACK: Final = b"Traceback (most recent call last):\n"
TRACEBACK_LINES: Final = 20  # of Spark's own; longer ones are of something else
CLOSED: Final = (b"BrokenPipeError: ", b"ConnectionResetError: ")
STACK: Final = ("at ", "... ")  # lines of Java's stack traces
UNCAUGHT: Final = 'Exception in thread "main" '
KEPT_LINES: Final = 200  # of a start that failed: a sentence, and its stack
LINE_BYTES: Final = 64 * 1024
END_SECONDS: Final = 10.0


def start_jvm(conf: SparkConf) -> None:
    """Start the JVM of this process, unless it has one; ConfigError has what a failed one printed.

    PySpark's own start hands the JVM this process's stderr; this one hands it a pipe.
    """
    from pyspark import SparkContext
    from pyspark.errors import PySparkRuntimeError

    if SparkContext._gateway is not None:
        return
    read, write = os.pipe()
    printed = _Printed(read)
    try:
        gateway = _launched(conf, write)
    except PySparkRuntimeError:
        os.close(write)
        raise ConfigError(f"Spark's Java does not start: {printed.after_the_end()}") from None
    except BaseException:
        os.close(write)
        raise
    os.close(write)
    printed.started()
    SparkContext._ensure_initialized(gateway=gateway, conf=conf)


def _launched(conf: SparkConf, stderr: int) -> Any:
    """PySpark's gateway to a new JVM; an interrupt waits for it, and then ends the JVM.

    If PySpark's launch is interrupted, nobody holds the JVM, which cannot tell its address and
    runs for ever. Ctrl-C interrupts the main thread only, so the launch has a thread of its own.
    """
    from pyspark.java_gateway import launch_gateway

    with ThreadPoolExecutor(1, "millstream-jvm-start") as thread:
        launch = thread.submit(launch_gateway, conf, {"stderr": stderr})
        try:
            return launch.result()
        except BaseException:
            launch.add_done_callback(_end_jvm)
            raise


def _end_jvm(launch: Future[Any]) -> None:
    if launch.exception() is None and (jvm := launch.result().proc) is not None:
        jvm.stdin.close()  # Spark's JVM ends when its stdin does


class _Printed:
    """What the JVM prints: kept while it starts, then passed on to this process's stderr."""

    def __init__(self, read: int) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._kept: deque[bytes] | None = deque(maxlen=KEPT_LINES)
        self._thread = threading.Thread(target=self._run, name="millstream-jvm-stderr", daemon=True)
        self._thread.start()

    def started(self) -> None:
        """Pass on what was kept, and from now on every line."""
        with self._lock:
            kept, self._kept = self._kept, None
            _pass_on(b"".join(kept or ()))

    def after_the_end(self) -> str:
        """What it printed last, as one line without a stack; called when the JVM has ended."""
        self._thread.join(END_SECONDS)
        lines = [line.decode("utf-8", "replace").strip() for line in self._kept or ()]
        said = [line for line in lines if line and not line.startswith(STACK)]
        return " ".join(said).removeprefix(UNCAUGHT) or "it printed nothing"

    def _run(self) -> None:
        meaningful = Meaningful()
        with os.fdopen(self._read, "rb") as file:
            # In pieces, so that a line of any length is never held completely.
            while line := file.readline(LINE_BYTES):
                self._take(meaningful.part(line))
        self._take(meaningful.rest())

    def _take(self, text: bytes) -> None:
        with self._lock:
            if self._kept is None:
                _pass_on(text)
            else:
                self._kept.append(text)


class Meaningful:
    """Leaves out the lines that Spark and Java print although nothing is wrong. Pure.

    These are a greeting, and the traceback of a Python worker that has planned a query: Spark takes
    the plan and closes the connection, sometimes before the worker has sent its last four bytes.
    """

    def __init__(self) -> None:
        self._held: list[bytes] = []  # a traceback, until its last line tells whose it is

    def part(self, line: bytes) -> bytes:
        """What to print after this line: it, what was held with it, or nothing yet."""
        if line == TRACEBACK:
            before = self.rest()
            self._held.append(line)
            return before
        if not self._held:
            return b"" if line == GREETING else line
        self._held.append(line)
        if line.startswith(b" ") and len(self._held) < TRACEBACK_LINES:
            return b""
        files = [line for line in self._held if line.startswith(b'  File "')]
        if line.startswith(CLOSED) and all(b"/pyspark/daemon.py" in file for file in files):
            self._held.clear()
        return self.rest()

    def rest(self) -> bytes:
        """What is still held."""
        held = b"".join(self._held)
        self._held.clear()
        return held


def _pass_on(text: bytes) -> None:
    if text:
        with contextlib.suppress(OSError):  # stderr is closed: the JVM must not wait for it
            os.write(STDERR, text)
