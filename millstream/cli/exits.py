"""Exit codes of the command line."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["EXIT_CODES", "Exit"]


class Exit(IntEnum):
    """Exit codes; scripts may rely on them."""

    OK = 0
    ERROR = 1  # the message on stderr says what went wrong and what to do
    USAGE = 2  # wrong option or argument
    NOT_RUNNING = 3  # no broker runs on the data folder
    UNHEALTHY = 4  # `status` or `doctor` found something wrong
    INTERRUPTED = 130  # Ctrl-C


EXIT_CODES = (
    "Exit codes: 0 ok, 1 error (one sentence on stderr), 2 wrong usage, 3 no broker is running, "
    "4 a check failed, 130 interrupted."
)
