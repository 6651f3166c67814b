"""Administration of subscriptions: create, edit, show, pause, seek, delete."""

from __future__ import annotations

import asyncio
from builtins import list as builtin_list
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from millstream.deadline import now_ns
from millstream.errors import (
    ApiError,
    ConfigError,
    MillstreamError,
    SubscriptionConflict,
    SubscriptionNotFound,
    TopicNotFound,
)
from millstream.events.event import Partition, datetime_of
from millstream.events.start import Start
from millstream.events.subject import check_name
from millstream.messaging.dead_letters.store import default_dead_letter_topic
from millstream.messaging.subscriptions.settings import (
    SubscriptionSettings,
    config_of,
    differences,
    settings_of,
)
from millstream.messaging.topics.handle import TopicHandle
from millstream.messaging.topics.lookup import open_topic, side_by_side
from millstream.messaging.topics.missing import NAMES_SECONDS
from millstream.nearest import check_known, propose, settings_from
from millstream.wire.api import ConsumerInfo, ErrorCode
from millstream.wire.message import stored_ns_of
from millstream.wire.protocol import unique_token

__all__ = ["Lag", "SubscriptionInfo", "SubscriptionPosition", "Subscriptions"]

# The server is asked once for each pattern; with more, the age of any message is a good estimate.
PATTERNS_ASKED_MAX: Final = 64
PAUSE_FOREVER = timedelta(days=36_500)  # the server needs a date


@dataclass(frozen=True, slots=True)
class SubscriptionPosition:
    """The position of a subscription in one partition."""

    partition: int
    next_offset: int  # everything before it is settled
    pending: int  # messages not delivered yet
    in_flight: int  # delivered and not settled
    redelivered: int


@dataclass(frozen=True, slots=True)
class SubscriptionInfo:
    """A subscription's settings and state."""

    topic: str
    name: str
    settings: SubscriptionSettings
    positions: tuple[SubscriptionPosition, ...]
    paused: bool
    waiting_members: int  # pull requests that wait for events

    @property
    def pending(self) -> int:
        """Messages not delivered yet, in all partitions."""
        return sum(position.pending for position in self.positions)

    @property
    def in_flight(self) -> int:
        """Messages delivered and not settled, in all partitions."""
        return sum(position.in_flight for position in self.positions)


@dataclass(frozen=True, slots=True)
class Lag:
    """The lag of a subscription: messages not settled, and the age of the oldest of them."""

    messages: int
    seconds: float


