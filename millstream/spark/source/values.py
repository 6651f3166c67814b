"""The column `value`: bytes as they are, or the fields of the topic's schema."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["BytesValues", "Decoded", "Values", "fitted"]


class Decoded:
    """A column of values, with the reason for each one that could not be decoded (null there)."""

    __slots__ = ("array", "reasons")

    def __init__(self, array: pa.Array, reasons: Sequence[str | None] | None = None) -> None:
        self.array = array
        self.reasons = reasons  # None: all are sound


class Values(Protocol):
    """Makes the column `value` of what messages hold."""

    def plain(self, payloads: pa.Array, schema_ids: Sequence[str | None] | None) -> Decoded:
        """The values of plain messages; null is a deletion."""

    def packed(self, values: pa.Array, schema_id: str | None) -> Decoded:
        """The values of a pack."""


class BytesValues:
    """Values of a topic without a schema: bytes, or text if that was asked for."""

    def __init__(self, type_: pa.DataType) -> None:
        self._type = type_
        self._text = bool(pa.types.is_string(type_))

    def plain(self, payloads: pa.Array, schema_ids: Sequence[str | None] | None) -> Decoded:
        return self._as_asked(payloads)

    def packed(self, values: pa.Array, schema_id: str | None) -> Decoded:
        if pa.types.is_struct(values.type):
            reason = "typed values (a struct of columns) in a topic that is read as bytes"
            return Decoded(pa.nulls(len(values), self._type), [reason] * len(values))
        return self._as_asked(values)

    def _as_asked(self, values: pa.Array) -> Decoded:
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


def fitted(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    """The array in exactly the type Spark expects: fields chosen by name, the rest cast."""
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
    return array.cast(wanted)
