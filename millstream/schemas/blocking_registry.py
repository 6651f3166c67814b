"""The registry for Spark workers and threads: the same records, read with plain calls."""

from __future__ import annotations

from typing import Final

from millstream.errors import SchemaNotFound, TopicNotFound
from millstream.messaging.event import NULL_HEADER
from millstream.schemas.records import (
    TABLE,
    TopicSchemas,
    message_subject,
    read_record,
    read_schema,
    record_key,
)
from millstream.schemas.schema import Schema
from millstream.wire.blocking import BlockingJetStream
from millstream.wire.blocking_streams import get_message
from millstream.wire.jetstream import StoredMessage
from millstream.wire.protocol import parse_headers

__all__ = ["BlockingRegistry"]

# Schemas kept decoded; a worker meets the few versions of its topics.
SCHEMAS_KEPT: Final = 1000


class BlockingRegistry:
    """Reads versions and schemas; registering is the asynchronous registry's work."""

    def __init__(self, jetstream: BlockingJetStream, timeout: float = 30.0) -> None:
        self._jetstream = jetstream
        self._timeout = timeout  # seconds for each look
        self._schemas: dict[int, Schema] = {}

    def find(self, topic: str) -> TopicSchemas | None:
        """The versions of a topic's schema; None when it has none."""
        found = self._get({"last_by_subj": message_subject(record_key(topic))})
        if found is None or NULL_HEADER in parse_headers(found.headers):
            return None
        return read_record(found.payload)

    def topic(self, topic: str) -> TopicSchemas:
        """Like `find`; SchemaNotFound when the topic has no schema."""
        record = self.find(topic)
        if record is None:
            raise SchemaNotFound(f"topic '{topic}' has no schema")
        return record

    def schema(self, id_: int, fingerprint: str | None = None) -> Schema:
        """The schema with that id; SchemaNotFound when there is none."""
        known = self._schemas.get(id_)
        if known is not None:
            return known
        found = self._get({"seq": id_})
        if found is None:
            raise SchemaNotFound(f"there is no schema with id {id_} in the registry ('{TABLE}')")
        if len(self._schemas) >= SCHEMAS_KEPT:
            self._schemas.pop(next(iter(self._schemas)))
        schema = read_schema(id_, found.subject, found.payload, fingerprint)
        self._schemas[id_] = schema
        return schema

    def schemas_of(self, record: TopicSchemas) -> list[Schema]:
        """Every version's schema, oldest first."""
        return [self.schema(v.id, v.fingerprint) for v in record.versions]

    def _get(self, ask: dict[str, object]) -> StoredMessage | None:
        try:
            return get_message(self._jetstream, TABLE, ask, self._timeout)
        except TopicNotFound:
            return None  # no schema was ever registered
