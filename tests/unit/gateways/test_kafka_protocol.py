"""Kafka's messages: requests from bytes, responses to bytes, for every version that is served."""

from __future__ import annotations

import io
import struct
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_reader, entity_writer

from fuzz.kafka_targets import REQUESTS, read_kafka_request
from fuzz.pack_memory import mutate
from millstream.gateways.kafka.protocol import (
    VERSIONS,
    Api,
    BadRequest,
    ErrorCode,
    UnsupportedApiVersions,
    api_versions,
    read_request,
    unsupported_version_answer,
    write_response,
)
from millstream.gateways.kafka.record_frames import PARTS_MAX

SERVED = [
    (api, version)
    for api, (low, high) in VERSIONS.items()
    for version in range(3 if api is Api.PRODUCE else low, high + 1)
]
PRODUCE = list(range(3, 10))


def request(api: Api, version: int, body: Any, client: str | None = "me") -> bytes:
    """A request as a client of kio writes it."""
    kind = load_request_schema(int(api), version)
    header: Any = kind.__header_schema__
    known = {
        "request_api_key": int(api),
        "request_api_version": version,
        "correlation_id": 7,
        "client_id": client,
    }
    buffer = io.BytesIO()
    entity_writer(header)(buffer, header(**known))
    entity_writer(kind)(buffer, body)
    return buffer.getvalue()


def produce(version: int, topics: int = 1, partitions: int = 1, records: bytes = b"xyz") -> bytes:
    kind: Any = load_request_schema(0, version)
    topic = kind.__dataclass_fields__["topic_data"].type.__args__[0]
    part = topic.__dataclass_fields__["partition_data"].type.__args__[0]
    data = tuple(
        topic(
            name=f"topic-{number}",
            partition_data=tuple(part(index=i, records=records) for i in range(partitions)),
        )
        for number in range(topics)
    )
    return request(
        Api.PRODUCE,
        version,
        kind(transactional_id=None, acks=-1, timeout=timedelta(seconds=1), topic_data=data),
    )


def response(api: Api, version: int, frame: memoryview) -> tuple[int, Any]:
    """A response as a client of kio reads it: the correlation id and the body."""
    data = bytes(frame)
    assert int.from_bytes(data[:4], "big") == len(data) - 4
    kind = load_response_schema(int(api), version)
    header, size = entity_reader(kind.__header_schema__)(data, 4)
    body, used = entity_reader(kind)(data, 4 + size)
    assert 4 + size + used == len(data)
    return header.correlation_id, body


@pytest.mark.parametrize(("api", "version"), SERVED)
def test_every_version_that_is_offered_can_be_read_and_written(api: Api, version: int) -> None:
    assert load_request_schema(int(api), version) is not None
    assert load_response_schema(int(api), version) is not None


def test_produce_is_offered_from_0_because_clients_stop_compressing_otherwise() -> None:
    assert VERSIONS[Api.PRODUCE][0] == 0
    for version in range(3):
        with pytest.raises(BadRequest):
            read_request(struct.pack(">hhih", 0, version, 1, -1) + bytes(20))


@pytest.mark.parametrize("version", PRODUCE)
def test_a_produce_request_is_read_in_every_version(version: int) -> None:
    found = read_request(produce(version, topics=2, partitions=3))
    assert (found.api, found.version, found.correlation_id) == (Api.PRODUCE, version, 7)
    assert found.client_id == "me"
    assert [topic.name for topic in found.body.topic_data] == ["topic-0", "topic-1"]
    assert [part.index for part in found.body.topic_data[1].partition_data] == [0, 1, 2]
    assert bytes(found.body.topic_data[0].partition_data[0].records) == b"xyz"


