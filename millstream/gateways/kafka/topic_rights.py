"""What the user of a session may see and do of topics, and the errors it gets."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from millstream.errors import (
    ConfigError,
    ConnectError,
    MillstreamError,
    NoResponders,
    PermissionDenied,
    RequestTimeout,
)
from millstream.gateways.kafka.calls import Call
from millstream.gateways.kafka.catalog import TopicCatalog
from millstream.gateways.kafka.kafka_topic import KafkaTopic, TopicRefused
from millstream.gateways.kafka.protocol import ErrorCode
from millstream.gateways.kafka.topic_names import BadName, topic_name_of
from millstream.gateways.rights import TopicSubjects

if TYPE_CHECKING:
    from millstream.gateways.access import Access

__all__ = [
    "FORBIDDEN",
    "UNKNOWN",
    "access_of",
    "cluster_operations",
    "is_visible",
    "managed_topic",
    "may_see_name",
    "refusal_of",
    "seen_topic",
    "topic_operations",
]

_log = logging.getLogger("millstream.gateways.kafka")

# Operations by Kafka's numbers; a set of them is a number with these bits.
_READ, _WRITE, _CREATE, _DELETE, _ALTER, _DESCRIBE = 3, 4, 5, 6, 7, 8
_DESCRIBE_CONFIGS, _ALTER_CONFIGS, _IDEMPOTENT_WRITE = 10, 11, 12

UNKNOWN: Final = "This server does not host this topic-partition."
FORBIDDEN: Final = "Topic authorization failed."


def access_of(call: Call) -> Access:
    """The rights of the user; a connection without them has no calls but those for a login."""
    if call.session.access is None:
        raise PermissionError("a call before the login")
    return call.session.access


def is_visible(access: Access, topic: KafkaTopic) -> bool:
    """Whether the user may know of a topic: all that may do anything with it may."""
    subjects = topic.subjects
    return access.may_read(subjects) or access.may_write(subjects) or access.may_manage(subjects)


def may_see_name(access: Access, name: str) -> bool:
    """Whether the user may know that there is no such topic; with a bad name, everybody may."""
    try:
        topic = topic_name_of(name)
    except BadName:
        return True
    one = TopicSubjects((topic,), (topic,))
    many = TopicSubjects((f"{topic}-0",), (f"{topic}.0",))
    return access.may_create(topic) or any(
        may(subjects)
        for may in (access.may_read, access.may_write, access.may_manage)
        for subjects in (one, many)
    )


async def seen_topic(catalog: TopicCatalog, access: Access, name: str) -> KafkaTopic:
    """A topic that the user may know of; TopicRefused as Kafka does it."""
    topic = await catalog.find(name)
    if topic is None:
        if may_see_name(access, name):
            raise TopicRefused(ErrorCode.unknown_topic_or_partition, UNKNOWN)
        raise TopicRefused(ErrorCode.topic_authorization_failed, FORBIDDEN)
    if not is_visible(access, topic):
        raise TopicRefused(ErrorCode.topic_authorization_failed, FORBIDDEN)
    return topic


async def managed_topic(catalog: TopicCatalog, access: Access, name: str) -> KafkaTopic:
    """A topic that the user may change and delete."""
    topic = await seen_topic(catalog, access, name)
    if not access.may_manage(topic.subjects):
        raise TopicRefused(ErrorCode.topic_authorization_failed, FORBIDDEN)
    return topic


def topic_operations(access: Access, topic: KafkaTopic) -> int:
    """What the user may do with a topic, as a set of operations."""
    subjects = topic.subjects
    allowed = {_DESCRIBE, _DESCRIBE_CONFIGS}
    if access.may_read(subjects):
        allowed.add(_READ)
    if access.may_write(subjects):
        allowed.add(_WRITE)
    if access.may_manage(subjects):
        allowed |= {_DELETE, _ALTER, _ALTER_CONFIGS}
    return _bits(allowed)


def cluster_operations(access: Access) -> int:
    """What the user may do with the cluster, as a set of operations."""
    allowed = {_DESCRIBE, _DESCRIBE_CONFIGS, _IDEMPOTENT_WRITE}
    if access.may_create("*"):
        allowed.add(_CREATE)
    return _bits(allowed)


def _bits(operations: set[int]) -> int:
    return sum(1 << number for number in operations)


def refusal_of(error: MillstreamError) -> TopicRefused:
    """The error for a client when the broker did not do what was asked."""
    _log.warning("the broker refused a request: %s", error)
    if isinstance(error, RequestTimeout | NoResponders | ConnectError):
        return TopicRefused(ErrorCode.request_timed_out, str(error))  # clients try again
    if isinstance(error, PermissionDenied):
        text = f"the gateway itself has no permission for this: {error}"
        return TopicRefused(ErrorCode.topic_authorization_failed, text)
    if isinstance(error, ConfigError):
        return TopicRefused(ErrorCode.invalid_config, str(error))
    return TopicRefused(ErrorCode.unknown_server_error, str(error))
