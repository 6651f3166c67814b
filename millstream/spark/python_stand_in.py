"""What Spark starts as Python: has a prepared process forked, or starts Python as it was asked to.

Runs as a script without the package and without site, so that it is ready in milliseconds. It lives
as long as the forked process does and ends with its status: Spark holds this one for that one.
See pyspark_daemon.py for the other side.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

WORD_BYTES = 4
LOOK_SECONDS = 0.5


def main(address: str, arguments: list[str]) -> None:
    """Be the process that Spark asked for."""
    status = _forked(address, arguments)
    if status is None:  # nobody forks, or not this: start it as Spark wanted to
        os.execv(sys.executable, [sys.executable, *arguments])
    elif status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


def _forked(address: str, arguments: list[str]) -> int | None:
    """The status of the forked process once it has ended; None if there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as daemon:
        try:
            daemon.connect(address)
            folder = os.getcwd()  # noqa: PTH109 - pathlib takes longer to import than all of this
            words = [folder, str(len(arguments)), *arguments]
            pairs = [name + b"=" + value for name, value in os.environb.items()]
            body = b"\0".join([*map(os.fsencode, words), *pairs])
            socket.send_fds(daemon, [len(body).to_bytes(WORD_BYTES, "big")], [0, 1, 2])
            daemon.sendall(body)
            process = _word(daemon)
        except OSError:
            return None
        if not process:
            return None
        try:
            status = _word(daemon)
        except OSError:
            status = None
        while status is None:  # the daemon was killed; what it forked lives
            try:
                os.kill(process, 0)
            except OSError:
                return 1
            time.sleep(LOOK_SECONDS)
        return status


def _word(daemon: socket.socket) -> int | None:
    """The next number that the daemon sends; None if it has ended."""
    received = b""
    while len(received) < WORD_BYTES:
        part = daemon.recv(WORD_BYTES - len(received))
        if not part:
            return None
        received += part
    return int.from_bytes(received, "big", signed=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
