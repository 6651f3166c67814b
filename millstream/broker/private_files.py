"""Files of a node, and the pipe to its owner. Files written here are for their owner only.

Standard library only: the keeper loads this file.
"""

# Importing pathlib would take longer than everything else at start-up.
# ruff: noqa: PTH105, PTH108, PTH118, PTH123, PTH208
from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Final

__all__ = ["detach", "locked_file", "ports_in", "read_plan", "sign_lock", "write_private"]


PLAN_BYTES: Final = 1024 * 1024


def read_plan() -> dict[str, Any] | None:
    """The plan that the owner of a keeper writes to it, in one line; None if it does not."""
    text = b""
    while not text.endswith(b"\n"):
        part = os.read(0, 65536)
        if not part or len(text) > PLAN_BYTES:
            return None
        text += part
    plan: dict[str, Any] = json.loads(text)
    return plan


def detach() -> None:
    """Disconnect this process from its owner: from now on everything goes to the log file only."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)


def ports_in(folder: str, pid: int) -> dict[str, Any] | None:
    """The ports that a server wrote when all its listeners were open; None before."""
    for name in os.listdir(folder):
        if name.endswith(f"_{pid}.ports"):
            with contextlib.suppress(ValueError), open(os.path.join(folder, name)) as file:
                content: dict[str, Any] = json.load(file)
                return content
    return None


def locked_file(path: str) -> int:
    """Create a file that names this process; it is locked, so a stale one is recognised."""
    marker = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(marker, fcntl.LOCK_EX)
    sign_lock(marker)
    return marker


def sign_lock(lock: int) -> None:
    """Write the holder into the lock file, for processes that find it locked."""
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    holder = {"pid": os.getpid(), "since": since, "host": socket.gethostname()}
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps(holder).encode(), 0)


def write_private(path: str, text: str, *, durable: bool = False) -> None:
    """Replace a file atomically; only its owner can ever read it.

    `durable` is for what cannot be recreated; for the rest it would only slow down the start.
    """
    draft = f"{path}.{os.getpid()}.{os.urandom(4).hex()}"
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        try:
            os.write(file, text.encode())
            if durable:
                os.fsync(file)
        finally:
            os.close(file)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise
