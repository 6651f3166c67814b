"""The guard: what is published to a guarded topic, checked before it is stored.

Nobody but the guard writes to the own subjects of a guarded topic (`guarded.py` has them).
Clients publish to its entrance as they would to a JetStream stream, and the guard checks the
payload against the topic's schema, stores it and answers like JetStream itself:
`{"stream": ..., "seq": ...}`, or `{"error": {...}}` with the reason. So every JetStream client's
publish call works, with its retries, message ids and expected sequences.

1. `ingress.<topic>` and `ingress.<topic>.<key>`: a plain message of any client. The guard chooses
   the partition and the subject.
2. `ingress.<topic>._as.<rest>`: a message as it is to be stored, of Millstream's own clients:
   single events, packs, fenced units, scheduled events. It is checked and stored unchanged.
3. `_ingress.<guard>.<topic>.<rest>`: the same for the messages of an atomic batch, which must all
   reach the same guard; `ingress.<topic>._batch` says which.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final, Self

import msgspec

from millstream.closing import AsyncClosing
from millstream.errors import (
    ApiError,
    ConfigError,
    MillstreamError,
    PackError,
    PayloadTooLarge,
    SchemaError,
    WrongSequence,
)
from millstream.guarded import BATCH_TOKEN, ENTRANCE, GUARDED_TOKEN, INSTANCE
from millstream.messaging import Client, Message, Subscriber, SubscriberSettings
from millstream.messaging.topics.lookup import open_topic
from millstream.schemas.registry.guard_messages import Entrance
from millstream.schemas.registry.records import TABLE, read_record, record_key
from millstream.schemas.registry.registry import Registry
from millstream.tables import Table
from millstream.wire.aio.publisher import StreamPublisher
from millstream.wire.api import ErrorCode, PubAck, Refusal
from millstream.wire.message import OutgoingMessage
from millstream.wire.protocol import hpub, unique_token

__all__ = ["Guard", "GuardSettings", "refusal_of"]

_log = logging.getLogger("millstream.schemas")

STORE_SECONDS: Final = 15.0
# For the answer to the last message of a batch; the client waits for this long as well.
BATCH_SECONDS: Final = 5.0
# Batches under way whose outcome is remembered; the server itself allows 1,000 at a time.
BATCHES_MAX: Final = 1000
# Refusals that are logged: the first show what is wrong, more would fill the disk.
LOGGED_MAX: Final = 100


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """How many messages a guard accepts at the same time."""

    max_in_flight: int = 1024  # messages being stored; more wait in `messages_max`
    messages_max: int = 65_536  # waiting messages; beyond this the answer is an error

    def __post_init__(self) -> None:
        if self.max_in_flight < 1 or self.messages_max < 1:
            raise ConfigError("max_in_flight and messages_max must be 1 or more")


class Guard(AsyncClosing):
    """Stores what fits a topic's schema and refuses the rest, for clients of any language.

    Stored at least once; with `Nats-Msg-Id` once per id within the topic's duplicate window, and
    exactly once by writers. Messages of one client and key keep their order. Several guards of a
    topic share the work; then the order holds for messages that are each awaited before the next.
    """

    def __init__(self, client: Client, topic: str, settings: GuardSettings | None = None) -> None:
        self.topic = topic
        self.settings = settings or GuardSettings()
        self.subject = f"{ENTRANCE}.{topic}"
        self.stored = 0
        self.refused = 0
        self._client = client
        self._registry = Registry(client)
        self._entrance: Entrance | None = None
        self._publisher = StreamPublisher(
            client.connection, self.settings.max_in_flight, guarded=False
        )
        self._name = unique_token(12)
        self._subscribers: list[Subscriber] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._pending: set[asyncio.Future[Any]] = set()
        # Batches under way by id; the refusal of its first bad message.
        self._batches: dict[str, Refusal | None] = {}

    # -- life -----------------------------------------------------------------------------

    async def _enter(self) -> None:
        await self.open()

    async def _leave(self, error: BaseException | None) -> None:
        await self.close()

    async def open(self) -> Self:
        """Start listening: messages published to its subject are checked and stored."""
        info = await open_topic(self._client.jetstream, self.topic)
        if not info.settings.guarded:
            raise ConfigError(
                f"topic '{self.topic}' is not guarded, and a topic cannot become guarded later. "
                f"Create a topic of another name with guarded=True and copy the events into it: "
                f"millstream topic replay {self.topic} --to OTHER"
            )
        record = await self._registry.topic(self.topic)
        entrance = self._entrance = Entrance(info, record, self._registry, self._name)
        self.subject = entrance.subject
        await self._check_free()
        await entrance.version(None)
        self._start(self._follow_versions())
        try:
            await self._listen(self.subject, shared=True)
            await self._listen(f"{self.subject}.>", shared=True)
            await self._listen(f"{INSTANCE}.{self._name}.{entrance.token}.>", shared=False)
        except BaseException:
            await self.close()
            raise
        return self

    async def _listen(self, subject: str, *, shared: bool) -> None:
        settings = SubscriberSettings(
            queue=f"mill-guard-{self.topic}" if shared else "",
            messages_max=self.settings.messages_max,
            on_drop=self._dropped,
        )
        subscriber = await self._client.subscribe(subject, settings)
        self._subscribers.append(subscriber)
        self._start(self._serve(subscriber))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

    async def close(self) -> None:
        """Accept no more messages, and return when all accepted ones are answered."""
        for subscriber in self._subscribers:
            await subscriber.drain()
        for task in self._tasks[:1]:
            task.cancel()  # the task that follows versions; the others end with their subscriber
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while self._pending:
            await asyncio.wait(set(self._pending))
        self._publisher.close()
        if not self._client.connection.closed:
            await self._client.flush()

    async def run(self) -> None:
        """Serve until cancelled; an error that ends the guard is raised."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def _check_free(self) -> None:
        for config in await self._client.jetstream.stream_configs(f"{self.subject}.>"):
            raise ConfigError(
                f"the stream '{config['name']}' stores what is published to "
                f"'{self.subject}.>', the entrance of topic '{self.topic}', so it would bypass "
                f"the guard. Remove that stream or its subject"
            )

    async def _follow_versions(self) -> None:
        """Load each new version of the schema as soon as it is registered."""
        table = Table(await self._client.topic(TABLE))
        async for change in table.changes([record_key(self.topic)]):
            if change.value is not None and self._entrance is not None:
                self._entrance.record = read_record(change.value)

    # -- messages -------------------------------------------------------------------------

    async def _serve(self, subscriber: Subscriber) -> None:
        async for message in subscriber:
            if not _may_answer(message):
                self.refused += 1
                continue
            try:
                await self._take(message)
            except MillstreamError as error:
                self._refuse(message, refusal_of(error))
            except Exception as error:  # a bug must not stop the guard for the other clients
                _log.exception("guard of '%s' failed on '%s'", self.topic, message.subject)
                self._refuse(message, refusal_of(error))

    async def _take(self, message: Message) -> None:
        """Check a message and start to store it; the sender is answered when it is stored."""
        if self._entrance is None:
            raise ConfigError("open the guard first: async with mill.guard(...)")
        if message.subject == f"{self.subject}.{BATCH_TOKEN}":
            if message.reply is not None:
                message.respond(self._name)
            return
        batch = self._batch_of(message)
        try:
            wanted = await self._entrance.check(message)
        except Exception as error:
            if batch is None or message.reply is not None:
                raise
            self._note(batch, refusal_of(error))
            return
        if batch is not None:
            await self._take_part(message, batch, wanted)
            return
        if self._publisher.full:
            await self._publisher.wait_for_space()
        stored = self._publisher.publish(wanted, STORE_SECONDS, lambda ack: ack)
        self._pending.add(stored)
        stored.add_done_callback(lambda done: self._answer(message, done))

    def _answer(self, message: Message, stored: asyncio.Future[PubAck]) -> None:
        self._pending.discard(stored)
        if stored.cancelled():
            return
        error = stored.exception()
        if error is not None:
            self._refuse(message, refusal_of(error))
            return
        self.stored += 1
        if message.reply is not None:
            ack = stored.result()
            told: dict[str, Any] = {"stream": ack.stream, "seq": ack.seq}
            if ack.duplicate:
                told["duplicate"] = True
            if ack.domain:
                told["domain"] = ack.domain
            message.respond(msgspec.json.encode(told))

    def _refuse(self, message: Message, why: Refusal) -> None:
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
        if not _may_answer(message):
            return
        text = f"the guard of '{self.topic}' has {self.settings.messages_max:,} messages waiting"
        self._refuse(message, Refusal(503, ErrorCode.GUARD_BUSY, text))

    # -- batches --------------------------------------------------------------------------

    def _batch_of(self, message: Message) -> str | None:
        batch = message.headers.get("Nats-Batch-Id")
        if batch is not None and not message.subject.startswith(f"{INSTANCE}."):
            raise ConfigError(
                f"a batch must reach one guard: ask '{self.subject}.{BATCH_TOKEN}' for its name "
                f"and publish to {INSTANCE}.<name>.<topic>..."
            )
        return batch

    def _note(self, batch: str, why: Refusal | None) -> None:
        while len(self._batches) >= BATCHES_MAX and batch not in self._batches:
            del self._batches[next(iter(self._batches))]
        self._batches[batch] = self._batches.get(batch) or why

    async def _take_part(self, message: Message, batch: str, wanted: OutgoingMessage) -> None:
        """Pass a message of a batch on at once: the server collects them."""
        connection = self._client.connection
        subject, block, payload = wanted
        if "Nats-Batch-Commit" not in message.headers:
            self._note(batch, None)
            if self._batches[batch] is None:
                reply = (message.reply or "").encode()
                connection.send(hpub(subject, reply, block, payload))
                if connection.congested:
                    await connection.writable()
            return
        why = self._batches.pop(batch, None)
        if why is not None:
            self._refuse(message, why)
            return
        asked = connection.ask(subject.decode(), bytes(payload), block, asks_again=True)
        commit = asyncio.ensure_future(self._commit(message, asked))
        self._pending.add(commit)
        commit.add_done_callback(self._pending.discard)

    async def _commit(self, message: Message, asked: asyncio.Future[tuple[bytes, bytes]]) -> None:
        """Answer the last message of a batch as the server does."""
        try:
            async with asyncio.timeout(BATCH_SECONDS):
                _, answer = await asked
        except (MillstreamError, TimeoutError) as error:
            self._refuse(message, refusal_of(error))
            return
        self.stored += 1
        if message.reply is not None and not self._client.connection.closed:
            message.respond(answer)


def _may_answer(message: Message) -> bool:
    """Whether the sender waits at a subject of a client's.

    The guard may publish where the sender may not: an answer there would be an event, or a command.
    """
    return not (message.reply or "").startswith((f"{GUARDED_TOKEN}.", "$"))


def refusal_of(error: BaseException) -> Refusal:
    """An error as the answer to a publish."""
    if isinstance(error, WrongSequence) and error.sent_again:
        # The guard sent it twice, so the first copy may be what the second one ran into.
        text = "no ack in time: it may or may not be stored. Publish it again with its id"
        return Refusal(503, ErrorCode.GUARD_NOT_STORED, text)
    if isinstance(error, ApiError):
        return Refusal(error.code or 400, error.err_code, error.description)
    if isinstance(error, SchemaError | PackError):
        return Refusal(400, ErrorCode.GUARD_UNFIT, str(error))
    if isinstance(error, PayloadTooLarge):
        return Refusal(400, 10054, str(error))
    if isinstance(error, ConfigError):
        return Refusal(400, ErrorCode.GUARD_HEADER, str(error))
    return Refusal(503, ErrorCode.GUARD_NOT_STORED, str(error) or type(error).__name__)
