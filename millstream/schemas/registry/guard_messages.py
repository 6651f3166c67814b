"""What a guard makes of a message: checked against the topic's schema, ready to be stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from millstream.errors import ApiError, ConfigError, SchemaNotFound
from millstream.events.classify import NULL_HEADER, Kind, check_whole, kind_of
from millstream.events.encoding import TopicShape
from millstream.events.event import ID_HEADER, SCHEMA_HEADER, TIME_HEADER
from millstream.events.fence import EXPECTED_HEADER
from millstream.events.packs.pack import decode
from millstream.events.schedule import RULE_HEADER, TARGET_HEADER, TTL_HEADER
from millstream.events.subject import key_of_token
from millstream.guarded import ENTRANCE, INSTANCE, OWN_TOKEN, guarded_topic
from millstream.messaging import Message, NewEvent, PublishOptions, TopicInfo
from millstream.schemas.registry.binding import TypedValues, WrittenVersion
from millstream.schemas.registry.records import TopicSchemas
from millstream.schemas.registry.registry import Registry
from millstream.settings import parse_duration
from millstream.wire.message import OutgoingMessage
from millstream.wire.protocol import unique_token

__all__ = ["Entrance"]

EXPECTED_STREAM: Final = "Nats-Expected-Stream"
# Added by the server to what comes from a user with an account of its own: who it is.
REQUEST_INFO: Final = "Nats-Request-Info"
_WRONG_STREAM: Final = 10060  # the server's own number
_DIGITS_MAX: Final = 19  # times and sequences have 64 bits
# Headers of the server that a message may have that is stored as it is. Not roll-ups, which remove
# other events, and not markers, which would hide the payload from readers.
_PASSED: Final = frozenset(
    {
        *(ID_HEADER, "Nats-TTL", EXPECTED_STREAM, EXPECTED_HEADER),
        *("Nats-Expected-Last-Sequence", "Nats-Expected-Last-Msg-Id"),
        *(RULE_HEADER, TARGET_HEADER, TTL_HEADER),
        *("Nats-Batch-Id", "Nats-Batch-Sequence", "Nats-Batch-Commit"),
    }
)


class Entrance:
    """Checks the messages for one guarded topic."""

    def __init__(
        self, info: TopicInfo, record: TopicSchemas, registry: Registry, guard: str
    ) -> None:
        self.record = record  # replaced when a version is registered
        self.token = guarded_topic(f"{info.prefix}.".encode()) or ""
        self.subject = f"{ENTRANCE}.{self.token}"
        self._registry = registry
        self._settings = info.settings
        self._streams = [part.stream for part in info.partitions]
        self._prefix = info.prefix or ""
        self._prefixes = [part.prefix or "" for part in info.partitions]
        self._shape = TopicShape(info.name, self._prefixes)
        # Where messages arrive that are stored as they are.
        self._own = (f"{self.subject}.{OWN_TOKEN}.", f"{INSTANCE}.{guard}.{self.token}.")
        self._loaded: tuple[TopicSchemas, TypedValues] | None = None

    async def check(self, message: Message) -> OutgoingMessage:
        """What to store; raises the reason if the message must not be stored."""
        for start in self._own:
            if message.subject.startswith(start):
                return await self._as_it_is(message, message.subject[len(start) :])
        return await self._plain(message)

    async def version(self, schema_id: str | None) -> tuple[str, WrittenVersion]:
        """A version of the topic's schema; None: the latest."""
        record = self.record
        wanted = str(record.latest.id) if schema_id is None else schema_id
        if wanted not in {str(version.id) for version in record.versions}:
            raise SchemaNotFound(
                f"topic '{record.topic}' has no version with schema id {wanted!r:.40}"
            )
        if self._loaded is None or self._loaded[0] is not record:
            schemas = await self._registry.schemas_of(record)
            self._loaded = record, TypedValues(record, schemas, self._registry.schema)
        return wanted, self._loaded[1].written(wanted)

    # -- plain messages -------------------------------------------------------------------

    async def _plain(self, message: Message) -> OutgoingMessage:
        """A message of any client: the guard chooses partition, subject and headers."""
        headers = dict(message.headers)
        headers.pop(REQUEST_INFO, None)
        expected = headers.pop(EXPECTED_STREAM, None)
        if expected not in (None, *self._streams):
            raise ApiError(400, _WRONG_STREAM, f"expected stream {expected!r} does not match")
        schema_id, written = await self.version(headers.pop(SCHEMA_HEADER, None))
        null = headers.pop(NULL_HEADER, None) is not None
        event_id = headers.pop(ID_HEADER, None) or unique_token(20)
        timestamp = _number(headers, TIME_HEADER, "nanoseconds since 1970")
        options = _options(headers)
        if options is not None:
            self._settings.check_options(options)
        for name in headers:
            if name.lower().startswith(("nats-", "mill-")):
                raise ConfigError(f"header {name!r}: not supported by the guard")
        if not null:
            written.check(message.data)
        key = key_in(message.subject, self.subject)
        value = None if null else message.data
        event = NewEvent(value, key, headers or None, timestamp, event_id, options)
        _, subject, block = self._shape.encode(event, event_id, None if null else schema_id)
        return OutgoingMessage(subject, block, value or b"")

    # -- messages as they are stored ------------------------------------------------------

    async def _as_it_is(self, message: Message, rest: str) -> OutgoingMessage:
        headers = _checked_names(message)
        subject = f"{self._prefix}.{rest}"
        stored_as = subject
        if RULE_HEADER in headers:
            if not headers[RULE_HEADER].startswith("@at "):
                raise ConfigError(f"header {RULE_HEADER}: a guard supports '@at' and a time only")
            stored_as = headers.get(TARGET_HEADER, "")
        elif TARGET_HEADER in headers:
            raise ConfigError(f"header {TARGET_HEADER}: given without {RULE_HEADER}")
        start = self._start_of(subject)
        if self._start_of(stored_as) != start:
            raise ConfigError(f"header {TARGET_HEADER}: {stored_as!r:.80} is another partition")
        block = _without_request_info(message.block)
        for text in (subject, stored_as):
            try:
                check_whole(text.encode(), block, len(start))
            except ValueError as error:
                raise ConfigError(f"the message is {error}") from error
        # A scheduled message is read twice: as it is stored now, and as it is stored when due.
        kind, due = (kind_of(text.encode(), block, len(start)) for text in (subject, stored_as))
        if kind.is_plain and EXPECTED_HEADER in headers:
            expected = _number(dict(headers), EXPECTED_HEADER, "a sequence number")
            self._settings.check_options(PublishOptions(expected_last=expected))
        for each in {kind, due}:
            await self._check_payload(each, headers, message.data)
        return OutgoingMessage(subject.encode(), block, message.data)

    def _start_of(self, subject: str) -> str:
        """What precedes the key in a subject of the topic."""
        for prefix in self._prefixes:
            if subject.startswith(f"{prefix}."):
                return f"{prefix}."
        raise ConfigError(f"'{subject:.80}' is no subject of topic '{self.record.topic}'")

    async def _check_payload(self, kind: Kind, headers: Mapping[str, str], data: bytes) -> None:
        if kind is Kind.OWN:
            return  # no reader takes it for an event
        if kind.is_pack:
            pack = decode(headers, data)
            if pack.count:
                if not self._settings.takes_packs:
                    raise ConfigError(f"topic '{self.record.topic}' takes no packs")
                _, written = await self.version(_schema_id(pack.schema_id))
                written.check_pack(pack)
            return
        if kind in (Kind.DELETION, Kind.REDRIVEN_DELETION):
            if data:
                raise ConfigError(f"header {NULL_HEADER}: an event without a value has a payload")
            return
        _, written = await self.version(_schema_id(headers.get(SCHEMA_HEADER)))
        written.check(data)


