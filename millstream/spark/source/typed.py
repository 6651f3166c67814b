"""Topics with a schema: their values as a struct of typed columns, whichever version wrote them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from millstream.errors import ConfigError
from millstream.settings import ConnectionSettings
from millstream.spark.source.row_schema import BYTES, ValueShape
from millstream.spark.source.values import BytesValues, Values
from millstream.wire.sync.connection import BlockingJetStream

if TYPE_CHECKING:
    from millstream.schemas import Schema
    from millstream.schemas.codecs import WireFormat

__all__ = ["TopicType", "common_shape", "find_type", "values_of"]


@dataclass(frozen=True)
class TopicType:
    """A topic's schema as a query found it when it was built; travels to the workers."""

    topic: str
    format: WireFormat
    latest: str  # id of the version that is read as, and written with
    texts: Mapping[str, str]  # every version known then, as kept by the registry, by id

    @property
    def schema(self) -> Schema:
        """The version that is read as, and written with."""
        from millstream.schemas import Schema

        return Schema.from_json(self.texts[self.latest])

    @property
    def shape(self) -> ValueShape:
        """What the column `value` can be."""
        from millstream.schemas import spark_arrow_type, spark_type

        record = self.schema.record
        fields = {f.name: spark_type(f.type, nullability=False) for f in record.fields}
        ddl = spark_type(record, nullability=False)
        return ValueShape(ddl, fields, (spark_arrow_type(record),))


def find_type(jetstream: BlockingJetStream, topic: str) -> TopicType | None:
    """A topic's schema, or None when it has none."""
    # Loaded only for topics that have one: every Python process that Spark starts pays for it.
    from millstream.spark.source.typed_column import load_type

    return load_type(jetstream, topic)


def common_shape(types: Mapping[str, TopicType], topics: Sequence[str]) -> ValueShape:
    """The shape of `value` for all topics of a query: one schema, or bytes."""
    typed = [types[topic] for topic in topics if topic in types]
    if not typed:
        return BYTES
    first = typed[0]
    for topic in topics:
        other = types.get(topic)
        if other is None or other.schema.record != first.schema.record:
            raise ConfigError(
                f"topics '{first.topic}' and '{topic}' do not have the same schema, so they cannot "
                f"share the column 'value': read them one by one, or leave 'value' out with the "
                f"option columns"
            )
    return first.shape


def values_of(type_: TopicType | None, wanted: pa.DataType, settings: ConnectionSettings) -> Values:
    """What makes the column `value` of a topic's messages."""
    if type_ is None:
        return BytesValues(wanted)
    from millstream.spark.source.typed_column import TypedColumn

    return TypedColumn(type_, wanted, settings)
