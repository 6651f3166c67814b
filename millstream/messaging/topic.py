"""A topic: a durable, replayable, partitioned log of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from millstream.errors import (
    ConfigError,
    MillstreamError,
    PartlyStored,
    SchemaError,
    SubscriptionNotFound,
    TopicNotFound,
    Unconfirmed,
    WrongSequence,
)
from millstream.events.encoding import TopicShape
from millstream.events.event import (
    ID_HEADER,
    Durability,
    Event,
    NewEvent,
    Partition,
    PublishOptions,
    Receipt,
)
from millstream.events.fence import EXPECTED_HEADER
from millstream.events.packs.packing import Packing
from millstream.events.start import Start
from millstream.events.subject import check_name, key_token, partition_of
from millstream.events.unpack import events_in, raw_of
from millstream.events.value_type import ValueType
from millstream.messaging.dead_letters.queue import DeadLetterQueue
from millstream.messaging.dead_letters.store import DeadLetterStore, default_dead_letter_topic
from millstream.messaging.publishing.event_producer import EventProducer
from millstream.messaging.publishing.event_publisher import PUBLISH_SECONDS, EventPublisher
from millstream.messaging.reading.latest import last_on, read_latest
from millstream.messaging.reading.replay import ReadPlan, plan_of, read_events, read_messages
from millstream.messaging.subscriptions.admin import Lag, SubscriptionAdmin, SubscriptionInfo
from millstream.messaging.subscriptions.settings import SubscriptionSettings
from millstream.messaging.subscriptions.subscription import Subscription
from millstream.messaging.topics import admin as topic_admin
from millstream.messaging.topics.admin import Purge
from millstream.messaging.topics.durability import durability_of
from millstream.messaging.topics.info import TopicInfo
from millstream.messaging.topics.lookup import open_topic
from millstream.wire.aio.atomic import publish_batch
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.aio.publisher import StreamPublisher
from millstream.wire.message import RawMessage, StoredMessage
from millstream.wire.protocol import parse_headers, unique_token

if TYPE_CHECKING:
    from pyarrow import RecordBatch

    from millstream.messaging.groups.group import Group, GroupSettings
    from millstream.messaging.process import Process, ProcessSettings, Transform
    from millstream.messaging.publishing.pack_producer import PackProducer
    from millstream.messaging.publishing.writer import Writer, WriterTarget
    from millstream.messaging.reading.verify import Verification
    from millstream.messaging.subscriptions.http_push import HttpPush, HttpPushSettings

__all__ = ["Topic", "durabilities_of"]


async def durabilities_of(jetstream: JetStream, info: TopicInfo) -> list[Durability]:
    """What holds for an acknowledged event, by partition."""
    return [await durability_of(jetstream, part.config, part.leader) for part in info.partitions]


def _obstacle(info: TopicInfo, value_type: ValueType | None) -> MillstreamError | None:
    """Why nothing can be written to a topic here; None when it can."""
    if not info.managed or info.settings.is_copy:
        return ConfigError(
            f"'{info.name}' takes no events here: it is a copy of another topic, or a stream "
            f"that Millstream did not make (publish to its subjects with mill.publish_acked)"
        )
    if info.settings.wire_format is not None and value_type is None:
        return SchemaError(
            f"topic '{info.name}' has a schema, and this connection is for messaging alone, so "
            f"nobody would check what is written. Connect with millstream.connect()"
        )
    return None


async def _looked_up(partition: Partition, found: StoredMessage) -> list[Event]:
    raw = raw_of(partition.stream, found)
    if partition.learn is not None:
        await partition.learn([raw])
    return events_in(partition, raw)


class Topic:
    """A durable log of events. Publishing is acknowledged; reading never removes anything.

    Events of one key keep their order; a publish that had to be sent again may come after a later
    one of the same connection, unless it is awaited one at a time.
    """

    def __init__(
        self,
        jetstream: JetStream,
        stream_publisher: StreamPublisher,
        info: TopicInfo,
        durabilities: Sequence[Durability],
        value_type: ValueType | None = None,
    ) -> None:
        self.name = info.name
        self.settings = info.settings
        self.partitions = len(info.partitions)
        self._durabilities = list(durabilities)
        self._jetstream = jetstream
        self._stream_publisher = stream_publisher
        self._obstacle = _obstacle(info, value_type)
        self._value_type = value_type
        self._shape = TopicShape(info.name, [part.prefix or info.name for part in info.partitions])
        self._publisher = EventPublisher(stream_publisher, self._shape, durabilities, value_type)
        self._partitions = [
            Partition(part.stream, info.name, part.number, part.prefix, value_type)
            for part in info.partitions
        ]
        self._subscriptions = SubscriptionAdmin(jetstream, info.name, self._partitions)

    @property
    def value_type(self) -> ValueType | None:
        """How values are checked and encoded; None: they are bytes."""
        return self._value_type

    @property
    def durability(self) -> Durability:
        """What holds when an ack arrives; `unknown` when it differs between partitions."""
        found = set(self._durabilities)
        return found.pop() if len(found) == 1 else "unknown"

    async def refresh_durability(self) -> None:
        """Ask the servers anew: after a reconnect they may be others."""
        self._durabilities = ["unknown"] * self.partitions
        self._publisher.set_durabilities(self._durabilities)
        self._durabilities = await durabilities_of(self._jetstream, await self.info())
        self._publisher.set_durabilities(self._durabilities)

    def __repr__(self) -> str:
        return f"<Topic {self.name}, {self.partitions} partition(s)>"

    # -- publishing -----------------------------------------------------------------------

    async def publish(
        self,
        value: Any,
        key: str | bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        timestamp: datetime | int | None = None,
        id: str | None = None,
        options: PublishOptions | None = None,
    ) -> Receipt:
        """Store one event and return its receipt when it is stored as durably as the topic says.

        It is sent again until the broker answers; its id (given or made) makes the copies one.
        """
        self._check_writable()
        if options is not None and options.ttl is not None:
            self.settings.ttl_text(options.ttl)  # refuses what the broker would cut short
        if self._stream_publisher.full:
            await self._stream_publisher.room()
        if headers is None and timestamp is None and id is None and options is None:
            return await self._publisher.send_plain(value, key)
        event = NewEvent(value, key, headers, timestamp, id, options)
        if options is None or options.expected_last is None:
            return await self._publisher.send(event)
        return await self._publish_after(event, options.expected_last)

    async def _publish_after(self, event: NewEvent, last: int) -> Receipt:
        """Store an event that must follow the offset `last`; WrongSequence says that it does not.

        A copy that was sent again is refused too when the first one was stored, by a broker that
        has restarted and forgotten its id: then what follows `last` is looked at.
        """
        event = replace(event, id=event.id or unique_token(20))
        try:
            return await self._publisher.send(event)
        except WrongSequence as refused:
            if not refused.sent_again:
                raise
            partition, message = self._publisher.encode(event)
            subject = message.subject.decode()
            ask = {"seq": last + 1, "next_by_subj": subject}
            found = await self._jetstream.get_message(self._partitions[partition].stream, ask)
            headers = {} if found is None else parse_headers(found.headers)
            if found is not None and headers.get(ID_HEADER) == event.id:
                durability = self._durabilities[partition]
                return Receipt(self.name, partition, found.sequence, True, durability)
            if headers.get(EXPECTED_HEADER) == str(last):
                raise  # another one was stored in its place
            raise Unconfirmed(
                f"'{subject}' was sent again after its ack was lost, and the copy was refused: "
                f"the event may have been stored after offset {last} and replaced since"
            ) from refused

    async def publish_many(self, events: Iterable[NewEvent | Any]) -> list[Receipt]:
        """Store events with many in flight; receipts in the order given.

        When some are refused the others are stored all the same, and PartlyStored says which.
        """
        self._check_writable()
        futures: list[asyncio.Future[Receipt]] = []
        for event in events:
            if self._stream_publisher.full:
                await self._stream_publisher.room()
            new = event if isinstance(event, NewEvent) else NewEvent(event)
            try:
                futures.append(self._publisher.send(new))
            except MillstreamError as error:
                futures.append(asyncio.get_running_loop().create_future())
                futures[-1].set_exception(error)
        results = await asyncio.gather(*futures, return_exceptions=True)
        failed: dict[int, MillstreamError] = {}
        receipts: list[Receipt] = []
        for place, result in enumerate(results):
            if isinstance(result, MillstreamError):
                failed[place] = result
            elif isinstance(result, BaseException):
                raise result
            else:
                receipts.append(result)
        if failed:
            raise PartlyStored(len(results), failed)
        return receipts

    async def publish_atomic(
        self, events: Sequence[NewEvent | Any], timeout: float = PUBLISH_SECONDS
    ) -> list[Receipt]:
        """Store up to 1,000 events of one partition: all of them, side by side, or none."""
        self._check_writable()
        messages = []
        partitions: set[int] = set()
        for event in events:
            new = event if isinstance(event, NewEvent) else NewEvent(event)
            partition, message = self._publisher.encode(new)
            partitions.add(partition)
            messages.append(message)
        if len(partitions) > 1:
            raise ConfigError(
                f"an atomic batch is stored in one partition; these events belong to "
                f"{sorted(partitions)}. Give them keys of one partition"
            )
        if not messages:
            return []
        partition = partitions.pop()
        stream = self._partitions[partition].stream
        ack = await publish_batch(self._jetstream, stream, messages, timeout)
        first = ack.seq - len(messages) + 1
        return [
            Receipt(self.name, partition, first + place, False, self._durabilities[partition])
            for place in range(len(messages))
        ]

    def producer(self, packs: Packing | None = None) -> PackProducer:
        """A producer that sends many events in one message: the fast way to store many."""
        from millstream.messaging.publishing.pack_producer import PackProducer

        self._check_packs()
        return PackProducer(self._target(), packs or Packing(), self.durability)

    def event_producer(self, max_in_flight: int = 1024) -> EventProducer:
        """A producer of plain messages, one an event, many in flight; each has a receipt."""
        self._check_writable()
        return EventProducer(self._publisher, max_in_flight)

    def writer(self, name: str, packs: Packing | None = None, lanes: int = 1) -> Writer:
        """A named writer that stores each event exactly once: `async with topic.writer("w")`."""
        from millstream.messaging.publishing.writer import Writer

        self._check_packs()
        return Writer(self._target(), name, packs or Packing(), lanes)

    def process(
        self, target: Topic, function: Transform, settings: ProcessSettings | None = None
    ) -> Process:
        """What applies a function to every event and stores the results in another topic, once."""
        from millstream.messaging.process import Process, ProcessSettings

        target._check_packs()
        chosen = settings or ProcessSettings(f"{self.name}-to-{target.name}")
        return Process(self._partitions, target._target(), function, chosen)

    def _target(self) -> WriterTarget:
        from millstream.messaging.publishing.writer import WriterTarget

        return WriterTarget(
            self._jetstream, self._stream_publisher, self._shape, self._partitions, self._value_type
        )

    def _check_writable(self) -> None:
        if self._obstacle is not None:
            raise self._obstacle.with_traceback(None)

    def _check_packs(self) -> None:
        self._check_writable()
        if not self.settings.takes_packs:
            raise ConfigError(
                f"'{self.name}' keeps the last events of each key (history), and in a pack the "
                f"broker cannot tell keys apart: publish single events to it"
            )

    # -- reading --------------------------------------------------------------------------

    def read(self, plan: ReadPlan | None = None, **choices: Any) -> AsyncIterator[Event]:
        """Events of a range, in order within each partition, without touching subscriptions.

        `read()` gives all that is stored now; `read(start=Start.at_offset(5), end=10)`,
        `read(follow=True)`, `read(keys=["a"])`: see ReadPlan. What was redriven for one
        subscription is left out, here and in all that reads like this: it was read before.
        """
        return read_events(self._jetstream, self._partitions, plan_of(plan, choices))

    def batches(self, plan: ReadPlan | None = None, **choices: Any) -> AsyncIterator[RecordBatch]:
        """Like `read`, but as Arrow record batches: the quick way to many events.

        Columns: key, timestamp, headers, id, value (a struct of typed columns, or binary),
        partition, offset and index. The columns of packs are not copied. A value that cannot be
        decoded raises SchemaError with its offset.
        """
        from millstream.messaging.reading.batches import read_batches

        wanted = plan_of(plan, choices)
        return read_batches(self._jetstream, self._partitions, wanted, self._value_type)

    def read_messages(self, plan: ReadPlan) -> AsyncIterator[tuple[Partition, list[RawMessage]]]:
        """Like `read`, but the messages as they came: for who makes events of them elsewhere."""
        return read_messages(self._jetstream, self._partitions, plan)

    async def get(self, offset: int, partition: int = 0) -> list[Event]:
        """The events of the message at an offset (several for a pack); empty when it is gone.

        Also one that was redriven for one subscription, which `read` leaves out.
        """
        chosen = self._partitions[partition]
        found = await self._jetstream.get_message(chosen.stream, {"seq": offset})
        return [] if found is None else await _looked_up(chosen, found)

    async def last(self, key: str) -> Event | None:
        """The last event of a key that was written as a plain message; None when there is none.

        An event redriven for one subscription does not become it; one redriven for all does.
        """
        partition = self._partitions[partition_of(key, self.partitions)]
        if partition.prefix is None:
            raise ConfigError(f"'{self.name}' is a foreign stream: its subjects carry no keys")
        subject = f"{partition.prefix}.{key_token(key)}"
        return await last_on(self._jetstream, partition, subject)

    def latest(self, keys: Sequence[str] = ()) -> AsyncIterator[Event]:
        """The last plain event of each key (or of these keys), each key once.

        A key that had an event when this began is there, with that one or a later one.
        """
        return read_latest(self._jetstream, self._partitions, keys)

    # -- subscriptions --------------------------------------------------------------------

    async def subscribe(
        self, name: str, settings: SubscriptionSettings | None = None
    ) -> Subscription:
        """Become a member of a durable subscription, which is made when it does not exist.

        Without settings an existing one is used as it is; with other settings than it has,
        SubscriptionConflict says which differ.
        """
        check_name("subscription", name)
        agreed = await self._subscriptions.declare(name, settings)
        dead = agreed.dead_letter or default_dead_letter_topic(self.name, name)
        store = DeadLetterStore(self._jetstream, self._stream_publisher, dead, name)
        return Subscription(self._jetstream, name, agreed, self._partitions, store)

    def group(
        self, name: str, settings: GroupSettings | None = None, *, member_id: str | None = None
    ) -> Group:
        """A member of an ordered group: `async with topic.group("g") as group`, then `run`.

        Members share the partitions; each key is handled by one member at a time, in order.
        """
        from millstream.messaging.groups.group import Group

        return Group(
            self._jetstream,
            self._stream_publisher,
            self.name,
            self._partitions,
            name,
            settings,
            member_id=member_id,
        )

    async def http_push(
        self,
        name: str,
        push: HttpPushSettings,
        settings: SubscriptionSettings | None = None,
    ) -> HttpPush:
        """Post the events of a subscription to an HTTP endpoint: then `await push.run()`."""
        from millstream.messaging.subscriptions.http_push import HttpPush

        return HttpPush(await self.subscribe(name, settings), push)

    async def dead_letters(self, subscription: str) -> DeadLetterQueue:
        """What a subscription, group or process gave up: to list, show, edit and redrive."""
        dead = default_dead_letter_topic(self.name, subscription)
        try:
            info = await self._subscriptions.info(subscription)
            dead = info.settings.dead_letter or dead
        except SubscriptionNotFound as missing:
            # Groups and processes have no consumer, and letters outlive their subscription.
            try:
                await open_topic(self._jetstream, dead)
            except TopicNotFound:
                raise missing from None
        return DeadLetterQueue(self._jetstream, self._stream_publisher, dead, self._value_type)

    async def subscriptions(self) -> list[SubscriptionInfo]:
        """All subscriptions of the topic."""
        return await self._subscriptions.infos()

    async def subscription_info(self, name: str) -> SubscriptionInfo:
        return await self._subscriptions.info(name)

    async def edit_subscription(self, name: str, **changes: Any) -> SubscriptionSettings:
        """Change settings of a subscription; where it stands is kept."""
        return await self._subscriptions.edit(name, **changes)

    async def delete_subscription(self, name: str) -> None:
        await self._subscriptions.delete(name)

    async def lag(self, name: str) -> Lag:
        """How far a subscription is behind, in messages and in seconds."""
        return await self._subscriptions.lag(name)

    async def pause(self, name: str, seconds: float | None = None) -> datetime:
        """Stop delivering to a subscription until then; None: until `resume`."""
        return await self._subscriptions.pause(name, seconds)

    async def resume(self, name: str) -> None:
        await self._subscriptions.resume(name)

    async def seek(self, name: str, to: Start) -> None:
        """Move a subscription to an offset, a time, ALL, NEW or LAST."""
        await self._subscriptions.seek(name, to)

    # -- the topic itself -----------------------------------------------------------------

    async def info(self) -> TopicInfo:
        """Settings and state, by partition."""
        return await open_topic(self._jetstream, self.name)

    async def verify(self) -> AsyncIterator[Verification]:
        """Walk the log and name every hole; the report so far, until it is whole."""
        from millstream.messaging.reading.verify import verify_log

        async for report in verify_log(self._jetstream, self.name, self._partitions):
            yield report

    async def purge(self, what: Purge | None = None) -> int:
        """Remove events: all, or as `Purge` says; how many messages that were."""
        return await topic_admin.purge(self._jetstream, self.name, what)
