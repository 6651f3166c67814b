"""From nothing to the first acknowledged message, and what a broker costs a test."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.harness import Result, Skipped, against
from millstream.broker import Broker, BrokerSettings, find_binary
from millstream.testing import running_broker, running_cluster

MILLISECONDS = "ms"
COMMAND = (sys.executable, "-c", "from millstream.cli.main import main; main()")


def measure(quick: bool) -> Iterator[Result | Skipped]:
    """Start-up times; each ends with a message on disk and its ack in our hands."""
    yield from against(
        "up to first ack",
        MILLISECONDS,
        _with_folder(up_to_first_ack),
        {"bare nats-server": _with_folder(bare_server_to_first_ack)},
        quick=quick,
        better="lower",
    )
    yield from against(
        "embedded broker to first ack",
        MILLISECONDS,
        _with_folder(embedded_to_first_ack),
        {"bare nats-server": _with_folder(bare_server_to_first_ack)},
        quick=quick,
        better="lower",
    )
    yield from against("broker for one test", MILLISECONDS, broker_for_one_test, {}, quick=quick)
    yield from against("cluster of three", MILLISECONDS, cluster_of_three, {}, quick=quick)


def up_to_first_ack(folder: Path) -> float:
    """`millstream up` as a command, then a client's first acknowledged message."""
    started = time.perf_counter()
    done = subprocess.run(
        [*COMMAND, "up", "--data", str(folder), "--port", "0", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"millstream up failed: {done.stderr}")
    first_ack(json.loads(done.stdout)["url"])
    elapsed = time.perf_counter() - started
    subprocess.run([*COMMAND, "down", "--data", str(folder)], capture_output=True, check=True)
    return elapsed * 1000


def embedded_to_first_ack(folder: Path) -> float:
    """`Broker().start()` in this process, then the first acknowledged message."""
    started = time.perf_counter()
    with Broker(BrokerSettings(data=folder)) as broker:
        first_ack(broker.url)
        return (time.perf_counter() - started) * 1000


def bare_server_to_first_ack(folder: Path) -> float:
    """The floor: nats-server itself with the same durability, watched without a pause."""
    ports = folder / "ports"
    ports.mkdir()
    config = folder / "server.conf"
    config.write_text(
        f'listen: "127.0.0.1:-1"\nports_file_dir: "{ports}"\n'
        f'jetstream {{ store_dir: "{folder}", sync_interval: always }}\n'
    )
    binary = find_binary().path
    started = time.perf_counter()
    server = subprocess.Popen([binary, "-c", config], stderr=subprocess.DEVNULL)
    try:
        while not (found := list(ports.glob("*.ports"))) or not found[0].stat().st_size:
            if server.poll() is not None:
                raise RuntimeError("nats-server ended while starting")
            time.sleep(0.001)
        first_ack(json.loads(found[0].read_text())["nats"][0])
        return (time.perf_counter() - started) * 1000
    finally:
        server.terminate()
        server.wait()


def broker_for_one_test() -> float:
    """Start and stop, temporary folder included."""
    started = time.perf_counter()
    with running_broker():
        pass
    return (time.perf_counter() - started) * 1000


def cluster_of_three() -> float:
    """Three nodes, ready with a leader."""
    started = time.perf_counter()
    with running_cluster():
        return (time.perf_counter() - started) * 1000


def first_ack(url: str) -> None:
    """Create a stream and publish one message, with the least client there is."""
    host, _, port = url.rpartition("://")[2].rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        lines = connection.makefile("rb")
        connection.sendall(b'CONNECT {"verbose":false}\r\nSUB reply 1\r\n')
        stream = json.dumps({"name": "s", "subjects": ["s"]})
        for subject, body in (("$JS.API.STREAM.CREATE.s", stream), ("s", "x" * 128)):
            connection.sendall(f"PUB {subject} reply {len(body)}\r\n{body}\r\n".encode())
            answer = _next_message(lines)
            if "error" in answer:
                raise RuntimeError(f"{subject}: {answer['error']}")
        lines.close()


def _next_message(lines: Any) -> dict[str, Any]:
    while not (line := lines.readline()).startswith(b"MSG "):
        if not line:
            raise RuntimeError("the server closed the connection")
    body: dict[str, Any] = json.loads(lines.read(int(line.split()[-1])))
    return body


def _with_folder(contestant: Callable[[Path], float]) -> Callable[[], float]:
    def run() -> float:
        folder = Path(tempfile.mkdtemp(prefix="millstream-bench-"))
        try:
            os.sync()  # what the round before left to write is not this round's cost
            return contestant(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    return run
