"""Following a log that is written, rotated or not there yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from millstream.cli.commands.logs import Tail, last_lines, parse_line

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
