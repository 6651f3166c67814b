"""Appends with the library `eventsourcing` on SQLite, PostgreSQL and topics, for other families.

    with sqlite_recorder() as recorder:
        print(append_events(recorder, aggregates=64, each=10, threads=64).per_second)

All three store an event durably before the call returns: SQLite with synchronous=FULL, PostgreSQL
with fsync and synchronous_commit, a broker with durability "fsync". PeerAbsent says what is
missing.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from eventsourcing.persistence import ApplicationRecorder, InfrastructureFactory, StoredEvent
from eventsourcing.sqlite import SQLiteConnection, SQLiteFactory

from bench.harness import PeerAbsent

__all__ = [
    "Appends",
    "append_events",
    "millstream_recorder",
    "postgres_recorder",
    "postgres_server",
    "sqlite_recorder",
]

STATE = b'{"amount":{"_type_":"decimal_str","_data_":"12.50"},"timestamp":"2026-11-17T15:43:43"}'
TOPIC = "bank:Account.Deposited"
START_SECONDS = 60.0
# PostgreSQL refuses to run as root; its Debian package creates this user.
UNPRIVILEGED = "postgres"
POSTGRES_PROGRAMS = "/usr/lib/postgresql"


@dataclass(frozen=True, slots=True)
class Appends:
    """How long a number of appends took, each of one event, together and one by one."""

    seconds: float
    latencies: Sequence[float]  # seconds, sorted

    @property
    def per_second(self) -> float:
        """Events a second."""
        return len(self.latencies) / self.seconds

    @property
    def median(self) -> float:
        """Seconds for one append."""
        return statistics.median(self.latencies)

    def quantile(self, part: float) -> float:
        """The seconds that this part of the appends did not exceed: 0.99 for the slowest 1 %."""
        return self.latencies[min(len(self.latencies) - 1, int(part * len(self.latencies)))]


def append_events(
    recorder: ApplicationRecorder, aggregates: int, each: int, threads: int = 1
) -> Appends:
    """Append `each` events to every one of so many new aggregates, one event with each call.

    The threads share the aggregates out; each waits for its append before it makes the next.
    """
    ids = [uuid4() for _ in range(aggregates)]

    def work(first: int) -> list[float]:
        taken = []
        for version in range(1, each + 1):
            for one in ids[first::threads]:
                began = time.perf_counter()
                recorder.insert_events([StoredEvent(one, version, TOPIC, STATE)])
                taken.append(time.perf_counter() - began)
        return taken

    began = time.perf_counter()
    if threads == 1:
        latencies = work(0)
    else:
        with ThreadPoolExecutor(threads) as pool:
            latencies = [one for found in pool.map(work, range(threads)) for one in found]
    return Appends(time.perf_counter() - began, sorted(latencies))


# -- where the events go ------------------------------------------------------------------


@contextmanager
def sqlite_recorder() -> Iterator[ApplicationRecorder]:
    """The library on a SQLite file of its own, synced with every transaction."""
    with tempfile.TemporaryDirectory(prefix="millstream-bench-") as folder:
        factory = SQLiteFactory({"SQLITE_DBNAME": f"file:{folder}/events.db"})
        pool = factory.datastore.pool
        connect = pool._create_connection

        def durable() -> SQLiteConnection:
            connection = connect()
            connection.cursor().execute("PRAGMA synchronous=FULL")
            return connection

        pool._create_connection = durable  # type: ignore[method-assign]
        try:
            yield factory.application_recorder()
        finally:
            factory.close()


@contextmanager
def postgres_recorder(port: int, connections: int = 1) -> Iterator[ApplicationRecorder]:
    """The library on a new table of the PostgreSQL that listens on this port."""
    try:
        from eventsourcing.postgres import PostgresFactory
    except ImportError as error:
        raise PeerAbsent(
            f"psycopg is not installed ({error}): pip install millstream[dev]"
        ) from None
    from eventsourcing.utils import Environment

    settings = {
        "POSTGRES_DBNAME": "postgres",
        "POSTGRES_HOST": "127.0.0.1",
        "POSTGRES_PORT": str(port),
        "POSTGRES_USER": "bench",
        "POSTGRES_PASSWORD": "-",
        "POSTGRES_POOL_SIZE": str(connections),
        "POSTGRES_MAX_OVERFLOW": "0",
        "POSTGRES_MAX_WAITING": "0",
    }
    factory = PostgresFactory(Environment(f"bench{uuid4().hex[:8]}", settings))
    with factory:
        try:
            yield factory.application_recorder()
        finally:
            factory.close()


@contextmanager
def millstream_recorder(url: str) -> Iterator[ApplicationRecorder]:
    """The library on a new topic of the broker at this address."""
    settings = {
        "PERSISTENCE_MODULE": "millstream.eventsourcing",
        "NATS_URL": url,
        "MILLSTREAM_TOPIC": f"bench-{uuid4().hex[:8]}",
    }
    factory = InfrastructureFactory.construct(settings)
    try:
        yield factory.application_recorder()
    finally:
        factory.close()


# -- a PostgreSQL of its own --------------------------------------------------------------


def _program(name: str) -> str:
    """The path of one of PostgreSQL's programs, of the newest version."""
    versions = sorted(Path(POSTGRES_PROGRAMS).glob(f"*/bin/{name}"), key=_version_of)
    found = str(versions[-1]) if versions else shutil.which(name)
    if found is None:
        raise PeerAbsent(f"PostgreSQL is not installed ({name}): make system-deps")
    return found


def _version_of(path: Path) -> float:
    number = path.parents[1].name
    return float(number) if number.replace(".", "", 1).isdigit() else 0.0


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextmanager
def postgres_server(max_connections: int = 100) -> Iterator[int]:
    """A new PostgreSQL in a folder of its own that syncs every transaction; gives its port."""
    initdb, postgres = _program("initdb"), _program("postgres")
    user = UNPRIVILEGED if os.geteuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="millstream-bench-") as folder:
        data, log = Path(folder, "data"), Path(folder, "log")
        if user is not None:
            try:
                shutil.chown(folder, user)
            except LookupError:
                raise PeerAbsent(
                    f"no user '{user}' to run PostgreSQL as: make system-deps"
                ) from None
        make = [initdb, "-D", str(data), "-U", "bench", "-A", "trust", "--no-sync"]
        made = subprocess.run(make, user=user, cwd=folder, capture_output=True, text=True)
        if made.returncode:
            raise PeerAbsent(f"PostgreSQL could not create its folder: {made.stderr.strip()}")
        port = _free_port()
        settings = {
            "port": port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "fsync": "on",
            "synchronous_commit": "on",
            "max_connections": max_connections,
        }
        options = [text for item in settings.items() for text in ("-c", "{}={}".format(*item))]
        with log.open("w") as output:
            server = subprocess.Popen(
                [postgres, "-D", str(data), *options],
                user=user,
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            _wait_ready(server, port, log)
            yield port
        finally:
            server.send_signal(signal.SIGINT)  # ends sessions, then itself
            try:
                server.wait(START_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _wait_ready(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    ready = [_program("pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(port)]
    until = time.monotonic() + START_SECONDS
    while subprocess.run(ready).returncode:
        if server.poll() is not None or time.monotonic() > until:
            raise PeerAbsent(f"PostgreSQL did not start: {log.read_text()[-500:].strip()}")
        time.sleep(0.05)
