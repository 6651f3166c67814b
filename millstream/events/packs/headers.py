"""The message headers of a pack: their names, and the checks every reader makes first."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from millstream.errors import PackError
from millstream.events.classify import PACK_HEADER

__all__ = [
    "CHECKSUM",
    "CONTENT_TYPE",
    "COUNT",
    "FORMAT_VERSION",
    "MEDIA_TYPE",
    "SCHEMA",
    "VERSION",
    "PackHeaders",
    "is_schema_id",
    "message_size",
    "read_headers",
    "write_headers",
]

CONTENT_TYPE: Final = "Content-Type"
VERSION: Final = PACK_HEADER
COUNT: Final = "Mill-Count"
SCHEMA: Final = "Mill-Schema"
CHECKSUM: Final = "Mill-Checksum"

MEDIA_TYPE: Final = "application/vnd.apache.arrow.stream"
FORMAT_VERSION: Final = "1"

_COUNT = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)
_CHECKSUM = re.compile(r"[0-9a-f]{8}", re.ASCII)
_SCHEMA = re.compile(r"[!-~]{1,128}")


@dataclass(frozen=True, slots=True)
class PackHeaders:
    """The contents of a pack's headers."""

    count: int
    checksum: int
    schema_id: str | None


def read_headers(headers: Mapping[str, str]) -> PackHeaders:
    """The pack's headers, checked; raises `PackError` for the first one that is wrong."""
    version = headers.get(VERSION)
    if version != FORMAT_VERSION:
        advice = "use a newer Millstream" if version else "this is a plain message"
        raise PackError(f"{VERSION} is {_shown(version)}, this reader knows 1: {advice}", "version")
    media_type = headers.get(CONTENT_TYPE)
    if media_type != MEDIA_TYPE:
        raise PackError(
            f"{CONTENT_TYPE} is {_shown(media_type)}, not {MEDIA_TYPE!r}", "content-type"
        )
    count = headers.get(COUNT)
    if count is None or not _COUNT.fullmatch(count):
        raise PackError(f"{COUNT} is {_shown(count)}, not a decimal number", "count")
    checksum = headers.get(CHECKSUM)
    if checksum is None or not _CHECKSUM.fullmatch(checksum):
        raise PackError(f"{CHECKSUM} is {_shown(checksum)}, not 8 hex digits", "checksum")
    schema_id = headers.get(SCHEMA)
    if schema_id is not None and not is_schema_id(schema_id):
        raise PackError(f"{SCHEMA} is {_shown(schema_id)}, not a schema id", "headers")
    return PackHeaders(int(count), int(checksum, 16), schema_id)


def write_headers(pack: PackHeaders) -> dict[str, str]:
    """These contents as headers."""
    headers = {
        CONTENT_TYPE: MEDIA_TYPE,
        VERSION: FORMAT_VERSION,
        COUNT: str(pack.count),
        CHECKSUM: f"{pack.checksum:08x}",
    }
    if pack.schema_id is not None:
        headers[SCHEMA] = pack.schema_id
    return headers


def is_schema_id(text: str) -> bool:
    """Whether a text can be a schema id: 1 to 128 visible ASCII characters."""
    return _SCHEMA.fullmatch(text) is not None


def _shown(value: str | None) -> str:
    return "missing" if value is None else repr(value[:60])


def message_size(headers: Mapping[str, str], payload_size: int) -> int:
    """Bytes of a NATS message as max_payload counts them: header block and payload."""
    text = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    return len(b"NATS/1.0\r\n") + len(text.encode()) + len(b"\r\n") + payload_size
