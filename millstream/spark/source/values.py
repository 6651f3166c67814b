"""The column `value`: bytes as they are, or the fields of the topic's schema."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from millstream.events.escapes import escaped
from millstream.events.undecodable import DECODE_FAILURES, reason_of
from millstream.settings import ConnectionSettings
from millstream.spark.broker_access import SchemaSnapshot, jetstream_to, load_schema

if TYPE_CHECKING:
    from millstream.schemas import Schema
    from millstream.schemas.registry.binding import WrittenVersion

__all__ = ["BytesDecoder", "Decoded", "TypedDecoder", "ValueDecoder", "fitted"]


class Decoded:
    """A column of values, with the reason for each one that could not be decoded (null there)."""

    __slots__ = ("array", "reasons")

    def __init__(self, array: pa.Array, reasons: Sequence[str | None] | None = None) -> None:
        self.array = array
        self.reasons = reasons  # None: every value was decoded


class ValueDecoder(Protocol):
    """Builds the column `value` from the contents of messages."""

    def plain(self, payloads: pa.Array, schema_ids: Sequence[str | None] | None) -> Decoded:
        """The values of plain messages; null is a deletion."""

    def packed(self, values: pa.Array, schema_id: str | None) -> Decoded:
        """The values of a pack."""


class BytesDecoder:
    """Values of a topic without a schema: bytes, or text if the query's schema says so."""

    def __init__(self, type_: pa.DataType) -> None:
        self._type = type_
        self._text = bool(pa.types.is_string(type_))

    def plain(self, payloads: pa.Array, schema_ids: Sequence[str | None] | None) -> Decoded:
        return self._as_wanted(payloads)

    def packed(self, values: pa.Array, schema_id: str | None) -> Decoded:
        if pa.types.is_struct(values.type):
            reason = "typed values (a struct of columns) in a topic that is read as bytes"
            return Decoded(pa.nulls(len(values), self._type), [reason] * len(values))
        return self._as_wanted(values)

    def _as_wanted(self, values: pa.Array) -> Decoded:
        if not self._text:
            return Decoded(values)
        try:
            return Decoded(values.cast(pa.string()))
        except pa.ArrowInvalid:
            return self._one_by_one(values.to_pylist())

    def _one_by_one(self, values: list[bytes | None]) -> Decoded:
        texts: list[str | None] = []
        reasons: list[str | None] = []
        for value in values:
            try:
                texts.append(None if value is None else value.decode())
                reasons.append(None)
            except UnicodeDecodeError as error:
                texts.append(None)
                reasons.append(f"not UTF-8: {error.reason} at byte {error.start}")
        return Decoded(pa.array(texts, pa.string()), reasons)


class TypedDecoder:
    """Values of a topic with a schema, resolved to the version that the query reads them as."""

    def __init__(self, known: SchemaSnapshot, settings: ConnectionSettings) -> None:
        # Loaded only for topics with a schema: every Python process of Spark pays for it.
        from millstream.schemas import ColumnBuilder

        self._known = known
        self._settings = settings
        self._record = known.latest.record  # of the version that values are read as
        self._builder = ColumnBuilder(self._record)
        self._versions: dict[str, WrittenVersion] = {}

    def _version(self, schema_id: str | None) -> WrittenVersion:
        from millstream.schemas.registry.binding import WrittenVersion

        id_ = self._known.latest_id if schema_id is None else schema_id
        version = self._versions.get(id_)
        if version is None:
            version = self._versions[id_] = WrittenVersion(
                self._find(id_), self._known.format, self._record, None
            )
        return version

    def _find(self, id_: str) -> Schema:
        from millstream.schemas import Schema
        from millstream.schemas.registry.records import parse_id

        text = self._known.texts.get(id_)
        if text is not None:
            return Schema.from_json(text)
        return load_schema(jetstream_to(self._settings), parse_id(id_))

    def plain(self, payloads: pa.Array, schema_ids: Sequence[str | None] | None) -> Decoded:
        values: list[Any] = []
        reasons: list[str | None] = []
        all_decoded = True
        for number, payload in enumerate(payloads.to_pylist()):
            value, reason = None, None
            if payload is not None:
                try:
                    value = self._version(schema_ids[number] if schema_ids else None).value(payload)
                except DECODE_FAILURES as error:
                    reason, all_decoded = reason_of(error), False
            values.append(value)
            reasons.append(reason)
        return Decoded(self._column(values), None if all_decoded else reasons)

    def _column(self, values: list[Any]) -> pa.Array:
        present = [value for value in values if value is not None]
        column = self._builder.build(present)
        if len(present) == len(values):
            return column
        indices, following = [], 0
        for value in values:
            indices.append(None if value is None else following)
            following += value is not None
        return column.take(pa.array(indices, pa.int64()))

    def packed(self, values: pa.Array, schema_id: str | None) -> Decoded:
        if not pa.types.is_struct(values.type):
            return self.plain(values, [schema_id] * len(values))
        try:
            return Decoded(self._version(schema_id).column(values))
        except DECODE_FAILURES:
            return self._one_by_one(values, schema_id)

    def _one_by_one(self, values: pa.Array, schema_id: str | None) -> Decoded:
        """Each row on its own, because one of them cannot be decoded."""
        rows: list[pa.Array] = []
        reasons: list[str | None] = []
        nothing = self._column([None])
        for number in range(len(values)):
            try:
                rows.append(self._version(schema_id).column(values.slice(number, 1)))
                reasons.append(None)
            except DECODE_FAILURES as error:
                rows.append(nothing)
                reasons.append(reason_of(error))
        return Decoded(pa.concat_arrays(rows), reasons)


def fitted(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    """The array in exactly the type that Spark expects: fields chosen by name, the rest cast."""
    if array.type.equals(wanted, check_metadata=False):
        return array
    if pa.types.is_struct(wanted) and pa.types.is_struct(array.type):
        fields = [wanted.field(number) for number in range(wanted.num_fields)]
        children = [fitted(array.field(field.name), field.type) for field in fields]
        mask = pc.is_null(array) if array.null_count else None
        return pa.StructArray.from_arrays(children, fields=fields, mask=mask)
    if pa.types.is_list(wanted) and pa.types.is_list(array.type):
        items = fitted(array.flatten(), wanted.value_type)
        counts = pc.fill_null(pc.list_value_length(array), 0)
        ends = pc.cumulative_sum(counts.cast(pa.int32()))
        offsets = pa.concat_arrays([pa.array([0], pa.int32()), ends])
        mask = pc.is_null(array) if array.null_count else None
        return pa.ListArray.from_arrays(offsets, items, type=wanted, mask=mask)
    if pa.types.is_string(wanted) and pa.types.is_binary(array.type):
        return _as_text(array)
    return array.cast(wanted)


def _as_text(array: pa.Array) -> pa.Array:
    """Subjects or keys as text; bytes that are not UTF-8 in their reversible form."""
    try:
        return array.cast(pa.string())
    except pa.ArrowInvalid:
        texts = [
            None if data is None else escaped(data.decode("utf-8", "surrogateescape"))
            for data in array.to_pylist()
        ]
        return pa.array(texts, pa.string())
