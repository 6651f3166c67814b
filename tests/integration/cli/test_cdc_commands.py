"""`millstream cdc` and `up --cdc`, on SQLite: settings, checks, a capture that runs, is asked,
stopped, killed, and reset.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import pytest
from typer.testing import CliRunner, Result

import millstream
from millstream import broker
from millstream.broker import CaptureProcess
from millstream.cdc import CaptureStatus, load_capture, serve_capture
from millstream.cli.app import app
from millstream.errors import (
    CaptureBusy,
    CaptureError,
    CaptureNotRunning,
    ConfigError,
    MillstreamError,
)
from tests.integration.cli.conftest import Cli, alive

T = TypeVar("T")

PATIENCE = 60.0  # seconds for what takes one, on a busy machine
ROWS = 50


class Commands:
    """Commands in this process, which is quicker, and captures in processes of their own."""

    def __init__(self, processes: Cli) -> None:
        self.folder = processes.folder
        self.start = processes.start

    def invoke(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, arguments)

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """What a command prints; errors included."""
        done = self.invoke(*arguments)
        assert done.exit_code == code, (arguments, done.output, done.exception)
        return str(done.output)

    def json(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(self(*arguments, "--json", code=code))

    def error(self, *arguments: str, kind: type[MillstreamError] = ConfigError) -> str:
        """The error of a command that fails."""
        done = self.invoke(*arguments)
        assert isinstance(done.exception, kind), (arguments, done.output, done.exception)
        return str(done.exception)


@pytest.fixture
def run(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Commands:
    for name in [name for name in os.environ if name.startswith(("NATS_", "MILLSTREAM_"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(cli.folder)
    return Commands(cli)


def until(found: Callable[[], T | None]) -> T:
    """What a question answers once it does; the test fails if it never does."""
    end = time.monotonic() + PATIENCE
    while not (answer := found()):
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.05)
    return answer


@pytest.fixture
def shop(run: Commands) -> Iterator[sqlite3.Connection]:
    """A database with two tables, beside its settings."""
    with closing(sqlite3.connect(run.folder / "shop.db", isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA busy_timeout = 60000")
        connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, item TEXT NOT NULL)")
        connection.execute("CREATE TABLE users (id INTEGER PRIMARY KEY, email TEXT)")
        for number in range(ROWS):
            connection.execute("INSERT INTO orders (item) VALUES (?)", (f"item {number}",))
        (run.folder / "cdc.toml").write_text('name = "shop"\nsource = "sqlite:///shop.db"\n')
        yield connection


def events_of(url: str, topic: str) -> list[dict[str, Any]]:
    async def read() -> list[dict[str, Any]]:
        async with millstream.connect(url) as mill:
            return [event.value async for event in (await mill.topic(topic)).read()]

    return asyncio.run(read())


def ops_of(url: str, topic: str) -> list[tuple[str, int]]:
    return [
        (value["op"], (value["after"] or value["before"])["id"]) for value in events_of(url, topic)
    ]


def status_of(run: Commands) -> dict[str, Any]:
    """What `cdc status` says, whatever its exit code."""
    done = run.invoke("cdc", "status", "--json")
    found: dict[str, Any] = json.loads(done.output) if done.output else {}
    return found


def streaming(run: Commands) -> Callable[[], dict[str, Any] | None]:
    def look() -> dict[str, Any] | None:
        found = status_of(run)
        return found if found.get("state") == "streaming" else None

    return look


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, err = process.communicate(timeout=PATIENCE)
    assert "Traceback" not in err
    return process.returncode, out + err


# -- without a broker ---------------------------------------------------------------------


def test_init_writes_settings_lists_tables_and_overwrites_nothing(
    run: Commands, shop: sqlite3.Connection
) -> None:
    (run.folder / "cdc.toml").unlink()
    done = run("cdc", "init", "--source", "sqlite:///shop.db", "--tables", "o*")
    assert "orders" in done
    assert "users" not in done
    assert "cdc.toml exists already" in run.error("cdc", "init")
    assert (run.folder / "cdc.toml").stat().st_mode & 0o777 == 0o600
    found = run.json("cdc", "check")
    assert (found["name"], found["ok"], found["tables"]) == ("shop", True, {"orders": "orders"})
    made = run.json("cdc", "init", "other.toml", "--source", "sqlite:///absent.db", "--name", "x")
    assert made["tables"] == []
    assert "absent.db" in made["problem"]
    assert not (run.folder / "absent.db").exists()


def test_init_keeps_a_password_out_of_the_file(run: Commands) -> None:
    url = "postgresql://app:hunter2@127.0.0.1:1/shop"
    done = run("cdc", "init", "--source", url)
    assert "set the environment variable CDC_PASSWORD" in done
    assert "The tables are not known yet" in done
    assert "hunter2" not in done + (run.folder / "cdc.toml").read_text()


def test_check_names_what_is_missing_with_its_fix(run: Commands, shop: sqlite3.Connection) -> None:
    settings = run.folder / "cdc.toml"
    shop.execute("CREATE TABLE loose (note TEXT)")
    done = run("cdc", "check", code=4)
    assert "MISSING  table loose" in done
    shop.execute("DROP TABLE loose")
    settings.write_text(settings.read_text() + '[table."order"]\nexclude = ["item"]\n')
    done = run("cdc", "check", code=4)
    assert "it has settings and is not captured. Did you mean 'orders'?" in done
    assert "-> correct its name" in done
    found = run.json("cdc", "check", code=4)
    assert found["ok"] is False
    assert {one["result"] for one in found["findings"]} >= {"ok", "error"}


def test_two_tables_are_not_given_one_topic(run: Commands, shop: sqlite3.Connection) -> None:
    settings = run.folder / "cdc.toml"
    settings.write_text(settings.read_text() + '[table."users"]\ntopic = "orders"\n')
    done = run("cdc", "check", code=4)
    assert "table users: it has the same topic as orders: 'orders'" in done


def test_wrong_arguments_are_named(run: Commands) -> None:
    assert "there is no cdc.toml in this folder" in run.error("cdc", "check")
    assert "there is no file my.toml" in run.error("cdc", "run", "my.toml")
    assert "'orcl://' is not a database" in run.error("cdc", "init", "--source", "orcl://x")
    assert "lower-case letters" in run.error("cdc", "init", "--name", "A B")
    assert not (run.folder / "cdc.toml").exists()
    (run.folder / "cdc.toml").write_text('name = "a"\nsource = "sqlite:///a.db"\ntabels = ["*"]')
    assert "unknown setting 'tabels': did you mean 'tables'?" in run.error("cdc", "status")
    assert "unknown setting 'tabels'" in run.error("up", "--cdc", "cdc.toml")
    assert "confirm with --yes" in _fixed(run).error("cdc", "reset")
    twice = run.error("up", "--cdc", "cdc.toml", "--cdc", "cdc.toml")
    assert "two files have a capture of the name 'a'" in twice
    (run.folder / "millstream.toml").write_text('[broker]\ncdc = ["other/cdc.toml"]\n')
    assert f"no file {run.folder}/other/cdc.toml" in run.error("up")


def _fixed(run: Commands) -> Commands:
    file = run.folder / "cdc.toml"
    file.write_text(file.read_text().replace("tabels", "tables"))
    return run


# -- on its own ---------------------------------------------------------------------------


def test_a_capture_runs_is_asked_and_stopped_and_goes_on_where_it_was(
    run: Commands, shop: sqlite3.Connection
) -> None:
    url = run.json("up", "--port", "0")["url"]
    first = run.start("cdc", "run")
    found = until(streaming(run))
    assert {one["table"]: one["topic"] for one in found["tables"]} == {
        "orders": "orders",
        "users": "users",
    }
    assert "running. Stop it first" in run.error("cdc", "run", kind=CaptureBusy)
    assert "running. Stop it first" in run.error("cdc", "reset", "--yes", kind=CaptureBusy)
    shop.execute("UPDATE orders SET item = 'new' WHERE id = 1")
    until(lambda: len(events_of(url, "orders")) > ROWS)
    assert "orders" in run("cdc", "status")
    assert "has stopped" in run("cdc", "stop")
    code, text = ended(first)
    assert (code, "was stopped" in text) == (0, True)
    assert "is not running" in run.error("cdc", "stop", kind=CaptureNotRunning)
    assert ended(run.start("cdc", "stop"))[0] == 3
    gone = run("cdc", "status", code=3)
    assert "shop: not running" in gone
    assert run.json("cdc", "status", code=3)["running"] is False
    shop.execute("DELETE FROM orders WHERE id = 2")
    second = run.start("cdc", "run", "--json")
    until(lambda: len(events_of(url, "orders")) > ROWS + 1)
    second.send_signal(signal.SIGTERM)
    code, text = ended(second)
    states = [json.loads(line)["state"] for line in text.splitlines()]
    assert (code, states[-1]) == (0, "stopped")
    snapshot = [("r", number + 1) for number in range(ROWS)]
    assert ops_of(url, "orders") == [*snapshot, ("u", 1), ("d", 2)]


def test_a_reset_capture_begins_with_a_snapshot_again(
    run: Commands, shop: sqlite3.Connection
) -> None:
    url = run.json("up", "--port", "0")["url"]

    def run_until_streaming() -> None:
        settings = load_capture()

        async def capture() -> None:
            stop = asyncio.Event()

            def watch(status: CaptureStatus) -> None:
                if status.state == "streaming":
                    stop.set()

            async with asyncio.timeout(PATIENCE), millstream.connect(url) as mill:
                assert (await serve_capture(mill, settings, stop, watch)).state == "stopped"

        asyncio.run(capture())

    run_until_streaming()
    other = ("--table", "nothing", "--yes")
    assert "has no table nothing" in run.error("cdc", "reset", *other, kind=CaptureError)
    assert run.json("cdc", "reset", "--keep-topics", "--yes")["deleted_topics"] == []
    run_until_streaming()
    ops = [value["op"] for value in events_of(url, "orders")]
    assert ops == ["r"] * ROWS + ["t"] + ["r"] * ROWS
    assert run.json("cdc", "reset", "--table", "orders", "--yes")["deleted_topics"] == ["orders"]
    run_until_streaming()
    assert [value["op"] for value in events_of(url, "orders")] == ["r"] * ROWS
    assert run.json("cdc", "reset", "--yes")["deleted_topics"] == ["orders", "users"]
    left = shop.execute(
        "SELECT count(*) FROM sqlite_master "
        "WHERE name NOT IN ('orders', 'users', 'sqlite_sequence')"
    )
    assert left.fetchone() == (0,)


def test_a_capture_that_cannot_start_says_why(run: Commands, shop: sqlite3.Connection) -> None:
    run("up", "--port", "0")
    settings = run.folder / "cdc.toml"
    settings.write_text(settings.read_text() + '[table."users"]\ntopic = "orders"\n')
    done = run("cdc", "run", code=4)
    assert "it has the same topic as orders" in done
    done = run("cdc", "run", "-q", code=4)
    assert "it has the same topic as orders" in done


# -- with the broker ----------------------------------------------------------------------


def capture_of(data: Path) -> CaptureProcess | None:
    found = broker.read_state(data).nodes[0].captures
    return found[0] if found else None


def test_the_broker_runs_a_capture_and_restarts_it_unless_it_was_stopped(
    run: Commands, shop: sqlite3.Connection
) -> None:
    (run.folder / "millstream.toml").write_text('[broker]\nport = 0\ncdc = ["cdc.toml"]\n')
    run("up", "--auth")
    data = run.folder / ".millstream"
    until(streaming(run))
    first = until(lambda: capture_of(data))
    assert (Path(first.file), first.restarts) == (run.folder / "cdc.toml", 0)
    os.kill(first.pid, signal.SIGKILL)

    def restarted() -> CaptureProcess | None:
        found = capture_of(data)
        return found if found and found.pid not in (0, first.pid) else None

    again = until(restarted)
    assert (again.restarts, again.problem) == (1, "it was killed by signal 9")
    shown = run("status")
    assert f"pid {again.pid}, restarted 1 time, last problem: it was killed by signal 9" in shown
    shop.execute("UPDATE orders SET item = 'new' WHERE id = 1")
    # The user of the guard may alter the schema of a topic.
    shop.execute("ALTER TABLE orders ADD COLUMN price REAL")
    shop.execute("INSERT INTO orders (item, price) VALUES ('last', 1.5)")

    def all_stored() -> bool:
        tables = {one["table"]: one for one in status_of(run).get("tables", [])}
        return bool(tables) and tables["orders"]["events"] >= 2

    until(all_stored)
    run("cdc", "stop")
    stopped = until(lambda: one if (one := capture_of(data)) and one.stopped else None)
    assert stopped.pid == 0
    assert "stopped, restarted 1 time; it runs again when the broker is started" in (run("status"))
    assert run.json("status")["nodes"][0]["captures"][0]["stopped"] is True
    assert status_of(run)["running"] is False
    run("down")
    run("up", "--auth")
    until(streaming(run))
    running = until(lambda: capture_of(data))
    run("down")
    until(lambda: not alive(running.pid))
    log = (data / "nodes" / "n1" / "server.log").read_text()
    assert "[cdc shop]" in log
    assert "[keeper] the capture of " in log


def test_a_capture_that_fails_is_tried_again_and_its_problem_is_shown(
    run: Commands, shop: sqlite3.Connection
) -> None:
    settings = run.folder / "cdc.toml"
    good = settings.read_text()
    settings.write_text(good.replace("shop.db", "absent.db"))
    run("up", "--port", "0", "--cdc", "cdc.toml")
    data = run.folder / ".millstream"
    settings.write_text("name = ")  # broken while the broker runs
    first = until(lambda: capture_of(data))
    if first.pid:
        os.kill(first.pid, signal.SIGKILL)
    broken = until(
        lambda: one if (one := capture_of(data)) and "cannot read" in one.problem else None
    )
    assert broken.restarts >= 1
    assert "cdc.toml" in run("status")
    settings.write_text(good)
    until(streaming(run))


def test_a_captured_topic_is_applied_to_a_table(run: Commands, shop: sqlite3.Connection) -> None:
    (run.folder / "millstream.toml").write_text('[broker]\nport = 0\ncdc = ["cdc.toml"]\n')
    run("up")
    until(streaming(run))
    copy = f"sqlite:///{run.folder}/copy.db"
    done = run.json("cdc", "apply", "orders", "--to", copy, "--table", "bought", "--once")
    assert (done["events"], done["rows"]) == (ROWS, ROWS)
    following = run.start("cdc", "apply", "orders", "--to", copy, "--table", "bought")
    shop.execute("UPDATE orders SET item = 'new' WHERE id = 1")
    shop.execute("DELETE FROM orders WHERE id = 2")
    expected = shop.execute("SELECT id, item FROM orders ORDER BY id").fetchall()

    def copied() -> bool:
        with closing(sqlite3.connect(run.folder / "copy.db")) as connection:
            found = connection.execute("SELECT id, item FROM bought ORDER BY id").fetchall()
        return bool(found == expected)

    until(copied)
    following.send_signal(signal.SIGINT)
    code, text = ended(following)
    assert (code, "applied 2 events" in text) == (0, True)
    wrong = ("cdc", "apply", "orders", "--once", "--to")
    assert "'orcl://x'" in run.error(*wrong, "orcl://x")
    assert "workers" in run.error(*wrong, copy, "--workers", "2")
    assert "NOT_THERE is not set" in run.error(*wrong, copy, "--password-env", "NOT_THERE")
