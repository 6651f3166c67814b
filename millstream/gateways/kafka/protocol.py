"""Kafka's messages: which versions are served, requests from bytes, responses to bytes. Pure.

kio has a class for each version of each message. A handler sees the class of the request and
returns a dict; the fields that a version does not have are left out, so that one handler serves
all versions. The messages that carry records are read and written by `record_frames`.
"""

from __future__ import annotations

import dataclasses
import io
import struct
import typing
from collections.abc import Iterator, Mapping
from datetime import timedelta
from enum import IntEnum
from functools import cache
from typing import Any, Final, NamedTuple

from kio.index import load_request_schema, load_response_schema
from kio.schema.errors import ErrorCode
from kio.serial import entity_reader, entity_writer

from millstream.gateways.kafka.record_frames import fetch_answer, produce_answer, read_produce
from millstream.gateways.kafka.request_shape import check_shape

__all__ = [
    "VERSIONS",
    "Api",
    "BadRequest",
    "ErrorCode",
    "Request",
    "UnsupportedApiVersions",
    "api_versions",
    "read_request",
    "schemas_loaded",
    "unsupported_version_answer",
    "write_response",
]


class Api(IntEnum):
    """The calls that are served, by their numbers."""

    PRODUCE = 0
    FETCH = 1
    LIST_OFFSETS = 2
    METADATA = 3
    OFFSET_COMMIT = 8
    OFFSET_FETCH = 9
    FIND_COORDINATOR = 10
    JOIN_GROUP = 11
    HEARTBEAT = 12
    LEAVE_GROUP = 13
    SYNC_GROUP = 14
    DESCRIBE_GROUPS = 15
    LIST_GROUPS = 16
    SASL_HANDSHAKE = 17
    API_VERSIONS = 18
    CREATE_TOPICS = 19
    DELETE_TOPICS = 20
    DELETE_RECORDS = 21
    INIT_PRODUCER_ID = 22
    DESCRIBE_CONFIGS = 32
    ALTER_CONFIGS = 33
    SASL_AUTHENTICATE = 36
    CREATE_PARTITIONS = 37
    DELETE_GROUPS = 42
    INCREMENTAL_ALTER_CONFIGS = 44
    OFFSET_DELETE = 47
    DESCRIBE_CLUSTER = 60


# The lowest and highest version of each call that clients are offered. Fetch up to 12 and Produce
# up to 9 name topics; later ones use ids, which no client needs.
VERSIONS: Final[Mapping[Api, tuple[int, int]]] = {
    # From 0, though 3 is the first that is served: librdkafka takes a higher minimum as a broker
    # without compression, and silently compresses nothing.
    Api.PRODUCE: (0, 9),
    Api.FETCH: (4, 12),
    Api.LIST_OFFSETS: (1, 7),
    Api.METADATA: (0, 12),
    Api.OFFSET_COMMIT: (2, 8),
    Api.OFFSET_FETCH: (1, 8),
    Api.FIND_COORDINATOR: (0, 4),
    Api.JOIN_GROUP: (0, 7),
    Api.HEARTBEAT: (0, 4),
    Api.LEAVE_GROUP: (0, 4),
    Api.SYNC_GROUP: (0, 5),
    Api.DESCRIBE_GROUPS: (0, 5),
    Api.LIST_GROUPS: (0, 4),
    Api.SASL_HANDSHAKE: (0, 1),
    Api.API_VERSIONS: (0, 3),
    Api.CREATE_TOPICS: (2, 7),
    Api.DELETE_TOPICS: (1, 5),
    Api.DELETE_RECORDS: (0, 2),
    Api.INIT_PRODUCER_ID: (0, 4),
    Api.DESCRIBE_CONFIGS: (1, 4),
    Api.ALTER_CONFIGS: (0, 2),
    Api.SASL_AUTHENTICATE: (0, 2),
    Api.CREATE_PARTITIONS: (0, 3),
    Api.DELETE_GROUPS: (0, 2),
    Api.INCREMENTAL_ALTER_CONFIGS: (0, 1),
    Api.OFFSET_DELETE: (0, 0),
    Api.DESCRIBE_CLUSTER: (0, 1),
}

_FIRST_PRODUCE: Final = 3  # that can be read; see above why more are offered

# Reading makes objects of twenty times a request's size: only records, which stay bytes, are large.
_USUAL_SIZE_MAX: Final = 2 * 1024 * 1024
_BEFORE_LOGIN_MAX: Final = 64 * 1024
_SIZE_MAX: Final[Mapping[Api, int]] = {
    Api.PRODUCE: 2**31 - 1,  # the listener's own limit of a frame counts
    Api.API_VERSIONS: _BEFORE_LOGIN_MAX,
    Api.SASL_HANDSHAKE: _BEFORE_LOGIN_MAX,
    Api.SASL_AUTHENTICATE: _BEFORE_LOGIN_MAX,
}

_START: Final = struct.Struct(">hhi")  # api key, api version, correlation id
_NO_THROTTLE: Final = timedelta(0)


class BadRequest(ValueError):
    """Bytes that are no request, or one that is not served; the connection is closed."""


class Request(NamedTuple):
    """One request as it arrived."""

    api: Api
    version: int
    correlation_id: int
    client_id: str
    body: Any  # an instance of kio's class for the call and version, or a ProduceRequest