def _schema_id(given: str | None) -> str:
    if given is None:
        raise ConfigError(f"header {SCHEMA_HEADER} is missing: which version is it?")
    return given


def _checked_names(message: Message) -> dict[str, str]:
    """The headers, if each of Millstream's and of the server's is there once and allowed."""
    seen: set[str] = set()
    for name, _ in message.header_items:
        low = name.lower()
        if not low.startswith(("nats-", "mill-")):
            continue
        if low in seen:
            raise ConfigError(f"header {name!r} is given twice")
        seen.add(low)
        if low.startswith("nats-") and name not in _PASSED and name != REQUEST_INFO:
            raise ConfigError(f"header {name!r}: not supported by the guard")
    return dict(message.headers)


def _without_request_info(block: bytes) -> bytes:
    start = block.find(f"\r\n{REQUEST_INFO}:".encode())
    return block if start < 0 else block[:start] + block[block.index(b"\r\n", start + 2) :]


def _options(headers: dict[str, str]) -> PublishOptions | None:
    """The options in JetStream headers, which are removed."""
    expected = _number(headers, EXPECTED_HEADER, "a sequence number")
    ttl = headers.pop("Nats-TTL", None)
    if ttl is None and expected is None:
        return None
    seconds = None
    if ttl is not None:  # the server's own header, in which a number is seconds
        seconds = parse_duration(float(ttl) if ttl.isascii() and ttl.isdigit() else ttl)
    return PublishOptions(ttl=seconds, expected_last=expected, timeout=None)


def _number(headers: dict[str, str], name: str, what: str) -> int | None:
    """The whole number in a header, which is removed; ConfigError if it is something else."""
    text = headers.pop(name, None)
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > _DIGITS_MAX:
        raise ConfigError(f"header {name} {text!r:.40}: expected {what}")
    return int(text)


def key_in(subject: str, entrance: str) -> str | None:
    """The key in a subject: the tokens after the entrance, escaped as in topics."""
    if subject == entrance:
        return None
    tokens = subject[len(entrance) + 1 :].split(".")
    if len(tokens) == 1:
        return key_of_token(tokens[0].encode())
    return ".".join(key_of_token(token.encode()) or "" for token in tokens)
