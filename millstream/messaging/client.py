"""A connection to a broker, for messaging; `millstream.Mill` adds schemas and tables."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from millstream.closing import AsyncClosing, Opening
from millstream.deadline import Deadline
from millstream.errors import MillstreamError, RequestTimeout, TopicNotFound
from millstream.events.event import ID_HEADER, Receipt
from millstream.events.value_type import ValueType
from millstream.messaging.core.discovery import ServiceInfo, ServiceStats, discover
from millstream.messaging.core.identity import Identity, IdentitySettings, claim_identity
from millstream.messaging.core.message import (
    HeaderItems,
    Message,
    Payload,
    body_of,
    publish,
    subject_bytes,
)
from millstream.messaging.core.overload import SubscriberSettings
from millstream.messaging.core.paced_publisher import PacedPublisher
from millstream.messaging.core.request import ANSWERS_MAX, QUIET_SECONDS, gather, request
from millstream.messaging.core.service import Service
from millstream.messaging.core.subscriber import MessageHandler, Subscriber
from millstream.messaging.groups.admin import GroupAdmin, GroupInfo, hold_for_groups
from millstream.messaging.groups.store import topics_with_groups
from millstream.messaging.process_list import ProcessInfo, list_processes
from millstream.messaging.publishing.event_publisher import PUBLISH_SECONDS
from millstream.messaging.reading.event_count import EventCount, count_events
from millstream.messaging.topic import Topic
from millstream.messaging.topics import admin as topic_admin
from millstream.messaging.topics.durability import durabilities_of, shortfall_of
from millstream.messaging.topics.handle import TopicHandle
from millstream.messaging.topics.info import TopicInfo
from millstream.messaging.topics.lookup import list_topics, open_topic
from millstream.messaging.topics.settings import TOPIC_SETTINGS, Retention, TopicSettings
from millstream.messaging.topics.unstored import UnstoredWarnings
from millstream.nearest import check_known, settings_from
from millstream.settings import ConnectionSettings, Reconnect
from millstream.wire.aio.connection import Connection, Outlet
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.aio.publisher import StreamPublisher
from millstream.wire.message import OutgoingMessage

__all__ = ["Client", "Connecting"]

# Messages in flight of one connection; more than this only waits in the server's own queue.
IN_FLIGHT_MAX: Final = 4096
# A running broker acks within milliseconds; one that is being restarted, within seconds.
CLOSE_SECONDS: Final = 5.0
DRAIN_SECONDS: Final = 30.0
RELEASE_SECONDS: Final = 2.0
LOOKUP_SECONDS: Final = 1.0

_log = logging.getLogger("millstream.messaging")

C = TypeVar("C", bound="Client")


class Connecting(Opening[C]):
    """A connection about to be opened: `await` it, or use it as `async with`."""

    def __init__(
        self,
        make: Callable[[Connection], C],
        settings: ConnectionSettings,
        client_id: str | None = None,
    ) -> None:
        super().__init__(partial(_connected, make, settings, client_id))


async def _connected(
    make: Callable[[Connection], C], settings: ConnectionSettings, client_id: str | None
) -> C:
    connection = Connection(settings)
    await connection.open()
    client = make(connection)
    try:
        if client_id is not None:
            await client.claim(client_id)
    except BaseException:
        await client.close()
        raise
    return client


class Client(AsyncClosing):
    """A connection to a broker for one event loop. Reconnects automatically; close it when done."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.jetstream = JetStream(connection)
        self.identity: Identity | None = None
        self._publisher = StreamPublisher(connection, IN_FLIGHT_MAX)
        self._unstored = UnstoredWarnings(self.jetstream)
        self._topics: weakref.WeakSet[Topic] = weakref.WeakSet()
        self._refreshing: asyncio.Task[None] | None = None
        connection.on_connected.append(self._reconnected)

    async def _leave(self, error: BaseException | None) -> None:
        await self.close()

    @property
    def url(self) -> str:
        """The server this is connected to."""
        return self.connection.url

    @property
    def connected(self) -> bool:
        """Whether a server is connected now; a lost connection is reopened automatically."""
        return self.connection.connected

    async def flush(self, timeout: float | None = None) -> None:
        """Return when the server has processed everything sent so far."""
        await self.connection.flush(timeout)

    async def drain(self, timeout: float = DRAIN_SECONDS) -> None:
        """Close gracefully: accept nothing new, let handlers finish, store what was sent.

        Subscribers, services, subscriptions and groups stop first, then producers of packs send
        what they have. What is unfinished after `timeout` seconds is abandoned; the error lists it.
        """
        deadline = Deadline(timeout)
        if self.connection.closed:
            return
        try:
            intakes = [intake.drain(timeout) for intake in list(self.connection.intakes)]
            ended = await asyncio.gather(*intakes, return_exceptions=True)
            outlets = [_closed(outlet, deadline.left()) for outlet in list(self.connection.outlets)]
            ended += await asyncio.gather(*outlets, return_exceptions=True)
        except BaseException:  # cancelled: the caller has no further use for the connection
            await self.connection.close(timeout=0)
            raise
        await self._close(deadline)
        for result in ended:
            if isinstance(result, BaseException):
                raise result

    async def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Wait for the acks of events in flight, then close. Safe to call twice.

        Events that are not acked after `timeout` seconds fail with ConnectionClosed. Use `drain`
        to let subscriptions and handlers finish as well.
        """
        await self._close(Deadline(timeout))

    async def _close(self, deadline: Deadline) -> None:
        if self.connection.closed:
            return
        try:
            await self._settle(deadline)
        except BaseException:  # cancelled: the socket must not stay open all the same
            await self.connection.close(timeout=0)
            raise
        await self.connection.close(deadline.left())

    async def _settle(self, deadline: Deadline) -> None:
        """Wait for acks in flight and give the client id back."""
        await self._unstored.close(deadline.left(LOOKUP_SECONDS) if self.connected else 0)
        for topic in self._topics:
            topic.forget_durability()  # now: acks of events that were sent again come next
        if self._refreshing is not None:
            self._refreshing.cancel()
        try:
            async with asyncio.timeout(deadline.left()):
                await self._publisher.settled()
        except TimeoutError:
            _log.warning("closing with %d events not acknowledged", self._publisher.in_flight)
        if self.identity is not None and self.connected:
            try:
                async with asyncio.timeout(RELEASE_SECONDS):
                    await self.identity.release()
            except (MillstreamError, TimeoutError) as error:
                _log.info("the client id is not released, it expires on its own: %s", error)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}{'' if self.connected else ', disconnected'}>"

    # -- core subjects: at most once ------------------------------------------------------

    async def publish(
        self,
        subject: str,
        data: Payload = b"",
        headers: HeaderItems | None = None,
        reply: str | None = None,
    ) -> None:
        """Send a message to the current subscribers of a subject: at most once, in order.

        A topic's events go through `topic.publish`: a subject that has the name of a topic but
        is not stored by it is reported once, as a warning in the log.
        """
        await publish(self.connection, subject, data, headers, reply)
        self._unstored.published(subject)

    def subscribe(
        self,
        subject: str,
        settings: SubscriberSettings | None = None,
        handler: MessageHandler | None = None,
        **values: Any,
    ) -> Subscriber:
        """Receive messages of a subject from now on: at most once.

        `async with mill.subscribe("weather.*") as subscriber`, then `async for`.
        `subscribe("weather.*", queue="forecast")`: see SubscriberSettings.
        """
        wanted = settings_from(SubscriberSettings, settings, values, ("handler",))
        return Subscriber(self.connection, subject, wanted, handler)

    async def request(
        self,
        subject: str,
        data: Payload = b"",
        headers: HeaderItems | None = None,
        timeout: float | None = None,
    ) -> Message:
        """Send a request and return the first answer; NoResponders when there is no subscriber."""
        return await request(self.connection, subject, data, headers, timeout)

    async def gather(
        self,
        subject: str,
        data: Payload = b"",
        headers: HeaderItems | None = None,
        *,
        limit: int = ANSWERS_MAX,
        quiet: float = QUIET_SECONDS,
        timeout: float | None = None,
    ) -> list[Message]:
        """Send a request and return the answers of all subscribers."""
        return await gather(
            self.connection, subject, data, headers, limit=limit, quiet=quiet, timeout=timeout
        )

    def paced(self, subject: str, **window: int) -> PacedPublisher:
        """A publisher that sends no faster than the subject's blocking subscribers read."""
        check_known(window, ("window_messages", "window_bytes"))
        return PacedPublisher(self.connection, subject, **window)

    def service(self, name: str, version: str, **details: Any) -> Service:
        """A service that answers requests: add endpoints, then enter it with `async with`.

        `details` are `description`, `metadata`, `queue` and `prefix`.
        """
        check_known(details, ("description", "metadata", "queue", "prefix"))
        return Service(self.connection, name, version, **details)

    async def services(
        self,
        name: str | None = None,
        *,
        limit: int = ANSWERS_MAX,
        quiet: float = QUIET_SECONDS,
        timeout: float | None = None,
    ) -> list[ServiceInfo]:
        """The running instances of all services, or of one, of any NATS client.

        Limits as in `gather`: an instance that answers later is not found.
        """
        return await discover(
            self.connection, ServiceInfo, name, limit=limit, quiet=quiet, timeout=timeout
        )

    async def service_stats(
        self,
        name: str | None = None,
        *,
        limit: int = ANSWERS_MAX,
        quiet: float = QUIET_SECONDS,
        timeout: float | None = None,
    ) -> list[ServiceStats]:
        """What each running instance of a service has done since it started; see `services`."""
        return await discover(
            self.connection, ServiceStats, name, limit=limit, quiet=quiet, timeout=timeout
        )

    async def claim(
        self, client_id: str, settings: IdentitySettings | None = None, **values: Any
    ) -> Identity:
        """Claim a client id for this connection; IdentityTaken while its holder is alive.

        `claim("billing-1", heartbeat=1)`: see IdentitySettings.
        """
        wanted = settings_from(IdentitySettings, settings, values)
        self.identity = await claim_identity(self.connection, client_id, wanted)
        return self.identity

    # -- topics ---------------------------------------------------------------------------

    async def create_topic(
        self, name: str, settings: TopicSettings | None = None, **values: Any
    ) -> Topic:
        """Create a topic; no-op if it already exists with the same settings.

        `create_topic("orders", partitions=4, max_age="7d")`: see TopicSettings. TopicConflict says
        which setting differs when it exists with other settings.
        """
        wanted = settings_from(TopicSettings, settings, values) or TopicSettings()
        return await self.open_as(await topic_admin.declare(self.jetstream, name, wanted))

    async def topic(self, name: str) -> Topic:
        """An existing topic, or any JetStream stream as it is."""
        return await self.open_as(await open_topic(self.jetstream, name))

    async def topics(self) -> list[TopicInfo]:
        """All topics and streams visible to this user."""
        return await list_topics(self.jetstream)

    async def count_events(self, topic: str, packs_max: int | None = None) -> EventCount:
        """The number of events of a topic; `info().messages` counts a pack of many as one.

        Reads the headers of all packs. With `packs_max` it reads only so many, and what is inside
        the others is an estimate. ConfigError for a foreign stream.
        """
        info = await open_topic(self.jetstream, topic)
        return await count_events(self.jetstream, info, packs_max)

    async def groups(self) -> list[GroupInfo]:
        """The ordered groups of all topics, running or not."""
        found: list[GroupInfo] = []
        for name in await topics_with_groups(self.jetstream):
            with suppress(TopicNotFound):  # its groups outlive a topic
                info = await open_topic(self.jetstream, name)
                handle = TopicHandle.of(self.jetstream, self._publisher, info, None)
                admin = GroupAdmin(self.jetstream, self._publisher, name, handle.partitions)
                found += await admin.list()
        return found

    async def processes(self) -> list[ProcessInfo]:
        """The processes that have stored a position, running or not: what they read and write.

        One that was last run by an older version is found when it has run again.
        """
        return await list_processes(self.jetstream)

    async def edit_topic(self, name: str, **changes: Any) -> TopicInfo:
        """Change settings of a topic; some cannot be changed after it was created.

        With retention `interest` the broker drops what nobody wants from then on. Events are kept
        for the topic's subscriptions and groups; a process or Spark query must be started again.
        """
        check_known(changes, TOPIC_SETTINGS)
        if "retention" in changes:
            wanted = TopicSettings(retention=changes["retention"]).retention
            if wanted is Retention.INTEREST:
                await hold_for_groups(self.jetstream, await open_topic(self.jetstream, name))
        return await topic_admin.edit(self.jetstream, name, changes)

    async def delete_topic(self, name: str) -> None:
        """Delete a topic and all its events."""
        await topic_admin.delete(self.jetstream, name)

    async def publish_acked(
        self,
        subject: str,
        data: Payload = b"",
        headers: Mapping[str, str] | None = None,
        id: str | None = None,
    ) -> Receipt:
        """Publish to a subject of a foreign stream; returns when the event is stored."""
        own_id = {ID_HEADER: id or self._publisher.new_id()}
        payload, block = body_of(data, {**(headers or {}), **own_id})
        if self._publisher.full:
            await self._publisher.wait_for_space()
        message = OutgoingMessage(subject_bytes(subject), block, payload)
        return await self._publisher.publish(
            message,
            PUBLISH_SECONDS,
            lambda ack: Receipt(ack.stream, 0, ack.seq, ack.duplicate, "unknown"),
        )

    async def promote_topic(self, name: str, *, allow_lag: bool = False) -> TopicInfo:
        """Turn a mirror into a topic of its own, which continues after the last mirrored event."""
        return await topic_admin.promote(self.jetstream, name, allow_lag=allow_lag)

    async def open_as(self, info: TopicInfo, value_type: ValueType | None = None) -> Topic:
        """Internal: a topic with a value type, for the layers above messaging."""
        durabilities = await durabilities_of(self.jetstream, info)
        handle = TopicHandle.of(self.jetstream, self._publisher, info, value_type)
        shortfall = await shortfall_of(self.jetstream, info)
        topic = Topic(handle, info, durabilities, shortfall)
        self._topics.add(topic)
        return topic

    def _reconnected(self) -> None:
        """Another server may be less durable: receipts must not promise more than it does."""
        if self._refreshing is not None:
            self._refreshing.cancel()
        reconnect = self.connection.settings.reconnect
        # A task: a cancelled `gather` that is not awaited logs an error.
        self._refreshing = asyncio.create_task(_refresh_all(list(self._topics), reconnect))


async def _closed(outlet: Outlet, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await outlet.close()
    except TimeoutError as error:
        raise RequestTimeout(repr(outlet), seconds, ": it still had events to store") from error


async def _refresh_all(topics: Sequence[Topic], reconnect: Reconnect) -> None:
    await asyncio.gather(*(_refresh(topic, reconnect) for topic in topics))


async def _refresh(topic: Topic, reconnect: Reconnect) -> None:
    """Receipts say `unknown` until this ends; a cluster may have to elect a leader first."""
    deadline = Deadline(reconnect.give_up_after)
    wait = reconnect.wait
    while not deadline.passed:
        try:
            await topic.admin.refresh_durability()
            return
        except MillstreamError as error:
            _log.debug("the durability of %s is not known yet: %s", topic.name, error)
        await asyncio.sleep(deadline.left(wait))
        wait = min(2 * wait, reconnect.wait_max)
