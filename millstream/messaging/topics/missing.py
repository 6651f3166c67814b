"""The error for a topic that does not exist, with the names that may be meant. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from millstream.errors import TopicNotFound
from millstream.nearest import did_you_mean
from millstream.wire.api import ErrorCode

__all__ = ["NAMES_SECONDS", "no_such_topic", "topic_names"]

NAMES_SECONDS: Final = 1.0  # an error must not wait long for what it may propose


def no_such_topic(
    name: str,
    streams: Iterable[str] = (),
    text: str = "",
    advice: str = "Create it, or check the name",
) -> TopicNotFound:
    """The error for a name that is neither a topic nor one of the streams."""
    text = text or f"there is no topic or stream '{name}'"
    question = did_you_mean(name, topic_names(streams), most=2)
    if question:
        advice = question[0].upper() + question[1:]
    return TopicNotFound(0, ErrorCode.STREAM_NOT_FOUND, text, advice)


def topic_names(streams: Iterable[str]) -> list[str]:
    """The topics that streams of these names belong to; those of partitions are `orders-0`...

    >>> topic_names(["orders-0", "orders-1", "paid", "v-2"])
    ['orders', 'paid', 'v-2']
    """
    names = set(streams)
    found = set()
    for name in names:
        topic, _, number = name.rpartition("-")
        found.add(topic if number.isdigit() and f"{topic}-0" in names else name)
    return sorted(found)
