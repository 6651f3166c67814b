"""Appends with the library `eventsourcing` on SQLite, PostgreSQL and topics, for other families.

    with sqlite_recorder() as recorder:
        print(append_events(recorder, aggregates=64, each=10, threads=64).per_second)

All three store an event durably before the call returns: SQLite with synchronous=FULL, PostgreSQL
with fsync and synchronous_commit, a broker with durability "fsync". PeerAbsent says what is
missing.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import uuid4

from eventsourcing.persistence import ApplicationRecorder, InfrastructureFactory, StoredEvent
from eventsourcing.sqlite import SQLiteConnection, SQLiteFactory

from bench.harness import PeerAbsent
from tools.postgres_server import USER, PostgresAbsent, running_postgres

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
        "POSTGRES_USER": USER,
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


@contextmanager
def postgres_server(max_connections: int = 100) -> Iterator[int]:
    """A new PostgreSQL in a folder of its own that syncs every transaction; gives its port."""
    try:
        with running_postgres(fsync="on", max_connections=max_connections) as server:
            yield server.port
    except PostgresAbsent as error:
        raise PeerAbsent(str(error)) from None
