"""The Python that Spark starts its processes with: a stand-in whose processes are forked."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import Final

from millstream.settings import child_environment, environment
from millstream.spark import python_stand_in

__all__ = [
    "OWN_VARIABLES",
    "become_environment",
    "forking_python",
    "is_forking",
    "told_to_spark",
    "worker_python",
]

# Set for the daemon because a running one cannot change it: Spark sets the same for its workers.
OWN_VARIABLES: Final = {
    "PYTHONHASHSEED": "0",
    "PYTHONUNBUFFERED": "YES",
    "OMP_NUM_THREADS": "1",
}

_VARIABLE: Final = "PYSPARK_PYTHON"
_SEED: Final = "PYTHONHASHSEED"

# By process: a fork of this one needs a daemon of its own, which ends with it.
_programs: Final[dict[int, str]] = {}
_daemons: Final[list[subprocess.Popen[bytes]]] = []


def worker_python(local: bool) -> str:
    """The Python for the processes of this process's Spark; their preparation starts now.

    One that the user has chosen stays. On a cluster it is a path on other machines.
    """
    chosen = environment(_VARIABLE)
    own = chosen is None or chosen == sys.executable
    return forking_python() if own and local else chosen or sys.executable


def forking_python() -> str:
    """The program to start instead of this Python; it is this Python if nothing can be forked."""
    process = os.getpid()
    if process not in _programs:
        try:
            _programs[process] = _start()
        except OSError:  # a folder whose path is too long for a socket, or that has no room
            _programs[process] = sys.executable
    return _programs[process]


def is_forking(python: str) -> bool:
    """Whether Spark's processes are forks, with this as their Python: they start in no time."""
    return python != sys.executable and python == _programs.get(os.getpid())


def _start() -> str:
    folder = Path(tempfile.mkdtemp(prefix="millstream-spark-"))
    try:
        address, program = folder / "daemon.sock", folder / "python"
        words = [sys.executable, "-IS", str(Path(python_stand_in.__file__)), str(address)]
        program.write_text(f'#!/bin/sh\nexec {" ".join(map(quote, words))} "$@"\n')
        program.chmod(0o700)
        if not os.access(program, os.X_OK):  # a file system that runs nothing
            raise OSError(f"{program} cannot be run")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(address))
            listener.listen()
            variables = {**OWN_VARIABLES, _SEED: environment(_SEED) or OWN_VARIABLES[_SEED]}
            module = "millstream.spark.pyspark_daemon"
            _daemons.append(
                subprocess.Popen(
                    [sys.executable, "-m", module, str(listener.fileno()), str(folder)],
                    stdin=subprocess.PIPE,
                    pass_fds=(listener.fileno(),),
                    env=child_environment(**variables),
                    process_group=0,  # Ctrl-C is for the driver, even while this one imports
                )
            )
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return str(program)


@contextmanager
def told_to_spark(python: str) -> Iterator[None]:
    """While this is open, Spark reads from the environment that this is its Python.

    Afterwards the variable is as before, or names this Python: other processes have no use for a
    stand-in that ends with this one.
    """
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = python
    try:
        yield
    finally:
        os.environ[_VARIABLE] = before or sys.executable


def become_environment(variables: Mapping[str, str]) -> None:
    """Replace the whole environment of this process."""
    os.environ.clear()
    os.environ.update(variables)
