"""From nothing to the first acknowledged event: the command, the embedded broker, a test's broker.

The floor is nats-server itself, started with a configuration of the same durability and asked over
the same client, so the difference is what the lock, the checks and the keeper cost.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import millstream
from bench.harness import Result, Skipped, against
from millstream.broker import Broker, BrokerSettings, find_binary, read_state
from millstream.testing import running_broker

MILLSTREAM = str(Path(sys.executable).with_name("millstream"))
Start = Callable[[Path], AbstractContextManager[str]]

PATIENCE = 20.0  # seconds for a server to listen, on the slowest machine


def measure(quick: bool) -> Iterator[Result | Skipped]:
    """Seconds until the first ack, and seconds of one test with a broker of its own."""
    floor = {"nats-server": partial(timed_start, bare_server)}
    # The client's modules are loaded before the clock runs, for everybody alike.
    timed_start(embedded_broker)
    for name, start in (("up to first ack", command), ("Broker to first ack", embedded_broker)):
        ours = partial(timed_start, start)
        yield from against(name, "s", ours, floor, quick=quick, better="lower")
    yield from against("test broker, start and stop", "s", whole_test, {}, quick=quick)


def timed_start(start: Start) -> float:
    """Seconds from the call until an event of a new topic is acknowledged."""
    with tempfile.TemporaryDirectory(prefix="millstream-bench-") as folder:
        began = time.perf_counter()
        with start(Path(folder)) as url:
            asyncio.run(first_ack(url))
            return time.perf_counter() - began


async def first_ack(url: str) -> None:
    async with millstream.connect(url) as mill:
        topic = await mill.create_topic("first")
        await topic.publish(b"event")


@contextmanager
def command(folder: Path) -> Iterator[str]:
    """`millstream up`, as a newcomer types it."""
    subprocess.run(
        [MILLSTREAM, "up", "--port", "0", "--data", str(folder)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    try:
        yield read_state(folder).url
    finally:
        subprocess.run(
            [MILLSTREAM, "down", "--data", str(folder)], check=True, stdout=subprocess.DEVNULL
        )


@contextmanager
def embedded_broker(folder: Path) -> Iterator[str]:
    """A Broker in this process."""
    with Broker(BrokerSettings(data=folder)) as broker:
        yield broker.url


@contextmanager
def bare_server(folder: Path) -> Iterator[str]:
    """nats-server with a data folder, and a client that tries until it listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (folder / "conf").write_text(
        f"host: 127.0.0.1\nport: {port}\n"
        f'jetstream {{ store_dir: "{folder}", sync_interval: always }}\n'
    )
    server = subprocess.Popen(
        [str(find_binary().path), "-c", str(folder / "conf")], stderr=subprocess.DEVNULL
    )
    try:
        await_listener(port)
        yield f"nats://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def await_listener(port: int) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            time.sleep(0.002)
        else:
            return
    raise TimeoutError(f"nats-server did not listen within {PATIENCE} s")


def whole_test() -> float:
    began = time.perf_counter()
    with running_broker():
        pass
    return time.perf_counter() - began
