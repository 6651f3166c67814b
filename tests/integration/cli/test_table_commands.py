"""table ls, get, put, rm, watch."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pytest

import millstream.blocking
from millstream.blocking import Table
from tests.integration.cli.messaging_commands import Commands


@dataclass
class Price:
    cents: int


@pytest.fixture
def run(millstream_url: str) -> Commands:
    """A table of bytes, and a topic that is not a table."""
    run = Commands(millstream_url)
    run("topic", "create", "stock", "--history", "1", "--partitions", "2")
    run("topic", "create", "orders")
    return run


def test_values_are_put_read_listed_and_removed(run: Commands, tmp_path: Path) -> None:
    assert "Stored: stock, revision 1" in run("table", "put", "stock", "flour", "12")
    run("table", "put", "stock", "bran", piped=b"a\nb")
    file = tmp_path / "value"
    file.write_bytes(b"\xff\x00")
    run("table", "put", "stock", "bin/1", f"@{file}")
    assert run("table", "get", "stock", "flour") == "12\n"
    assert run("table", "get", "stock", "bran") == "a\\nb\n"
    assert run("table", "get", "stock", "bran", "--raw") == "a\nb"
    found = run.json("table", "get", "stock", "bin/1")
    assert (found["key"], found["value_base64"], found["revision"]) == ("bin/1", "/wA=", 1)
    assert "timestamp" in found
    listed = run.lines("table", "ls", "stock")
    assert sorted(entry["key"] for entry in listed) == ["bin/1", "bran", "flour"]
    assert [entry["key"] for entry in run.lines("table", "ls", "stock", "--prefix", "b")] == [
        entry["key"] for entry in listed if entry["key"].startswith("b")
    ]
    assert "--yes" in run.error("table", "rm", "stock", "flour")
    gone = run.json("table", "rm", "stock", "flour", "--yes")["revision"]
    assert f"is deleted (revision {gone})" in run.error("table", "get", "stock", "flour")
    assert "flour" not in run("table", "ls", "stock")
    assert "no key 'oats'" in run.error("table", "get", "stock", "oats")
    assert "no key 'oats'" in run.error("table", "rm", "stock", "oats", "--yes")


def test_only_tables_are_listed_and_opened(run: Commands) -> None:
    assert [table["name"] for table in run.json("table", "ls")] == ["stock"]
    assert "stock" in run("table", "ls")
    assert "not a table" in run.error("table", "get", "orders", "k")
    assert "give a table" in run.error("table", "ls", "--prefix", "a")


def test_an_expected_revision_lets_one_writer_win(run: Commands) -> None:
    first = run.json("table", "put", "stock", "flour", "1", "--expect", "0")["revision"]
    run.error("table", "put", "stock", "flour", "2", "--expect", "0")
    second = run.json("table", "put", "stock", "flour", "2", "--expect", str(first))["revision"]
    run.error("table", "rm", "stock", "flour", "--yes", "--expect", str(first))
    assert run("table", "get", "stock", "flour") == "2\n"
    run("table", "rm", "stock", "flour", "--yes", "--expect", str(second))


def test_a_table_is_read_as_it_was(run: Commands) -> None:
    run("topic", "create", "prices", "--history", "2")
    run("table", "put", "prices", "flour", "100")
    then = run.json("table", "get", "prices", "flour")["timestamp"]
    run("table", "put", "prices", "flour", "120")
    run("table", "put", "prices", "bran", "80")
    assert run("table", "get", "prices", "flour", "--at", then) == "100\n"
    assert run.json("table", "get", "prices", "flour", "--at", then)["timestamp"] == then
    assert "had no key 'bran'" in run.error("table", "get", "prices", "bran", "--at", then)
    listed = run.lines("table", "ls", "prices", "--at", then)
    assert [(entry["key"], entry["value"]) for entry in listed] == [("flour", "100")]
    # Without a zone it is local time.
    local = datetime.fromisoformat(then).astimezone().replace(tzinfo=None).isoformat(" ")
    assert run("table", "get", "prices", "flour", "--at", local) == "100\n"
    run("table", "put", "prices", "flour", "130")
    for command in (["get", "prices", "flour"], ["ls", "prices"]):
        assert "larger history" in run.error("table", *command, "--at", then)
    assert "it was created at" in run.error("table", "ls", "prices", "--at", "1000d")
    assert "in the future" in run.error("table", "ls", "prices", "--at", "2999-01-01 00:00")
    assert "not a time" in run.error("table", "ls", "prices", "--at", "yesterday")
    assert "give a table" in run.error("table", "ls", "--at", then)


def test_a_typed_table_takes_and_prints_json(run: Commands) -> None:
    with millstream.blocking.connect(run.url) as mill:
        mill.create_table("prices", schema=Price)
    run("table", "put", "prices", "flour", '{"cents": 1250}')
    assert run("table", "get", "prices", "flour") == '{"cents":1250}\n'
    assert run.json("table", "get", "prices", "flour")["value"] == {"cents": 1250}
    assert "cents" in run.error("table", "put", "prices", "flour", '{"cents": "many"}')
    assert run.lines("table", "ls", "prices")[0]["value"] == {"cents": 1250}


def test_watch_prints_current_values_then_changes(run: Commands) -> None:
    run("table", "put", "stock", "flour", "1")
    run("table", "put", "stock", "bran", "1")
    run("table", "rm", "stock", "bran", "--yes")
    deleted = run("table", "watch", "stock", "--prefix", "br", "--count", "1")
    assert "bran  (deleted)" in deleted
    done = threading.Event()
    with millstream.blocking.connect(run.url) as mill, ThreadPoolExecutor(1) as pool:
        table = mill.table("stock")
        pool.submit(put_until, done, table)
        changes = run.lines("table", "watch", "stock", "flour", "--count", "3")
        done.set()
    assert [change["key"] for change in changes] == ["flour"] * 3
    assert [int(change["value"]) for change in changes] == sorted(
        {int(change["value"]) for change in changes}
    )
    assert "keys, or --prefix" in run.error("table", "watch", "stock", "k", "--prefix", "k")


def put_until(done: threading.Event, table: Table) -> None:
    """Change flour and another key, again and again."""
    for number in range(2, 10_000):
        table.put("flour", b"%d" % number)
        table.put("oats", b"%d" % number)
        if done.wait(0.01):
            return
