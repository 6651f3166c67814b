"""The recorders of the library, on a topic of one partition.

The offset of an event is its notification id: offsets grow in the order of storing, and no event
appears later at a lower one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final
from uuid import UUID

from eventsourcing.persistence import (
    AggregateRecorder,
    ApplicationRecorder,
    Notification,
    ProcessRecorder,
    Recorder,
    StoredEvent,
    Subscription,
    Tracking,
    TrackingRecorder,
)

from millstream import blocking
from millstream.errors import MillstreamError
from millstream.events.event import Event
from millstream.events.start import Start
from millstream.eventsourcing.appending import Appending
from millstream.eventsourcing.datastore import MillstreamDatastore
from millstream.eventsourcing.following import FollowingSubscription
from millstream.eventsourcing.stored import (
    event_behind,
    head_of,
    is_event,
    key_of,
    notification_of,
    stored_of,
    tracking_key,
    version_of,
)
from millstream.eventsourcing.translated import translated
from millstream.messaging.topics.admin import Purge

__all__ = [
    "MillstreamAggregateRecorder",
    "MillstreamApplicationRecorder",
    "MillstreamProcessRecorder",
    "MillstreamTrackingRecorder",
]

_log = logging.getLogger("millstream.eventsourcing")

# How many messages are looked at first for the last event, from the end; then more and more.
LOOK_BACK_MESSAGES: Final = 64
LOOK_BACK_GROWTH: Final = 8
# Only the last tracking record of an application counts. After this many the others are removed.
TRIM_RECORDS: Final = 1000


class _TopicRecorder(Recorder):
    """What all recorders have: a topic, and how to append to it."""

    def __init__(
        self,
        datastore: MillstreamDatastore,
        topic_name: str,
        *,
        create: bool = True,
        snapshots_of: str | None = None,
    ) -> None:
        self.datastore = datastore
        self.topic: blocking.Topic = datastore.topic(topic_name, create=create)
        self._heads = datastore.heads(topic_name)
        # Where the events are that snapshots were taken of: those of this topic, or, in a topic of
        # snapshots, those of the topic `snapshots_of`.
        self._marks = datastore.marks(snapshots_of or topic_name)
        taken_of = None if snapshots_of is None else datastore.heads(snapshots_of)
        self._appending = Appending(self.topic, self._heads, taken_of)


class MillstreamAggregateRecorder(_TopicRecorder, AggregateRecorder):
    """Stores and selects the events of aggregates, or their snapshots."""

    def insert_events(
        self, stored_events: Sequence[StoredEvent], **kwargs: Any
    ) -> Sequence[int] | None:
        """Store the events, all of them or none; IntegrityError when a version exists."""
        self._appending.append(stored_events, None)
        return None

    def select_events(
        self,
        originator_id: UUID | str,
        *,
        gt: int | None = None,
        lte: int | None = None,
        desc: bool = False,
        limit: int | None = None,
    ) -> Sequence[StoredEvent]:
        """The events of one aggregate by version; the server's index finds them."""
        key = key_of(originator_id)
        with translated():
            chosen = self._chosen(key, gt, lte, last_only=desc and limit == 1)
        chosen.sort(key=version_of, reverse=desc)
        chosen = chosen[:limit]
        if chosen and (mark := event_behind(chosen[0])) is not None:
            self._marks.put(key, mark)
        return [stored_of(event) for event in chosen]

    def _chosen(self, key: str, gt: int | None, lte: int | None, last_only: bool) -> list[Event]:
        if last_only and gt is None and lte is None:
            last = self.topic.last(key)
            if last is None or head_of(last).ends_at(version_of(last)):
                return [] if last is None else [last]
        events = list(self._events_of(key, gt))
        if events:
            self._heads.put(key, head_of(events[-1]))
        return [
            event
            for event in events
            if (gt is None or version_of(event) > gt) and (lte is None or version_of(event) <= lte)
        ]

    def _events_of(self, key: str, gt: int | None) -> Iterator[Event]:
        """The events of a key; of those up to version `gt` some may be left out."""
        start = Start.ALL
        for known in (self._heads.get(key), self._marks.get(key)):
            if gt is not None and known is not None and known.ends_at(gt):
                start = Start.at_offset(known.offset + 1)
        events = self.topic.read(start=start, subjects=[self._appending.subject(key)])
        return filter(is_event, events)


