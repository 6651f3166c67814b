"""Helpers of the broker's tests: a nats-py client, and checks of processes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import nats
import nats.errors
import pytest

from millstream import Topic
from millstream.broker import Broker, Credentials
from millstream.errors import NoGuard

T = TypeVar("T")

PATIENCE = 30.0  # seconds for what takes milliseconds, unless a process is stalled


@contextlib.asynccontextmanager
async def client(url: str, who: Credentials | None = None, **options: Any) -> AsyncIterator[Any]:
    """A connection of nats-py; errors outside of replies are in `connection.seen`.

    Its flush returns when the server has handled all that was sent: of nats-py's own, the PING may
    overtake what was published before it. Requests of its JetStream have time, unless given less.
    """
    seen: list[str] = []

    async def note(error: Exception) -> None:
        seen.append(str(error))

    if who is not None:
        options |= {"user": who.user, "password": who.password.reveal()}
    patient = {"connect_timeout": PATIENCE, "error_cb": note}
    options = {"allow_reconnect": False, **patient, **options}
    connection: Any = await nats.connect(url.split(","), **options)
    connection.seen = seen
    connection.flush = functools.partial(_flush_twice, connection.flush)
    connection.jetstream = functools.partial(connection.jetstream, timeout=PATIENCE)
    try:
        yield connection
    finally:
        await connection.close()


async def _flush_twice(flush: Callable[[float], Awaitable[None]]) -> None:
    await flush(PATIENCE)
    await flush(PATIENCE)


def login(url: str, user: str | None = None, password: str = "", **more: object) -> str:
    """What the server answers to a login: PONG, or its error. A refused nats-py leaks sockets."""
    host, _, port = url.rpartition("://")[2].rpartition(":")
    names = {} if user is None else {"user": user, "pass": password}
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as plain:
        info = b""
        while not info.endswith(b"\r\n"):
            info += plain.recv(65536) or b"closed\r\n"
        context = more.get("tls")
        with contextlib.ExitStack() as stack:
            talk = plain
            if isinstance(context, ssl.SSLContext):
                talk = stack.enter_context(context.wrap_socket(plain, server_hostname=host))
            talk.sendall(f"CONNECT {json.dumps({'verbose': False, **names})}\r\nPING\r\n".encode())
            return talk.recv(4096).decode().strip()


async def publish(url: str, *bodies: bytes, stream: str = "orders", **options: Any) -> list[int]:
    """Create the stream if needed, publish, and return the acknowledged sequences."""
    async with client(url, **options) as connection:
        jetstream = connection.jetstream()
        await jetstream.add_stream(name=stream, subjects=[f"{stream}.>"])
        return [(await jetstream.publish(f"{stream}.x", body)).seq for body in bodies]


async def stored(
    url: str, stream: str = "orders", *, timeout: float = PATIENCE, **options: Any
) -> list[bytes]:
    """Every message of a stream."""
    async with client(url, **options) as connection:
        jetstream = connection.jetstream(timeout=timeout)
        state = (await jetstream.stream_info(stream)).state
        numbers = range(state.first_seq, state.last_seq + 1)
        return [(await jetstream.get_msg(stream, number)).data for number in numbers]


async def answered(ask: Callable[[], Awaitable[T]]) -> T:
    """What a cluster answers: a request during an election gets no answer."""
    end = time.monotonic() + 2 * PATIENCE
    while True:
        try:
            return await ask()
        except (nats.errors.Error, TimeoutError):
            if time.monotonic() > end:
                raise
            await asyncio.sleep(0.02)


async def declare(connection: Any, stream: str) -> None:
    """Create a replicated stream."""
    jetstream = connection.jetstream(timeout=0.5)
    subjects = [f"{stream}.>"]
    await answered(lambda: jetstream.add_stream(name=stream, subjects=subjects, num_replicas=3))


async def publish_until(jetstream: Any, number: int, subject: str = "orders.x") -> None:
    """Publish one event until it is acknowledged; the id makes retries safe."""
    body, headers = str(number).encode(), {"Nats-Msg-Id": str(number)}
    await answered(lambda: jetstream.publish(subject, body, headers=headers))


async def publish_guarded(topic: Topic, value: Any, key: str | None = None) -> None:
    """Publish when the broker has started the topic's guard, which may take long here."""
    end = time.monotonic() + 2 * PATIENCE
    while True:
        try:
            await topic.publish(value, key)
            return
        except NoGuard:
            if time.monotonic() > end:
                raise


def wait_until(condition: Callable[[], Any], seconds: float = 2 * PATIENCE) -> Any:
    """The first true value of the condition; fails when the time is up."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"not true within {seconds} s: {condition}")
        time.sleep(0.01)
    return value


async def wait_until_async(condition: Callable[[], Any], seconds: float = 2 * PATIENCE) -> Any:
    """The same, without blocking the event loop."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"not true within {seconds} s: {condition}")
        await asyncio.sleep(0.01)
    return value


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def command_line(pid: int) -> bytes:
    """A process's command line, as the process list shows it."""
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def exists(path: Path) -> bool:
    """Whether the file or folder exists."""
    return path.exists()


def content(path: Path) -> bytes:
    """The content of a file; empty if it was removed since it was listed, as drafts are."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return b""


def store_of(broker: Broker) -> Path:
    """The folder of the broker's streams."""
    return Path(json.loads((broker.data / "nodes/n1/plan.json").read_text())["store"])


@contextlib.contextmanager
def owner(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Another Python process that runs this code; killed at the end, with its forks."""
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
    """A file system of a few megabytes; the test is skipped if none can be mounted."""

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
