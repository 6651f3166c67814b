"""store ls, show, append, history, snapshot, rm, archive, erase, diff."""

from __future__ import annotations

import asyncio
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
from typer.testing import CliRunner

import millstream.blocking
from millstream import NEW, NamedEvent, Personal, StoredEvent
from millstream.cli.app import app
from millstream.errors import Unfit, UnknownEvent
from tests.integration.cli.messaging_commands import Commands
from tests.integration.event_store.bank import EVENTS, Account, Deposited, Opened, Withdrawn

BANK = "tests.integration.event_store.bank:Account"


class Frugal(Account):
    """Another class of states than the one that the store was opened with."""


@pytest.fixture
def run(millstream_url: str) -> Commands:
    """A store with two aggregates, and a topic that is not a store."""
    with millstream.blocking.connect(millstream_url) as mill:
        store = mill.event_store("accounts", Account, events=EVENTS)
        store.append("x.ann", [Opened("ann"), Deposited(5)], NEW, correlation_id="c1")
        store.append("x.ann", [Withdrawn(2)], 2, headers={"from": "web"})
        store.append("y.ben", [Opened("ben")], NEW)
        mill.create_topic("orders")
        mill.create_topic("plain", packs=False)
    return Commands(millstream_url)


def test_stores_are_listed_and_shown(run: Commands) -> None:
    (found,) = run.json("store", "ls")
    assert (found["store"], found["aggregates"], found["appends"]) == ("accounts", 2, 3)
    assert found["events"] == ["Opened", "Deposited", "Withdrawn"]
    assert (found["partitions"], found["state"]) == (1, BANK)
    assert "accounts" in run("store", "ls")
    shown = run.json("store", "show", "accounts")
    assert shown["events"][1] == {
        "name": "Deposited",
        "versions": 1,
        "fields": [{"name": "amount", "type": "int64", "required": True}],
    }
    assert shown["settings"]["storage"] == "file"
    assert "owner: string" in run("store", "show", "accounts")
    assert "not an event store" in run.error("store", "show", "orders")
    assert "not an event store" in run.error("store", "show", "plain")
    assert "'nothing'" in run.error("store", "show", "nothing")
    assert "give an ID" in run.error("store", "show", "accounts", "--at", "1")


def test_states_now_and_in_the_past(run: Commands) -> None:
    found = run.json("store", "show", "accounts", "x.ann")
    assert found["state"] == {"owner": "ann", "balance": 3, "history": [5, -2]}
    assert (found["store"], found["id"], found["version"]) == ("accounts", "x.ann", 3)
    assert run.json("store", "show", "accounts", "x.ann", "--at", "2")["state"]["balance"] == 5
    stored = found["stored"]
    for clock in ("stored", "event"):
        at = ("--at", stored, "--clock", clock)
        assert run.json("store", "show", "accounts", "x.ann", *at)["version"] == 3
    assert '"balance": 3' in run("store", "show", "accounts", "x.ann", "--state", BANK)
    assert "as of" in run.error("store", "show", "accounts", "x.ann", "--at", "1h")
    assert "last version is 3" in run.error("store", "show", "accounts", "x.ann", "--at", "4")
    assert "no events of 'x'" in run.error("store", "show", "accounts", "x")
    assert "not a time" in run.error("store", "show", "accounts", "x.ann", "--at", "soon")
    assert "stored or event" in run.error("store", "show", "accounts", "x.ann", "--clock", "mine")


