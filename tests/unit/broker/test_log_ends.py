"""Where logs end: checkpoints and block files, without a server."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from millstream.broker.health import losses_of
from millstream.broker.log_ends import (
    LOSSES_KEPT,
    Block,
    Cut,
    LogEnds,
    block_files,
    cut_logs,
    last_of,
    loss_text,
    records_of,
)

NOON, LATER = "2026-01-31T12:00:00Z", "2026-01-31T13:00:00Z"


def answer(last: int, created: str = "c1", storage: str = "file", first: int = 1) -> Any:
    stream = {
        "name": "log",
        "created": created,
        "state": {"first_seq": first, "last_seq": last},
        "config": {"storage": storage},
    }
    return {"account_details": [{"name": "main", "stream_detail": [stream]}]}


def test_a_log_that_ends_before_its_checkpoint_is_reported_once_and_kept() -> None:
    ends = LogEnds()
    assert ends.see(answer(500), NOON) == []
    (text,) = ends.see(answer(450), LATER)
    assert "the log of 'log' lost the offsets 451 to 500" in text
    assert f"500 was seen at {NOON}" in text
    assert ends.see(answer(451), LATER) == []
    assert [loss["marked"] for loss in ends.losses] == [500]


def test_a_growing_or_unchanged_log_is_not_reported_and_keeps_its_first_time() -> None:
    ends = LogEnds()
    for last, now in ((1, NOON), (7, NOON), (7, LATER)):
        assert ends.see(answer(last), now) == []
    assert ends.checkpoints == {"main/log": {"created": "c1", "last": 7, "at": NOON}}


def test_a_recreated_stream_has_no_history_and_no_losses() -> None:
    ends = LogEnds()
    ends.see(answer(500), NOON)
    assert ends.see(answer(450), NOON)
    assert ends.see(answer(3, created="c2"), LATER) == []
    assert ends.losses == []


def test_streams_in_memory_have_no_checkpoint() -> None:
    ends = LogEnds()
    ends.see(answer(500, storage="memory"), NOON)
    assert ends.see(answer(0, storage="memory"), LATER) == []
    assert ends.checkpoints == {}


def test_a_cut_without_a_checkpoint_may_be_a_torn_write() -> None:
    ends = LogEnds()
    (text,) = ends.see(answer(9), NOON, cut={"main/log": Cut(True, 40, torn=True)})
    assert "cut off" in text
    assert "interrupted the last write" in text
    assert ends.not_noted() == [], "nothing that was acknowledged is known to be lost"


@pytest.mark.parametrize(
    ("cut", "lost"),
    [
        (Cut(True, 100, end=12), [10, 12]),
        (Cut(True, 100), [10, 12]),  # encrypted: no more than fit into what is gone
        (Cut(True, 100, end=12, torn=True), [10, 12]),
    ],
)
def test_what_was_cut_off_is_lost(cut: Cut, lost: list[int]) -> None:
    ends = LogEnds()
    ends.see(answer(9), NOON, cut={"main/log": cut})
    (loss,) = ends.not_noted()
    assert loss["lost"] == lost
    ends.moved(loss, 12)
    assert ends.checkpoints["main/log"]["last"] == 12


def test_a_hole_is_a_loss_of_its_own() -> None:
    cut = Cut(True)
    cut.inside = [(4, 6), (0, 0)]
    ends = LogEnds()
    ends.see(answer(9, first=2), NOON, cut={"main/log": cut})
    assert [loss["lost"] for loss in ends.not_noted()] == [[4, 6], [2, 9]]


def test_a_loss_that_was_accepted_says_so() -> None:
    ends = LogEnds()
    ends.see(answer(12), NOON)
    ends.see(answer(9), LATER)
    entry = {"first": 10, "last": 12, "found": LATER, "accepted": {"at": "noon", "by": "ann"}}
    stream = answer(12)
    stream["account_details"][0]["stream_detail"][0]["config"]["metadata"] = {
        "key": json.dumps([entry])
    }
    assert ends.see(stream, LATER, key="key") == []
    assert "accepted at noon by ann" in loss_text(ends.losses[0])


def test_a_log_without_its_old_files_expired_or_starts_again_at_one() -> None:
    gone = {"main/log": Cut(False, 200)}
    assert LogEnds().see(answer(50, first=51), NOON, cut=gone) == []
    assert LogEnds().see(answer(53, first=51), NOON, cut=gone) == [], "new events have arrived"
    assert len(LogEnds().see(answer(0, first=0), NOON, cut=gone)) == 1
    assert len(LogEnds().see(answer(2, first=1), NOON, cut=gone)) == 1


def test_checkpoints_survive_a_file_and_only_the_newest_losses_are_kept(tmp_path: Path) -> None:
    ends = LogEnds()
    for number in range(LOSSES_KEPT + 5):
        ends.see(answer(1000 - number), NOON)
    file = tmp_path / "ends.json"
    file.write_text(ends.text())
    again = LogEnds(file.read_text())
    assert (again.checkpoints, again.losses) == (ends.checkpoints, ends.losses)
    losses = losses_of(file)
    assert len(losses) == LOSSES_KEPT
    assert (losses[-1].account, losses[-1].stream) == ("main", "log")
    assert losses[-1].marked == losses[-1].last + 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"marks": 3}', '{"marks": {}, "losses": [7]}'])
def test_a_torn_file_counts_as_none(tmp_path: Path, text: str) -> None:
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


def replace_file(file: Path) -> None:
    draft = file.with_suffix(".tmp")
    draft.write_bytes(b"short")
    draft.replace(file)


def overwrite(file: Path) -> None:
    file.write_bytes(b"short")


def append(file: Path) -> None:
    with file.open("ab") as content:
        content.write(b"more")


@pytest.mark.parametrize(
    ("blocks", "change", "cut"),
    [
        ([10], lambda file: None, None),
        ([10], append, None),
        ([10], replace_file, None),  # compacted, or expired and created again
        ([10], overwrite, None),  # removed and created again with the same inode
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
    found = {stream: what.left for stream, what in cut_logs(before).items()}
    assert found == ({} if cut is None else {"main/log": cut})


def test_a_folder_without_streams_has_no_blocks(tmp_path: Path) -> None:
    assert block_files(str(tmp_path / "none")) == {}
    assert json.loads(LogEnds().text()) == {"marks": {}, "losses": []}


def record(sequence: int, value: bytes = b"value") -> bytes:
    """A record as the server writes it, with any checksum."""
    body = b"log.k" + value + b"\xff" * 8
    return struct.pack("<IQQH", 22 + len(body), sequence, 77, 5) + body


def test_the_last_sequence_of_a_block_is_found_over_damage() -> None:
    records = [record(n, b"v" * n) for n in range(5, 15)]
    whole = b"".join(records)
    assert records_of(whole) == (14, len(whole))
    assert records_of(b"") == (0, 0)
    torn = whole + record(15)[:-3]
    assert records_of(torn) == (14, len(whole))
    for broken in (0, 4, 9):
        for at in (0, 3, 10):  # in its length, or in its sequence
            damaged = [bytearray(one) for one in records]
            damaged[broken][at] ^= 8
            last, end = records_of(b"".join(damaged))
            if broken < 9:
                assert (last, end) == (14, len(whole)), (broken, at)
            else:  # nothing comes after it
                assert last in (13, 14)


def test_a_walked_block_knows_its_last_whole_record(tmp_path: Path) -> None:
    file = tmp_path / "1.blk"
    file.write_bytes(record(3) + record(4))
    block = Block(str(file), last=True, walk=True)
    assert (block.first, block.end, block.whole) == (3, 4, block.size)
    file.write_bytes(record(3) + record(4)[:-1])
    block = Block(str(file), last=True, walk=True)
    assert (block.end, block.whole) == (3, len(record(3)))
    (tmp_path / "1.key").write_bytes(b"key")
    assert Block(str(file), last=True, walk=True).end == 0, "encrypted"


def removal(sequence: int) -> bytes:
    """A record that says that another one was removed: without a subject or a value."""
    return struct.pack("<IQQH", 30, sequence | 1 << 62, 77, 0) + b"\xff" * 8


def test_removals_are_records_and_not_the_end_of_a_log(tmp_path: Path) -> None:
    """A queue ends with them; to read such a file from its start took a second for each stream."""
    messages = b"".join(record(n) for n in range(2_000_001, 2_000_101))
    removed = b"".join(removal(n) for n in range(2_000_001, 2_000_051))
    file = tmp_path / "1.blk"
    for content, end in (
        (messages + removed, 2_000_100),
        (removal(1) + messages + removed, 2_000_100),  # of a message in an older file
        (removal(2_000_000), 2_000_000),  # an emptied log keeps its end
        (messages + removed + record(2_000_200), 2_000_200),
    ):
        file.write_bytes(content)
        block = Block(str(file), last=True, walk=True)
        assert (block.end, block.whole) == (end, len(content))
        assert records_of(content) == (end, len(content))
        file.write_bytes(content + record(2_000_201)[:-3])  # a torn write
        block = Block(str(file), last=True, walk=True)
        assert (block.end, block.whole) == (end, len(content))
    assert last_of(messages + removed) == 2_000_100, "found without a look at all records"
    assert last_of(record(5) + record(6, bytes(200_000))) == 0, "too far from the end"


def test_a_torn_write_is_no_loss_where_the_rest_cannot_be_read_either(msgs: Path) -> None:
    """Of an encrypted log nobody but the server can say where its last record ends."""
    (msgs / "10.blk").write_bytes(bytes(300))
    (msgs / "10.key").write_bytes(b"key")
    before = block_files(str(msgs.parents[4]), walk=True)
    with (msgs / "10.blk").open("r+b") as file:
        file.truncate(240)
    cut = cut_logs(before)
    ends = LogEnds()
    ends.see(answer(9), NOON, cut=cut)
    assert [loss["lost"] for loss in ends.losses] == [None], "nothing says that more is gone"
    ends = LogEnds()
    ends.see(answer(10), NOON)
    ends.see(answer(8), LATER, cut=cut)
    assert [loss["lost"] for loss in ends.losses] == [[9, 10]], "a checkpoint had seen more"
    assert cut["main/log"].size == 60, "room for two"


def test_a_file_that_had_only_a_torn_write_is_no_loss(msgs: Path) -> None:
    (msgs / "10.blk").write_bytes(record(5)[:-9])
    before = block_files(str(msgs.parents[4]), walk=True)
    (msgs / "10.blk").unlink()
    ends = LogEnds()
    ends.see(answer(4), NOON, cut=cut_logs(before))
    assert [loss["lost"] for loss in ends.losses] == [None]