@pytest.mark.parametrize("version", PRODUCE)
def test_a_produce_request_may_be_large_by_its_records_only(version: int) -> None:
    large = read_request(produce(version, records=bytes(20_000_000)))
    assert len(large.body.topic_data[0].partition_data[0].records) == 20_000_000
    assert read_request(produce(version, partitions=PARTS_MAX - 1))
    with pytest.raises(BadRequest, match="topics and partitions"):
        read_request(produce(version, partitions=PARTS_MAX))
    with pytest.raises(BadRequest, match="topics and partitions"):
        read_request(produce(version, topics=3, partitions=PARTS_MAX // 3))


@pytest.mark.parametrize("version", PRODUCE)
def test_a_produce_request_that_ends_anywhere_is_refused(version: int) -> None:
    whole = produce(version, topics=2, partitions=2)
    for size in range(len(whole)):
        with pytest.raises(BadRequest):
            read_request(whole[:size])


def test_a_client_may_have_no_name() -> None:
    kind: Any = load_request_schema(12, 0)
    body = kind(group_id="g", generation_id=1, member_id="m")
    assert read_request(request(Api.HEARTBEAT, 0, body, client=None)).client_id == ""


def test_bytes_after_a_request_are_left_out() -> None:
    # As librdkafka 2.16 asks for all topics.
    sent = bytes.fromhex("0003000c00000005000772646b61666b610000000000010000")
    assert read_request(sent).body.topics is None


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (b"", "no header"),
        (b"\0\0\0", "no header"),
        (struct.pack(">hhi", 4, 0, 1), "call 4 is not served"),
        (struct.pack(">hhi", -1, 0, 1), "call -1 is not served"),
        (struct.pack(">hhi", 1, 13, 1), "FETCH version 13 is not served, 4 to 12 are"),
        (struct.pack(">hhi", 1, -5, 1), "FETCH version -5 is not served"),
        (struct.pack(">hhi", 3, 1, 1), "METADATA version 1 cannot be read"),
        (REQUESTS[1][:-1], "cannot be read"),
        (REQUESTS[1][:11] + b"\x7f\xff\xff\xff" + REQUESTS[1][15:], "cannot be read"),
        (REQUESTS[1] + bytes(2 * 1024 * 1024), "2,097,152 are accepted"),
        (REQUESTS[0] + bytes(64 * 1024), "65,536 are accepted"),
    ],
)
def test_bytes_that_are_no_request_are_refused_with_the_reason(frame: bytes, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        read_request(frame)


def test_api_versions_in_a_newer_version_are_answered_in_the_oldest() -> None:
    with pytest.raises(UnsupportedApiVersions) as refused:
        read_request(struct.pack(">hhih", 18, 4, 99, -1) + b"\0\1\1\0")
    frame = unsupported_version_answer(refused.value.correlation_id)
    correlation_id, body = response(Api.API_VERSIONS, 0, frame)
    assert (correlation_id, body.error_code) == (99, ErrorCode.unsupported_version)
    assert {(key.api_key, key.min_version, key.max_version) for key in body.api_keys} == {
        (api, low, high) for api, (low, high) in VERSIONS.items()
    }


@pytest.mark.parametrize("version", range(4))
def test_api_versions_never_have_tags_in_their_header(version: int) -> None:
    frame = write_response(Api.API_VERSIONS, version, 5, api_versions())
    correlation_id, body = response(Api.API_VERSIONS, version, frame)
    assert correlation_id == 5
    assert len(body.api_keys) == len(VERSIONS)
    if version:
        assert body.throttle_time == timedelta(0)


@pytest.mark.parametrize("version", PRODUCE)
def test_one_dict_of_fields_is_an_answer_of_every_version(version: int) -> None:
    part = {
        "index": 3,
        "error_code": ErrorCode.invalid_record,
        "base_offset": 17,
        "log_append_time": None,
        "log_start_offset": 2,
        "record_errors": [{"batch_index": 4, "batch_index_error_message": "no"}],
        "error_message": "record 4: no",
    }
    answer = {"responses": [{"name": "t", "partition_responses": [part]}], "no_such": 1}
    _, body = response(Api.PRODUCE, version, write_response(Api.PRODUCE, version, 1, answer))
    (found,) = body.responses[0].partition_responses
    assert (found.index, found.base_offset) == (3, 17)
    assert found.error_code is ErrorCode.invalid_record
    if version >= 8:
        assert found.record_errors[0].batch_index == 4
        assert found.error_message == "record 4: no"


def fetched(index: int, records: list[bytes]) -> dict[str, Any]:
    return {
        "partition_index": index,
        "error_code": ErrorCode.offset_out_of_range if index else ErrorCode.none,
        "high_watermark": 2**40 + index,
        "last_stable_offset": 2**40,
        "log_start_offset": 7,
        "aborted_transactions": None,
        "preferred_read_replica": -1,
        "records": records,
    }


@pytest.mark.parametrize("version", range(4, 13))
@pytest.mark.parametrize("size", [0, 1, 126, 127, 128, 20_000, 3_000_000])
def test_an_answer_with_records_is_what_kio_reads(version: int, size: int) -> None:
    parts = [fetched(0, [b"head", bytes(size)]), fetched(1, [])]
    topics = [{"topic": "t" * 200, "partitions": parts}, {"topic": "ü", "partitions": []}]
    answer = {"error_code": ErrorCode.none, "session_id": 0, "responses": topics}
    correlation, body = response(Api.FETCH, version, write_response(Api.FETCH, version, 9, answer))
    assert (correlation, body.throttle_time) == (9, timedelta(0))
    assert [topic.topic for topic in body.responses] == ["t" * 200, "ü"]
    first, second = body.responses[0].partitions
    assert bytes(first.records) == b"head" + bytes(size)
    assert (second.partition_index, bytes(second.records or b"")) == (1, b"")
    assert (first.error_code, second.error_code) == (0, ErrorCode.offset_out_of_range)
    assert (first.high_watermark, second.high_watermark) == (2**40, 2**40 + 1)
    assert first.last_stable_offset == 2**40
    assert first.aborted_transactions is None
    if version >= 5:
        assert second.log_start_offset == 7
    if version >= 11:
        assert first.preferred_read_replica == -1


@pytest.mark.parametrize("version", PRODUCE)
def test_a_produce_answer_without_a_fault_is_what_kio_reads(version: int) -> None:
    part = {
        "error_code": ErrorCode.none,
        "base_offset": 2**50,
        "log_append_time": None,
        "log_start_offset": -1,
        "record_errors": (),
        "error_message": None,
    }
    parts = [{"index": index, **part} for index in range(300)]
    topics = [{"name": name, "partition_responses": parts} for name in ("a", "b" * 130)]
    frame = write_response(Api.PRODUCE, version, -5, {"responses": topics})
    correlation, body = response(Api.PRODUCE, version, frame)
    assert (correlation, body.throttle_time) == (-5, timedelta(0))
    assert [topic.name for topic in body.responses] == ["a", "b" * 130]
    found = body.responses[1].partition_responses
    assert [one.index for one in found] == list(range(300))
    assert {one.base_offset for one in found} == {2**50}
    assert {one.log_append_time for one in found} == {None}
    if version >= 8:
        assert {one.error_message for one in found} == {None}


@pytest.mark.parametrize("version", PRODUCE)
@pytest.mark.parametrize("size", [0, 1, 5, 900, 100_000])
def test_a_produce_request_is_read_as_by_kio(version: int, size: int) -> None:
    kind: Any = load_request_schema(0, version)
    for frame in (
        produce(version, topics=3, partitions=2, records=bytes(size)),
        produce(version, topics=1, partitions=1, records=bytes(size)),
        produce(version, topics=0),
    ):
        _, start = entity_reader(kind.__header_schema__)(frame, 0)
        expected, _ = entity_reader(kind)(frame, start)
        found = read_request(frame).body
        assert (found.acks, found.transactional_id) == (expected.acks, expected.transactional_id)
        assert [
            (topic.name, [(part.index, bytes(part.records)) for part in topic.partition_data])
            for topic in found.topic_data
        ] == [
            (topic.name, [(part.index, bytes(part.records)) for part in topic.partition_data])
            for topic in expected.topic_data
        ]


def test_a_field_that_a_version_needs_and_nobody_gave_is_an_error() -> None:
    with pytest.raises(TypeError, match="error_code"):
        write_response(Api.HEARTBEAT, 0, 1, {})


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=200), api=st.sampled_from(SERVED))
def test_any_bytes_are_read_or_refused(data: bytes, api: tuple[Api, int]) -> None:
    read_kafka_request(data)
    read_kafka_request(struct.pack(">hhih", *api, 1, -1) + data)


@settings(max_examples=300, deadline=None)
@given(
    frame=st.sampled_from([*REQUESTS, *(produce(version, 2, 2) for version in PRODUCE)]),
    chance=st.randoms(use_true_random=False),
)
def test_requests_with_faults_are_read_or_refused(frame: bytes, chance: Any) -> None:
    read_kafka_request(mutate(frame, chance))
