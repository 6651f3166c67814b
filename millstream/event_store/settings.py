"""How a store is opened: its own settings, and those of its topic that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from millstream.errors import ConfigError
from millstream.event_store.event_types import Upcasters
from millstream.event_store.folding import Fold
from millstream.messaging import TopicSettings
from millstream.messaging.topics.choices import Discard
from millstream.messaging.topics.settings import TOPIC_SETTINGS
from millstream.nearest import check_known

__all__ = ["StoreSettings", "split_settings", "topic_settings"]

# Settings of a topic that would remove events of an aggregate, or that a store sets itself.
_REFUSED: Final = {
    "history": "a store keeps every event",
    "max_age": "a store keeps every event; delete or archive aggregates instead",
    "max_messages": "a store keeps every event; use max_bytes with discard='new'",
    "retention": "a store keeps every event",
    "packs": "an append is a message on the subject of its aggregate",
    "wire_format": "events are lines of JSON",
    "mirror": "a copy takes no appends; open its origin",
    "sources": "a copy takes no appends; open its origin",
}


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """How a store reads and writes its aggregates; the fields are keywords of `event_store`."""

    fold: Fold | None = None  # state and event to the next state, instead of a method `apply`
    initial: Any = None  # the state before the first event, with `fold`
    snapshot_every: int | None = None  # events between snapshots; None: only when asked for
    snapshot_version: int = 1  # raise it when `apply` changes: older snapshots are then ignored
    upcasters: Upcasters = field(default_factory=dict)  # (event, version): function to the next
    # Of the next versions of its events, such as FULL; None: as it is, BACKWARD in a new store.
    compatibility: str | None = None

    def __post_init__(self) -> None:
        if self.snapshot_every is not None:
            _check_count("snapshot_every", self.snapshot_every)
        _check_count("snapshot_version", self.snapshot_version)


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} {value!r:.40}: give a number from 1 on")


def split_settings(values: Mapping[str, Any]) -> tuple[StoreSettings, dict[str, Any]]:
    """The settings of a store, and those of its topic, from one set of keywords."""
    own = {one.name for one in fields(StoreSettings)}
    for name, reason in _REFUSED.items():
        if name in values:
            raise ConfigError(f"{name} is no setting of an event store: {reason}")
    check_known(values, [*own, *(name for name in TOPIC_SETTINGS if name not in _REFUSED)])
    store = StoreSettings(**{name: value for name, value in values.items() if name in own})
    return store, {name: value for name, value in values.items() if name not in own}


def topic_settings(values: Mapping[str, Any]) -> TopicSettings:
    """The settings of a store's topic, which never removes an event by itself."""
    found = TopicSettings(**values, packs=False)
    if found.max_bytes is not None and found.discard is not Discard.NEW:
        raise ConfigError(
            "max_bytes of an event store needs discard='new': a full store then refuses appends, "
            "and does not remove its oldest events"
        )
    return found
