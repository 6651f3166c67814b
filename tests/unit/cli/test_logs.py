"""Following a log that is written, rotated or not there yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from millstream.cli.app import app
from millstream.cli.commands.logs import Tail, by_time, last_lines, parse_line

Follow = Callable[[Path], Tail]


@pytest.fixture
def followed() -> Iterator[Follow]:
    with ExitStack() as opened:
        yield lambda log: opened.enter_context(closing(Tail(log, from_end=True)))


def test_only_complete_new_lines_are_read(followed: Follow, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("old\n")
    tail = followed(log)
    with log.open("a") as stream:
        stream.write("one\ntw")
        stream.flush()
        assert list(tail.new_lines()) == ["one"]
        stream.write("o\n")
        stream.flush()
        assert list(tail.new_lines()) == ["two"]
    assert list(tail.new_lines()) == []


def test_rotation_loses_nothing(followed: Follow, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("")
    tail = followed(log)
    log.write_text("before\n")
    log.rename(tmp_path / "server.log.1")
    log.write_text("after\n")
    assert list(tail.new_lines()) + list(tail.new_lines()) == ["before", "after"]


def test_a_log_that_appears_later_is_read_from_its_start(followed: Follow, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    tail = followed(log)
    assert list(tail.new_lines()) == []
    log.write_text("first\n")
    assert list(tail.new_lines()) == ["first"]


def test_the_last_lines_reach_back_into_the_rotated_file(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    (tmp_path / "server.log.1").write_text("a\nb\n")
    log.write_text("c\n")
    assert last_lines(log, 2) == ["b", "c"]
    assert last_lines(log, 0) == []
    assert last_lines(tmp_path / "nothing", 5) == []


def test_a_line_is_parsed() -> None:
    line = "[42] 2026/11/15 22:18:49.123456 [ERR] no room: [x]"
    assert parse_line(line) == {
        "time": "2026-11-15T22:18:49.123456Z",
        "level": "error",
        "text": "no room: [x]",
    }
    assert parse_line("anything") == {"time": None, "level": None, "text": "anything"}


def stamped(second: int, text: str) -> str:
    return f"[7] 2026/01/02 03:04:{second:02}.000001 [INF] {text}"


def test_lines_of_several_nodes_are_merged_by_time(tmp_path: Path) -> None:
    logs = {
        "n1": [stamped(1, "a"), "[keeper] restarting it", "more", stamped(5, "e")],
        "n2": ["no time yet", stamped(2, "c"), stamped(4, "d")],
        "n3": [],
    }
    for node, lines in logs.items():
        folder = tmp_path / "nodes" / node
        folder.mkdir(parents=True)
        (folder / "server.log").write_text("".join(f"{line}\n" for line in lines))

    def shown(*options: str) -> list[str]:
        done = CliRunner().invoke(app, ["logs", "--data", str(tmp_path), *options])
        return [line.rpartition("] ")[2] for line in done.output.splitlines()]

    order = ["n2: no time yet", "a", "restarting it", "n1: more", "c", "d", "e"]
    assert shown() == order
    assert shown("-n", "3") == order[-3:]  # of all nodes together
    assert shown("-n", "0") == []
    assert shown("-n", "2", "--node", "n2") == ["c", "d"]


def test_followed_lines_keep_the_order_of_their_node() -> None:
    times: dict[str, str] = {}
    by_time({"n1": [stamped(5, "a")], "n2": []}, times)
    new = {"n1": ["more", stamped(3, "a clock that was set back")], "n2": [stamped(4, "b")]}
    assert [text for _, text in by_time(new, times)] == [
        stamped(4, "b"),
        "more",
        stamped(3, "a clock that was set back"),
    ]
