"""What the broker's tests share: a client that is not ours, and looks at processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import nats
import nats.errors
import pytest

from millstream.broker import Broker, Credentials


@contextlib.asynccontextmanager
async def client(url: str, who: Credentials | None = None, **options: Any) -> AsyncIterator[Any]:
    """A connection of nats-py; errors that come beside the replies are in `connection.seen`."""
    seen: list[str] = []

    async def note(error: Exception) -> None:
        seen.append(str(error))

    if who is not None:
        options |= {"user": who.user, "password": who.password.reveal()}
    options = {"allow_reconnect": False, "connect_timeout": 5, "error_cb": note, **options}
    connection: Any = await nats.connect(url.split(","), **options)
    connection.seen = seen
    try:
        yield connection
    finally:
        await connection.close()


def login(url: str, user: str | None = None, password: str = "", **more: object) -> str:
    """What the server answers to a login: PONG, or its error. A refused nats-py leaks sockets."""
    host, _, port = url.rpartition("://")[2].rpartition(":")
    names = {} if user is None else {"user": user, "pass": password}
    with socket.create_connection((host, int(port)), timeout=5) as plain:
        plain.recv(65536)
        context = more.get("tls")
        with contextlib.ExitStack() as stack:
            talk = plain
            if isinstance(context, ssl.SSLContext):
                talk = stack.enter_context(context.wrap_socket(plain, server_hostname=host))
            talk.sendall(f"CONNECT {json.dumps({'verbose': False, **names})}\r\nPING\r\n".encode())
            return talk.recv(4096).decode().strip()


async def publish(url: str, *bodies: bytes, stream: str = "orders", **options: Any) -> list[int]:
    """Declare the stream if need be, publish, and return the sequences that were acknowledged."""
    async with client(url, **options) as connection:
        jetstream = connection.jetstream()
        await jetstream.add_stream(name=stream, subjects=[f"{stream}.>"])
        return [(await jetstream.publish(f"{stream}.x", body)).seq for body in bodies]


async def stored(url: str, stream: str = "orders", **options: Any) -> list[bytes]:
    """Every message of a stream."""
    async with client(url, **options) as connection:
        jetstream = connection.jetstream()
        state = (await jetstream.stream_info(stream)).state
        numbers = range(state.first_seq, state.last_seq + 1)
        return [(await jetstream.get_msg(stream, number)).data for number in numbers]


def wait_until(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    """The first true value of the condition; fails when the time is over."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"not true within {seconds} s: {condition}")
        time.sleep(0.01)
    return value


async def wait_until_async(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    """The same, while the event loop goes on."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"not true within {seconds} s: {condition}")
        await asyncio.sleep(0.01)
    return value


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be noticed by its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def command_line(pid: int) -> bytes:
    """What the process list shows of a process."""
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def exists(path: Path) -> bool:
    """Whether there is such a file or folder."""
    return path.exists()


def store_of(broker: Broker) -> Path:
    """Where the broker keeps its streams."""
    return Path(json.loads((broker.data / "nodes/n1/plan.json").read_text())["store"])


@contextlib.contextmanager
def owner(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Another Python process that runs this code; killed at the end, and its forks with it."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        bufsize=1,
        process_group=0,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def line_of(process: subprocess.Popen[str]) -> str:
    """The next line that the process prints."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line, "the process ended without a word"
    return line


class small_disk:  # noqa: N801 - read as a function
    """A file system of a few megabytes; the test is skipped where none can be mounted."""

    def __init__(self, folder: Path, size: str) -> None:
        self.folder, self.size = folder, size

    def __enter__(self) -> Path:
        self.folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={self.size}", "none", str(self.folder)]
        try:
            done = subprocess.run(mount, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("there is no mount command here")
        if done.returncode != 0:
            pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
        return self.folder

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "-l", str(self.folder)], check=True)
