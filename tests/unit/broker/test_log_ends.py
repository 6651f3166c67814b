"""Where logs ended: marks and block files, without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millstream.broker.health import losses_of
from millstream.broker.log_ends import LOSSES_KEPT, LogEnds, block_files, cut_logs

NOON, LATER = "2026-01-31T12:00:00Z", "2026-01-31T13:00:00Z"


def answer(last: int, created: str = "c1", storage: str = "file", first: int = 1) -> Any:
    stream = {
        "name": "log",
        "created": created,
        "state": {"first_seq": first, "last_seq": last},
        "config": {"storage": storage},
    }
    return {"account_details": [{"name": "main", "stream_detail": [stream]}]}


def test_a_log_that_ends_before_its_mark_is_told_once_and_kept() -> None:
    ends = LogEnds()
    assert ends.see(answer(500), NOON) == []
    (text,) = ends.see(answer(450), LATER)
    assert "the log of 'log' ends at 450, though 500 was seen there at" in text
    assert NOON in text
    assert ends.see(answer(451), LATER) == []
    assert [loss["marked"] for loss in ends.losses] == [500]


def test_growth_and_rest_are_no_news_and_a_mark_keeps_the_time_it_was_first_seen() -> None:
    ends = LogEnds()
    for last, now in ((1, NOON), (7, NOON), (7, LATER)):
        assert ends.see(answer(last), now) == []
    assert ends.marks == {"main/log": {"created": "c1", "last": 7, "at": NOON}}


def test_a_stream_made_anew_has_no_past_and_takes_the_losses_of_the_old_one_along() -> None:
    ends = LogEnds()
    ends.see(answer(500), NOON)
    assert ends.see(answer(450), NOON)
    assert ends.see(answer(3, created="c2"), LATER) == []
    assert ends.losses == []


def test_streams_in_memory_begin_anew_and_are_not_marked() -> None:
    ends = LogEnds()
    ends.see(answer(500, storage="memory"), NOON)
    assert ends.see(answer(0, storage="memory"), LATER) == []
    assert ends.marks == {}


def test_a_cut_without_a_mark_says_that_a_torn_write_is_possible() -> None:
    (text,) = LogEnds().see(answer(9), NOON, cut={"main/log": True})
    assert "cut off" in text
    assert "tore the last write" in text


def test_a_log_without_its_old_files_has_expired_or_begins_again_at_its_start() -> None:
    gone = {"main/log": False}
    assert LogEnds().see(answer(50, first=51), NOON, cut=gone) == []
    assert LogEnds().see(answer(53, first=51), NOON, cut=gone) == [], "new events came already"
    assert len(LogEnds().see(answer(0, first=0), NOON, cut=gone)) == 1
    assert len(LogEnds().see(answer(2, first=1), NOON, cut=gone)) == 1


def test_the_notes_survive_a_file_and_only_the_newest_losses_are_kept(tmp_path: Path) -> None:
    ends = LogEnds()
    for number in range(LOSSES_KEPT + 5):
        ends.see(answer(1000 - number), NOON)
    file = tmp_path / "ends.json"
    file.write_text(ends.text())
    again = LogEnds(file.read_text())
    assert (again.marks, again.losses) == (ends.marks, ends.losses)
    told = losses_of(file)
    assert len(told) == LOSSES_KEPT
    assert (told[-1].account, told[-1].stream) == ("main", "log")
    assert told[-1].marked == told[-1].last + 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"marks": 3}', '{"marks": {}, "losses": [7]}'])
def test_notes_that_are_torn_count_as_none(tmp_path: Path, text: str) -> None:
    file = tmp_path / "ends.json"
    file.write_text(text)
    assert losses_of(file) == ()


@pytest.fixture
def msgs(tmp_path: Path) -> Path:
    folder = tmp_path / "jetstream" / "main" / "streams" / "log" / "msgs"
    folder.mkdir(parents=True)
    for number in (1, 2, 10):
        (folder / f"{number}.blk").write_bytes(bytes(range(200)))
    (folder / "index.db").write_bytes(b"index")
    return folder


def shorten(file: Path) -> None:
    with file.open("r+b") as content:
        content.truncate(150)


def grow_after_cut(file: Path) -> None:
    with file.open("r+b") as content:
        content.truncate(100)
        content.seek(100)
        content.write(b"x" * 400)


def write_anew(file: Path) -> None:
    draft = file.with_suffix(".tmp")
    draft.write_bytes(b"short")
    draft.replace(file)


def write_over(file: Path) -> None:
    file.write_bytes(b"short")


def append(file: Path) -> None:
    with file.open("ab") as content:
        content.write(b"more")


@pytest.mark.parametrize(
    ("blocks", "change", "cut"),
    [
        ([10], lambda file: None, None),
        ([10], append, None),
        ([10], write_anew, None),  # compacted, or expired and made anew
        ([10], write_over, None),  # removed and made anew with the inode of the old one
        ([1, 2], Path.unlink, None),  # expired
        ([1, 2, 10], Path.unlink, False),
        ([10], shorten, True),
        ([10], grow_after_cut, True),
        ([10], Path.unlink, True),
        ([2], shorten, True),
    ],
)
def test_only_a_file_that_lost_its_end_in_place_was_cut(
    tmp_path: Path, msgs: Path, blocks: list[int], change: Any, cut: bool | None
) -> None:
    before = block_files(str(tmp_path))
    for block in blocks:
        change(msgs / f"{block}.blk")
    assert cut_logs(before) == ({} if cut is None else {"main/log": cut})


def test_a_folder_without_streams_has_no_blocks(tmp_path: Path) -> None:
    assert block_files(str(tmp_path / "none")) == {}
    assert json.loads(LogEnds().text()) == {"marks": {}, "losses": []}