class MillstreamApplicationRecorder(MillstreamAggregateRecorder, ApplicationRecorder):
    """Also gives the events of all aggregates in the order of storing."""

    def insert_events(
        self, stored_events: Sequence[StoredEvent], **kwargs: Any
    ) -> Sequence[int] | None:
        """Store the events, all of them or none; returns their notification ids."""
        return self._appending.append(stored_events, None)

    def select_notifications(
        self,
        start: int | None,
        limit: int,
        stop: int | None = None,
        topics: Sequence[str] = (),
        *,
        inclusive_of_start: bool = True,
    ) -> Sequence[Notification]:
        """Up to `limit` events from `start` on, in order, of these classes if any are given."""
        first = max(1, (start or 0) + (start is not None and not inclusive_of_start))
        end = None if stop is None else stop + 1
        with translated():
            # As many messages as events are wanted; only where some are none is more read.
            near = first + limit if end is None else min(end, first + limit)
            found = list(self._notifications(first, near, topics))
            if len(found) < limit and near != end:
                further = self._notifications(near, end, topics)
                found += islice(further, limit - len(found))
        return found

    def _notifications(
        self, first: int, end: int | None, topics: Sequence[str]
    ) -> Iterator[Notification]:
        if end is not None and first >= end:
            return
        for event in self.topic.read(start=Start.at_offset(first), end=end):
            if is_event(event):
                notification = notification_of(event)
                if not topics or notification.topic in topics:
                    yield notification

    def max_notification_id(self) -> int | None:
        """The id of the last event; None when there is none."""
        with translated():
            (state,) = self.topic.info().partitions
            end, count = state.last_offset + 1, 1
            while end > state.first_offset:
                start = max(state.first_offset, end - count)
                events = self.topic.read(start=Start.at_offset(start), end=end)
                offsets = [event.offset for event in events if is_event(event)]
                if offsets:
                    return offsets[-1]
                end, count = start, max(LOOK_BACK_MESSAGES, count * LOOK_BACK_GROWTH)
        return None

    def subscribe(
        self, gt: int | None = None, topics: Sequence[str] = ()
    ) -> Subscription[ApplicationRecorder]:
        """The events after `gt`, and then each new one as it is stored."""
        return FollowingSubscription(self, gt, topics)


class MillstreamTrackingRecorder(_TopicRecorder, TrackingRecorder):
    """Stores how far the events of other applications have been processed."""

    def __init__(
        self, datastore: MillstreamDatastore, topic_name: str, *, create: bool = True
    ) -> None:
        super().__init__(datastore, topic_name, create=create)
        self._lock = threading.Lock()
        self._untrimmed: dict[str, int] = {}

    def insert_tracking(self, tracking: Tracking) -> None:
        """Store a position; IntegrityError when it or a later one is stored already."""
        self._append([], tracking)

    def max_tracking_id(self, application_name: str) -> int | None:
        """The last position of an application; None when there is none."""
        with translated():
            head = self._appending.tracked(application_name)
        return head.version if head.offset else None

    def _append(self, stored: Sequence[StoredEvent], tracking: Tracking | None) -> list[int]:
        offsets = self._appending.append(stored, tracking)
        if tracking is not None:
            self._trim(tracking.application_name)
        return offsets

    def _trim(self, application_name: str) -> None:
        """Now and then, remove the tracking records that do not count any more."""
        with self._lock:
            count = self._untrimmed.get(application_name, 0) + 1
            self._untrimmed[application_name] = count % TRIM_RECORDS
        if count < TRIM_RECORDS:
            return
        try:
            self.topic.admin.purge(Purge(key=tracking_key(application_name), keep=1))
        except MillstreamError as error:  # they are only in the way
            _log.warning("old tracking records of '%s' stay: %s", self.topic.name, error)


class MillstreamProcessRecorder(
    MillstreamTrackingRecorder, MillstreamApplicationRecorder, ProcessRecorder
):
    """Stores events and the position of what caused them, all of it or nothing."""

    def insert_events(
        self, stored_events: Sequence[StoredEvent], **kwargs: Any
    ) -> Sequence[int] | None:
        """Store the events with the keyword `tracking`, if given; returns notification ids."""
        return self._append(stored_events, kwargs.get("tracking"))
