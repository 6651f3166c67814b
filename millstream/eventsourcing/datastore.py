"""The connection that the recorders of one application share, and its topics."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from eventsourcing.persistence import ProgrammingError

from millstream import blocking
from millstream.blocking.connected import close_anywhere
from millstream.errors import TopicConflict, TopicNotFound
from millstream.eventsourcing.stored import OriginatorHead
from millstream.eventsourcing.translated import translated
from millstream.messaging.topics.choices import Retention
from millstream.settings import ConnectionSettings

__all__ = ["Heads", "MillstreamDatastore"]

HEADS_MAX: Final = 10_000


class Heads:
    """The last known event of each key of a topic, for the keys used last.

    It saves a request where it is right; where it is not, the server refuses what was based on it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[str, OriginatorHead] = OrderedDict()

    def get(self, key: str) -> OriginatorHead | None:
        """The last known event of a key."""
        with self._lock:
            head = self._known.get(key)
            if head is not None:
                self._known.move_to_end(key)
            return head

    def put(self, key: str, head: OriginatorHead) -> None:
        """Remember an event that was just read or stored."""
        with self._lock:
            self._known[key] = head
            self._known.move_to_end(key)
            if len(self._known) > HEADS_MAX:
                self._known.popitem(last=False)

    def forget(self, key: str) -> None:
        """What was known of a key may be wrong."""
        with self._lock:
            self._known.pop(key, None)


class MillstreamDatastore:
    """One connection for all recorders of an application; threads share it."""

    def __init__(self, settings: ConnectionSettings) -> None:
        with translated():
            self.mill = blocking.connect(settings=settings)
        self._lock = threading.Lock()
        self._heads: dict[str, Heads] = {}
        self._marks: dict[str, Heads] = {}

    def topic(self, name: str, *, create: bool) -> blocking.Topic:
        """A topic for recorders: an existing one as it is, if it fits, else a new one."""
        with translated():
            try:
                topic = self.mill.topic(name)
            except TopicNotFound:
                if not create:
                    raise
                try:
                    topic = self.mill.create_topic(name, packs=False)
                except TopicConflict:  # another process created it meanwhile
                    topic = self.mill.topic(name)
        settings = topic.settings
        if topic.partitions != 1 or settings.takes_packs or settings.retention != Retention.LIMITS:
            raise ProgrammingError(
                f"topic '{name}' does not fit: events need one partition, packs=False and "
                f"retention 'limits', found {topic.partitions} partition(s), "
                f"packs={settings.takes_packs}, retention '{settings.retention}'. Set "
                f"MILLSTREAM_TOPIC to another name, or create the topic with these settings"
            )
        return topic

    def heads(self, topic: str) -> Heads:
        """What is known of a topic's keys, shared by all recorders of that topic."""
        with self._lock:
            return self._heads.setdefault(topic, Heads())

    def marks(self, topic: str) -> Heads:
        """The events of a topic that the snapshots read last were taken of."""
        with self._lock:
            return self._marks.setdefault(topic, Heads())

    def close(self) -> None:
        """Close the connection; the recorders cannot be used any more. Safe to call twice.

        The library also calls this when an application is garbage-collected, in whatever thread.
        """
        with translated():
            close_anywhere(self.mill)
