"""The columns of a source, as Spark DDL and as Arrow types. Pure, without pyspark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import pyarrow as pa

from millstream.errors import ConfigError
from millstream.spark.broker_access import SchemaSnapshot
from millstream.spark.options import COLUMNS, METADATA, SourceOptions

__all__ = [
    "BYTES",
    "ValueShape",
    "check_schema",
    "check_types",
    "column_names",
    "shape_of",
    "source_ddl",
]

_HEADERS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
DEFAULT_COLUMNS: Final = ("key", "value", "timestamp")
_DDL: Final[Mapping[str, str]] = {
    "key": "BINARY",
    "topic": "STRING",
    "partition": "INT",
    "offset": "BIGINT",
    "timestamp": "TIMESTAMP",
    "subject": "STRING",
    "index": "INT",
    "headers": "ARRAY<STRUCT<key: STRING, value: BINARY>>",
    "reason": "STRING",
}
# The types that a user's schema may ask for; the first is the default.
_TYPES: Final[Mapping[str, tuple[pa.DataType, ...]]] = {
    "key": (pa.binary(), pa.string()),
    "value": (),
    "topic": (pa.string(),),
    "partition": (pa.int32(),),
    "offset": (pa.int64(),),
    "timestamp": (pa.timestamp("us", "UTC"),),
    "subject": (pa.string(),),
    "index": (pa.int32(),),
    "headers": (_HEADERS,),
    "reason": (pa.string(),),
}


class ValueShape:
    """What the column `value` can be: bytes, or a struct with the topic's fields."""

    __slots__ = ("ddl", "fields", "types")

    def __init__(self, ddl: str, fields: Mapping[str, str], types: tuple[pa.DataType, ...]) -> None:
        self.ddl = ddl  # of the complete column
        self.fields = fields  # DDL of each field of a struct; empty for bytes
        self.types = types  # Arrow types that a user's schema may ask for


BYTES: Final = ValueShape("BINARY", {}, (pa.binary(), pa.string()))


def shape_of(schemas: Mapping[str, SchemaSnapshot], topics: Sequence[str]) -> ValueShape:
    """The shape of `value` for all topics of a query: they have the same schema, or none."""
    typed = [schemas[topic] for topic in topics if topic in schemas]
    if not typed:
        return BYTES
    first = typed[0]
    record = first.latest.record
    for topic in topics:
        other = schemas.get(topic)
        if other is None or other.latest.record != record:
            raise ConfigError(
                f"topics '{first.topic}' and '{topic}' do not have the same schema, so they cannot "
                f"share the column 'value': read them separately, or leave 'value' out with the "
                f"option columns"
            )
    from millstream.schemas import spark_arrow_type, spark_type

    fields = {field.name: spark_type(field.type, nullability=False) for field in record.fields}
    return ValueShape(spark_type(record, nullability=False), fields, (spark_arrow_type(record),))


def column_names(options: SourceOptions, typed: bool = False) -> list[str]:
    """The names of the columns that the options choose, in their order.

    Spark converts every column of every row, used or not, and for typed values that is most of the
    work of a read: so they come with few others.
    """
    chosen = {name.partition(".")[0] for name in options.columns} or set(DEFAULT_COLUMNS)
    if options.metadata or (options.metadata is None and not options.columns and not typed):
        chosen.update(METADATA)
    if options.headers:
        chosen.add("headers")
    if options.undecodable == "null":
        chosen.add("reason")
    return [name for name in COLUMNS if name in chosen]


def source_ddl(options: SourceOptions, value: ValueShape) -> str:
    """The source's schema as DDL text."""
    parts = []
    for name in column_names(options, typed=bool(value.fields)):
        ddl = _value_ddl(options, value) if name == "value" else _DDL[name]
        parts.append(f"`{name}` {ddl}")
    return ", ".join(parts)


def _value_ddl(options: SourceOptions, value: ValueShape) -> str:
    inner = [name.partition(".")[2] for name in options.columns if name.startswith("value.")]
    if not inner:
        return value.ddl
    if not value.fields:
        raise ConfigError(
            f"option 'columns': the values are bytes, so there is no 'value.{inner[0]}'; "
            f"declare the topic with a schema, or choose 'value'"
        )
    if "value" in options.columns:
        raise ConfigError("option 'columns': choose 'value' or some of its fields, not both")
    for name in inner:
        if name not in value.fields:
            raise ConfigError(
                f"option 'columns': the topic's values have no field {name!r}; "
                f"they have {', '.join(value.fields)}"
            )
    fields = (f"`{name}`: {value.fields[name]}" for name in value.fields if name in inner)
    return f"STRUCT<{', '.join(fields)}>"


def check_schema(schema: pa.Schema, value: ValueShape, options: SourceOptions) -> None:
    """Reject a user's schema that asks for something the source does not have."""
    check_types(schema, {**_TYPES, "value": value.types}, options)


def check_types(
    schema: pa.Schema, known: Mapping[str, tuple[pa.DataType, ...]], options: SourceOptions
) -> None:
    """The same, with the types that each column can have."""
    names: list[str] = schema.names
    if len(set(names)) != len(names):
        raise ConfigError(f"the schema names a column twice: {', '.join(names)}")
    for field in schema:
        if field.name not in known:
            raise ConfigError(
                f"the schema asks for the column '{field.name}'; the source has {', '.join(known)}"
            )
        if field.name == "reason" and options.undecodable != "null":
            raise ConfigError("the column 'reason' needs the option undecodable = null")
        allowed = known[field.name]
        if not any(_fits(field.type, other) for other in allowed):
            raise ConfigError(
                f"the schema asks for {field.name} as {field.type}; it can be {_shown(allowed)}"
            )


def _shown(types: Iterable[pa.DataType]) -> str:
    return " or ".join(str(kind) for kind in types)


def _fits(wanted: pa.DataType, have: pa.DataType) -> bool:
    """Whether a type is the other one, or a struct with some of its fields, at any depth."""
    if pa.types.is_struct(wanted) and pa.types.is_struct(have):
        known = {have.field(n).name: have.field(n).type for n in range(have.num_fields)}
        fields = [wanted.field(n) for n in range(wanted.num_fields)]
        return all(f.name in known and _fits(f.type, known[f.name]) for f in fields)
    if pa.types.is_map(wanted) and pa.types.is_map(have):
        return _fits(wanted.key_type, have.key_type) and _fits(wanted.item_type, have.item_type)
    if pa.types.is_list(wanted) and pa.types.is_list(have):
        return _fits(wanted.value_type, have.value_type)
    return bool(wanted.equals(have))
