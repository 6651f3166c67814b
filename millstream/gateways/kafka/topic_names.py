"""Names of topics: Kafka's and Millstream's. Pure.

Kafka allows dots, a first character of any kind, and 249 characters; a topic of Millstream is part
of subjects and of stream names, which allow less. A name that both allow is kept. Otherwise a dot
becomes `_`, and a name that would start with `_` or `-` gets `kafka` before it. Kafka's name is
stored in the metadata of the topic. Two names that become the same topic collide: the second one is
refused, as Kafka itself refuses `a.b` beside `a_b`.
"""

from __future__ import annotations

import re
from typing import Final

from millstream.events.subject import NAME_CHARS_MAX, is_name

__all__ = ["OWN_PREFIX", "BadName", "is_own", "kafka_name_of", "recorded_name", "topic_name_of"]

KAFKA_CHARS_MAX: Final = 249
# Topics that Millstream keeps its own records in; clients of Kafka neither see nor create them.
OWN_PREFIX: Final = "mill-"

_KAFKA_NAME: Final = re.compile(r"[a-zA-Z0-9._-]+")
_PREFIX: Final = "kafka"


class BadName(ValueError):
    """A name that no topic can have; the text says why."""


def topic_name_of(name: str) -> str:
    """The topic of Millstream that Kafka's clients call so; BadName if there can be none.

    >>> topic_name_of("orders-v1"), topic_name_of("orders.v1"), topic_name_of("__offsets")
    ('orders-v1', 'orders_v1', 'kafka__offsets')
    """
    if not name or name in (".", ".."):
        raise BadName(f"the name of a topic cannot be {name!r}")
    if len(name) > KAFKA_CHARS_MAX or not _KAFKA_NAME.fullmatch(name):
        raise BadName(
            f"{name!r:.260} is not the name of a topic: use 1 to {KAFKA_CHARS_MAX} of "
            f"a-z A-Z 0-9 . _ -"
        )
    topic = name.replace(".", "_")
    if topic[0] in "_-":
        topic = _PREFIX + topic
    if not is_name(topic):
        raise BadName(
            f"{name!r} would be the topic {topic!r}, which has {len(topic)} characters; "
            f"topics of Millstream have at most {NAME_CHARS_MAX}. Choose a shorter name"
        )
    if is_own(topic):
        raise BadName(
            f"{name!r}: topics whose names start with '{OWN_PREFIX}' are Millstream's own. "
            f"Choose another name"
        )
    return topic


def recorded_name(name: str) -> str | None:
    """What the metadata of a topic has to say of Kafka's name; None: they are the same."""
    return None if topic_name_of(name) == name else name


def kafka_name_of(topic: str, recorded: str | None) -> str:
    """Kafka's name of a topic, given the one in its metadata.

    What is recorded counts only for the topic that it belongs to: a topic may be a restored copy
    under another name.
    """
    if recorded is None:
        return topic
    try:
        fits = topic_name_of(recorded) == topic
    except BadName:
        fits = False
    return recorded if fits else topic


def is_own(topic: str) -> bool:
    """Whether a topic holds records of Millstream itself."""
    return topic.startswith(OWN_PREFIX)
