"""One dead letter: read from its message, changed, and turned back into an event. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from millstream.errors import ConfigError, DataLoss, Unfit
from millstream.events import fence
from millstream.events.classify import (
    FOR_HEADER,
    NULL_HEADER,
    PACK_HEADER,
    check_whole,
    holds_pack,
)
from millstream.events.encoding import check_headers, value_bytes
from millstream.events.escapes import header_pairs, unescaped
from millstream.events.event import (
    ID_HEADER,
    KEY_HEADER,
    OWN_ID_HEADER,
    RESERVED_PREFIXES,
    SCHEMA_HEADER,
    TIME_HEADER,
    Partition,
    Unreadable,
    datetime_of,
)
from millstream.events.json_value import as_json, is_json, read_json
from millstream.events.subject import (
    KEY_BYTES_MAX,
    KEYLESS_TOKEN,
    PACK_TOKEN,
    copies_prefix,
    key_bytes,
    key_of_token,
    key_token,
    stored_key_token,
)
from millstream.events.undecodable import DECODE_FAILURES
from millstream.events.unpack import open_pack
from millstream.events.value_type import ValueType
from millstream.messaging.dead_letters.store import (
    ATTEMPTS_HEADER,
    BROKEN_PACK_HEADER,
    CAUSE_HEADER,
    DAMAGED,
    INDEX_HEADER,
    OFFSET_HEADER,
    PARTITION_HEADER,
    SUBJECT_HEADER,
    SUBSCRIPTION_HEADER,
    TOPIC_HEADER,
    WHEN_HEADER,
)
from millstream.wire.api import parse_ack_address
from millstream.wire.message import OutgoingMessage, RawMessage
from millstream.wire.protocol import encode_headers, parse_header_items, parse_headers

__all__ = [
    "DeadLetter",
    "DeadLetterFilter",
    "edited_message",
    "read_letter",
    "redriven_message",
    "redriven_subject",
]

# The position that an edited letter keeps in the order of the queue.
ORDER_HEADER: Final = "Mill-Dead-Order"
# How many times the event was redriven before.
REDRIVES_HEADER: Final = "Mill-Redrives"
# Redriven events of packs, for all: a token no writer's name can start with, so no fence is hit.
REDRIVE_TOKEN: Final = "_redrive"
# Headers of a letter that its event does not get back: a writer's fence that a broken pack had,
# and those that are written again.
_LEFT_OUT: Final = frozenset(
    {
        fence.WRITER_HEADER,
        fence.EPOCH_HEADER,
        fence.OWNER_HEADER,
        fence.NUMBER_HEADER,
        fence.PREVIOUS_HEADER,
        fence.POSITION_HEADER,
        fence.NOTE_HEADER,
        fence.PART_HEADER,
        fence.PARTS_HEADER,
        TIME_HEADER,
        REDRIVES_HEADER,
        FOR_HEADER,
        OWN_ID_HEADER,
        KEY_HEADER,
    }
)
_LEFT_OUT_PREFIXES: Final = ("Nats-", "Mill-Dead-")
_COUNT: Final = re.compile("[0-9]{1,9}")
_BROKEN_PACK_LINE: Final = f"\r\n{BROKEN_PACK_HEADER}: ".encode()


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An event that a subscription gave up on, with the reason and its origin."""

    offset: int  # in the dead-letter topic; an edited letter has a new one
    order: int  # its position in the queue: the offset it had first
    cause: str
    attempts: int
    when: datetime  # it was dead-lettered
    topic: str  # the original one, like the following
    partition: int
    origin_offset: int
    origin_index: int  # index in its pack; 0 for a plain event
    subject: str
    subscription: str
    key: str | None
    value: Any  # bytes, or what the schema makes of them; None when the event had none
    headers: Mapping[str, str]  # the producer's own
    timestamp_ns: int
    id: str | None
    redrives: int  # how many times it was redriven before
    raw: RawMessage = field(repr=False, compare=False)

    @property
    def edited(self) -> bool:
        """Whether it was changed since it was dead-lettered."""
        return self.order != self.offset

    def json(self) -> Any:
        """The value, read as JSON; NotJson if it is none."""
        return read_json(self.value, lambda: f"dead letter {self.order} of '{self.topic}'")

    @property
    def timestamp(self) -> datetime:
        """Event time in UTC."""
        return datetime_of(self.timestamp_ns)

    @property
    def size(self) -> int:
        """Bytes of the stored value."""
        return len(self.raw.payload)

    @property
    def stored_ns(self) -> int:
        """When this version of the letter was stored."""
        return parse_ack_address(self.raw.reply).timestamp_ns


