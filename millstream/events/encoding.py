"""New events to subjects and header blocks. Pure; shared by all publishers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from millstream.errors import ConfigError
from millstream.events.classify import NULL_HEADER
from millstream.events.event import (
    ID_HEADER,
    RESERVED_PREFIXES,
    SCHEMA_HEADER,
    TIME_HEADER,
    NewEvent,
    PublishOptions,
    nanoseconds_of,
)
from millstream.events.fence import EXPECTED_HEADER
from millstream.events.json_value import payload_bytes
from millstream.events.schedule import SCHEDULE_TOKEN, TARGET_HEADER, TTL_HEADER, at_rule
from millstream.events.subject import key_token, not_a_key, partition_of
from millstream.wire.protocol import encode_headers

__all__ = [
    "HEADER_BYTES_MAX",
    "SCHEDULE_TOKEN",
    "Encoded",
    "TopicShape",
    "check_headers",
    "value_bytes",
]

# The server's limit for the header block of one message.
HEADER_BYTES_MAX: Final = 64 * 1024

# Routing a key costs more than looking it up; this many keys take a few megabytes.
KEYS_REMEMBERED_MAX: Final = 10_000

Encoded = tuple[int, bytes, bytes]  # partition, subject, header block


def value_bytes(value: Any) -> bytes:
    """The payload of an event in a topic without a schema; dicts and lists go through `as_json`."""
    advice = "Declare the topic with a schema, or convert it"
    return payload_bytes("a topic without a schema", value, advice)


def check_headers(headers: Mapping[str, str]) -> None:
    """Refuse names that belong to the server or to Millstream."""
    if not isinstance(headers, Mapping):
        raise ConfigError(f"headers are a dict of text, found {type(headers).__name__}")
    for name in headers:
        if isinstance(name, str) and name.startswith(RESERVED_PREFIXES):
            raise ConfigError(f"header {name!r}: names that start with Nats- or Mill- are reserved")


class TopicShape:
    """How a topic's events are spread over subjects and partitions."""

    __slots__ = ("_routes", "_turn", "partitions", "prefixes", "topic")

    def __init__(self, topic: str, prefixes: Sequence[str]) -> None:
        self.topic = topic
        self.partitions = len(prefixes)
        self.prefixes = list(prefixes)  # of the subjects of each partition
        self._turn = 0
        self._routes: dict[str | bytes, tuple[int, bytes]] = {}

    def route(self, key: str | bytes | None) -> tuple[int, bytes]:
        """Partition and subject of an event; events without a key take turns."""
        if key is not None:
            try:
                known = self._routes.get(key)
            except TypeError:  # a list, for example, cannot be looked up
                raise not_a_key(key) from None
            if known is not None:
                return known
            if len(self._routes) >= KEYS_REMEMBERED_MAX:
                self._routes.clear()
            found = self._routes[key] = self._route(key)
            return found
        return self._route(None)

    def _route(self, key: str | bytes | None) -> tuple[int, bytes]:
        if self.partitions == 1:
            partition = 0
        elif key is None:
            partition = self._turn
            self._turn = (partition + 1) % self.partitions
        else:
            partition = partition_of(key, self.partitions)
        return partition, f"{self.prefixes[partition]}.{key_token(key)}".encode()

    def subject_of(self, event: NewEvent, partition: int) -> str:
        """The subject under which an event is stored in a partition."""
        prefix, token = self.prefixes[partition], key_token(event.key)
        scheduled = event.options is not None and event.options.deliver_at is not None
        return f"{prefix}.{SCHEDULE_TOKEN}.{token}" if scheduled else f"{prefix}.{token}"

    def encode(self, event: NewEvent, event_id: str, schema_id: str | None) -> Encoded:
        """Partition, subject and header block of an event."""
        partition, subject = self.route(event.key)
        pairs: list[tuple[str, str]] = []
        if event.timestamp is not None:
            pairs.append((TIME_HEADER, str(nanoseconds_of(event.timestamp))))
        if schema_id is not None:
            pairs.append((SCHEMA_HEADER, schema_id))
        if event.value is None:
            pairs.append((NULL_HEADER, "1"))
        if event.headers is not None:
            check_headers(event.headers)
            pairs.extend(event.headers.items())
        if event.options is not None:
            subject = self._apply(event.options, partition, subject, event_id, pairs)
        if not pairs and event_id.isalnum():  # most events: there is nothing to check
            return partition, subject, f"NATS/1.0\r\n{ID_HEADER}: {event_id}\r\n\r\n".encode()
        # As packs do: an event that another client stored can be stored again.
        block = encode_headers([(ID_HEADER, event_id), *pairs], foreign=True)
        if len(block) > HEADER_BYTES_MAX:
            raise ConfigError(
                f"headers of {len(block):,} bytes: the server accepts {HEADER_BYTES_MAX:,}. "
                f"Put large data into the value"
            )
        return partition, subject, block

    def _apply(
        self,
        options: PublishOptions,
        partition: int,
        subject: bytes,
        event_id: str,
        pairs: list[tuple[str, str]],
    ) -> bytes:
        if options.ttl is not None:
            if options.ttl < 1:
                raise ConfigError(f"ttl {options.ttl!r}: the shortest is 1 second")
            # In a record of a schedule, Nats-TTL would remove the record before it is due.
            name = "Nats-TTL" if options.deliver_at is None else TTL_HEADER
            pairs.append((name, f"{int(options.ttl)}s"))
        if options.expected_last is not None:
            pairs.append((EXPECTED_HEADER, str(options.expected_last)))
        if options.deliver_at is None:
            return subject
        if options.expected_last is not None:
            raise ConfigError("deliver_at and expected_last cannot be combined")
        pairs.extend(at_rule(options.deliver_at).headers)
        pairs.append((TARGET_HEADER, subject.decode()))
        return f"{self.prefixes[partition]}.{SCHEDULE_TOKEN}.{key_token(event_id)}".encode()
