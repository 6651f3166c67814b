"""Captures beside the server: started, restarted when they fail, left alone when they are done."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.broker import process_keeper
from millstream.broker.child_process import start_child
from millstream.broker.process_keeper import CaptureKeeper, GuardKeeper

PATIENCE = 30.0
WAITS = "trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.05; done"


class Kept:
    """A keeper of captures whose program is a script, with all that it wrote and reported."""

    def __init__(self, folder: Path, script: str) -> None:
        self.plan = folder / "plan.json"
        self.plan.write_text(json.dumps({"captures": ["/a/cdc.toml"]}))
        self.log = b""
        self.facts: list[dict[str, Any]] = []
        command = ["/bin/sh", "-c", script]
        plan = (command, str(self.plan))
        self.keeper = CaptureKeeper("captures.json", plan, self._write, self._report, start_child)

    def _write(self, data: bytes) -> None:
        self.log += data

    def _report(self, file: str, facts: list[dict[str, Any]]) -> None:
        assert file == "captures.json"
        self.facts = facts

    def watch_until(self, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while not (self.facts and condition(self.facts[0])):
            assert time.monotonic() < end, (self.facts, self.log)
            self.keeper.watch(lambda: (0, "nobody asks"))
            for output in select.select(self.keeper.outputs(), [], [], 0.01)[0]:
                self.keeper.read(output)
        return self.facts[0]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Kept]]:
    monkeypatch.setattr(process_keeper, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(process_keeper, "LOOK_POLL", 0.0)
    monkeypatch.setattr(process_keeper, "LOOK_SHARE", 0)
    made: list[Kept] = []

    def make(script: str) -> Kept:
        made.append(Kept(tmp_path, script))
        return made[-1]

    yield make
    for one in made:
        one.keeper.stop()


def test_one_that_fails_is_started_again_with_its_last_line_kept(
    kept: Callable[[str], Kept],
) -> None:
    one = kept('echo "begun for $0"; echo the database is away >&2; exit 1')
    found = one.watch_until(lambda facts: facts["restarts"] >= 2)
    assert found["file"] == "/a/cdc.toml"
    assert found["problem"] == "the database is away"
    assert not found["done"]
    assert b"begun for /a/cdc.toml\n" in one.log
    assert b"[keeper] the capture of /a/cdc.toml ended, restarting it\n" in one.log


def test_one_that_is_killed_is_started_again(kept: Callable[[str], Kept]) -> None:
    one = kept(WAITS)
    first = one.watch_until(lambda facts: facts["pid"] and b"up" in one.log)["pid"]
    os.kill(first, signal.SIGKILL)
    found = one.watch_until(lambda facts: facts["pid"] not in (0, first))
    assert (found["restarts"], found["problem"]) == (1, "it was killed by signal 9")


def test_one_that_is_done_is_not_started_again_not_even_with_another_server(
    kept: Callable[[str], Kept],
) -> None:
    one = kept("echo once; exit 0")
    one.watch_until(lambda facts: facts["done"])
    one.keeper.stop()
    for _ in range(20):
        one.keeper.watch(lambda: (0, ""))
    assert one.log == b"once\n"
    assert (one.facts[0]["pid"], one.facts[0]["done"]) == (0, True)


def test_one_that_ends_with_the_server_is_started_with_the_next(
    kept: Callable[[str], Kept],
) -> None:
    one = kept(WAITS)
    one.watch_until(lambda facts: facts["pid"] and b"up" in one.log)
    one.keeper.stop()
    assert one.log == b"up\nbye\n"
    assert one.facts == []
    one.watch_until(lambda facts: facts["pid"] and one.log.count(b"up") == 2)


def test_one_that_does_not_end_is_killed(
    kept: Callable[[str], Kept], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_keeper, "STOP_GRACE", 0.1)
    one = kept("trap '' TERM; echo up; while :; do sleep 0.05; done")
    pid = one.watch_until(lambda facts: facts["pid"] and b"up" in one.log)["pid"]
    one.keeper.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_plan_that_is_being_written_is_read_again(kept: Callable[[str], Kept]) -> None:
    one = kept(WAITS)
    whole = one.plan.read_text()
    one.plan.write_text(whole[:5])
    one.keeper.watch(lambda: (0, ""))
    assert one.facts == []
    one.plan.write_text(whole)
    one.watch_until(lambda facts: facts["pid"])


def test_pauses_of_captures_grow_longer_than_those_of_guards() -> None:
    assert CaptureKeeper.longest_pause > GuardKeeper.longest_pause
    assert not GuardKeeper.may_end