@dataclass(frozen=True, slots=True)
class DeadLetterFilter:
    """Selects dead letters; all by default. A letter must match everything given."""

    keys: tuple[str | None, ...] = ()  # None: events without a key
    cause: str | None = None  # a part of the cause, ignoring case
    subscription: str | None = None
    first: int | None = None  # offsets in the dead-letter topic, both inclusive
    last: int | None = None
    limit: int | None = None  # at most this many, the oldest first

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", tuple(self.keys))
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit {self.limit}: ask for at least one dead letter")
        if self.first is not None and self.last is not None and self.first > self.last:
            raise ConfigError(f"no offset is between {self.first} and {self.last}")

    def takes(self, letter: DeadLetter) -> bool:
        """Whether a letter is selected; the limit is not checked."""
        return (
            (not self.keys or letter.key in self.keys)
            and (self.cause is None or self.cause.lower() in letter.cause.lower())
            and (self.subscription is None or self.subscription == letter.subscription)
            and (self.first is None or letter.offset >= self.first)
            and (self.last is None or letter.offset <= self.last)
        )


def read_letter(raw: RawMessage, value_type: ValueType | None = None) -> DeadLetter:
    """The dead letter in a message; DataLoss when its headers are incomplete."""
    pairs = parse_header_items(raw.headers)
    found: dict[str, str] = {}
    for name, text in pairs:
        found.setdefault(name, text)
    offset = parse_ack_address(raw.reply).sequence
    value, headers = _content(raw, found, value_type)
    try:
        check_whole(raw.subject, raw.headers, 0)
        token = found.get(KEY_HEADER)
        return DeadLetter(
            offset,
            int(found.get(ORDER_HEADER, offset)),
            found[CAUSE_HEADER],
            int(found[ATTEMPTS_HEADER]),
            datetime.fromisoformat(found[WHEN_HEADER]),
            found[TOPIC_HEADER],
            int(found[PARTITION_HEADER]),
            int(found[OFFSET_HEADER]),
            int(found[INDEX_HEADER]),
            found[SUBJECT_HEADER],
            found[SUBSCRIPTION_HEADER],
            None if token is None else key_of_token(token.encode()),
            value,
            headers,
            int(found[TIME_HEADER]),
            found.get(OWN_ID_HEADER),
            _redrives(found.get(REDRIVES_HEADER, "0")),
            raw,
        )
    except (KeyError, ValueError) as error:
        raise DataLoss(
            f"the message at offset {offset} of the dead-letter topic is not a valid dead letter "
            f"({error}): it was damaged, or another client published there. Read the topic and "
            f"delete the message"
        ) from error


def _redrives(text: str) -> int:
    """How often an event was redriven; a number that another client made up counts as none."""
    return int(text) if _COUNT.fullmatch(text) else 0


def _content(
    raw: RawMessage, found: Mapping[str, str], value_type: ValueType | None
) -> tuple[Any, dict[str, str]]:
    """Value and headers; a value that cannot be decoded is returned as bytes."""
    own = {name: text for name, text in found.items() if not name.startswith(RESERVED_PREFIXES)}
    try:
        if holds_pack(raw.headers):
            message = open_pack(Partition("", "", 0, None), raw)
            pack = message.pack
            values = value_type.values(pack) if value_type else pack.values()
            value, headers = next(zip(values, pack.headers(), strict=True), (None, None))
            if isinstance(value, Unreadable):
                value = pack.values()[0]
            return value, {unescaped(name): _text(data) for name, data in headers or ()}
        if NULL_HEADER in found:
            return None, own
        if value_type is not None and BROKEN_PACK_HEADER not in found:
            return value_type.decode(raw.payload, found.get(SCHEMA_HEADER)), own
    except DECODE_FAILURES:
        return raw.payload, own
    return raw.payload, own


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


# -- editing ------------------------------------------------------------------------------


def edited_message(
    letter: DeadLetter, changes: Mapping[str, Any], value_type: ValueType | None
) -> OutgoingMessage:
    """The letter with another `value` or other `headers`; its origin is kept."""
    if is_json(changes.get("value")) and SCHEMA_HEADER not in parse_headers(letter.raw.headers):
        value, headers = as_json(changes["value"], changes.get("headers", letter.headers))
        changes = {"value": value, "headers": headers}
    if "headers" in changes:
        check_headers(changes["headers"])
    kept = [
        (name, text)
        for name, text in parse_header_items(letter.raw.headers)
        if name.startswith("Mill-") and name != ORDER_HEADER
    ]
    kept.append((ORDER_HEADER, str(letter.order)))
    if holds_pack(letter.raw.headers):
        own, payload = _edited_pack(letter, changes)
        names = {name for name, _ in own}
        kept = [(name, text) for name, text in kept if name not in names]
    else:
        own = list(changes.get("headers", letter.headers).items())
        payload = letter.raw.payload
        if "value" in changes:
            kept, payload = _edited_value(kept, changes["value"], value_type)
    block = encode_headers([*kept, *own], foreign=True)
    return OutgoingMessage(letter.raw.subject, block, payload)


