"""How the settings that are wanted differ from those of an existing topic. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from enum import StrEnum
from typing import Any

from millstream.errors import TopicConflict
from millstream.messaging.topics.choices import Retention
from millstream.messaging.topics.origin import Origin
from millstream.messaging.topics.setting_forms import Fixed, OneWay, SetBy, duration_text
from millstream.messaging.topics.settings import TOPIC_SETTINGS, TopicSettings
from millstream.wire.api import ErrorCode

__all__ = ["Difference", "conflict", "differences"]


@dataclass(frozen=True, slots=True)
class Difference:
    """One setting that is not as wanted."""

    setting: str
    wanted: Any
    found: Any
    changeable: bool
    how: str  # how to change it, or why it cannot be changed

    def __str__(self) -> str:
        what = f"{self.setting} is {_text(self.found)}, wanted {_text(self.wanted)}"
        return f"{what} ({self.how})"


def differences(wanted: TopicSettings, found: TopicSettings) -> list[Difference]:
    """Every setting of `found` that is not as `wanted`; what was not given is not compared."""
    result = []
    for field in fields(TopicSettings):
        name = field.name
        if _same(name, wanted, found):
            continue
        ours, theirs = _value(wanted, name), _value(found, name)
        obstacle = _obstacle(name, ours, theirs)
        how = f"cannot be changed: {obstacle}" if obstacle else f"edit_topic(..., {name}=...)"
        if ours is Retention.INTEREST and obstacle is None:
            how += "; events that no subscription wants are dropped immediately"
        result.append(Difference(name, ours, theirs, obstacle is None, how))
    return result


def conflict(topic: str, found: Sequence[Difference], doing: str) -> TopicConflict:
    """The error that names every difference and what can be done about it."""
    listed = "; ".join(map(str, found))
    error = TopicConflict(0, ErrorCode.STREAM_NAME_IN_USE, f"topic '{topic}' {doing}: {listed}")
    error.differences = tuple(found)
    return error


def _value(settings: TopicSettings, name: str) -> Any:
    if TOPIC_SETTINGS[name].is_feature:
        return settings.allows(name)
    return settings.window if name == "duplicate_window" else getattr(settings, name)


def _same(name: str, wanted: TopicSettings, found: TopicSettings) -> bool:
    if name == "mirror":
        return _same_origin(wanted.mirror, found.mirror)
    if name == "sources":
        return len(wanted.sources) == len(found.sources) and all(
            any(_same_origin(ours, theirs) for theirs in found.sources) for ours in wanted.sources
        )
    if name == "max_subscriptions" and wanted.max_subscriptions is None:
        return True  # what the account allowed when it was declared
    if name in ("kafka_name", "kafka_configs", "partitioner") and getattr(wanted, name) is None:
        return True  # set by a gateway for Kafka
    if name == "packs" and (wanted.is_copy or found.is_copy):
        return True
    if name in ("rollup", "schedules") and getattr(wanted, name) is None:
        return True  # topics of earlier versions have them
    return bool(_value(wanted, name) == _value(found, name))


def _same_origin(wanted: Origin | None, found: Origin | None) -> bool:
    if wanted is None or found is None:
        return wanted is found
    named = ["topic", "domain", "start", "filter"]
    if wanted.partitions is not None:
        named += ["partitions", "prefix", "foreign"]
    return all(getattr(wanted, name) == getattr(found, name) for name in named)


def _obstacle(name: str, wanted: Any, found: Any) -> str | None:
    if name == "mirror" and found is not None and wanted is None:
        return "promote_topic(...) makes it a topic of its own"
    match TOPIC_SETTINGS[name].change:
        case Fixed(why):
            return why
        case SetBy(fixed=why) if why:
            return why
        case OneWay(why) if found and not wanted:
            return why
    if name == "wire_format" and found is not None:
        return "stored events are encoded in it. Give the schema, or declare another topic"
    if name == "retention" and Retention.WORK_QUEUE in (wanted, found):
        return "a work queue cannot become another topic, and no other topic a work queue"
    if name == "sources" and not found:
        return "events are published to it. Declare a topic of another name with these sources"
    return None


def _text(value: Any) -> str:
    if value is None or value == ():
        return "none"
    if isinstance(value, timedelta):
        return duration_text(value)
    if isinstance(value, StrEnum):
        return value.value
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else repr(value)