def test_without_the_class_of_the_states_the_last_events_are_shown(
    run: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with millstream.blocking.connect(run.url) as mill:
        mill.event_store("bare", events=EVENTS).append("a1", [Deposited(1), Deposited(2)])
    found = run.json("store", "show", "bare", "a1")
    assert (found["version"], found["last_events"][0]["count"]) == (2, 2)
    assert found["last_events"][0]["data"] == {"amount": 2}
    assert '{"amount":2}' in run("store", "show", "bare", "a1")
    assert run.json("store", "show", "bare", "a1", "--at", "1")["version"] == 1
    assert "no events of 'a2'" in run.error("store", "show", "bare", "a2")
    wrong = ("store", "show", "bare", "a1", "--state")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "broken_bank.py").write_text("class Account:\n    def apply(self, event): 1 / 0\n")
    assert "no class 'Opened'" in run.error(*wrong, "broken_bank:Account")
    with (tmp_path / "broken_bank.py").open("a") as module:
        module.write("from tests.integration.event_store.bank import Opened, Deposited, Withdrawn")
    monkeypatch.delitem(sys.modules, "broken_bank")
    assert "ZeroDivisionError" in run.error(*wrong, "broken_bank:Account")
    monkeypatch.delitem(sys.modules, "broken_bank")
    assert "no no_module:Account to import" in run.error(*wrong, "no_module:Account")
    assert "module:Class" in run.error(*wrong, "Account")


def test_looking_at_states_registers_nothing(run: Commands) -> None:
    with millstream.blocking.connect(run.url) as mill:
        before = [mill.topic("mill-schemas").info().messages]
        run("store", "show", "accounts", "x.ann", "--state", f"{__name__}:Frugal")
        run("store", "snapshot", "accounts", "x.ann")
        before.append(mill.topic("mill-schemas").info().messages)
    assert before[0] == before[1]


def test_events_are_appended_by_name(run: Commands, tmp_path: Path) -> None:
    file = tmp_path / "event.json"
    file.write_text('{"amount": 7}')
    receipt = run.json(
        *("store", "append", "accounts", "x.ann", "Deposited", '{"amount": 1}'),
        *("Withdrawn", f"@{file}", "--expected", "3", "--id", "t1", "--correlation", "c"),
        *("--causation", "d", "--header", "from: desk", "--time", "2026-01-31T12:00Z"),
    )
    assert (receipt["first_version"], receipt["version"], receipt["duplicate"]) == (4, 5, False)
    events = run.lines("store", "history", "accounts", "x.ann")[3:]
    assert [event["data"] for event in events] == [{"amount": 1}, {"amount": 7}]
    assert events[0]["timestamp"] == "2026-01-31T12:00:00Z"
    assert (events[0]["correlation_id"], events[0]["causation_id"]) == ("c", "d")
    assert (events[0]["append_id"], events[0]["headers"]) == ("t1", {"from": "desk"})
    again = ("store", "append", "accounts", "x.ann", "Deposited", '{"amount": 1}', "--id", "t1")
    assert "stored before" in run(*again)
    append = ("store", "append", "accounts", "z")
    assert "version 5" in run.error(*again[:6], "-e", "3")
    assert "version 1, offset" in run(*append, "Opened", "-", "-e", "new", piped='{"owner": "z"}')
    assert "amount" in run.error(*append, "Deposited", '{"amount": "many"}')
    assert "not one of its events" in run.error(*append, "Closed", "{}")
    assert "there is no JSON" in run.error(*append, "Opened")
    assert "new or any" in run.error(*append, "Opened", "{}", "--expected", "old")
    assert len(run.lines("store", "history", "accounts", "z")) == 1


def test_history_of_one_aggregate_a_category_and_all(run: Commands) -> None:
    def versions(*arguments: str) -> list[tuple[str, int]]:
        found = run.lines("store", "history", "accounts", *arguments)
        return [(event["id"], event["version"]) for event in found]

    ann = [("x.ann", 1), ("x.ann", 2), ("x.ann", 3)]
    assert versions("x.ann") == ann
    assert versions("x.ann", "--backward", "--limit", "2") == ann[:0:-1]
    assert versions() == [*ann, ("y.ben", 1)]
    assert versions("--limit", "2") == ann[:2]
    assert versions("--category", "y") == [("y.ben", 1)]
    assert versions("--backward", "--limit", "2") == [("y.ben", 1), ("x.ann", 3)]
    assert versions("--backward", "--limit", "9", "--category", "x") == ann[::-1]
    line = run("store", "history", "accounts", "x.ann", "-b", "-n", "1")
    assert line.startswith("0@2  ")
    assert line.endswith('  x.ann  3  Withdrawn  {"amount":2}  from: web\n')
    assert "correlation: c1" in run("store", "history", "accounts", "x.ann")
    assert "one of --backward" in run.error("store", "history", "accounts", "-b", "-f")
    assert "with --limit" in run.error("store", "history", "accounts", "-b")
    assert "or --category" in run.error("store", "history", "accounts", "a", "--category", "x")


