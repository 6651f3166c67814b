"""The guard: plain NATS messages from any client, checked before they are stored.

Clients publish to `ingress.<topic>.<key>` (or `ingress.<topic>` without a key) as they would to a
JetStream stream. The guard checks the payload against the topic's schema, stores it and answers
like JetStream itself: `{"stream": ..., "seq": ...}`, or `{"error": {...}}` with the reason. So
every JetStream client's publish call works, its retries and message ids included.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any, Final, Self

import msgspec

from millstream.closing import AsyncClosing
from millstream.errors import (
    ApiError,
    ConfigError,
    MillstreamError,
    PayloadTooLarge,
    SchemaError,
    SchemaNotFound,
)
from millstream.events.classify import NULL_HEADER
from millstream.events.event import SCHEMA_HEADER
from millstream.events.subject import check_subject, key_of_token
from millstream.messaging import (
    Client,
    Message,
    NewEvent,
    PublishOptions,
    Receipt,
    Subscriber,
    SubscriberSettings,
    Topic,
    TopicInfo,
)
from millstream.messaging.topics.lookup import open_topic
from millstream.schemas.registry.binding import RawValues, TypedValues
from millstream.schemas.registry.records import TABLE, TopicSchemas, read_record, record_key
from millstream.schemas.registry.registry import Registry
from millstream.settings import parse_duration
from millstream.tables import Table

__all__ = ["Guard", "GuardSettings", "Refused"]

_log = logging.getLogger("millstream.schemas")

# The guard's own error numbers, outside those of the server (10000 and up).
ERR_UNFIT: Final = 40001  # the payload does not fit the schema
ERR_HEADER: Final = 40002  # a header asks for something that the entrance does not support
ERR_NOT_STORED: Final = 40003  # not stored, or unknown; publish it again with its id
ERR_BUSY: Final = 40004  # too many messages at the moment; publish it again
EXPECTED_STREAM: Final = "Nats-Expected-Stream"
EXPECTED_SEQUENCE: Final = "Nats-Expected-Last-Subject-Sequence"
# Refusals that are logged: the first show what is wrong, more would fill the disk.
LOGGED_MAX: Final = 100
_DIGITS_MAX: Final = 19  # times and sequences have 64 bits


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """Where a guard listens and how many messages it accepts at the same time."""

    subject: str | None = None  # None: ingress.<topic>
    max_in_flight: int = 1024  # events being stored; more wait in `messages_max`
    messages_max: int = 65_536  # waiting messages; beyond this the answer is an error

    def __post_init__(self) -> None:
        if self.subject is not None:
            check_subject(self.subject, wildcards=False)
        if self.max_in_flight < 1 or self.messages_max < 1:
            raise ConfigError("max_in_flight and messages_max must be 1 or more")


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a message was not stored, in the server's error format."""

    code: int
    err_code: int
    description: str


class _Checked(RawValues):
    """Payloads that are encoded already: checked, then stored unchanged."""

    schema_id = ""  # of the version

    def __init__(self, topic: str, values: TypedValues, schema_id: str) -> None:
        super().__init__(topic)
        self._written = values.written(schema_id)
        self.schema_id = schema_id

    def encode(self, value: object) -> bytes:
        """The payload, if it is a value of the version."""
        if not isinstance(value, bytes):
            raise ConfigError(f"a guard stores bytes, found {type(value).__name__}")
        self._written.check(value)
        return value


