"""Values of topics with a schema: found in the registry, decoded and resolved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa

from millstream.errors import MillstreamError, SchemaNotFound, TopicNotFound
from millstream.schemas import ColumnBuilder, Schema
from millstream.schemas.registry.binding import WrittenVersion
from millstream.schemas.registry.records import (
    TABLE,
    TopicSchemas,
    record_of,
    record_query,
    schema_of,
)
from millstream.settings import ConnectionSettings
from millstream.spark.broker_access import PATIENCE_SECONDS, jetstream_to
from millstream.spark.source.typed import TopicType
from millstream.spark.source.values import Decoded
from millstream.wire.sync.connection import BlockingJetStream
from millstream.wire.sync.streams import get_message

__all__ = ["TypedColumn", "load_type"]

# What decoding bytes of unknown origin may raise besides our own errors.
_STUMBLES: Final = (MillstreamError, ValueError, OverflowError, LookupError)


def load_type(jetstream: BlockingJetStream, topic: str) -> TopicType | None:
    """A topic's schema, or None when it has none."""
    record = _record(jetstream, topic)
    if record is None or not record.versions:
        return None
    texts = {
        str(version.id): _load(jetstream, version.id, version.fingerprint).to_json()
        for version in record.versions
    }
    return TopicType(topic, record.format, str(record.latest.id), texts)


def _record(jetstream: BlockingJetStream, topic: str) -> TopicSchemas | None:
    try:
        return record_of(get_message(jetstream, TABLE, record_query(topic), PATIENCE_SECONDS))
    except TopicNotFound:
        return None


def _load(jetstream: BlockingJetStream, id_: int, fingerprint: str | None = None) -> Schema:
    found = get_message(jetstream, TABLE, {"seq": id_}, PATIENCE_SECONDS)
    return schema_of(id_, found, fingerprint)


class TypedColumn:
    """The values of a topic with a schema, resolved to the version that the query reads as."""

    def __init__(self, type_: TopicType, wanted: pa.DataType, settings: ConnectionSettings) -> None:
        self._type = type_
        self._wanted = wanted
        self._settings = settings
        self._reader = type_.schema
        self._builder = ColumnBuilder(self._reader.record)
        self._versions: dict[str, WrittenVersion] = {}

    def _version(self, schema_id: str | None) -> WrittenVersion:
        id_ = schema_id or self._type.latest
        known = self._versions.get(id_)
        if known is None:
            known = self._versions[id_] = WrittenVersion(
                self._find(id_), self._type.format, self._reader.record, None
            )
        return known

    def _find(self, id_: str) -> Schema:
        text = self._type.texts.get(id_)
        if text is not None:
            return Schema.from_json(text)
        if not id_.isascii() or not id_.isdigit():
            raise SchemaNotFound(f"{id_!r:.40} is not the id of a schema")
        return _load(jetstream_to(self._settings), int(id_))

    def plain(self, payloads: pa.Array, schema_ids: Sequence[str | None] | None) -> Decoded:
        values: list[Any] = []
        reasons: list[str | None] = []
        sound = True
        for number, payload in enumerate(payloads.to_pylist()):
            value, reason = None, None
            if payload is not None:
                try:
                    value = self._version(schema_ids[number] if schema_ids else None).value(payload)
                except _STUMBLES as error:
                    reason, sound = str(error), False
            values.append(value)
            reasons.append(reason)
        return Decoded(self._column(values), None if sound else reasons)

    def _column(self, values: list[Any]) -> pa.Array:
        present = [value for value in values if value is not None]
        column = self._builder.build(present)
        if len(present) == len(values):
            return column
        places, at = [], 0
        for value in values:
            places.append(None if value is None else at)
            at += value is not None
        return column.take(pa.array(places, pa.int64()))

    def packed(self, values: pa.Array, schema_id: str | None) -> Decoded:
        if not pa.types.is_struct(values.type):
            return self.plain(values, [schema_id] * len(values))
        try:
            return Decoded(self._version(schema_id).column(values))
        except _STUMBLES:
            return self._one_by_one(values, schema_id)

    def _one_by_one(self, values: pa.Array, schema_id: str | None) -> Decoded:
        """Each row alone, because one of them cannot be read."""
        rows: list[pa.Array] = []
        reasons: list[str | None] = []
        nothing = self._column([None])
        for number in range(len(values)):
            try:
                rows.append(self._version(schema_id).column(values.slice(number, 1)))
                reasons.append(None)
            except _STUMBLES as error:
                rows.append(nothing)
                reasons.append(str(error))
        return Decoded(pa.concat_arrays(rows), reasons)