def _edited_value(
    kept: list[tuple[str, str]], value: Any, value_type: ValueType | None
) -> tuple[list[tuple[str, str]], bytes]:
    schema = dict(kept).get(SCHEMA_HEADER)
    kept = [
        pair for pair in kept if pair[0] not in (NULL_HEADER, SCHEMA_HEADER) and pair != DAMAGED
    ]
    if value is None:
        return [*kept, (NULL_HEADER, "1")], b""
    if value_type is not None:
        return [*kept, (SCHEMA_HEADER, value_type.schema_id)], value_type.encode(value)
    if schema is not None:  # bytes in the same format as before
        kept = [*kept, (SCHEMA_HEADER, schema)]
    return kept, value_bytes(value)


def _edited_pack(
    letter: DeadLetter, changes: Mapping[str, Any]
) -> tuple[list[tuple[str, str]], bytes]:
    """The one-row pack with another value or other headers, in the same types."""
    import pyarrow as pa

    from millstream.events.packs.pack import encode, envelope

    pack = open_pack(Partition("", "", 0, None), letter.raw).pack
    columns = {name: pack.column(name) for name in ("key", "timestamp", "headers", "id", "value")}
    if "value" in changes:
        value = changes["value"]
        if isinstance(value, str) and not pack.typed:
            value = value.encode()
        kind = columns["value"].type
        try:
            columns["value"] = pa.array([value], kind)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise Unfit("", str(kind), f"{value!r} ({error})") from error
    if "headers" in changes:
        pairs = header_pairs(changes["headers"])
        columns["headers"] = pa.array([pairs or None], columns["headers"].type)
    value_column = columns.pop("value")
    new = encode(envelope(value_column, **columns), schema_id=pack.schema_id)
    return list(new.headers.items()), bytes(memoryview(new.payload))


# -- redriving ----------------------------------------------------------------------------


def redriven_message(
    letter: DeadLetter, prefix: str | None, event_id: str, to_all: bool
) -> OutgoingMessage:
    """The event of a dead letter, to be stored in its topic again.

    `prefix` is that of its partition; None: a foreign stream, where it keeps its subject.
    """
    pairs = [
        (ID_HEADER, event_id),
        (TIME_HEADER, str(letter.timestamp_ns)),
        (REDRIVES_HEADER, str(letter.redrives + 1)),
    ]
    if not to_all:
        pairs.append((FOR_HEADER, letter.subscription))
    if letter.id is not None:
        pairs.append((OWN_ID_HEADER, letter.id))
    if not to_all and prefix is not None and letter.key is not None and not _is_pack(letter):
        pairs.append((KEY_HEADER, stored_key_token(letter.key)))  # its subject does not carry it
    for name, text in parse_header_items(letter.raw.headers):
        if name == BROKEN_PACK_HEADER:
            name = PACK_HEADER
        if name not in _LEFT_OUT and not name.startswith(_LEFT_OUT_PREFIXES):
            pairs.append((name, text))
    subject = redriven_subject(letter, prefix, to_all)
    block = encode_headers(pairs, foreign=True)
    return OutgoingMessage(subject.encode("utf-8", "surrogateescape"), block, letter.raw.payload)


def redriven_subject(letter: DeadLetter, prefix: str | None, to_all: bool) -> str:
    """Where the event of a dead letter is stored again."""
    if prefix is None:
        return letter.subject
    pack = _is_pack(letter)
    if not to_all:
        token = PACK_TOKEN if pack else _copy_token(letter.key)
        return f"{copies_prefix(prefix, letter.subscription)}.{token}"
    return f"{prefix}.{PACK_TOKEN}.{REDRIVE_TOKEN}" if pack else f"{prefix}.{key_token(letter.key)}"


def _copy_token(key: str | None) -> str:
    """Keeps the copies of different keys apart; a header has the key itself."""
    too_long = key is not None and len(key_bytes(key)) > KEY_BYTES_MAX
    return KEYLESS_TOKEN if too_long else key_token(key)


def _is_pack(letter: DeadLetter) -> bool:
    """Whether its message is a pack, readable or not."""
    return holds_pack(letter.raw.headers) or _BROKEN_PACK_LINE in letter.raw.headers
