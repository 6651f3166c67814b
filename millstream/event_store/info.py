"""What a broker knows of an event store, as a frozen value. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from millstream.messaging import TopicInfo

__all__ = ["StoreInfo"]


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """An event store: its types of events, and the state of its topic."""

    topic: TopicInfo
    events: tuple[str, ...]  # names of its types of events
    state: str | None  # class of its states as "module:Class"; None: not known

    @property
    def name(self) -> str:
        """Name of the store and of its topic."""
        return self.topic.name

    @property
    def aggregates(self) -> int:
        """Number of aggregates; deleted ones count, unless their ids can be used again."""
        return sum(part.keys for part in self.topic.partitions)

    @property
    def appends(self) -> int:
        """Number of appends; each has one event or more."""
        return self.topic.messages
