"""The registry for Spark workers and threads: the same records, read with plain calls."""

from __future__ import annotations

from typing import Final

from millstream.errors import NoResponders, SchemaNotFound
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
from millstream.wire.protocol import parse_headers

__all__ = ["BlockingRegistry"]

# Schemas kept decoded; a worker meets the few versions of its topics.
SCHEMAS_KEPT: Final = 1000


class BlockingRegistry:
    """Reads versions and schemas; registering is the asynchronous registry's work."""

    def __init__(self, jetstream: BlockingJetStream) -> None:
        self._jetstream = jetstream
        self._schemas: dict[int, Schema] = {}

    def find(self, topic: str) -> TopicSchemas | None:
        """The versions of a topic's schema; None when it has none."""
        subject = message_subject(record_key(topic))
        found = self._get({"last_by_subj": subject})
        if found is None or NULL_HEADER in found[0]:
            return None
        return read_record(found[1])

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
        schema = read_schema(id_, found[0].get("Nats-Subject", ""), found[1], fingerprint)
        self._schemas[id_] = schema
        return schema

    def schemas_of(self, record: TopicSchemas) -> list[Schema]:
        """Every version's schema, oldest first."""
        return [self.schema(v.id, v.fingerprint) for v in record.versions]

    def _get(self, ask: dict[str, object]) -> tuple[dict[str, str], bytes] | None:
        try:
            found = self._jetstream.get_direct(TABLE, ask)
        except NoResponders:
            return None  # no schema was ever registered
        return None if found is None else (parse_headers(found[0]), found[1])
