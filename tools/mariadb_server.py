"""A real MariaDB in a folder of its own, for tests.

    with running_mariadb() as server:
        with server.connect() as connection, connection.cursor() as cursor:
            cursor.execute("SELECT 1")
        server.kill()
        server.start()

MariadbAbsent says what is missing where it cannot run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.postgres_server import PostgresAbsent, free_port

if TYPE_CHECKING:
    from pymysql.connections import Connection

__all__ = ["PASSWORD", "USER", "Mariadb", "MariadbAbsent", "running_mariadb"]

USER = "millstream"
PASSWORD = "p@ss/word"  # with what a URL must escape
URL_PASSWORD = "p%40ss%2Fword"
SERVERS = ("mariadbd", "/usr/sbin/mariadbd")
START_SECONDS = 60.0
STOP_SECONDS = 30.0
PORT_TRIES = 10
DEFAULTS: dict[str, object] = {
    "bind-address": "127.0.0.1",
    "server-id": 1,
    "log-bin": "binlog",
    "binlog-format": "ROW",
    "binlog-row-metadata": "FULL",
    "character-set-server": "utf8mb4",
    # A server's own zone must not matter to anybody.
    "default-time-zone": "+05:30",
    "innodb-buffer-pool-size": "32M",
    "innodb-log-file-size": "8M",
    # Survives the end of its process all the same, and that is all that a test can kill.
    "innodb-flush-log-at-trx-commit": 2,
    "sync-binlog": 0,
    "skip-networking": 0,
    "performance-schema": 0,
}


class MariadbAbsent(Exception):
    """MariaDB cannot run here; the text says what is missing."""


class Mariadb:
    """A MariaDB that can be killed and started again, in the same folder, on the same port."""

    def __init__(self, folder: Path, settings: dict[str, object]) -> None:
        self.port = 0  # known once it was started
        self._folder, self._settings = folder, {**DEFAULTS, **settings}
        self._data, self._log = folder / "data", folder / "log"
        self._server: subprocess.Popen[bytes] | None = None

    @property
    def _user(self) -> list[str]:
        """It refuses to run as root unless that is asked for."""
        return ["--user=root"] if os.geteuid() == 0 else []

    def url_of(self, database: str, user: str = USER, password: str = URL_PASSWORD) -> str:
        """Of a database by its name."""
        return f"mysql://{user}:{password}@127.0.0.1:{self.port}/{database}"

    @property
    def log(self) -> str:
        """What the server wrote so far."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def connect(self, database: str | None = None, **options: Any) -> Connection[Any]:
        """A connection of a superuser that commits by itself, unless options say otherwise."""
        import pymysql

        given = {"user": USER, "password": PASSWORD, "autocommit": True, **options}
        return pymysql.connect(host="127.0.0.1", port=self.port, database=database, **given)

    def create_folder(self) -> None:
        """Create its files; once, before the first start."""
        install = shutil.which("mariadb-install-db")
        if install is None or _program() is None:
            raise MariadbAbsent("MariaDB is not installed: make system-deps")
        command = [install, "--no-defaults", f"--datadir={self._data}", *self._user]
        command += ["--auth-root-authentication-method=normal", "--skip-test-db"]
        made = subprocess.run(command, capture_output=True, text=True, cwd=self._folder)
        if made.returncode:
            raise MariadbAbsent(
                f"MariaDB could not create its folder: {made.stderr[-500:]}{made.stdout[-500:]}"
            )
        (self._folder / "first.sql").write_text(
            f"CREATE USER IF NOT EXISTS '{USER}'@'127.0.0.1' IDENTIFIED BY '{PASSWORD}';\n"
            f"GRANT ALL ON *.* TO '{USER}'@'127.0.0.1' WITH GRANT OPTION;\n"
        )

    def start(self) -> None:
        """Start, the first time on a free port; returns once it takes connections."""
        if self._server is not None and self._server.poll() is None:
            return
        first = self.port == 0
        for _ in range(PORT_TRIES):
            if first:
                try:
                    self.port = free_port()
                except PostgresAbsent as error:
                    raise MariadbAbsent(str(error)) from None
            if self._started():
                return
            if first and "in use" not in self.log[-3000:]:
                break  # another process was quicker with the port: only that is worth a new one
        raise MariadbAbsent(f"MariaDB did not start: {self.log[-800:].strip()}")

    def stop(self) -> None:
        """End it properly."""
        if self._server is None:
            return
        self._server.terminate()
        try:
            self._server.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        self._server = None

    def kill(self) -> None:
        """End it at once, as the kernel does when memory runs out."""
        if self._server is None:
            return
        self._server.kill()
        self._server.wait()
        self._server = None

    def _started(self) -> bool:
        import pymysql

        program = _program()
        if program is None:
            raise MariadbAbsent("MariaDB is not installed: make system-deps")
        settings = {**self._settings, "port": self.port}
        options = [f"--{name}={value}" for name, value in settings.items()]
        files = [f"--datadir={self._data}", f"--socket={self._folder / 'socket'}"]
        files += [f"--pid-file={self._folder / 'pid'}", f"--init-file={self._folder / 'first.sql'}"]
        with self._log.open("ab") as output:
            self._server = subprocess.Popen(
                [program, "--no-defaults", *self._user, *files, *options],
                cwd=self._folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl+C is for the tests; they stop it in their order
            )
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and self._server.poll() is None:
            try:
                with closing(self.connect()):
                    return True
            except pymysql.Error:
                time.sleep(0.02)
        self.kill()
        return False


@contextmanager
def running_mariadb(**settings: object) -> Iterator[Mariadb]:
    """A new MariaDB with such settings, `max_connections=20`, which is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="millstream-mariadb-") as folder:
        server = Mariadb(Path(folder), settings)
        server.create_folder()
        try:
            server.start()
            yield server
        finally:
            server.stop()


def _program() -> str | None:
    """The path of the server; Debian has it where only root looks."""
    return next((found for name in SERVERS if (found := shutil.which(name))), None)
