"""The topic that a sink writes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from millstream.errors import ConfigError
from millstream.events.fence import check_fence_kept
from millstream.messaging.topics.demand import nodes_to_ask, published_by, shortfall_among
from millstream.messaging.topics.info import topic_info
from millstream.messaging.topics.stream_config import (
    from_stream_config,
    identity_of,
    wire_format_of,
)
from millstream.settings import ConnectionSettings
from millstream.spark.broker_access import (
    SchemaSnapshot,
    connection_to,
    find_schema,
    find_server,
    find_topics,
    jetstream_to,
)
from millstream.wire.api import StreamInfo
from millstream.wire.sync.connection import BlockingJetStream

__all__ = ["Target", "check_durable", "find_target"]

KNOWN_MAX: Final = 1000
# By topic: the configuration of its streams, and what it says; no answer of a broker is kept.
_known: Final[dict[str, tuple[list[dict[str, Any]], Target]]] = {}


@dataclass(frozen=True)
class Target:
    """A topic that rows are written to; travels to the workers."""

    topic: str
    streams: tuple[str, ...]  # one for each partition
    prefixes: tuple[str, ...]  # of the subjects of each partition
    atomic: bool  # whether several messages can be stored together
    is_table: bool
    takes_packs: bool
    is_typed: bool  # whether its values have a schema
    schema: SchemaSnapshot | None
    max_payload: int  # of one message; the server's limit
    replicas: int = 1
    demands: bool = False  # whether it demands a durability

    @property
    def partitions(self) -> int:
        return len(self.streams)


def find_target(settings: ConnectionSettings, topic: str) -> Target:
    """The topic, which must exist and take events."""
    jetstream = jetstream_to(settings)
    infos = find_topics(jetstream, [topic])[topic]
    target = _configured(topic, [info.config for info in infos])
    return replace(
        target,
        schema=find_schema(jetstream, topic) if target.is_typed else None,
        max_payload=connection_to(settings).info.max_payload,
        demands=target.demands and check_durable(jetstream, topic, infos),
    )


def _configured(topic: str, configs: list[dict[str, Any]]) -> Target:
    """What the configuration of its streams says; read again only if it has changed.

    Spark asks for the writer of every batch, and reading it takes longer than asking the broker.
    """
    known = _known.get(topic)
    if known is None or known[0] != configs:
        known = (configs, _read(topic, configs))
        if len(_known) >= KNOWN_MAX:
            _known.clear()
        _known[topic] = known
    return known[1]


def _read(topic: str, configs: list[dict[str, Any]]) -> Target:
    identities = [identity_of(config) for config in configs]
    prefixes = [identity.prefix for identity in identities]
    copied = any(config.get("mirror") or config.get("sources") for config in configs)
    if copied or not all(identity.managed for identity in identities) or None in prefixes:
        raise ConfigError(
            f"'{topic}' cannot be written to: it is a copy of another topic, or a stream that "
            f"Millstream did not create. Create a topic with create_topic and write to that"
        )
    for config in configs:
        check_fence_kept(topic, config.get("retention", "limits"))
    first = from_stream_config(configs[0])
    return Target(
        topic=topic,
        streams=tuple(config["name"] for config in configs),
        prefixes=tuple(prefix or topic for prefix in prefixes),
        atomic=all(config.get("allow_atomic", False) for config in configs),
        is_table=(configs[0].get("max_msgs_per_subject") or 0) > 0,
        takes_packs=first.takes_packs,
        is_typed=wire_format_of(configs[0]) is not None,
        schema=None,
        max_payload=0,
        replicas=configs[0].get("num_replicas", 1),
        demands=first.durability is not None,
    )


def check_durable(jetstream: BlockingJetStream, topic: str, infos: Sequence[StreamInfo]) -> bool:
    """Raise NotDurable if the topic demands a durability that its servers do not give.

    Whether it demands one.
    """
    info = topic_info(topic, infos)
    published = {
        node: published_by(find_server(jetstream.connection, node)) for node in nodes_to_ask(info)
    }
    error = shortfall_among(info, published)
    if error is not None:
        raise error
    return info.settings.durability is not None
