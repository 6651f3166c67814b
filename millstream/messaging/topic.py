"""A topic: a durable, replayable, partitioned log of events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from millstream.closing import Opening
from millstream.errors import ConfigError, MillstreamError, NotDurable, SchemaError
from millstream.events.event import (
    Durability,
    Event,
    FullTopic,
    NewEvent,
    Partition,
    PublishOptions,
    Receipt,
)
from millstream.events.event_list import EventList
from millstream.events.fence import check_fence_kept
from millstream.events.packs.packing import Packing
from millstream.events.subject import check_name
from millstream.events.undecodable import OnUndecodable
from millstream.events.value_type import ValueType
from millstream.messaging.dead_letters.queue import DeadLetterQueue
from millstream.messaging.groups.admin import GroupAdmin
from millstream.messaging.groups.group import Group, GroupSettings
from millstream.messaging.publishing.acks import Acks
from millstream.messaging.publishing.bulk import publish_atomic, publish_many
from millstream.messaging.publishing.event_producer import EventProducer
from millstream.messaging.publishing.event_publisher import PUBLISH_SECONDS, EventPublisher
from millstream.messaging.publishing.expected_last import publish_after
from millstream.messaging.publishing.interest_check import InterestCheck, error_of
from millstream.messaging.reading.at_offset import events_at
from millstream.messaging.reading.events import read_event_lists, read_events
from millstream.messaging.reading.key_places import KeyPlaces
from millstream.messaging.reading.latest import last_of_key, read_latest
from millstream.messaging.reading.past import Past, past_of
from millstream.messaging.reading.replay import ReadPlan, plan_of
from millstream.messaging.schedules import Schedules
from millstream.messaging.subscriptions.admin import Subscriptions
from millstream.messaging.subscriptions.http_push import HttpPush, HttpPushSettings
from millstream.messaging.subscriptions.settings import SubscriptionSettings
from millstream.messaging.subscriptions.subscription import Subscription, join_subscription
from millstream.messaging.topic_admin import TopicAdmin
from millstream.messaging.topics.choices import Retention
from millstream.messaging.topics.handle import TopicHandle
from millstream.messaging.topics.info import TopicInfo
from millstream.messaging.topics.lookup import open_topic
from millstream.messaging.topics.setting_rules import check_overload, check_process_table
from millstream.nearest import settings_from

# What works on packs is imported by the methods that need it: it loads pyarrow, which takes longer
# than everything else together.
if TYPE_CHECKING:
    from pyarrow import RecordBatch

    from millstream.messaging.process import (
        Process,
        ProcessSettings,
        StateTables,
        Targets,
        Transform,
    )
    from millstream.messaging.processing.settings import ProcessTarget
    from millstream.messaging.publishing.pack_producer import PackProducer
    from millstream.messaging.publishing.target import PackTarget
    from millstream.messaging.publishing.writer import Writer

__all__ = ["Topic"]

BLOCK_SECONDS: Final = 30.0  # how long a producer waits for room in a full topic


def _obstacle(info: TopicInfo, value_type: ValueType | None) -> MillstreamError | None:
    """Why nothing can be published to a topic from here; None when it can."""
    if not info.managed or info.settings.is_copy:
        return ConfigError(
            f"'{info.name}' takes no events here: it is a copy of another topic, or a stream "
            f"that Millstream did not create (publish to its subjects with mill.publish_acked)"
        )
    if info.settings.wire_format is not None and value_type is None:
        return SchemaError(
            f"topic '{info.name}' has a schema, and this connection is for messaging only, so "
            f"values would not be checked. Connect with millstream.connect()"
        )
    return None


class Topic:
    """A durable log of events. Publishing is acknowledged; reading never removes anything.

    Events of one key keep their order. A publish that had to be sent again may be stored after a
    later one of the same connection, unless each is awaited before the next.

    Everyday calls are methods here: publish, read, subscribe, process. Managing subscriptions (lag,
    pause, seek, ...) is `topic.subscriptions`, ordered groups `topic.groups`, and maintenance
    (verify, purge) `topic.admin`.
    """

    def __init__(
        self,
        handle: TopicHandle,
        info: TopicInfo,
        durabilities: Sequence[Durability],
        shortfall: NotDurable | None = None,
    ) -> None:
        self.name = info.name
        self.settings = info.settings
        self.partitions = len(info.partitions)
        self._handle = handle
        self._jetstream, self._partitions = handle.jetstream, handle.partitions
        self._places = KeyPlaces(handle.jetstream, handle.partitions, info.settings.keys_at_home)
        self._stream_publisher = handle.publisher
        self._obstacle = _obstacle(info, handle.value_type)
        demanded = info.settings.durability is not None
        interest = info.settings.retention is Retention.INTEREST
        self._acks = Acks(
            info.name, durabilities, demanded, shortfall, PUBLISH_SECONDS, kept=not interest
        )
        self._publisher = EventPublisher(
            handle.publisher,
            handle.shape,
            self._acks,
            info.settings.check_options,
            handle.value_type,
            interest=interest,
        )
        self._interest = InterestCheck(handle) if self._publisher.interest else None
        self.subscriptions = Subscriptions(handle)  # its subscriptions, by name
        self.groups = GroupAdmin(  # its ordered groups, by name
            handle.jetstream, handle.publisher, info.name, handle.partitions
        )
        self.schedules = Schedules(handle, self._publisher, info.settings, self._check_writable)
        self.admin = TopicAdmin(handle, self._acks)  # maintenance

    @property
    def value_type(self) -> ValueType | None:
        """How values are checked and encoded; None: they are bytes."""
        return self._handle.value_type

    @property
    def durability(self) -> Durability:
        """What an ack guarantees; `unknown` when that differs between partitions."""
        return self._acks.durability

    @property
    def handle(self) -> TopicHandle:
        """Internal: what its parts share, for the layers above messaging."""
        return self._handle

    @property
    def acks(self) -> Acks:
        """Internal: what acks guarantee, for the layers above messaging."""
        return self._acks

    def forget_durability(self) -> None:
        """Internal: the connection is another one, and its server may be less durable."""
        self._acks.forget()

    async def info(self) -> TopicInfo:
        """Settings and state, by partition."""
        return await open_topic(self._jetstream, self.name)

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
        """Store one event; returns its receipt once it is stored with the topic's durability.

        It is sent again until the broker answers; its id (given or generated) lets the broker
        store it once. An interest topic keeps nothing that nobody wants: the durability is then
        `none`, and with `require_interest` NotKept is raised.
        """
        self._check_writable()
        acks = self._acks
        if acks.demanded:
            await acks.check()
        if self._interest is not None:
            event = NewEvent(value, key, headers, timestamp, id, options)
            receipt = await self._publish_to_interest(self._interest, event)
            return await acks.confirmed(receipt)
        if self._stream_publisher.full:
            await self._stream_publisher.wait_for_space()
        if options is None or options.expected_last is None:
            receipt = await self._publisher.publish(value, key, headers, timestamp, id, options)
        else:
            event = NewEvent(value, key, headers, timestamp, id, options)
            last = options.expected_last
            receipt = await publish_after(self._handle, self._publisher, event, last)
        return await acks.confirmed(receipt) if acks.demanded else receipt

    async def _publish_to_interest(self, check: InterestCheck, event: NewEvent) -> Receipt:
        before = await check.before()
        if self._stream_publisher.full:
            await self._stream_publisher.wait_for_space()
        last = None if event.options is None else event.options.expected_last
        if last is None:
            receipt = await self._publisher.publish_event(event)
        else:
            receipt = await publish_after(self._handle, self._publisher, event, last)
        durabilities = self._acks.durabilities
        (receipt,) = await check.checked(before, [event], [receipt], durabilities)
        if (error := error_of(event, receipt)) is not None:
            raise error
        return receipt

    async def publish_many(self, events: Iterable[NewEvent | Any]) -> list[Receipt]:
        """Store events with many in flight; receipts in the order given.

        If some are refused, the others are still stored, and PartlyStored names the refused ones.
        """
        self._check_writable()
        await self._acks.check()
        receipts = await publish_many(self._publisher, events, self._interest)
        return await self._acks.all_confirmed(receipts)

    async def publish_atomic(
        self, events: Sequence[NewEvent | Any], timeout: float = PUBLISH_SECONDS
    ) -> list[Receipt]:
        """Store up to 1,000 events of one partition next to each other: all of them or none."""
        self._check_writable()
        await self._acks.check()
        publisher, interest = self._publisher, self._interest
        receipts = await publish_atomic(self._handle, publisher, events, timeout, interest)
        return await self._acks.all_confirmed(receipts)

    def producer(
        self,
        packs: Packing | None = None,
        *,
        overload: FullTopic = "refuse",
        block_seconds: float = BLOCK_SECONDS,
    ) -> PackProducer:
        """A producer that sends many events in one message: the fastest way to store many.

        `overload` is as for `event_producer`.
        """
        from millstream.messaging.publishing.pack_producer import PackProducer

        check_overload(self.settings, overload, block_seconds)
        return PackProducer(self._target(), packs or Packing(), overload, block_seconds)

    def event_producer(
        self,
        max_in_flight: int = 1024,
        *,
        overload: FullTopic = "refuse",
        block_seconds: float = BLOCK_SECONDS,
    ) -> EventProducer:
        """A producer of plain events, one message each, with many in flight; each has a receipt.

        A full topic (`discard="new"`) refuses events. With `overload="block"` each waits up to
        `block_seconds` for room first, and `send` waits while `max_in_flight` of them do.
        `producer.counters` says what became of the events.
        """
        self._check_writable()
        check_overload(self.settings, overload, block_seconds)
        publisher = self._publisher
        if overload == "block":
            publisher = publisher.waiting(block_seconds)
        return EventProducer(publisher, max_in_flight)

    def writer(self, name: str, packs: Packing | None = None, lanes: int = 1) -> Writer:
        """A named writer that stores each event exactly once: `async with topic.writer("w")`."""
        from millstream.messaging.publishing.writer import Writer

        return Writer(self.fenced_target(), name, packs or Packing(), lanes)

    def process(
        self,
        target: Targets,
        function: Transform,
        settings: ProcessSettings | None = None,
        *,
        tables: StateTables | None = None,
        **values: Any,
    ) -> Process:
        """Apply a function to every event and store the results in another topic, exactly once.

        `process(target, function, on_error="dead_letter")`: see ProcessSettings, and `mill.process`
        for several targets and for tables.
        """
        from millstream.messaging.process import make_process

        return make_process(self, target, function, settings, tables, values)

    def process_input(self) -> Sequence[Partition]:
        """Internal: what a process reads."""
        return self._partitions

    def process_output(self, state: bool = False) -> ProcessTarget:
        """Internal: what a process writes to; with `state` a table that it reads and changes."""
        from millstream.messaging.processing.settings import ProcessTarget

        settings = self.settings
        is_table = settings.history is not None
        if not is_table and not state:
            target = self.fenced_target()
        else:
            check_process_table(self.name, settings, state)
            self._check_writable()
            check_fence_kept(self.name, settings.retention)
            target = self._pack_target()
        largest = self._jetstream.connection.info.max_payload
        size = min(settings.max_message_size or largest, largest)
        return ProcessTarget(self.name, target, is_table, size)

    def fenced_target(self) -> PackTarget:
        """Internal: what writers write to; refused where their fences would not be kept."""
        target = self._target()
        check_fence_kept(self.name, self.settings.retention)
        return target

    def _target(self) -> PackTarget:
        """What producers of packs write to; refused where packs cannot be stored."""
        self._check_writable()
        if not self.settings.takes_packs:
            raise ConfigError(
                f"'{self.name}' takes no packs (it was created with packs=False or a history), "
                f"because in a pack the broker cannot tell keys apart: publish single events to it"
            )
        return self._pack_target()

    def _pack_target(self) -> PackTarget:
        from millstream.messaging.publishing.target import PackTarget

        handle = self._handle
        return PackTarget(
            handle.jetstream,
            handle.publisher,
            handle.shape,
            handle.partitions,
            handle.value_type,
            self._acks,
            self.settings.replicas,
        )

    def _check_writable(self) -> None:
        if self._obstacle is not None:
            raise self._obstacle.with_traceback(None)
        self._acks.check_known()

    # -- reading --------------------------------------------------------------------------

    def read(self, plan: ReadPlan | None = None, **choices: Any) -> AsyncIterator[Event]:
        """Events of a range, in order within each partition; subscriptions are not affected.

        `read()` gives everything stored now; `read(start=Start.at_offset(5), end=10)`,
        `read(follow=True)`, `read(keys=["a"])`: see ReadPlan. `read(start=Start.LAST_PER_KEY,
        end=moment)` gives the last event of each key before that moment, if it is still stored.
        Events redriven for one subscription are left out, here and in `batches`: they were read
        before. A message that cannot be decoded raises Undecodable after the events before it;
        `undecodable="drop"` continues without it.
        """
        return read_events(self._jetstream, self._partitions, plan_of(plan, choices))

    def read_many(self, plan: ReadPlan | None = None, **choices: Any) -> AsyncIterator[EventList]:
        """Like `read`, but in lists: `for value in events.values` is the fastest way to objects.

        A list has the events of one pack, or up to a thousand single ones that are next to each
        other; its parts (`values`, `keys`, `offsets`, `timestamps`) are made when asked for.
        With `undecodable="drop"`, or a function, values are checked before a list is handed out.
        """
        return read_event_lists(self._jetstream, self._partitions, plan_of(plan, choices))

    def batches(self, plan: ReadPlan | None = None, **choices: Any) -> AsyncIterator[RecordBatch]:
        """Like `read`, but as Arrow record batches: the fastest way to read many events.

        Columns: key, timestamp, headers, id, value (a struct of typed columns, or binary),
        partition, offset and index. The columns of packs are not copied. An event that cannot be
        decoded raises Undecodable after those before it; `undecodable="drop"` continues without it.
        """
        from millstream.messaging.reading.batches import read_batches

        wanted = plan_of(plan, choices)
        return read_batches(self._jetstream, self._partitions, wanted, self._handle.value_type)

    async def get(self, offset: int, partition: int = 0) -> list[Event]:
        """The events of the message at an offset (several for a pack); empty if it was removed.

        Includes an event redriven for one subscription, which `read` leaves out. Undecodable when
        it is marked as a pack and is not a valid one.
        """
        return await events_at(self._jetstream, self._partitions[partition], offset)

    async def last(self, key: str) -> Event | None:
        """The last plain event of a key; None when there is none.

        An event redriven for one subscription does not count; one redriven for all does.
        """
        return await last_of_key(self._jetstream, self._places, key)

    def latest(
        self, keys: Sequence[str] = (), *, undecodable: OnUndecodable = "fail"
    ) -> AsyncIterator[Event]:
        """The last plain event of each key (or of these keys), each key once.

        A key that had an event when this started is included, with that event or a later one.
        `undecodable` is as in ReadPlan.
        """
        return read_latest(self._jetstream, self._partitions, self._places, keys, undecodable)

    async def past(self, time: datetime) -> Past:
        """Internal: what a table reads its values at an earlier time from; see `Table.at`."""
        return await past_of(self._jetstream, self._partitions, time)

    # -- subscribing ----------------------------------------------------------------------

    def subscribe(
        self, name: str, settings: SubscriptionSettings | None = None, **values: Any
    ) -> Opening[Subscription]:
        """Join a durable subscription: `async with topic.subscribe("billing") as billing`.

        It is created if it does not exist. Without settings an existing one is used as it is;
        when the settings given differ from its own, SubscriptionConflict says which.
        `subscribe("billing", max_deliver=3, ack_wait="1m")`: see SubscriptionSettings.
        """
        check_name("subscription", name)
        wanted = settings_from(SubscriptionSettings, settings, values)
        return Opening(partial(self._subscribe, name, wanted))

    async def _subscribe(self, name: str, settings: SubscriptionSettings | None) -> Subscription:
        return await join_subscription(self._handle, self.subscriptions, name, settings)

    def http_push(
        self,
        name: str,
        push: HttpPushSettings,
        settings: SubscriptionSettings | None = None,
        **values: Any,
    ) -> Opening[HttpPush]:
        """Post the events of a subscription to an HTTP endpoint.

        `async with topic.http_push("hook", HttpPushSettings(url)) as push`, then
        `await push.run()`. The settings and keywords are those of `subscribe`.
        """
        check_name("subscription", name)
        if not isinstance(push, HttpPushSettings):
            raise ConfigError(  # without its text: an address may hold a password
                f"give the endpoint as HttpPushSettings(url), found {type(push).__name__}"
            )
        wanted = settings_from(SubscriptionSettings, settings, values)
        return Opening(partial(self._http_push, name, push, wanted))

    async def _http_push(
        self, name: str, push: HttpPushSettings, settings: SubscriptionSettings | None
    ) -> HttpPush:
        return HttpPush(await self._subscribe(name, settings), push)

    def group(
        self,
        name: str,
        settings: GroupSettings | None = None,
        *,
        member_id: str | None = None,
        **values: Any,
    ) -> Group:
        """A member of an ordered group: `async with topic.group("g") as group`, then `run`.

        Members share the partitions; each key is handled by one member at a time, in order.
        `group("g", concurrency=4, lease="30s")`: see GroupSettings.
        """
        return Group(
            self._jetstream,
            self._stream_publisher,
            self.name,
            self._partitions,
            name,
            settings_from(GroupSettings, settings, values, ("member_id",)),
            member_id=member_id,
        )

    async def dead_letters(self, subscription: str) -> DeadLetterQueue:
        """The dead letters of a subscription, group or process: list, show, edit, redrive."""
        dead = await self.subscriptions.dead_letter_topic(subscription)
        return DeadLetterQueue(
            self._jetstream, self._stream_publisher, dead, self._handle.value_type
        )
