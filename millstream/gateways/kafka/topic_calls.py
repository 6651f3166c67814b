"""The calls about topics and the cluster: Metadata, DescribeCluster, CreateTopics, DeleteTopics,
CreatePartitions. Those about settings are in `config_calls`."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from millstream.errors import ConfigError, MillstreamError
from millstream.gateways.kafka.calls import Call, Handler
from millstream.gateways.kafka.catalog import TopicCatalog
from millstream.gateways.kafka.config_calls import ConfigCalls, answer_of, config_fields
from millstream.gateways.kafka.kafka_topic import KafkaTopic, TopicRefused
from millstream.gateways.kafka.protocol import Api, ErrorCode
from millstream.gateways.kafka.topic_configs import entries_of, new_settings
from millstream.gateways.kafka.topic_names import BadName, topic_name_of
from millstream.gateways.kafka.topic_rights import (
    FORBIDDEN,
    access_of,
    cluster_operations,
    is_visible,
    managed_topic,
    may_see_name,
    topic_operations,
)
from millstream.messaging import TopicSettings
from millstream.messaging.topics.lookup import side_by_side
from millstream.messaging.topics.origin import PARTITIONS_MAX

if TYPE_CHECKING:
    from millstream.gateways.access import Access

__all__ = ["TopicCalls", "TopicDefaults"]

_log = logging.getLogger("millstream.gateways.kafka")

REPLICAS_MAX: Final = 5  # of a stream
_NOT_ASKED: Final = -(2**31)  # instead of a set of operations
_BROKERS, _CONTROLLERS = 1, 2  # endpoints that DescribeCluster is asked for


class TopicDefaults(Protocol):
    """The settings of the gateway that matter for topics."""

    @property
    def auto_create(self) -> bool:
        """Whether topics that clients ask for are created."""

    @property
    def default_partitions(self) -> int:
        """Of topics that are created without a number."""

    @property
    def default_replicas(self) -> int | None:
        """Of topics that are created without a number; None: 1."""

    @property
    def max_frame(self) -> int:
        """The size of a request, and so of a batch."""


class TopicCalls:
    """Handlers of the calls about topics; to its clients the gateway is the only broker."""

    def __init__(
        self,
        catalog: TopicCatalog,
        settings: TopicDefaults,
        *,
        node_id: int,
        host: str,
        port: int,
        cluster_id: str,
    ) -> None:
        """`host` and `port` are where clients connect to: the advertised ones."""
        self._catalog = catalog
        self._settings = settings
        self._node_id = node_id
        self._host, self._port = host, port
        self._cluster_id = cluster_id
        partitions, auto = settings.default_partitions, settings.auto_create
        self._configs = ConfigCalls(catalog, node_id, partitions, auto, settings.max_frame)

    def handlers(self) -> dict[Api, Handler]:
        """Which call each of them serves."""
        return {
            Api.METADATA: self.metadata,
            Api.DESCRIBE_CLUSTER: self.describe_cluster,
            Api.CREATE_TOPICS: self.create_topics,
            Api.DELETE_TOPICS: self.delete_topics,
            Api.CREATE_PARTITIONS: self.create_partitions,
            **self._configs.handlers(),
        }

    # -- Metadata -------------------------------------------------------------------------

    async def metadata(self, call: Call) -> dict[str, Any]:
        """The brokers, and topics with their partitions."""
        access, body = access_of(call), call.request.body
        with_operations = getattr(body, "include_topic_authorized_operations", False)
        if body.topics is None or (call.request.version == 0 and not body.topics):
            # If that fails, the connection is closed: there is no place for an error, and with an
            # empty list clients would give up their topics.
            visible = [one for one in await self._catalog.all() if is_visible(access, one)]
            topics = [self._described(access, one, with_operations) for one in visible]
        else:
            create = getattr(body, "allow_auto_topic_creation", True)
            topics = await self._named(access, body.topics, create, with_operations)
        operations = _NOT_ASKED
        if getattr(body, "include_cluster_authorized_operations", False):
            operations = cluster_operations(access)
        return {
            "brokers": [self._self() | {"node_id": self._node_id}],
            "cluster_id": self._cluster_id,
            "controller_id": self._node_id,
            "topics": topics,
            "cluster_authorized_operations": operations,
        }

    async def _named(
        self, access: Access, wanted: Sequence[Any], create: bool, with_operations: bool
    ) -> list[dict[str, Any]]:
        names = [one.name for one in wanted if one.name is not None]
        try:
            found = await self._catalog.find_many(names)
        except MillstreamError as error:
            _log.warning("topics could not be looked up: %s", error)
            code = ErrorCode.leader_not_available  # clients ask again
            return [_nothing(one.name, getattr(one, "topic_id", None), code) for one in wanted]
        ids = {getattr(one, "topic_id", None) for one in wanted if one.name is None}
        by_id = {}
        if ids:
            by_id = {one.id: one for one in await self._catalog.all() if one.id in ids}

        async def answer(one: Any) -> dict[str, Any]:
            if one.name is None:
                topic = by_id.get(one.topic_id)
                if topic is None or not is_visible(access, topic):
                    return _nothing(None, one.topic_id, ErrorCode.unknown_topic_id)
                return self._described(access, topic, with_operations)
            topic = found.get(one.name)
            try:
                if topic is None:
                    topic = await self._created(access, one.name, create)
                if not is_visible(access, topic):
                    raise TopicRefused(ErrorCode.topic_authorization_failed, FORBIDDEN)
            except TopicRefused as refused:
                return _nothing(one.name, None, refused.code)
            except MillstreamError as error:
                _log.warning("topic '%s' could not be created: %s", one.name, error)
                return _nothing(one.name, None, ErrorCode.leader_not_available)
            return self._described(access, topic, with_operations)

        return await side_by_side(answer, wanted)

    async def _created(self, access: Access, name: str, create: bool) -> KafkaTopic:
        """What was not found: TopicRefused, also if it is created; a topic made meanwhile."""
        try:
            topic_name = topic_name_of(name)
        except BadName as error:
            raise TopicRefused(ErrorCode.invalid_topic_exception, str(error)) from error
        if not may_see_name(access, name):
            raise TopicRefused(ErrorCode.topic_authorization_failed, FORBIDDEN)
        if not create or not self._settings.auto_create:
            raise TopicRefused(ErrorCode.unknown_topic_or_partition, "")
        if not access.may_create(topic_name):
            raise TopicRefused(ErrorCode.topic_authorization_failed, FORBIDDEN)
        base = TopicSettings(partitions=self._settings.default_partitions)
        settings = new_settings(base, {}, self._settings.max_frame)
        try:
            await self._catalog.create(name, settings)
        except TopicRefused as refused:
            if refused.code is not ErrorCode.topic_already_exists:
                _log.warning("topic '%s' was not created: %s", name, refused.text)
                raise
            topic = await self._catalog.find(name)
            if topic is not None:
                return topic  # somebody else was faster
            _log.warning("%s", refused.text)
            raise TopicRefused(ErrorCode.invalid_topic_exception, refused.text) from refused
        # As Kafka does: clients ask again at once, and those that only describe a topic learn that
        # there was none.
        raise TopicRefused(ErrorCode.unknown_topic_or_partition, "")

    def _described(
        self, access: Access, topic: KafkaTopic, with_operations: bool
    ) -> dict[str, Any]:
        nodes = (self._node_id,)
        return {
            "error_code": ErrorCode.none,
            "name": topic.name,
            "topic_id": topic.id,
            "is_internal": False,
            "partitions": [
                {
                    "error_code": ErrorCode.none,
                    "partition_index": index,
                    "leader_id": self._node_id,
                    "leader_epoch": self._catalog.leader_epoch(topic.name, index),
                    "replica_nodes": nodes,
                    "isr_nodes": nodes,
                    "offline_replicas": (),
                }
                for index in range(topic.partitions)
            ],
            "topic_authorized_operations": (
                topic_operations(access, topic) if with_operations else _NOT_ASKED
            ),
        }

    def _self(self) -> dict[str, Any]:
        return {"host": self._host, "port": self._port, "rack": None}

    async def describe_cluster(self, call: Call) -> dict[str, Any]:
        """The cluster: this gateway."""
        access, body = access_of(call), call.request.body
        endpoint = getattr(body, "endpoint_type", _BROKERS)
        code, text = ErrorCode.none, None
        if endpoint == _CONTROLLERS:
            code = ErrorCode.mismatched_endpoint_type
            text = "The request was sent to an endpoint of the wrong type."
        elif endpoint != _BROKERS:
            code, text = ErrorCode.unsupported_endpoint_type, "Unsupported endpoint type."
        asked = body.include_cluster_authorized_operations
        return {
            "error_code": code,
            "error_message": text,
            "endpoint_type": _BROKERS,
            "cluster_id": self._cluster_id,
            "controller_id": self._node_id,
            "brokers": [self._self() | {"broker_id": self._node_id}],
            "cluster_authorized_operations": cluster_operations(access) if asked else _NOT_ASKED,
        }

    # -- CreateTopics ---------------------------------------------------------------------

    async def create_topics(self, call: Call) -> dict[str, Any]:
        """Create topics; each is created as wanted, or refused."""
        access, body = access_of(call), call.request.body
        count = Counter(one.name for one in body.topics)
        wanted = list({one.name: one for one in body.topics}.values())

        async def one(new: Any) -> dict[str, Any]:
            made: dict[str, Any] = {}

            async def create() -> None:
                if count[new.name] > 1:
                    raise TopicRefused(
                        ErrorCode.invalid_request, f"Duplicate topic name: {new.name}"
                    )
                _check_may_create(access, new.name)
                settings = self._new_settings(new)
                check_only = body.validate_only
                topic = await self._catalog.create(new.name, settings, validate_only=check_only)
                settings = settings if topic is None else topic.info.settings
                made.update(
                    topic_id=None if topic is None else topic.id,
                    num_partitions=settings.partitions,
                    replication_factor=settings.replicas,
                    configs=config_fields(entries_of(settings)),
                )

            answer = await answer_of(create())
            nothing = {
                "topic_id": None,
                "num_partitions": -1,
                "replication_factor": -1,
                "configs": None,
            }
            return {"name": new.name, "topic_config_error_code": 0, **nothing, **answer, **made}

        return {"topics": await side_by_side(one, wanted)}

    def _new_settings(self, new: Any) -> TopicSettings:
        """What a client wants, as topic settings."""
        partitions, replicas = new.num_partitions, new.replication_factor
        if new.assignments:
            partitions, replicas = self._assigned(new)
        if partitions == -1:
            partitions = self._settings.default_partitions
        if not 1 <= partitions <= PARTITIONS_MAX:
            raise TopicRefused(
                ErrorCode.invalid_partitions,
                f"Number of partitions was set to {partitions}; it must be 1 to {PARTITIONS_MAX}, "
                f"or -1 for the default of {self._settings.default_partitions}",
            )
        if replicas == -1:
            replicas = self._settings.default_replicas or 1
        if not 1 <= replicas <= REPLICAS_MAX:
            raise TopicRefused(
                ErrorCode.invalid_replication_factor,
                f"Replication factor: {replicas}; it must be 1 to {REPLICAS_MAX}, or -1 for 1",
            )
        given = {one.name: one.value for one in new.configs}
        if len(given) != len(new.configs):
            raise TopicRefused(ErrorCode.invalid_request, "Error due to duplicate config keys")
        try:
            base = TopicSettings(partitions=partitions, replicas=replicas)
        except ConfigError as error:
            raise TopicRefused(ErrorCode.invalid_request, str(error)) from error
        return new_settings(base, given, self._settings.max_frame)

    def _assigned(self, new: Any) -> tuple[int, int]:
        """Partitions and replicas of a manual assignment, which can only be to this gateway."""
        if new.num_partitions != -1 or new.replication_factor != -1:
            raise TopicRefused(
                ErrorCode.invalid_request,
                "Both numPartitions or replicationFactor and replicasAssignments were set. "
                "Give one of them",
            )
        indexes = sorted(one.partition_index for one in new.assignments)
        if indexes != list(range(len(indexes))):
            raise TopicRefused(
                ErrorCode.invalid_replica_assignment,
                "partitions are numbered from 0, without gaps and each once",
            )
        if any(tuple(one.broker_ids) != (self._node_id,) for one in new.assignments):
            raise TopicRefused(
                ErrorCode.invalid_replica_assignment,
                f"there is one broker for clients, {self._node_id}: this gateway. Give a "
                f"replication factor to have replicas on several nodes",
            )
        return len(indexes), 1

    # -- DeleteTopics, CreatePartitions ---------------------------------------------------

    async def delete_topics(self, call: Call) -> dict[str, Any]:
        """Delete topics with all their records."""
        access = access_of(call)

        async def one(name: str) -> dict[str, Any]:
            async def delete() -> None:
                topic = await managed_topic(self._catalog, access, name)
                await self._catalog.delete(topic)

            return {"name": name, **await answer_of(delete())}

        names = list(dict.fromkeys(call.request.body.topic_names))
        return {"responses": await side_by_side(one, names)}

    async def create_partitions(self, call: Call) -> dict[str, Any]:
        """TopicRefused with a reason: a topic keeps the number of its partitions."""
        access, body = access_of(call), call.request.body
        count = Counter(one.name for one in body.topics)

        async def one(new: Any) -> dict[str, Any]:
            async def grow() -> None:
                if count[new.name] > 1:
                    raise TopicRefused(
                        ErrorCode.invalid_request, f"Duplicate topic name: {new.name}"
                    )
                topic = await managed_topic(self._catalog, access, new.name)
                raise TopicRefused(ErrorCode.invalid_partitions, _keeps(topic, new.count))

            return {"name": new.name, **await answer_of(grow())}

        wanted = list({one.name: one for one in body.topics}.values())
        return {"results": await side_by_side(one, wanted)}


def _check_may_create(access: Access, name: str) -> None:
    try:
        topic = topic_name_of(name)
    except BadName as error:
        raise TopicRefused(ErrorCode.invalid_topic_exception, str(error)) from error
    if not access.may_create(topic):
        raise TopicRefused(ErrorCode.topic_authorization_failed, "Authorization failed.")


def _keeps(topic: KafkaTopic, count: int) -> str:
    if count == topic.partitions:
        return f"Topic already has {count} partition(s)."
    if count < topic.partitions:
        return (
            f"The topic {topic.name} currently has {topic.partitions} partition(s); {count} would "
            f"not be an increase."
        )
    return (
        f"The topic {topic.name} keeps its {topic.partitions} partition(s), because the partition "
        f"of a key depends on how many there are: create a topic of another name with {count} and "
        f"copy this one into it (millstream topic replay {topic.topic} --to NAME)"
    )


def _nothing(name: str | None, id: Any, code: ErrorCode) -> dict[str, Any]:
    return {
        "error_code": code,
        "name": name,
        "topic_id": id,
        "is_internal": False,
        "partitions": (),
        "topic_authorized_operations": _NOT_ASKED,
    }