class UnsupportedApiVersions(BadRequest):
    """The first request of a newer client: answered with the versions that are served."""

    def __init__(self, correlation_id: int) -> None:
        super().__init__("ApiVersions in a version that is not served")
        self.correlation_id = correlation_id


@cache
def _readers(api: int, version: int) -> tuple[Any, Any, Any]:
    body = load_request_schema(api, version)
    return entity_reader(body.__header_schema__), entity_reader(body), body


@cache
def _writer(api: int, version: int) -> tuple[Any, Any, bool]:
    body = load_response_schema(api, version)
    return body, entity_writer(body), body.__header_schema__.__flexible__


def schemas_loaded() -> Iterator[None]:
    """Load kio's classes of all calls and versions, one at each step: each takes milliseconds."""
    for api, (low, high) in VERSIONS.items():
        for version in range(low, high + 1):
            if api is not Api.PRODUCE:
                _readers(int(api), version)
            if api not in (Api.PRODUCE, Api.FETCH):
                _writer(int(api), version)
            yield


def read_request(frame: bytes) -> Request:
    """The request in a frame, without the length before it; BadRequest if it is none."""
    if len(frame) < _START.size:
        raise BadRequest(f"a request of {len(frame)} bytes has no header")
    key, version, correlation_id = _START.unpack_from(frame)
    try:
        api = Api(key)
    except ValueError:
        raise BadRequest(f"the call {key} is not served") from None
    low, high = VERSIONS[api]
    if not low <= version <= high:
        if api is Api.API_VERSIONS:
            raise UnsupportedApiVersions(correlation_id)
        raise BadRequest(f"{api.name} version {version} is not served, {low} to {high} are")
    limit = _SIZE_MAX.get(api, _USUAL_SIZE_MAX)
    if len(frame) > limit:
        raise BadRequest(f"{api.name} of {len(frame):,} bytes; {limit:,} are accepted")
    try:
        if api is Api.PRODUCE:
            if version < _FIRST_PRODUCE:
                raise ValueError(f"{_FIRST_PRODUCE} is the first that is")
            client, produce = read_produce(frame, version)
            return Request(api, version, correlation_id, client or "", produce)
        header_reader, body_reader, kind = _readers(key, version)
        header, size = header_reader(frame, 0)
        check_shape(kind, frame, size)
        # What follows is left out, as by Kafka: librdkafka 2.16 has 3 bytes too many in Metadata.
        body, _ = body_reader(frame, size)
    except Exception as error:  # kio raises many kinds, for bytes that anybody may send
        raise BadRequest(f"{api.name} version {version} cannot be read: {error!r:.200}") from error
    return Request(api, version, correlation_id, header.client_id or "", body)


def write_response(
    api: Api, version: int, correlation_id: int, fields: Mapping[str, Any]
) -> memoryview:
    """The frame of a response, with its length before it."""
    if api is Api.PRODUCE:
        return produce_answer(version, correlation_id, fields)
    if api is Api.FETCH:
        return fetch_answer(version, correlation_id, fields)
    cls, write, flexible = _writer(int(api), version)
    buffer = io.BytesIO()
    buffer.write(b"\0\0\0\0" + correlation_id.to_bytes(4, "big", signed=True))
    if flexible:
        buffer.write(b"\0")  # no tagged fields
    write(buffer, _build(cls, fields))
    frame = buffer.getbuffer()
    frame[:4] = (len(frame) - 4).to_bytes(4, "big")
    return frame


def api_versions() -> dict[str, Any]:
    """The answer to ApiVersions."""
    served = [
        {"api_key": int(api), "min_version": low, "max_version": high}
        for api, (low, high) in VERSIONS.items()
    ]
    return {"error_code": ErrorCode.none, "api_keys": served}


def unsupported_version_answer(correlation_id: int) -> memoryview:
    """What a client gets that asked for ApiVersions in a newer version: it asks again in an
    offered one."""
    fields = api_versions() | {"error_code": ErrorCode.unsupported_version}
    return write_response(Api.API_VERSIONS, 0, correlation_id, fields)


@cache
def _parts(cls: type) -> dict[str, type | None]:
    """The fields of a message, and the class of those that hold messages of their own."""
    hints = typing.get_type_hints(cls)
    return {part.name: _message_in(hints[part.name]) for part in dataclasses.fields(cls)}


def _message_in(hint: Any) -> type | None:
    if dataclasses.is_dataclass(hint):
        return hint if isinstance(hint, type) else None
    found = (_message_in(inner) for inner in typing.get_args(hint))
    return next((inner for inner in found if inner is not None), None)


def _build(cls: type, fields: Mapping[str, Any]) -> Any:
    """An instance with the fields that this version has."""
    given: dict[str, Any] = {}
    for name, inner in _parts(cls).items():
        if name not in fields:
            if name == "throttle_time":
                given[name] = _NO_THROTTLE
            continue
        value = fields[name]
        if inner is not None:
            if isinstance(value, list | tuple):
                value = tuple(_build(inner, one) for one in value)
            elif isinstance(value, Mapping):
                value = _build(inner, value)
        elif isinstance(value, list):
            value = tuple(value)
        given[name] = value
    return cls(**given)
