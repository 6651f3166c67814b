"""A real PostgreSQL in a folder of its own, for tests and benchmarks.

    with running_postgres(fsync="on") as server:
        with server.connect() as connection:
            connection.execute("SELECT 1")
        server.kill()
        server.start()

PostgresAbsent says what is missing where it cannot run.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from psycopg import Connection

__all__ = ["USER", "Postgres", "PostgresAbsent", "free_port", "running_postgres"]

PROGRAMS = "/usr/lib/postgresql"  # where Debian has them, by version
# PostgreSQL refuses to run as root; its Debian package creates this user.
UNPRIVILEGED = "postgres"
USER = "millstream"
FIRST_DATABASE = "postgres"
START_SECONDS = 60.0
STOP_SECONDS = 30.0
PORT_TRIES = 10
PORT_SECONDS = 0.5  # before a port is tried again that must stay the same
READY_LINE = 7  # of postmaster.pid
DEFAULTS: dict[str, object] = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "wal_level": "logical",
    "max_replication_slots": 30,
    "max_wal_senders": 30,
    "max_connections": 100,
    "shared_buffers": "32MB",
    # Survives the end of its processes all the same, and they are all that a test can kill.
    "fsync": "off",
    "synchronous_commit": "on",
    # A server's own zone must not matter to anybody.
    "timezone": "Asia/Kolkata",
}


class PostgresAbsent(Exception):
    """PostgreSQL cannot run here; the text says what is missing."""


class Postgres:
    """A PostgreSQL that can be killed and started again, in the same folder, on the same port."""

    def __init__(self, folder: Path, settings: dict[str, object]) -> None:
        self.port = 0  # known once it was started
        self._folder, self._settings = folder, {**DEFAULTS, **settings}
        self._data, self._log = folder / "data", folder / "log"
        self._user = UNPRIVILEGED if os.geteuid() == 0 else None
        self._server: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Of its first database."""
        return self.url_of(FIRST_DATABASE)

    def url_of(self, database: str) -> str:
        """Of a database by its name."""
        return f"postgresql://{USER}@127.0.0.1:{self.port}/{database}"

    @property
    def log(self) -> str:
        """What the server wrote so far."""
        return self._log.read_text(errors="replace")

    @property
    def running(self) -> bool:
        """Whether its first process is alive."""
        return self._server is not None and self._server.poll() is None

    def connect(self, database: str = FIRST_DATABASE, **options: Any) -> Connection[Any]:
        """A connection of a superuser that commits by itself, unless options say otherwise."""
        import psycopg

        return psycopg.connect(self.url_of(database), **{"autocommit": True, **options})

    def create_database(self, name: str) -> str:
        """A new, empty database; gives its URL."""
        with self.connect() as connection:
            # A copy of template0 needs no wait for whoever is connected to template1.
            connection.execute(f'CREATE DATABASE "{name}" TEMPLATE template0')
        return self.url_of(name)

    def drop_database(self, name: str) -> None:
        """Remove a database with its replication slots, whoever is connected to it."""
        slots = "SELECT slot_name, active_pid FROM pg_replication_slots WHERE database = %s"
        until = time.monotonic() + STOP_SECONDS
        with self.connect() as connection:
            while left := connection.execute(slots, [name]).fetchall():
                if time.monotonic() > until:
                    raise TimeoutError(f"slots of {name} stayed in use: {left}")
                for slot, process in left:
                    if process is not None:
                        connection.execute("SELECT pg_terminate_backend(%s, 1000)", [process])
                    with suppress(_database_error()):  # still in use for a moment, or gone
                        connection.execute("SELECT pg_drop_replication_slot(%s)", [slot])
            connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def create_folder(self) -> None:
        """Create its files; once, before the first start."""
        initdb = _program("initdb")
        if self._user is not None:
            try:
                shutil.chown(self._folder, self._user)
            except LookupError:
                raise PostgresAbsent(
                    f"no user '{self._user}' to run PostgreSQL as: make system-deps"
                ) from None
        command = [initdb, "-D", str(self._data), "-U", USER, "-A", "trust", "--no-sync"]
        command += ["--encoding", "UTF8", "--locale", "C"]
        made = subprocess.run(
            command, user=self._user, cwd=self._folder, capture_output=True, text=True
        )
        if made.returncode:
            raise PostgresAbsent(f"PostgreSQL could not create its folder: {made.stderr.strip()}")

    def start(self) -> None:
        """Start, the first time on a free port; returns once it takes connections."""
        if self.running:
            return
        first = self.port == 0
        for _ in range(PORT_TRIES):
            if first:
                self.port = free_port()
            if self._started():
                return
            if "in use" not in self.log[-500:]:
                break  # only a port that another process has taken is worth another attempt
            time.sleep(0 if first else PORT_SECONDS)
        failure = PostgresAbsent if first else RuntimeError
        raise failure(f"PostgreSQL did not start: {self.log[-500:].strip()}")

    def stop(self) -> None:
        """End it properly: sessions first, then itself."""
        if self._server is None:
            return
        self._server.send_signal(signal.SIGINT)
        try:
            self._server.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        self._server = None

    def kill(self) -> None:
        """End all its processes at once, as the kernel does when memory runs out."""
        if self._server is None:
            return
        children: list[int] = []
        if self._server.poll() is None:  # else its number may be another process's by now
            # Stopped, it can neither start more processes nor see to the end of those it has.
            self._server.send_signal(signal.SIGSTOP)
            children = _children_of(self._server.pid)
        self._server.kill()
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self._server.wait()
        self._server = None
        until = time.monotonic() + STOP_SECONDS
        while any(map(_is_alive, children)):
            if time.monotonic() > until:
                raise TimeoutError(f"processes of PostgreSQL outlived SIGKILL: {children}")
            time.sleep(0.005)

    def _started(self) -> bool:
        settings = {**self._settings, "port": self.port}
        options = [text for item in settings.items() for text in ("-c", "{}={}".format(*item))]
        with self._log.open("ab") as output:
            self._server = subprocess.Popen(
                [_program("postgres"), "-D", str(self._data), *options],
                user=self._user,
                cwd=self._folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl+C is for the tests; they stop it in their order
            )
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and self._server.poll() is None:
            if self._is_ready(self._server.pid):
                return True
            time.sleep(0.01)
        self.kill()
        return False

    def _is_ready(self, process: int) -> bool:
        try:
            lines = (self._data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return (
            len(lines) > READY_LINE
            and lines[0] == str(process)  # not what one that was killed left there
            and lines[READY_LINE].strip() == "ready"
        )


@contextmanager
def running_postgres(**settings: object) -> Iterator[Postgres]:
    """A new PostgreSQL with such settings, `max_connections=20`, which is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="millstream-postgres-") as folder:
        server = Postgres(Path(folder), settings)
        server.create_folder()
        try:
            server.start()
            yield server
        finally:
            server.stop()


def _database_error() -> type[Exception]:
    import psycopg

    return psycopg.Error


def _program(name: str) -> str:
    """The path of one of PostgreSQL's programs, of the newest version."""
    versions = sorted(Path(PROGRAMS).glob(f"*/bin/{name}"), key=_version_of)
    found = str(versions[-1]) if versions else shutil.which(name)
    if found is None:
        raise PostgresAbsent(f"PostgreSQL is not installed ({name}): make system-deps")
    return found


def _version_of(path: Path) -> float:
    number = path.parents[1].name
    return float(number) if number.replace(".", "", 1).isdigit() else 0.0


def free_port() -> int:
    """One that the system gives to no outgoing connection while the server is down."""
    for _ in range(PORT_TRIES):
        port = random.SystemRandom().randrange(16_000, 32_000)
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                one.bind(("127.0.0.1", port))
                return port
    raise PostgresAbsent("no port between 16000 and 32000 is free")


def _children_of(process: int) -> list[int]:
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True)
    pairs = [line.split() for line in listed.stdout.splitlines()]
    return [int(child) for child, parent in pairs if int(parent) == process]


def _is_alive(process: int) -> bool:
    """Whether it still holds memory and sockets; one that waits to be reaped does not."""
    listed = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True)
    state = listed.stdout.strip()
    return bool(state) and not state.startswith(b"Z")
