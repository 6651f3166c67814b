"""One message of a core subject: how it is sent, and what arrives. At most once."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final

from millstream.errors import ConfigError, ServiceError
from millstream.events.json_value import (
    JSON_HEADERS,
    has_content_type,
    is_json,
    json_bytes,
    payload_bytes,
    read_json,
)
from millstream.events.subject import check_subject
from millstream.wire.aio.connection import Connection
from millstream.wire.protocol import (
    EMPTY_HEADERS,
    Headers,
    encode_headers,
    parse_header_items,
    parse_headers,
)

__all__ = ["HeaderItems", "Message", "Payload", "body_of", "publish", "subject_bytes"]

ERROR_HEADER: Final = "Nats-Service-Error"
ERROR_CODE_HEADER: Final = "Nats-Service-Error-Code"
_ERROR_MARK: Final = b"\r\nNats-Service-Error"

HeaderItems = Headers | Iterable[tuple[str, str]]
# What a message holds: bytes, text as UTF-8, or a dict or list as JSON.
Payload = bytes | str | dict[Any, Any] | list[Any]

# Tokens without anything that could be a wildcard or break the line; others are fully checked.
_PLAIN_SUBJECT = re.compile(r"[^\s.*>\0\ud800-\udfff]+(?:\.[^\s.*>\0\ud800-\udfff]+)*")
# Programs publish to few subjects repeatedly; the bound is for those that generate them.
_SUBJECTS_REMEMBERED: Final = 4096


@lru_cache(maxsize=_SUBJECTS_REMEMBERED)
def subject_bytes(subject: str) -> bytes:
    """A subject to publish to, as bytes; wildcards and malformed ones are refused."""
    if not isinstance(subject, str) or not _PLAIN_SUBJECT.fullmatch(subject):
        check_subject(subject, wildcards=False)
    return subject.encode()


def body_of(data: Payload, headers: HeaderItems | None) -> tuple[bytes, bytes]:
    """Payload and header block of a message: text is sent as UTF-8, a dict or list as JSON.

    A repeated header is given as two pairs.
    """
    if type(data) is not bytes:
        if is_json(data):
            pairs = list(headers.items() if isinstance(headers, Mapping) else headers or ())
            if not has_content_type(name for name, _ in pairs):
                pairs = [*JSON_HEADERS.items(), *pairs]
            data, headers = json_bytes(data), pairs
        else:
            data = payload_bytes("a message", data)
    return data, encode_headers(headers) if headers else EMPTY_HEADERS


async def publish(
    connection: Connection,
    subject: str,
    data: Payload = b"",
    headers: HeaderItems | None = None,
    reply: str | None = None,
) -> None:
    """Send a message to the current subscribers: at most once, in order for each connection.

    Returns when the message is handed to the connection, not when it is received; `flush` waits
    for the server. Waits while the socket's buffer is full. While disconnected, messages are kept
    in the connection's bounded buffer; when that is full, ConnectError is raised.
    """
    payload, block = body_of(data, headers)
    connection.publish(
        subject_bytes(subject), payload, subject_bytes(reply) if reply else b"", block
    )
    if connection.congested:
        await connection.writable()
    elif not connection.buffered_bytes:
        # A full buffer was just sent: a loop that only publishes must yield to other tasks.
        await asyncio.sleep(0)


class Message:
    """A message that arrived on a subject; it is not redelivered."""

    __slots__ = ("_block", "_connection", "_headers", "_reply", "_subject", "data")

    def __init__(
        self, connection: Connection, subject: bytes, reply: bytes, headers: bytes, data: bytes
    ) -> None:
        self._connection = connection
        self._subject = subject
        self._reply = reply
        self._block = headers
        self._headers: dict[str, str] | None = None
        self.data = data

    @property
    def subject(self) -> str:
        """The subject it was published to; for an answer, the subject of the request."""
        return self._subject.decode("utf-8", "surrogateescape")

    @property
    def reply(self) -> str | None:
        """Where the sender waits for an answer; None if it does not."""
        return self._reply.decode("utf-8", "surrogateescape") if self._reply else None

    @property
    def headers(self) -> MappingProxyType[str, str]:
        """Headers by name; for a repeated name the first."""
        if self._headers is None:
            self._headers = parse_headers(self._block) if self._block else {}
        return MappingProxyType(self._headers)

    @property
    def header_items(self) -> list[tuple[str, str]]:
        """All headers in their order, repeated ones included."""
        return parse_header_items(self._block) if self._block else []

    @property
    def block(self) -> bytes:
        """Internal: the headers as they arrived."""
        return self._block

    @property
    def text(self) -> str:
        """The payload as text; bytes that are not UTF-8 raise UnicodeDecodeError."""
        return self.data.decode()

    def json(self) -> Any:
        """The payload, read as JSON; NotJson if it is none."""
        return read_json(self.data, lambda: f"message on '{self.subject}'")

    @property
    def size(self) -> int:
        """Bytes of payload and headers."""
        return len(self.data) + len(self._block)

    @property
    def service_error(self) -> ServiceError | None:
        """The error a service answered with; None if this is not such an answer."""
        if _ERROR_MARK not in self._block:
            return None
        headers = self.headers
        code = headers.get(ERROR_CODE_HEADER)
        description = headers.get(ERROR_HEADER)
        if code is None and description is None:
            return None
        return ServiceError(self.subject, code or "", description or "")

    def respond(self, data: Payload = b"", headers: HeaderItems | None = None) -> None:
        """Answer the sender, at most once; a message that expects no answer raises ConfigError."""
        if not self._reply:
            raise ConfigError(
                f"the message on '{self.subject}' expects no answer: it was published, "
                f"not requested. Check `message.reply` first"
            )
        payload, block = body_of(data, headers)
        self._connection.publish(self._reply, payload, headers=block)

    def respond_error(self, code: int, description: str, data: Payload = b"") -> None:
        """Answer with a standard NATS service error, which `request` raises as ServiceError.

        `code` is a number such as 400; `description` is one line of text.
        """
        line = " ".join(description.split())
        self.respond(data, {ERROR_HEADER: line, ERROR_CODE_HEADER: str(int(code))})

    def __repr__(self) -> str:
        awaits = f", reply={self.reply!r}" if self._reply else ""
        return f"Message({self.subject!r}, {len(self.data):,} bytes{awaits})"
