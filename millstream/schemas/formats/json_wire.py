"""Single events as JSON, by msgspec: ISO 8601 times, base64 bytes, decimals and UUIDs as text."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import msgspec

from millstream import errors
from millstream.schemas import types as t
from millstream.schemas.formats.jsonschema import to_json_schema
from millstream.schemas.schema import Schema
from millstream.schemas.values.fast_json import REFUSALS, Dump, Load, fast_dump, fast_load
from millstream.schemas.values.finite import compile_finite_fit
from millstream.schemas.values.fit import Fit, compile_fit

__all__ = ["JsonWire"]


class JsonWire:
    """Values are checked by msgspec first; the checker decides about those that it refuses.

    Compiled on first use: many codecs only read or only write.
    """

    def __init__(self, schema: Schema) -> None:
        # Refuses unions whose options look alike in JSON.
        to_json_schema(schema.record)
        self._record = schema.record
        self._encode: Callable[[Any], bytes] = msgspec.json.Encoder().encode
        self._decode: Callable[[bytes], Any] = msgspec.json.Decoder().decode

    @cached_property
    def _fast_dump(self) -> Dump:
        return fast_dump(self._record)

    @cached_property
    def _fast_load(self) -> Load:
        return fast_load(self._record)

    @cached_property
    def _fit(self) -> Fit:
        return compile_finite_fit(self._record)

    @cached_property
    def _fit_text(self) -> Fit:
        return compile_fit(self._record, text=True)

    def dump(self, value: object) -> bytes:
        """The bytes of a value that fits the schema."""
        try:
            return self._fast_dump(value)
        except REFUSALS:
            pass  # the checker decides, and words the refusal
        return self.dump_by_checker(value)

    def dump_by_checker(self, value: object) -> bytes:
        """`dump` without the fast path; it defines the result of `dump`."""
        return self._encode(self._fit(value))

    def load(self, data: bytes) -> dict[str, Any]:
        """The plain value of the bytes, checked."""
        try:
            return self._fast_load(data)
        except REFUSALS:
            pass  # the checker decides, and words the refusal
        return self.load_by_checker(data)

    def load_by_checker(self, data: bytes) -> dict[str, Any]:
        """`load` without the fast path; it defines the result of `load`."""
        try:
            raw = self._decode(data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            kind = t.kind(self._record)
            raise errors.Unfit("", f"{kind} as JSON", f"other bytes: {error}") from None
        plain: dict[str, Any] = self._fit_text(raw)
        return plain
