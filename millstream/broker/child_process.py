"""A child process that cannot outlive its parent.

Standard library only: the keeper loads this file.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Final

__all__ = ["start_child"]

PR_SET_PDEATHSIG: Final = 1


def start_child(run: Callable[[], None], what: str) -> tuple[int, int]:
    """Fork and call `run`, which replaces the program; the process id and the end of its output."""
    read, write = os.pipe()
    prctl = _kernel_call()
    parent = os.getpid()
    child = os.fork()
    if child:
        os.close(write)
        return child, read
    try:
        os.setpgid(0, 0)  # Ctrl-C in a terminal goes to the owner, which then stops us
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        _die_with(parent, prctl)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(write, 1)
        os.dup2(write, 2)
        run()
    except BaseException as error:
        os.write(2, f"cannot run {what}: {error}\n".encode())
    os._exit(127)


def _die_with(parent: int, prctl: Any) -> None:
    """In a child: have the kernel kill it with its parent."""
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def _kernel_call() -> Any:
    """The Linux call for `_die_with`, loaded before a fork; None on other systems."""
    if sys.platform != "linux":
        return None
    import ctypes

    return ctypes.CDLL(None).prctl
