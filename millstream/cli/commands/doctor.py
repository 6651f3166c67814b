"""`millstream doctor`: check what this machine has, what is missing, and how to fix it."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from millstream.cli.exits import Exit
from millstream.cli.output import DataOption, JsonOption, print_json, print_table, say, size
from millstream.deadline import now_ns
from millstream.errors import MillstreamError, NotRunning
from millstream.settings import data_folder, environment

__all__ = ["Check", "app", "java_version", "run_checks"]

app = typer.Typer()

PYTHON = (3, 11)
JAVA = 17
DISK_FREE = 1024**3  # bytes; below a gigabyte the store limit leaves little room for events
FSYNC_SLOW = 0.020  # seconds; with one fsync per message, fewer than 50 acks per second
JAVA_SECONDS = 20.0  # a cold Java start on a busy machine
EARLIEST_NS = 1_767_225_600 * 10**9  # 2026-01-01: this software did not exist before
CLOCK_ERROR = 5  # adjtimex(2): the clock is not synchronised


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `warning`: something works less well, or only a part does not work."""

    name: str
    state: Literal["ok", "warning", "failed"]
    found: str
    fix: str | None = None


@app.command()
def doctor(
    data: DataOption = None,
    port: Annotated[
        int, typer.Option(envvar="MILLSTREAM_PORT", help="Port that the broker will use.")
    ] = 4222,
    json_: JsonOption = False,
) -> None:
    """Check Python, Java, server, ports, disk and clock, and explain how to fix problems.

    Exit code 4 if a check failed; a warning is not a failure.
    """
    checks = list(run_checks(data_folder(data), port))
    if json_:
        print_json({"ok": not _failed(checks), "checks": checks})
    else:
        marks = {"ok": "ok", "warning": "! ", "failed": "X "}
        rows = [(marks[check.state], check.name, check.found) for check in checks]
        print_table("", ["", "check", "found"], rows)
        for check in checks:
            if check.fix:
                say(f"{check.name}: {check.fix}")
    if _failed(checks):
        raise typer.Exit(Exit.UNHEALTHY)


def _failed(checks: list[Check]) -> bool:
    return any(check.state == "failed" for check in checks)


def run_checks(folder: Path, port: int) -> Iterator[Check]:
    """Every check, each on its own: one that cannot be run is a finding, not the end."""
    checks: list[tuple[str, Callable[[], Check]]] = [
        ("python", _python),
        ("java", _java),
        ("server", _server),
        ("ports", lambda: _ports(folder, port)),
        ("disk", lambda: _disk(folder)),
        ("clock", _clock),
    ]
    for name, check in checks:
        try:
            yield check()
        except (MillstreamError, OSError, subprocess.SubprocessError) as error:
            yield Check(name, "failed", f"could not be checked: {error}")


def _python() -> Check:
    found = f"{sys.version.split()[0]} at {sys.executable}"
    if sys.version_info < PYTHON:
        return Check("python", "failed", found, "install Python 3.11 or newer")
    return Check("python", "ok", found)


def _java() -> Check:
    binary = _java_binary()
    how = _java_install()
    if binary is None:
        return Check("java", "warning", "none; only Spark pipelines need it", f"for Spark: {how}")
    try:
        asked = subprocess.run(
            [binary, "-version"], capture_output=True, text=True, timeout=JAVA_SECONDS, check=False
        )
        version = java_version(asked.stderr + asked.stdout)
    except (OSError, subprocess.TimeoutExpired):
        version = None
    if version is None:
        return Check(
            "java", "warning", f"{binary} does not report its version", f"for Spark: {how}"
        )
    if version < JAVA:
        return Check("java", "warning", f"Java {version} at {binary}; Spark needs {JAVA}", how)
    return Check("java", "ok", f"Java {version} at {binary}")