class Guard(AsyncClosing):
    """Stores what fits a topic's schema and refuses the rest, for clients of any language.

    Stored at least once; with `Nats-Msg-Id` once per id within the topic's duplicate window.
    Messages of one client and key keep their order. Several guards of a topic share the work.
    """

    def __init__(self, client: Client, topic: str, settings: GuardSettings | None = None) -> None:
        self.topic = topic
        self.settings = settings or GuardSettings()
        self.subject = self.settings.subject or f"ingress.{topic}"
        self.stored = 0
        self.refused = 0
        self._client = client
        self._registry = Registry(client)
        self._record: TopicSchemas | None = None
        self._info: TopicInfo | None = None
        self.streams: list[str] = []  # of the topic, by partition
        self._entrances: dict[str, _Entrance] = {}
        self._subscribers: list[Subscriber] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._pending: set[asyncio.Future[Receipt]] = set()

    # -- life -----------------------------------------------------------------------------

    async def _enter(self) -> None:
        await self.open()

    async def _leave(self, error: BaseException | None) -> None:
        await self.close()

    async def open(self) -> Self:
        """Start listening: messages published to its subject are checked and stored."""
        self._info = await open_topic(self._client.jetstream, self.topic)
        self.streams = [part.stream for part in self._info.partitions]
        if not self._info.settings.guarded:
            raise ConfigError(
                f"topic '{self.topic}' is not guarded. Declare it with guarded=True, or "
                f"edit_topic('{self.topic}', guarded=True)"
            )
        self._record = await self._registry.topic(self.topic)
        await self._check_free()
        await self._entrance(None)
        self._tasks.append(asyncio.create_task(self._follow_versions()))
        settings = SubscriberSettings(
            queue=f"mill-guard-{self.topic}",
            messages_max=self.settings.messages_max,
            on_drop=self._dropped,
        )
        try:
            for subject in (self.subject, f"{self.subject}.>"):
                subscriber = await self._client.subscribe(subject, settings)
                self._subscribers.append(subscriber)
                self._tasks.append(asyncio.create_task(self._serve(subscriber)))
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """Accept no more messages, and return when all accepted ones are answered."""
        for subscriber in self._subscribers:
            await subscriber.drain()
        for task in self._tasks[:1]:
            task.cancel()  # the task that follows versions; the others end with their subscriber
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while self._pending:
            await asyncio.wait(set(self._pending))
        await self._client.flush()

    async def run(self) -> None:
        """Serve until cancelled; an error that ends the guard is raised."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def _check_free(self) -> None:
        async for info in self._client.jetstream.streams(f"{self.subject}.>"):
            raise ConfigError(
                f"the stream '{info.config['name']}' stores what is published to "
                f"'{self.subject}.>', so it would bypass the guard. Choose another subject with "
                f"GuardSettings(subject=...)"
            )

    async def _follow_versions(self) -> None:
        """Load each new version of the schema as soon as it is registered."""
        table = Table(await self._client.topic(TABLE))
        async for change in table.changes([record_key(self.topic)]):
            if change.value is not None:
                self._record = read_record(change.value)

    # -- messages -------------------------------------------------------------------------

    async def _serve(self, subscriber: Subscriber) -> None:
        async for message in subscriber:
            try:
                entrance = await self._entrance(message.headers.get(SCHEMA_HEADER))
                await entrance.take(message)
            except MillstreamError as error:
                self._refuse(message, refusal_of(error))
            except Exception as error:  # a bug must not stop the guard for the other clients
                _log.exception("guard of '%s' failed on '%s'", self.topic, message.subject)
                self._refuse(message, refusal_of(error))

    async def _entrance(self, schema_id: str | None) -> _Entrance:
        record = self._record
        if record is None or self._info is None:
            raise ConfigError("open the guard first: async with mill.guard(...)")
        wanted = str(record.latest.id) if schema_id is None else schema_id
        known = self._entrances.get(wanted)
        if known is not None:
            return known
        if wanted not in {str(version.id) for version in record.versions}:
            raise SchemaNotFound(
                f"topic '{self.topic}' has no version with schema id {wanted!r:.40}"
            )
        schemas = await self._registry.schemas_of(record)
        values = TypedValues(record, schemas, self._registry.schema)
        topic = await self._client.open_as(self._info, _Checked(self.topic, values, wanted))
        self._entrances[wanted] = _Entrance(self, topic)
        return self._entrances[wanted]

    def _answer(self, message: Message, receipt: asyncio.Future[Receipt]) -> None:
        self._pending.discard(receipt)
        if receipt.cancelled():
            return
        error = receipt.exception()
        if error is not None:
            self._refuse(message, refusal_of(error))
            return
        self.stored += 1
        if message.reply is None:
            return
        stored = receipt.result()
        ack: dict[str, Any] = {"stream": self.streams[stored.partition], "seq": stored.offset}
        if stored.duplicate:
            ack["duplicate"] = True
        if self._client.jetstream.domain:
            ack["domain"] = self._client.jetstream.domain
        message.respond(msgspec.json.encode(ack))

    def _refuse(self, message: Message, why: Refused) -> None:
        self.refused += 1
        if self.refused <= LOGGED_MAX:
            _log.warning(
                "guard of '%s' refused a message on '%s': %s",
                *(self.topic, message.subject, why.description),
            )
        if message.reply is not None and not self._client.connection.closed:
            answer = {"error": why, "stream": self.topic, "seq": 0}
            message.respond(msgspec.json.encode(answer))

    def _dropped(self, message: Message) -> None:
        text = f"the guard of '{self.topic}' has {self.settings.messages_max:,} messages waiting"
        self._refuse(message, Refused(503, ERR_BUSY, text))


class _Entrance:
    """The publisher for one version of the topic."""

    def __init__(self, guard: Guard, topic: Topic) -> None:
        self._guard = guard
        self._producer = topic.event_producer(guard.settings.max_in_flight)

    async def take(self, message: Message) -> None:
        """Check a message and start to store it; the sender is answered when it is stored."""
        event = self._event(message)
        receipt = await self._producer.send(
            event.value,
            event.key,
            headers=event.headers,
            timestamp=event.timestamp,
            id=event.id,
            options=event.options,
        )
        self._guard._pending.add(receipt)
        receipt.add_done_callback(lambda done: self._guard._answer(message, done))

    def _event(self, message: Message) -> NewEvent:
        headers = dict(message.headers)
        expected = headers.pop(EXPECTED_STREAM, None)
        if expected not in (None, *self._guard.streams):
            raise ApiError(400, 10060, f"expected stream {expected!r} does not match")
        headers.pop(SCHEMA_HEADER, None)
        null = headers.pop(NULL_HEADER, None) is not None
        event_id = headers.pop("Nats-Msg-Id", None)
        timestamp = _number(headers, "Mill-Time", "nanoseconds since 1970")
        options = _options(headers)
        for name in headers:
            if name.startswith(("Nats-", "Mill-")):
                raise ConfigError(f"header {name!r}: not supported by the guard")
        key = _key(message.subject, self._guard.subject)
        value = None if null else message.data
        return NewEvent(value, key, headers or None, timestamp, event_id, options)


def _options(headers: dict[str, str]) -> PublishOptions | None:
    """The options in JetStream headers, which are removed."""
    expected = _number(headers, EXPECTED_SEQUENCE, "a sequence number")
    ttl = headers.pop("Nats-TTL", None)
    if ttl is None and expected is None:
        return None
    seconds = None if ttl is None else parse_duration(ttl)
    return PublishOptions(ttl=seconds, expected_last=expected, timeout=None)


def _number(headers: dict[str, str], name: str, what: str) -> int | None:
    """The whole number in a header, which is removed; ConfigError if it is something else."""
    text = headers.pop(name, None)
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > _DIGITS_MAX:
        raise ConfigError(f"header {name} {text!r:.40}: expected {what}")
    return int(text)


def _key(subject: str, entrance: str) -> str | None:
    """The key in a subject: the tokens after the entrance, escaped as in topics."""
    if subject == entrance:
        return None
    tokens = subject[len(entrance) + 1 :].split(".")
    if len(tokens) == 1:
        return key_of_token(tokens[0].encode())
    return ".".join(key_of_token(token.encode()) or "" for token in tokens)


def refusal_of(error: BaseException) -> Refused:
    """An error as the answer to a publish."""
    if isinstance(error, ApiError):
        return Refused(error.code or 400, error.err_code, error.description)
    if isinstance(error, SchemaError):
        return Refused(400, ERR_UNFIT, str(error))
    if isinstance(error, PayloadTooLarge):
        return Refused(400, 10054, str(error))
    if isinstance(error, ConfigError):
        return Refused(400, ERR_HEADER, str(error))
    return Refused(503, ERR_NOT_STORED, str(error) or type(error).__name__)