def test_history_names_what_it_cannot_decode(run: Commands) -> None:
    with millstream.blocking.connect(run.url) as mill:
        mill.request("accounts.x.ann", b"{", headers={"Mill-Versions": "4-4"})
        mill.event_store("accounts", Account, events=EVENTS).append("y.ben", [Deposited(1)])
    for arguments in ((), ("x.ann",), ("--backward", "--limit", "9")):
        printed, errors = run.partly("store", "history", "accounts", *arguments, "--json")
        assert errors.count("left out: accounts/0, offset 4, index 0: ") == 1
        assert len(printed.splitlines()) == (5 if "x.ann" not in arguments else 3)
    run("store", "history", "accounts", "--undecodable", "drop")


def test_history_follows_new_events(run: Commands) -> None:
    done = threading.Event()
    with millstream.blocking.connect(run.url) as mill, ThreadPoolExecutor(1) as pool:
        store = mill.event_store("accounts", Account, events=EVENTS)
        pool.submit(deposit_until, done, store)
        one = run.lines("store", "history", "accounts", "y.ben", "--follow", "--limit", "4")
        every = run.lines("store", "history", "accounts", "--follow", "--limit", "9")
        done.set()
    assert [event["version"] for event in one] == [1, 2, 3, 4]
    assert [event["id"] for event in every] == ["x.ann"] * 3 + ["y.ben"] * 6


def deposit_until(done: threading.Event, store: millstream.blocking.EventStore) -> None:
    """One deposit after the other."""
    for _ in range(10_000):
        store.append("y.ben", [Deposited(1)])
        if done.wait(0.01):
            return


def test_snapshots_are_stored(run: Commands) -> None:
    assert run.json("store", "snapshot", "accounts", "x.ann")["version"] == 3
    assert "version 1" in run("store", "snapshot", "accounts", "y.ben", "--state", BANK)
    with millstream.blocking.connect(run.url) as mill:
        assert len(list(mill.table("accounts-snapshots").entries())) == 2
        mill.event_store("bare", events=EVENTS).append("a1", [Deposited(1)])
    assert "give --state" in run.error("store", "snapshot", "bare", "a1")
    assert "no events of 'z'" in run.error("store", "snapshot", "accounts", "z")


def test_aggregates_are_removed_and_archived(run: Commands) -> None:
    assert "--yes" in run.error("store", "rm", "accounts", "x.ann")
    assert "--yes" in run.error("store", "archive", "accounts", "y.ben")
    run.error("store", "rm", "accounts", "x.ann", "--yes", "--expected", "2")
    assert "Deleted: x.ann" in run("store", "rm", "accounts", "x.ann", "--yes")
    assert "Archived: y.ben" in run("store", "archive", "accounts", "y.ben", "--yes")
    assert "was deleted" in run.error("store", "show", "accounts", "x.ann")
    assert run.json("store", "show", "accounts", "y.ben")["state"]["owner"] == "ben"
    text = run("store", "history", "accounts")
    assert "(deleted)" in text
    assert "(archived to accounts-archive)" in text
    run("store", "append", "accounts", "tmp", "Deposited", '{"amount": 1}')
    assert run.json("store", "rm", "accounts", "tmp", "--reusable", "--yes")["id"] == "tmp"
    run("store", "append", "accounts", "tmp", "Deposited", '{"amount": 1}', "--expected", "new")