class Subscriptions:
    """Manages the subscriptions of one topic by name, as `topic.subscriptions`.

    `await topic.subscriptions.lag("billing")`, `await topic.subscriptions.seek("billing",
    Start.ALL)`. To receive events, join one with `topic.subscribe`.
    """

    def __init__(self, topic: TopicHandle) -> None:
        self._jetstream = topic.jetstream
        self._topic = topic.shape.topic
        self._partitions = topic.partitions

    async def create(
        self, name: str, settings: SubscriptionSettings | None = None, **values: Any
    ) -> SubscriptionSettings:
        """Create a subscription without joining it; returns its settings.

        If it exists, settings that differ from its own raise SubscriptionConflict. Without
        settings an existing one is left as it is. The keywords are those of `topic.subscribe`.
        """
        check_name("subscription", name)
        settings = settings_from(SubscriptionSettings, settings, values)
        if settings is None:
            try:
                return (await self._info(name)).settings
            except SubscriptionNotFound:
                settings = SubscriptionSettings()
        for partition in self._partitions:
            config = config_of(name, settings, partition)
            try:
                await self._jetstream.create_consumer(partition.stream, config, "create")
            except SubscriptionConflict as conflict:
                found = settings_of(
                    (await self._jetstream.consumer_info(partition.stream, name)).config
                )
                differing = differences(settings, found)
                if differing:
                    raise SubscriptionConflict(
                        conflict.code,
                        conflict.err_code,
                        f"subscription '{name}' of '{self._topic}' exists with other settings: "
                        + "; ".join(differing),
                        "Open it without settings to use it as it is, change it with "
                        "topic.subscriptions.edit, or delete it first",
                    ) from conflict
        return settings

    async def edit(self, name: str, **changes: object) -> SubscriptionSettings:
        """Change settings of an existing subscription; its position is kept."""
        check_known(changes, SubscriptionSettings.__dataclass_fields__)
        settings = replace((await self.info(name)).settings, **changes)  # type: ignore[arg-type]
        for partition in self._partitions:
            await self._jetstream.create_consumer(
                partition.stream, config_of(name, settings, partition), "update"
            )
        return settings

    async def delete(self, name: str) -> None:
        """Remove the subscription on every partition."""
        found = False
        missing: SubscriptionNotFound | None = None
        for partition in self._partitions:
            try:
                await self._jetstream.delete_consumer(partition.stream, name)
                found = True
            except SubscriptionNotFound as error:
                missing = error
        if missing is not None and not found:
            raise await self._near(missing, name)

    async def info(self, name: str) -> SubscriptionInfo:
        """Settings and state of one subscription."""
        async with self._existing(name):
            return await self._info(name)

    async def _info(self, name: str) -> SubscriptionInfo:
        infos = [
            (partition, await self._jetstream.consumer_info(partition.stream, name))
            for partition in self._partitions
        ]
        return self._summary(name, infos)

    async def list(self) -> builtin_list[SubscriptionInfo]:
        """Settings and state of all subscriptions, sorted by name."""
        found: dict[str, builtin_list[tuple[Partition, ConsumerInfo]]] = {}
        async for partition, info in self._all():
            if info.config.durable_name:
                found.setdefault(info.name, []).append((partition, info))
        return [self._summary(name, infos) for name, infos in sorted(found.items())]

    async def lag(self, name: str) -> Lag:
        """The number of messages that are not settled yet, and the age of the oldest.

        On a cluster this is what the subscription's leader knows, which may be slightly old.
        """
        messages, oldest = 0, None
        for partition in self._partitions:
            async with self._existing(name):
                info = await self._jetstream.consumer_info(partition.stream, name)
            unsettled = info.num_pending + info.num_ack_pending
            messages += unsettled
            if unsettled:
                stored = await self._first_unsettled(partition.stream, info)
                if stored is not None:
                    oldest = stored if oldest is None else min(oldest, stored)
        seconds = 0.0 if oldest is None else max(0.0, (now_ns() - oldest) / 1e9)
        return Lag(messages, seconds)

    async def pause(self, name: str, seconds: float | None = None) -> datetime:
        """Stop delivery for some seconds (None: until `resume`); returns when it ends.

        Events that were delivered before can still be settled.
        """
        span = PAUSE_FOREVER if seconds is None else timedelta(seconds=seconds)
        until = datetime_of(now_ns()) + span
        text = until.astimezone(UTC).isoformat().replace("+00:00", "Z")
        for partition in self._partitions:
            async with self._existing(name):
                await self._jetstream.ask(
                    f"CONSUMER.PAUSE.{partition.stream}.{name}", {"pause_until": text}
                )
        return until

    async def resume(self, name: str) -> None:
        """End a pause now."""
        connection = self._jetstream.connection
        for partition in self._partitions:
            async with self._existing(name):
                await self._jetstream.ask(f"CONSUMER.PAUSE.{partition.stream}.{name}", {})
            # The server continues only at its next heartbeat, or when messages are requested: this
            # does that, for an inbox without a subscriber, so that none is delivered to it.
            subject = f"{self._jetstream.prefix}.CONSUMER.MSG.NEXT.{partition.stream}.{name}"
            inbox = f"{connection.settings.inbox_prefix}.{unique_token()}"
            connection.publish(subject.encode(), b'{"batch":1,"expires":1000000}', inbox.encode())

    async def seek(self, name: str, to: Start) -> None:
        """Move to an offset, a time, ALL, NEW or LAST; events after that are delivered again."""
        for partition in self._partitions:
            sequence = await self._sequence(partition.stream, to)
            try:
                body = {"seq": sequence}
                async with self._existing(name):
                    await self._jetstream.ask(f"CONSUMER.RESET.{partition.stream}.{name}", body)
            except ApiError as error:
                if error.err_code != ErrorCode.RESET_BELOW_START:
                    raise
                await self._recreate(partition, name, sequence)

    async def dead_letter_topic(self, name: str) -> str:
        """The topic that holds the dead letters of a subscription, group or process."""
        dead = default_dead_letter_topic(self._topic, name)
        try:
            return (await self._info(name)).settings.dead_letter or dead
        except SubscriptionNotFound as missing:
            # Groups and processes have no consumer, and dead letters outlive their subscription.
            try:
                await open_topic(self._jetstream, dead)
            except TopicNotFound:
                raise await self._near(missing, name) from None
            return dead

    # -- inside ---------------------------------------------------------------------------

    @asynccontextmanager
    async def _existing(self, name: str) -> AsyncIterator[None]:
        """Propose near names when there is no subscription of this name."""
        check_name("subscription", name)
        try:
            yield
        except SubscriptionNotFound as missing:
            raise await self._near(missing, name)  # noqa: B904 - it is the same error

    async def _near(self, missing: SubscriptionNotFound, name: str) -> SubscriptionNotFound:
        try:
            async with asyncio.timeout(NAMES_SECONDS):
                known = [info.name for info in await self.list()]
        except (MillstreamError, TimeoutError):  # the error is the one about the name
            return missing
        propose(missing, name, known)
        return missing

    async def _recreate(self, partition: Partition, name: str, sequence: int) -> None:
        """A consumer cannot go before its first start: create it again, starting there.

        Running members wait a second for it before they treat it as deleted.
        """
        found = settings_of((await self._jetstream.consumer_info(partition.stream, name)).config)
        moved = replace(found, start=Start.at_offset(sequence))
        await self._jetstream.delete_consumer(partition.stream, name)
        await self._jetstream.create_consumer(
            partition.stream, config_of(name, moved, partition), "create"
        )

    async def _sequence(self, stream: str, to: Start) -> int:
        if to.policy == "by_start_sequence":
            return to.offset
        if to.policy == "by_start_time":
            return await self._jetstream.sequence_at(stream, to.rfc3339 or "")
        state = (await self._jetstream.stream_info(stream)).state
        if to.policy == "all":
            return max(1, state.first_seq)
        if to.policy == "new":
            return state.last_seq + 1
        if to.policy == "last":
            return max(1, state.last_seq)
        raise ConfigError("seek to ALL, NEW, LAST, an offset or a time")

    async def _first_unsettled(self, stream: str, info: ConsumerInfo) -> int | None:
        """When the oldest message that the subscription has not settled was stored."""
        config = info.config
        patterns = config.filter_subjects or [config.filter_subject or ">"]
        if len(patterns) > PATTERNS_ASKED_MAX:
            patterns = [">"]

        async def first(pattern: str) -> int | None:
            ask = {"seq": info.ack_floor.stream_seq + 1, "next_by_subj": pattern}
            message = await self._jetstream.get_message(stream, ask)
            return None if message is None else stored_ns_of(message.time)

        found = await side_by_side(first, patterns)
        return min((time for time in found if time is not None), default=None)

    async def _all(self) -> AsyncIterator[tuple[Partition, ConsumerInfo]]:
        for partition in self._partitions:
            for info in await self._jetstream.consumers(partition.stream):
                yield partition, info

    def _summary(
        self, name: str, infos: builtin_list[tuple[Partition, ConsumerInfo]]
    ) -> SubscriptionInfo:
        positions = tuple(
            SubscriptionPosition(
                partition.number,
                info.ack_floor.stream_seq + 1,
                info.num_pending,
                info.num_ack_pending,
                info.num_redelivered,
            )
            for partition, info in infos
        )
        first = infos[0][1]
        return SubscriptionInfo(
            self._topic,
            name,
            settings_of(first.config),
            positions,
            any(info.paused for _, info in infos),
            sum(info.num_waiting for _, info in infos),
        )
