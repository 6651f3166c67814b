"""The calls of groups' offsets: OffsetCommit, OffsetFetch, OffsetDelete."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from millstream.errors import MillstreamError
from millstream.failure_log import FailureLog
from millstream.gateways.kafka.calls import Call, Handler
from millstream.gateways.kafka.coordinator import Coordinator, now_ms
from millstream.gateways.kafka.group_members import CONSUMER, Caller
from millstream.gateways.kafka.group_store import Committed, TopicPartition
from millstream.gateways.kafka.protocol import Api, ErrorCode

if TYPE_CHECKING:
    from millstream.gateways.kafka.catalog import KafkaTopic, TopicCatalog

__all__ = ["OffsetCalls", "may_join"]

_log = logging.getLogger("millstream.gateways.kafka")

_NO_OFFSET: Final = Committed(-1)
# From this version of OffsetFetch on, clients know that they can ask again for one partition. The
# error for the whole group must not be used for that: librdkafka stays with it for ever.
_UNSTABLE_VERSION: Final = 7
_GROUP_ERROR_VERSION: Final = 2

Errors = Mapping[TopicPartition, ErrorCode]


def may_join(call: Call, group: str) -> bool:
    """Whether the user of a connection may use a group."""
    access = call.session.access
    return access is not None and access.may_join(group)


class OffsetCalls:
    """Handlers of the calls of groups' offsets."""

    def __init__(self, coordinator: Coordinator, catalog: TopicCatalog) -> None:
        self._coordinator = coordinator
        self._catalog = catalog
        self._failures = FailureLog(_log)

    def handlers(self) -> dict[Api, Handler]:
        """Which call each of them serves."""
        return {
            Api.OFFSET_COMMIT: self.offset_commit,
            Api.OFFSET_FETCH: self.offset_fetch,
            Api.OFFSET_DELETE: self.offset_delete,
        }

    # -- OffsetCommit ---------------------------------------------------------------------

    async def offset_commit(self, call: Call) -> Mapping[str, Any]:
        """Keep where a group continues; answered when that is stored."""
        body = call.request.body
        group = body.group_id
        who = Caller(
            body.member_id,
            body.generation_id_or_member_epoch,
            getattr(body, "group_instance_id", None),
        )
        error = ErrorCode.group_authorization_failed
        if may_join(call, group):
            error = self._coordinator.commit_refusal(group, who)
        topics = None
        if error is ErrorCode.none:
            topics = await self._topics(one.name for one in body.topics)
        errors: dict[TopicPartition, ErrorCode] = {}
        if topics is not None:
            errors, changes = self._changes(call, body.topics, topics)
            if changes:
                error = await self._coordinator.commit(group, who, changes)
                errors |= dict.fromkeys(changes, error)
        elif error is ErrorCode.none:
            error = ErrorCode.coordinator_not_available
        return {"topics": _answered(body.topics, errors, error)}

    def _changes(
        self, call: Call, asked: Iterable[Any], topics: Mapping[str, KafkaTopic]
    ) -> tuple[dict[TopicPartition, ErrorCode], dict[TopicPartition, Committed]]:
        """What is refused, and what is to be stored."""
        errors: dict[TopicPartition, ErrorCode] = {}
        changes: dict[TopicPartition, Committed] = {}
        time_ms = now_ms()
        for topic in asked:
            known = topics.get(topic.name)
            for one in topic.partitions:
                part = TopicPartition(topic.name, one.partition_index)
                note = one.committed_metadata or ""
                error = _topic_refusal(call, known, one.partition_index)
                if known is None or error is not ErrorCode.none:
                    errors[part] = error
                elif one.committed_offset < 0:
                    errors[part] = ErrorCode.invalid_commit_offset_size
                elif len(note.encode()) > self._coordinator.limits.max_note_bytes:
                    errors[part] = ErrorCode.offset_metadata_too_large
                else:
                    epoch = getattr(one, "committed_leader_epoch", -1)
                    changes[part] = Committed(
                        one.committed_offset, epoch, note, time_ms, known.id.bytes
                    )
        return errors, changes

    # -- OffsetFetch ----------------------------------------------------------------------

    async def offset_fetch(self, call: Call) -> Mapping[str, Any]:
        """Where groups continue; without topics: wherever they have committed."""
        body = call.request.body
        if call.request.version < 8:
            return await self._fetched(call, body.group_id, body.topics)
        groups = [await self._fetched(call, one.group_id, one.topics) for one in body.groups]
        return {"groups": groups}

    async def _fetched(
        self, call: Call, group: str, asked: Sequence[Any] | None
    ) -> Mapping[str, Any]:
        version = call.request.version
        if not may_join(call, group):
            error = ErrorCode.group_authorization_failed
            if version >= _GROUP_ERROR_VERSION:
                return {"group_id": group, "topics": (), "error_code": error}
            return _offsets_answer(group, asked or (), error)
        offsets = self._coordinator.offsets(group)
        names = {part.topic for part in offsets or ()}
        if asked is not None:
            names = {one.name for one in asked}
        topics = None if offsets is None else await self._topics(names)
        if offsets is None or topics is None:
            if asked is None:
                error = ErrorCode.coordinator_load_in_progress
                return {"group_id": group, "topics": (), "error_code": error}
            soon = ErrorCode.unstable_offset_commit
            if version < _UNSTABLE_VERSION:
                soon = ErrorCode.coordinator_load_in_progress
            return _offsets_answer(group, asked, soon)
        if asked is None:
            found = _all_offsets(call, offsets, topics)
        else:
            found = [_topic_offsets(call, one, offsets, topics.get(one.name)) for one in asked]
        return {"group_id": group, "topics": found, "error_code": ErrorCode.none}

    # -- OffsetDelete ---------------------------------------------------------------------

    async def offset_delete(self, call: Call) -> Mapping[str, Any]:
        """Remove offsets of topics that the group does not read now."""
        body = call.request.body
        name = body.group_id
        if not may_join(call, name):
            return {"error_code": ErrorCode.group_authorization_failed, "topics": ()}
        group, offsets = self._coordinator.find(name), self._coordinator.offsets(name)
        if offsets is None:
            return {"error_code": ErrorCode.coordinator_load_in_progress, "topics": ()}
        if group is None:
            return {"error_code": ErrorCode.group_id_not_found, "topics": ()}
        if group.members and group.protocol_type != CONSUMER:
            return {"error_code": ErrorCode.non_empty_group, "topics": ()}
        topics = await self._topics(one.name for one in body.topics)
        if topics is None:
            return {"error_code": ErrorCode.coordinator_not_available, "topics": ()}
        used = group.members.subscribed()
        errors: dict[TopicPartition, ErrorCode] = {}
        wanted = []
        for topic in body.topics:
            for one in topic.partitions:
                part = TopicPartition(topic.name, one.partition_index)
                error = _topic_refusal(call, topics.get(part.topic), part.partition)
                if part in offsets and error is ErrorCode.unknown_topic_or_partition:
                    error = ErrorCode.none  # of a topic that was deleted
                if error is ErrorCode.none and (used is None or part.topic in used):
                    error = ErrorCode.group_subscribed_to_topic
                errors[part] = error
                if error is ErrorCode.none:
                    wanted.append(part)
        error = await self._coordinator.delete_offsets(name, wanted)
        if error is not ErrorCode.none:
            return {"error_code": error, "topics": ()}
        return {"error_code": error, "topics": _answered(body.topics, errors, error)}

    async def _topics(self, names: Iterable[str]) -> Mapping[str, KafkaTopic] | None:
        """The topics of these names that there are; None if the broker does not say now."""
        try:
            return await self._catalog.find_many(sorted(set(names)))
        except MillstreamError as error:
            self._failures.warn(None, "topics of a group cannot be looked up now: %s", error)
            return None


