"""Masked columns: what leaves the database as a hash, as stars, or not at all. Pure."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from millstream.cdc.model import RowChanges, TableShape
from millstream.cdc.settings import Mask, TableSettings
from millstream.errors import ConfigError, Unfit
from millstream.schemas import types as t
from millstream.settings import Secret

__all__ = ["Masks", "check_masks", "masked_errors"]

REDACTED: Final = "***"


def check_masks(shape: TableShape, masks: Mapping[str, Mask], secret: Secret | None) -> None:
    """Refuse masks that cannot be applied to a table."""
    types = {column.name: column.type for column in shape.columns}
    for name, mask in masks.items():
        where = f"table {shape.full_name}: mask of '{name}'"
        if name not in types:
            raise ConfigError(f"{where}: there is no such column among {', '.join(types)}")
        if name in shape.key:
            raise ConfigError(f"{where}: it is part of the key, by which changes find their row")
        if mask == "redact" and not isinstance(types[name], t.String):
            raise ConfigError(f"{where}: 'redact' is for text, use 'null' or 'hash'")
        if mask == "hash" and isinstance(types[name], t.List):
            raise ConfigError(f"{where}: 'hash' is for single values, not for arrays: use 'null'")
        if mask == "hash" and secret is None:
            raise ConfigError(f"{where}: 'hash' needs a secret: set mask_key or mask_key_env")


@contextmanager
def masked_errors(settings: TableSettings) -> Iterator[None]:
    """While this is open, errors about values do not show those of masked columns."""
    try:
        yield
    except Unfit as error:
        if error.field.rpartition(".")[2] not in settings.mask:
            raise
        raise Unfit(error.field, error.expected, "a masked value", error.row) from None


class Masks:
    """The masks of one table in one shape."""

    def __init__(self, shape: TableShape, masks: Mapping[str, Mask], secret: Secret | None) -> None:
        check_masks(shape, masks, secret)
        self._masks, self._secret = masks, secret or Secret("")  # checked: without hashes only
        self.shape = dataclasses.replace(
            shape,
            columns=tuple(
                dataclasses.replace(column, type=t.String())
                if masks.get(column.name) == "hash"
                else column
                for column in shape.columns
            ),
        )

    def applied(self, changes: RowChanges) -> RowChanges:
        """Changes without what is masked."""
        if not self._masks:
            return changes
        return dataclasses.replace(
            changes,
            table=self.shape,
            after=self._rows(changes.after),
            before=None if changes.before is None else self._rows(changes.before),
        )

    def _rows(self, rows: pa.StructArray) -> pa.StructArray:
        columns = []
        for column in self.shape.columns:
            found = pc.struct_field(rows, column.name)
            mask = self._masks.get(column.name)
            columns.append(found if mask is None else self._masked(found, mask))
        fields = list(self.shape.row_type)
        return pa.StructArray.from_arrays(columns, fields=fields, mask=rows.is_null())

    def _masked(self, column: pa.Array, mask: Mask) -> pa.Array:
        if mask == "null":
            return pa.nulls(len(column), column.type)
        if mask == "redact":
            stars = pa.scalar(REDACTED, pa.string())
            return pc.if_else(column.is_valid(), stars, pa.scalar(None, pa.string()))
        # Each distinct value once: masked columns often repeat.
        texts = column if pa.types.is_binary(column.type) else column.cast(pa.string())
        encoded = texts.dictionary_encode()
        hashes = [self._hash(value) for value in encoded.dictionary.to_pylist()]
        return pa.array(hashes, pa.string()).take(encoded.indices)

    def _hash(self, value: str | bytes) -> str:
        data = value if isinstance(value, bytes) else value.encode()
        return hmac.new(self._secret.reveal().encode(), data, hashlib.sha256).hexdigest()
