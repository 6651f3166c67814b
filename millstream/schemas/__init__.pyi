"""Schemas: one type model, every format to and from it, codecs and compatibility rules.

The names are imported when they are first used, so that importing this room does not load Arrow.
"""

from millstream.schemas.arrow_types import arrow_type
from millstream.schemas.codecs import WIRE_FORMATS, Codec, WireFormat, make_codec
from millstream.schemas.column_resolution import ColumnResolution
from millstream.schemas.compatibility import Mode, Problem, check, parse_mode
from millstream.schemas.declaration import declare
from millstream.schemas.formats.arrow import from_arrow, to_arrow
from millstream.schemas.formats.avro import from_avro, to_avro
from millstream.schemas.formats.jsonschema import from_json_schema, to_json_schema
from millstream.schemas.formats.proto_reading import from_descriptor
from millstream.schemas.formats.proto_text import parse_proto, to_proto
from millstream.schemas.formats.protobuf import pin_numbers, to_descriptor
from millstream.schemas.formats.python import Aliases, Doc, from_python
from millstream.schemas.formats.spark import spark_arrow_type, spark_type, to_spark
from millstream.schemas.resolution import Mismatch, Resolution, mismatches
from millstream.schemas.schema import Schema, SchemaOrigin
from millstream.schemas.values.columns import ColumnBuilder
from millstream.schemas.values.conform import Conformer
from millstream.schemas.values.rows import RowReader, object_maker

__all__ = [
    "WIRE_FORMATS",
    "Aliases",
    "Codec",
    "ColumnBuilder",
    "ColumnResolution",
    "Conformer",
    "Doc",
    "Mismatch",
    "Mode",
    "Problem",
    "Resolution",
    "RowReader",
    "Schema",
    "SchemaOrigin",
    "WireFormat",
    "arrow_type",
    "check",
    "declare",
    "from_arrow",
    "from_avro",
    "from_descriptor",
    "from_json_schema",
    "from_python",
    "make_codec",
    "mismatches",
    "object_maker",
    "parse_mode",
    "parse_proto",
    "pin_numbers",
    "spark_arrow_type",
    "spark_type",
    "to_arrow",
    "to_avro",
    "to_descriptor",
    "to_json_schema",
    "to_proto",
    "to_spark",
]
