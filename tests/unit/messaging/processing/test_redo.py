"""What a commit has for other streams: written, split, read again."""

from __future__ import annotations

import zlib

import pyarrow as pa
import pytest

from millstream.errors import ConfigError, DataLoss
from millstream.events.packs.pack import EncodedPack
from millstream.messaging.processing import redo
from millstream.messaging.processing.record import CommitRecord, InputPosition
from millstream.messaging.processing.redo import (
    StreamUnits,
    Unit,
    chunks_of,
    read_redo,
    units_of,
    write_redo,
)
from millstream.wire.message import OutgoingMessage


def rows(count: int, size: int = 10) -> list[OutgoingMessage]:
    return [OutgoingMessage(b"t.k%d" % n, b"h", b"%d" % n + b"x" * size) for n in range(count)]


def record(data: bytes) -> CommitRecord:
    return CommitRecord(7, "p", ["t"], {}, 1, len(data), zlib.crc32(data))


def test_rows_are_in_units_that_one_batch_takes() -> None:
    units = units_of(rows(2500))
    assert [len(unit.rows) for unit in units] == [999, 999, 502]
    assert [message for unit in units for message in unit.messages()] == rows(2500)
    large = units_of(rows(5, redo.UNIT_BYTES_MAX // 2))
    assert [len(unit.rows) for unit in large] == [1] * 5
    assert units_of([]) == []


def test_what_was_written_is_read_again() -> None:
    pack = EncodedPack({"Mill-Count": "3"}, pa.py_buffer(b"payload"), 3)
    streams = [StreamUnits("a", units_of(rows(3))), StreamUnits("b", [Unit.of_packs([pack])])]
    data = write_redo(streams)
    chunks = list(chunks_of(data, redo.HEADER_BYTES + 20))
    assert max(map(len, chunks)) == 20
    assert read_redo(record(data), chunks) == streams
    (found,) = read_redo(record(data), chunks)[1].units[0].encoded()
    assert (found.headers, bytes(found.payload), found.count) == (pack.headers, b"payload", 3)
    assert write_redo([]) == b""
    assert list(chunks_of(b"", 10_000)) == []
    assert read_redo(record(b""), []) == []


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_a_damaged_redo_is_data_loss(damage: str) -> None:
    data = write_redo([StreamUnits("a", units_of(rows(3)))])
    other = data[:-1] if damage == "missing" else b"\0" + data[1:]
    with pytest.raises(DataLoss, match="commit 7 of process 'p'"):
        read_redo(record(data), [other])


def test_a_commit_that_fits_no_batch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="do not fit one atomic batch"):
        list(chunks_of(b"x" * 100_000, redo.HEADER_BYTES + 10))
    with pytest.raises(ConfigError, match="do not fit one atomic batch"):
        list(chunks_of(b"x", redo.HEADER_BYTES))
    monkeypatch.setattr(redo, "REDO_BYTES_MAX", 100)
    with pytest.raises(ConfigError, match="do not fit one atomic batch"):
        list(chunks_of(b"x" * 101, 10_000))


def test_a_position_says_where_to_read_on() -> None:
    found = [InputPosition(), InputPosition(5, "1"), InputPosition(5, "1", 3)]
    assert [position.next for position in found] == [1, 6, 5]