@dataclass(frozen=True)
class Registered:
    name: Annotated[str, Personal(erased="(erased)")]


def test_a_person_is_erased(run: Commands) -> None:
    with millstream.blocking.connect(run.url) as mill:
        mill.event_store("people", events=[Registered])
    run("store", "append", "people", "p1", "Registered", '{"name": "Ann Smith"}')
    assert "Ann Smith" in run("store", "history", "people")
    assert "Ann Smith" not in run("topic", "tail", "people", "-o", "beginning", "-e")
    assert "--yes" in run.error("store", "erase", "people", "p1")
    assert run.json("store", "erase", "people", "p1", "--yes") == {"store": "people", "id": "p1"}
    assert "(erased)" in run("store", "history", "people")
    assert "no personal data of 'p1'" in run.error("store", "erase", "people", "p1", "--yes")


@dataclass
class Balance:
    amount: int


def test_two_versions_of_a_projection_are_compared(
    run: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing runs, so nothing has to settle.
    monkeypatch.setattr("millstream.projections.diff.SETTLE_SECONDS", 0.01)
    asyncio.run(build_two(run.url))
    rows = run.lines("store", "diff", "balances")
    assert rows == [
        {"table": "balances", "key": "x.ann", "old": {"amount": 3}, "new": {"amount": 5}},
        {"table": "balances", "key": "y.ben", "old": None, "new": {"amount": 0}},
    ]
    text = run("store", "diff", "balances", "--version", "2", "--against", "1")
    assert '~ x.ann  {"amount":3} -> {"amount":5}\n' in text
    assert '+ y.ben  {"amount":0}\n' in text
    assert "versions 1 and 2: 2 rows differ" in text
    assert '- y.ben  {"amount":0}\n' in run(
        "store", "diff", "balances", "--version", "1", "--against", "2"
    )
    result = CliRunner().invoke(app, ["store", "diff", "balances", "--check"], env=run.environment)
    assert result.exit_code == 4
    assert "compared with itself" in run.error("store", "diff", "balances", "--version", "1")
    assert "no version 3" in run.error("store", "diff", "balances", "--version", "3")
    assert "Did you mean 'balances'" in run.error("store", "diff", "balance")


async def build_two(url: str) -> None:
    """A projection, and a second version of it that is not active."""

    def balances(event: StoredEvent, rows: Any) -> None:
        before = rows.get(event.id, Balance(0)).amount
        if event.name == "Deposited":
            rows[event.id] = Balance(before + event.data["amount"])
        elif event.name == "Withdrawn":
            rows[event.id] = Balance(before - event.data["amount"])

    def deposits(event: StoredEvent, rows: Any) -> None:
        before = rows.get(event.id, Balance(0)).amount
        more = event.data["amount"] if event.name == "Deposited" else 0
        rows[event.id] = Balance(before + more)

    async with millstream.connect(url) as mill:
        store = await mill.event_store("accounts")
        for version, function in enumerate((balances, deposits), 1):
            projection = await mill.projection(
                "balances", store, function, schema=Balance, version=version
            )
            await projection.run(once=True)


@dataclass
class Priced:
    cents: int
    note: str = ""


def test_a_named_event_is_checked_by_its_schema(millstream_url: str) -> None:
    with millstream.blocking.connect(millstream_url) as mill:
        mill.event_store("prices", events=[Priced])
        store = mill.event_store("prices")
        store.append("p1", [NamedEvent("Priced", {"cents": 5})])
        (event,) = store.events("p1")
        assert event.data == {"cents": 5, "note": ""}
        with pytest.raises(Unfit, match="cents"):
            store.append("p1", [NamedEvent("Priced", {"cents": "many"})])
        with pytest.raises(UnknownEvent, match="'Sold'"):
            store.append("p1", [NamedEvent("Sold", {})])
        (typed,) = mill.event_store("prices", events=[Priced]).events("p1")
        assert typed.data == Priced(5)