def _topic_refusal(call: Call, topic: KafkaTopic | None, partition: int) -> ErrorCode:
    if topic is None:
        return ErrorCode.unknown_topic_or_partition
    if not _may_read(call, topic):
        return ErrorCode.topic_authorization_failed
    there = 0 <= partition < topic.partitions
    return ErrorCode.none if there else ErrorCode.unknown_topic_or_partition


def _may_read(call: Call, topic: KafkaTopic) -> bool:
    access = call.session.access
    return access is not None and access.may_read(topic.subjects)


def _answered(asked: Iterable[Any], errors: Errors, other: ErrorCode) -> list[dict[str, Any]]:
    """The code of each partition that was asked for."""
    return [
        {
            "name": topic.name,
            "partitions": [
                {
                    "partition_index": one.partition_index,
                    "error_code": errors.get(
                        TopicPartition(topic.name, one.partition_index), other
                    ),
                }
                for one in topic.partitions
            ],
        }
        for topic in asked
    ]


def _offset(partition: int, found: Committed, error: ErrorCode) -> dict[str, Any]:
    return {
        "partition_index": partition,
        "committed_offset": found.offset,
        "committed_leader_epoch": found.leader_epoch,
        "metadata": found.note,
        "error_code": error,
    }


def _offsets_answer(group: str, asked: Iterable[Any], error: ErrorCode) -> dict[str, Any]:
    """The same error for each partition."""
    topics = [
        {
            "name": one.name,
            "partitions": [_offset(number, _NO_OFFSET, error) for number in one.partition_indexes],
        }
        for one in asked
    ]
    return {"group_id": group, "topics": topics, "error_code": ErrorCode.none}


def _topic_offsets(
    call: Call,
    asked: Any,
    offsets: Mapping[TopicPartition, Committed],
    topic: KafkaTopic | None,
) -> dict[str, Any]:
    error = ErrorCode.none
    if topic is not None and not _may_read(call, topic):
        error = ErrorCode.topic_authorization_failed
    partitions = []
    for number in asked.partition_indexes:
        found = offsets.get(TopicPartition(asked.name, number), _NO_OFFSET)
        # A topic that was deleted and made again has other events at the old offsets.
        if error is not ErrorCode.none or topic is None or found.topic_id != topic.id.bytes:
            found = _NO_OFFSET
        partitions.append(_offset(number, found, error))
    return {"name": asked.name, "partitions": partitions}


def _all_offsets(
    call: Call,
    offsets: Mapping[TopicPartition, Committed],
    topics: Mapping[str, KafkaTopic],
) -> list[dict[str, Any]]:
    """All offsets of topics that there are and that the user may read."""
    found: dict[str, list[dict[str, Any]]] = {}
    for part, one in offsets.items():
        topic = topics.get(part.topic)
        if topic is not None and one.topic_id == topic.id.bytes and _may_read(call, topic):
            answer = _offset(part.partition, one, ErrorCode.none)
            found.setdefault(part.topic, []).append(answer)
    return [{"name": name, "partitions": partitions} for name, partitions in found.items()]
