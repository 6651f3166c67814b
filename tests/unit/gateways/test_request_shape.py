"""Counts and lengths in requests: what does not fit the bytes is refused before kio reads it.

kio would take memory for as many parts as a request says. Where a test here fails, its process may
end without a word.
"""

from __future__ import annotations

import dataclasses
import io
import random
import struct
import types
import typing
import uuid
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from kio.index import load_request_schema
from kio.serial import entity_reader, entity_writer

from millstream.gateways.kafka.protocol import VERSIONS, Api, BadRequest, read_request
from millstream.gateways.kafka.request_shape import PARTS_MAX, _shape_of, _Walk, check_shape

SERVED = [
    (api, version)
    for api, (low, high) in VERSIONS.items()
    for version in range(low, high + 1)
    if api is not Api.PRODUCE
]
HUGE = [
    b"\xff\xff\xff\xff\x0f",  # as a length of variable size
    b"\xff\xff\xff\xff\x7f",
    b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
    b"\x7f\xff\xff\xff",
    b"\x80\0\0\0",
    b"\xff\xff\xff\xfe",
]


def example(kind: Any, source: random.Random) -> Any:
    """An instance of a class of kio with fields by chance."""
    return kind(
        **{field.name: value(field.type, field, source) for field in dataclasses.fields(kind)}
    )


def value(hint: Any, field: Any, source: random.Random) -> Any:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        if source.random() < 0.2:
            return None
        hint = next(one for one in typing.get_args(hint) if one is not types.NoneType)
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)[0]
        return tuple(value(inner, field, source) for _ in range(source.choice((0, 1, 1, 2, 3))))
    if dataclasses.is_dataclass(hint):
        return example(hint, source)
    size = source.choice((0, 1, 5, 5, 130))
    made = {
        "bool": True,
        "string": "x" * size,
        "bytes": b"y" * size,
        "records": b"z" * size,
        "timedelta_i32": timedelta(milliseconds=5),
        "timedelta_i64": timedelta(milliseconds=5),
        "uuid": uuid.UUID(int=7),
    }
    return made.get(field.metadata["kafka_type"], source.randrange(-1, 100))


def frames(api: Api, version: int, count: int) -> list[bytes]:
    """Requests as a client of kio writes them, small enough to be tried in every place."""
    kind: Any = load_request_schema(int(api), version)
    found = []
    for seed in range(200):
        buffer = io.BytesIO()
        header = kind.__header_schema__
        known = {
            "request_api_key": int(api),
            "request_api_version": version,
            "correlation_id": seed,
            "client_id": "me",
        }
        entity_writer(header)(buffer, header(**known))
        entity_writer(kind)(buffer, example(kind, random.Random(seed)))
        if buffer.tell() < 4000:
            found.append(buffer.getvalue())
        if len(found) == count:
            break
    assert found
    return found


def body_of(api: Api, version: int, frame: bytes) -> tuple[Any, int]:
    kind: Any = load_request_schema(int(api), version)
    return kind, entity_reader(kind.__header_schema__)(frame, 0)[1]


@pytest.mark.parametrize(("api", "version"), SERVED)
def test_what_clients_send_is_walked_through_to_its_end(api: Api, version: int) -> None:
    for frame in frames(api, version, 20):
        kind, start = body_of(api, version, frame)
        assert _Walk(frame).after(_shape_of(kind), start) == len(frame)
        assert read_request(frame).api is api


@pytest.mark.parametrize(("api", "version"), SERVED)
def test_a_huge_count_anywhere_does_not_end_the_process(api: Api, version: int) -> None:
    (frame,) = frames(api, version, 1)
    _, start = body_of(api, version, frame)
    for at in range(start, min(len(frame), start + 80)):
        for huge in HUGE:
            for after in (frame[at + 1 :], b""):
                with suppress(BadRequest):  # bytes that are no count may be read
                    read_request(frame[:at] + huge + after)


@pytest.mark.parametrize(("api", "version"), SERVED)
def test_a_request_that_ends_anywhere_is_refused(api: Api, version: int) -> None:
    for frame in frames(api, version, 2):
        kind, start = body_of(api, version, frame)
        for end in range(start, min(len(frame), start + 100)):
            with pytest.raises(ValueError, match=r"length|parts in"):
                check_shape(kind, frame[:end], start)


def test_sixteen_bytes_do_not_name_billions_of_topics() -> None:
    frame = bytes.fromhex("0003000900000001ffff00ffffffff0f")
    with pytest.raises(BadRequest, match="4,294,967,294 parts in 0 bytes"):
        read_request(frame)


def test_a_request_has_a_limited_number_of_parts() -> None:
    head = struct.pack(">hhih", int(Api.METADATA), 1, 1, -1)
    fits, more = (
        head + struct.pack(">i", count) + b"\0\1t" * count for count in (PARTS_MAX, PARTS_MAX + 1)
    )
    assert len(read_request(fits).body.topics) == PARTS_MAX
    with pytest.raises(BadRequest, match="more than 100,000 parts"):
        read_request(more)


def test_a_tagged_field_has_the_size_that_it_says() -> None:
    kind: Any = load_request_schema(int(Api.FETCH), 12)
    (frame,) = frames(Api.FETCH, 12, 1)
    _, start = body_of(Api.FETCH, 12, frame)
    assert set(_shape_of(kind).tags or {}) == {0}
    fields = _Walk(frame).after(_shape_of(kind)._replace(tags=None), start)
    for size, fault in ((3, None), (2, "does not have its size"), (4, "does not have its size")):
        tagged = frame[:fields] + b"\1\0" + bytes((size,)) + b"\3ab" + b"\0" * 5
        if fault is None:
            check_shape(kind, tagged, start)
        else:
            with pytest.raises(ValueError, match=fault):
                check_shape(kind, tagged, start)