def java_version(text: str) -> int | None:
    """The major version in what `java -version` prints.

    >>> java_version('openjdk version "17.0.15" 2025-04-15'), java_version('version "1.8.0_4"')
    (17, 8)
    """
    match = re.search(r'version "(?:1\.)?(\d+)', text)
    return int(match[1]) if match else None


def _java_binary() -> str | None:
    home = environment("JAVA_HOME")
    if home is not None and (Path(home) / "bin" / "java").is_file():
        return str(Path(home) / "bin" / "java")
    return shutil.which("java")


def _java_install() -> str:
    tools = {
        "apt-get": f"apt-get install openjdk-{JAVA}-jre-headless",
        "dnf": f"dnf install java-{JAVA}-openjdk-headless",
        "apk": f"apk add openjdk{JAVA}-jre-headless",
        "brew": f"brew install openjdk@{JAVA}",
    }
    for tool, line in tools.items():
        if shutil.which(tool):
            return line
    return f"install a Java {JAVA} runtime and set JAVA_HOME to it"


def _server() -> Check:
    from millstream.broker import find_binary
    from millstream.errors import ServerMissing, ServerTooOld

    try:
        binary = find_binary()
    except (ServerMissing, ServerTooOld) as error:
        return Check("server", "failed", "no usable nats-server", str(error))
    return Check("server", "ok", f"nats-server {binary.version_text} at {binary.path}")


def _ports(folder: Path, port: int) -> Check:
    from millstream import broker

    try:
        state = broker.read_state(folder)
    except NotRunning:
        pass
    else:
        return Check("ports", "ok", f"a broker of this folder is running at {state.url}")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            fix = "stop what uses it, or choose another: millstream up --port N (0: any free)"
            return Check("ports", "failed", f"127.0.0.1:{port}: {error.strerror}", fix)
    return Check("ports", "ok", f"127.0.0.1:{port} is free")


def _disk(folder: Path) -> Check:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        fix = "choose another folder (--data DIR), or make this one writable"
        return Check("disk", "failed", f"{existing} is not writable", fix)
    free = shutil.disk_usage(existing).free
    slowness = _fsync_seconds(existing)
    found = f"{size(free)} free at {existing}, fsync takes {slowness * 1000:.1f} ms"
    if free < DISK_FREE:
        return Check("disk", "failed", found, "free some space, or use another disk (--data DIR)")
    if slowness > FSYNC_SLOW:
        fix = "every publish waits for this; use a faster disk, or publish in packs"
        return Check("disk", "warning", found, fix)
    return Check("disk", "ok", found)


def _fsync_seconds(existing: Path, times: int = 5) -> float:
    """The median time of a small write with fsync in that folder."""
    import tempfile

    spent = []
    with tempfile.TemporaryFile(dir=existing, prefix=".millstream-doctor-") as file:
        for _ in range(times):
            file.write(b"x" * 512)
            file.flush()
            start = time.perf_counter()
            os.fsync(file.fileno())
            spent.append(time.perf_counter() - start)
    return sorted(spent)[times // 2]


def _clock() -> Check:
    moment = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_ns() / 1e9))
    fix = "switch on time synchronisation: timedatectl set-ntp true, or install chrony"
    if now_ns() < EARLIEST_NS:
        return Check("clock", "failed", f"{moment} cannot be right", fix)
    synchronised = _clock_is_synchronised()
    if synchronised is None:
        return Check("clock", "ok", f"{moment} (it is unknown whether it is synchronised)")
    if not synchronised:
        return Check("clock", "warning", f"{moment}, not synchronised with a time server", fix)
    return Check("clock", "ok", f"{moment}, synchronised")


def _clock_is_synchronised() -> bool | None:
    """Whether the kernel reports a synchronised clock; None if it cannot be asked."""
    if sys.platform != "linux":
        return None
    import ctypes

    # All zero means "change nothing, only report"; the buffer is larger than any `struct timex`.
    answer = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(1024))
    return None if answer < 0 else answer != CLOCK_ERROR
