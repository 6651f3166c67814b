"""Events that the broker stores by itself at a later time, once or again and again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from millstream.errors import ApiError, ConfigError
from millstream.events.event import NewEvent, Partition, PlainEvent
from millstream.events.schedule import (
    NEXT_HEADER,
    RULE_HEADER,
    SCHEDULE_TOKEN,
    SCHEDULER_HEADER,
    TARGET_HEADER,
    ZONE_HEADER,
    Rule,
    due_at,
    named_subject,
    read_rule,
    with_headers,
)
from millstream.events.subject import check_name, key_of_token, key_token, partition_of
from millstream.events.undecodable import DECODE_FAILURES
from millstream.events.unpack import raw_of
from millstream.messaging.publishing.event_publisher import PUBLISH_SECONDS, EventPublisher
from millstream.messaging.reading.last_per_key import last_messages_now, stored_subjects
from millstream.messaging.topics.choices import Retention
from millstream.messaging.topics.handle import TopicHandle
from millstream.messaging.topics.settings import TopicSettings
from millstream.wire.message import OutgoingMessage, RawMessage
from millstream.wire.protocol import parse_headers

__all__ = ["Schedule", "Schedules"]

LISTED_MAX: Final = 1000
# The server's own numbers for a rule and for a time zone that it does not accept.
_BAD_RULE: Final = (10189, 10223)


@dataclass(frozen=True, slots=True)
class Schedule:
    """What is stored when: a named schedule, or an event that was published with `deliver_at`."""

    name: str  # of an event with `deliver_at`: its id
    rule: str  # "@every 1h", "0 0 3 * * *" (second first) or "@at 2027-01-01T00:00:00Z"
    time_zone: str | None  # of a cron rule; None: UTC
    next: datetime | None  # when it is due; None: not known before it was due the first time
    key: str | None
    value: Any
    headers: Mapping[str, str]
    partition: int
    offset: int  # of the record in its partition, which is no event

    @property
    def once(self) -> bool:
        """Whether it is due only once, and gone then."""
        return self.rule.startswith("@at ")


class Schedules:
    """The schedules of one topic, by name; the topic needs the setting `schedules`.

    `await topic.schedules.set("nightly", {"run": 1}, key="job", cron="0 3 * * *")`. What they
    store are ordinary events, without an id, with the time when they were stored.
    """

    def __init__(
        self,
        topic: TopicHandle,
        publisher: EventPublisher,
        settings: TopicSettings,
        check_writable: Callable[[], None],
    ) -> None:
        self._topic = topic
        self._jetstream = topic.jetstream
        self._publisher = publisher
        self._settings = settings
        self._check_writable = check_writable

    async def set(
        self,
        name: str,
        value: Any,
        key: str | bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        every: str | float | timedelta | None = None,
        cron: str | None = None,
        at: datetime | None = None,
        time_zone: str | None = None,
    ) -> Schedule:
        """Store an event again and again, or once; replaces a schedule of the same name.

        `every="1h"` (whole seconds), `cron="0 3 * * *"` (five fields as in crontab, or six with the
        second first) in a `time_zone` such as "Europe/Berlin", or `at=moment`. The value is checked
        now, not again when it is stored.
        """
        check_name("schedule", name)
        rule = read_rule(every, cron, at, time_zone)
        self._check_writable()
        self._check_topic(rule)
        number, event = self._publisher.encode(NewEvent(value, key, headers))
        shape = self._topic.shape
        if key is None:
            number = partition_of(name, shape.partitions)
        prefix = shape.prefixes[number]
        pairs = [*rule.headers, (TARGET_HEADER, f"{prefix}.{key_token(key)}")]
        if self._settings.max_age is not None:
            pairs.append(("Nats-TTL", "never"))  # or the schedule would expire like an event
        block = with_headers(event.headers, pairs)
        message = OutgoingMessage(named_subject(prefix, name).encode(), block, event.payload)
        publisher = self._publisher
        await publisher.acks.check()
        try:
            await publisher.stream_publisher.publish(message, PUBLISH_SECONDS, lambda ack: ack)
        except ApiError as error:
            if error.err_code not in _BAD_RULE:
                raise
            zone = "" if time_zone is None else f" in time zone {time_zone!r:.60}"
            raise ConfigError(
                f"schedule '{name}': the broker does not accept '{rule.text:.120}'{zone}: "
                f"{error.description}"
            ) from error
        # With another key it may have moved here from another partition.
        await self._remove([p for p in self._topic.partitions if p.number != number], name)
        stored = await self.get(name)
        if stored is None:
            raise ConfigError(f"schedule '{name}' was due or cancelled as soon as it was stored")
        return stored

    async def get(self, name: str) -> Schedule | None:
        """A schedule by name, or an event with `deliver_at` by its id; None if there is none."""
        for token in _tokens(name):
            for partition in self._topic.partitions:
                subject = f"{partition.prefix}.{SCHEDULE_TOKEN}.{token}"
                async for messages in last_messages_now(self._jetstream, partition, [subject]):
                    for raw in messages:
                        return await self._described(partition, raw)
        return None

    async def list(self, limit: int = LISTED_MAX) -> list[Schedule]:
        """All schedules, and events with `deliver_at` that are not due yet; at most `limit`."""
        found: list[Schedule] = []
        for partition in self._topic.partitions:
            pattern = f"{partition.prefix}.{SCHEDULE_TOKEN}.>"
            subjects: list[str] = []
            async for subject in stored_subjects(self._jetstream, partition, [pattern], own=True):
                subjects.append(subject)
                if len(subjects) + len(found) >= limit:
                    break
            async for messages in last_messages_now(self._jetstream, partition, subjects):
                found += [await self._described(partition, raw) for raw in messages]
        return sorted(found, key=lambda schedule: schedule.name)

    async def cancel(self, name: str) -> bool:
        """Remove a schedule, or an event with `deliver_at` by its id; whether there was one.

        What was stored before stays. An event that is due at this moment may still be stored.
        """
        return await self._remove(self._topic.partitions, name, *_tokens(name)[1:])

    async def _remove(self, partitions: Any, name: str, *ids: str) -> bool:
        removed = 0
        for partition in partitions:
            subjects = [named_subject(partition.prefix, name)]
            subjects += [f"{partition.prefix}.{SCHEDULE_TOKEN}.{token}" for token in ids]
            for subject in subjects:
                ask = {"filter": subject}
                removed += await self._jetstream.purge_stream(partition.stream, ask)
        return bool(removed)

    async def _described(self, partition: Partition, raw: RawMessage) -> Schedule:
        event = PlainEvent(partition, raw)
        headers = parse_headers(raw.headers)
        rule, target = headers.get(RULE_HEADER, ""), headers.get(TARGET_HEADER, "")
        fired = None
        if not Rule(rule).once:
            fired = await self._last_fired(partition, target, event)
        try:
            value = event.value
        except DECODE_FAILURES:
            value = event.data
        token = event.subject.rpartition(".")[2]
        return Schedule(
            name=key_of_token(token.encode()) or token,
            rule=rule,
            time_zone=headers.get(ZONE_HEADER),
            next=due_at(rule, fired),
            key=key_of_token(target[partition.prefix_size :].encode()),
            value=value,
            headers=event.headers,
            partition=partition.number,
            offset=event.offset,
        )

    async def _last_fired(
        self, partition: Partition, target: str, schedule: PlainEvent
    ) -> str | None:
        """What the last event of the key says about the next one, if this schedule stored it."""
        found = await self._jetstream.get_message(partition.stream, {"last_by_subj": target})
        if found is None or found.sequence < schedule.offset:
            return None
        headers = parse_headers(raw_of(partition.stream, found).headers)
        ours = headers.get(SCHEDULER_HEADER) == schedule.subject
        return headers.get(NEXT_HEADER) if ours else None

    def _check_topic(self, rule: Rule) -> None:
        """Refuse where the topic would not keep a schedule like this."""
        settings, name = self._settings, self._topic.shape.topic
        if not settings.allows("schedules"):
            raise ConfigError(
                f"topic '{name}' has no schedules: create it with schedules=True, or edit it "
                f"(topic edit {name} --schedules). The server then allows roll-ups as well: every "
                f"publisher of the topic can remove what others stored"
            )
        if settings.retention is not Retention.LIMITS:
            raise ConfigError(
                f"topic '{name}' has retention {settings.retention}, which would remove the "
                f"schedule itself: use a topic with retention limits"
            )
        limits = [limit for limit in ("max_messages", "max_bytes") if getattr(settings, limit)]
        if limits:
            raise ConfigError(
                f"topic '{name}' has {limits[0]}, which would remove the schedule itself when it "
                f"is the oldest message: use a topic that is limited by max_age"
            )
        if settings.max_age is not None and not settings.allows("message_ttl"):
            raise ConfigError(
                f"topic '{name}' has max_age and no message_ttl, so the schedule itself would "
                f"expire: set message_ttl"
            )
        if settings.guarded and not rule.once:
            raise ConfigError(
                f"topic '{name}' is guarded: its guard takes schedules with `at` only"
            )


def _tokens(name: str) -> list[str]:
    """The ends of the subjects under which a schedule of this name may be: named, or by id."""
    return [named_subject("", name).removeprefix(f".{SCHEDULE_TOKEN}."), key_token(name)]
