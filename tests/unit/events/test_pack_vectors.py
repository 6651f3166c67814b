"""The vectors of the pack format, read by Millstream and by a second implementation."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from millstream.errors import PackError
from millstream.events.packs.pack import decode
from tests.unit.events.independent_pack_decoder import lz4_frame, read_pack

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "tests" / "vectors" / "packs"


@dataclass(frozen=True)
class Vector:
    name: str
    payload: bytes
    text: dict[str, Any]

    @property
    def headers(self) -> dict[str, str]:
        headers: dict[str, str] = self.text["headers"]
        return headers


VECTORS = [
    Vector(file.stem, file.with_suffix(".bin").read_bytes(), json.loads(file.read_text("utf-8")))
    for file in sorted(FOLDER.glob("*.json"))
]
SOUND = [vector for vector in VECTORS if "events" in vector.text]
BROKEN = [vector for vector in VECTORS if "refused" in vector.text]


def in_json(value: Any) -> Any:
    """A Python value in the form of the vectors' JSON files."""
    match value:
        case dict():
            return {name: in_json(part) for name, part in value.items()}
        case list():
            return [in_json(part) for part in value]
        case bytes():
            return {"$bytes": value.hex()}
        case datetime():
            return {"$timestamp": value.isoformat()}
        case date():
            return {"$date": str(value)}
        case time():
            return {"$time": str(value)}
        case timedelta():
            return {"$microseconds": value // timedelta(microseconds=1)}
        case Decimal():
            return {"$decimal": str(value)}
    return value


def event_in_json(row: tuple[Any, ...]) -> dict[str, Any]:
    key, timestamp, headers, id_, value = row
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=(timestamp or 0) // 1000)
    pairs = None if headers is None else [{"key": name, "value": text} for name, text in headers]
    return {
        "key": None if key is None else in_json(key.encode("utf-8", "surrogateescape")),
        "timestamp": None if timestamp is None else in_json(moment),
        "headers": in_json(pairs),
        "id": id_,
        "value": in_json(value),
    }


def zstd(data: bytes, size: int) -> bytes:
    plain: bytes = pa.Codec("zstd").decompress(data, size, asbytes=True)
    return plain


@pytest.mark.parametrize("vector", SOUND, ids=lambda vector: vector.name)
def test_a_sound_vector_reads_as_its_events(vector: Vector) -> None:
    pack = decode(vector.headers, vector.payload)
    assert [event_in_json(row) for row in pack.events()] == vector.text["events"]
    assert pack.count == len(vector.text["events"])
    assert pack.schema_id == vector.headers.get("Mill-Schema")


@pytest.mark.parametrize("vector", SOUND, ids=lambda vector: vector.name)
def test_a_second_implementation_reads_the_same_events(vector: Vector) -> None:
    found = read_pack(vector.headers, vector.payload, {0: lz4_frame, 1: zstd})
    assert found == vector.text["events"]


@pytest.mark.parametrize("vector", BROKEN, ids=lambda vector: vector.name)
def test_a_broken_vector_is_refused_for_its_reason(vector: Vector) -> None:
    with pytest.raises(PackError) as caught:
        decode(vector.headers, vector.payload)
    assert (caught.value.reason, len(caught.value.text) > 10) == (vector.text["refused"], True)


def test_the_vectors_cover_compression_and_every_reason() -> None:
    assert {decode(v.headers, v.payload).compression for v in SOUND} == {None, "lz4", "zstd"}
    documented = (ROOT / "docs" / "PACKS.md").read_text("utf-8")
    for reason in {vector.text["refused"] for vector in BROKEN}:
        assert f"`{reason}`" in documented


def test_the_annotated_bytes_in_the_specification_are_those_of_the_vector() -> None:
    vector = next(vector for vector in SOUND if vector.name == "values-only")
    text = (ROOT / "docs" / "PACKS.md").read_text("utf-8")
    lines = re.findall(r"^    ([0-9a-f]{4})  ((?:[0-9a-f]{2} )+) *\| ", text, re.MULTILINE)
    shown = b""
    for offset, part in lines:
        assert int(offset, 16) == len(shown)
        shown += bytes.fromhex(part)
    assert shown == vector.payload
    assert all(f"    {name}: {value}\n" in text for name, value in vector.headers.items())
