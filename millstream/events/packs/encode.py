"""Write packs: from record batches to the headers and payload of one message."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Final, Literal

import pyarrow as pa

from millstream.errors import ConfigError, PackError, PayloadTooLarge, Unfit
from millstream.events.packs.envelope import ENVELOPE, cast_column, complete, plain_schema
from millstream.events.packs.headers import PackHeaders, is_schema_id, message_size, write_headers
from millstream.events.packs.ipc import END_OF_STREAM, ReadLimits, has_clean_offsets, layout_of
from millstream.wire.message import OutgoingMessage
from millstream.wire.protocol import encode_headers

__all__ = ["Compression", "EncodedPack", "empty", "encode", "split"]

Compression = Literal["auto", "none", "lz4", "zstd"]

# By itself a pack is compressed with lz4, which costs no throughput: what it takes to compress is
# saved on the way to the disk and back. Not below this size: each buffer has a cost of its own.
AUTO_BYTES_MIN: Final = 16 * 1024
# Nor if less than an eighth is saved: then readers need not decompress it.
_AUTO_WORTH: Final = 7 / 8

_DEFAULTS = ReadLimits()
# Kept free in each message for headers: the pack's, the fence's, 1 KiB of position.
HEADER_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class EncodedPack:
    """One message to send. The caller may add to `headers` first."""

    headers: dict[str, str]
    payload: pa.Buffer
    count: int
    incompressible: bool = False  # compressing was tried, and not worth it

    @property
    def size(self) -> int:
        """Bytes of the message, as the server's max_payload counts them."""
        return message_size(self.headers, self.payload.size)

    def message(self, subject: str, pairs: Sequence[tuple[str, str]] = ()) -> OutgoingMessage:
        """The message to publish on a subject, with headers besides the pack's own."""
        block = encode_headers([*pairs, *self.headers.items()])
        return OutgoingMessage(subject.encode(), block, memoryview(self.payload))


def encode(
    batches: pa.RecordBatch | Sequence[pa.RecordBatch],
    *,
    schema_id: str | None = None,
    compression: Compression = "none",
) -> EncodedPack:
    """One pack with the rows of `batches`, which have envelope columns (see `envelope`).

    Several batches stay several record batches; they are not joined. Compression that would not
    make the payload smaller is left out; `auto` compresses large ones with lz4 if that saves an
    eighth. Raises `Unfit` for columns that packs do not hold.
    """
    if compression not in ("auto", "none", "lz4", "zstd"):
        raise ConfigError(f"compression must be 'none', 'lz4' or 'zstd', not {compression!r}")
    given = [batches] if isinstance(batches, pa.RecordBatch) else list(batches)
    if not given:
        return empty(schema_id)
    count = sum(batch.num_rows for batch in given)
    form, plain = _uniform(given)
    if compression in ("auto", "none") and _is_small(form, plain):
        # Without a writer and its options: they take most of the time of one event.
        payload = pa.py_buffer(b"".join((form.message, plain[0].serialize(), END_OF_STREAM)))
        return EncodedPack(_headers(count, schema_id, payload), payload, count)
    size = _raw_size(form, plain)
    if compression == "auto" and size < AUTO_BYTES_MIN:
        compression = "none"
    payload, wasted = _write(form, plain, compression, size)
    if _needs_check(form, plain, size) and not _readable(payload, count):
        plain = [_fresh(batch) for batch in plain]
        payload, wasted = _write(form, plain, compression, _raw_size(form, plain))
    return EncodedPack(_headers(count, schema_id, payload), payload, count, wasted)


def empty(schema_id: str | None = None) -> EncodedPack:
    """A pack without events and without payload: a writer stores it to claim its subject."""
    payload = pa.py_buffer(b"")
    return EncodedPack(_headers(0, schema_id, payload), payload, 0)


def _headers(count: int, schema_id: str | None, payload: pa.Buffer) -> dict[str, str]:
    if schema_id is not None and not is_schema_id(schema_id):
        raise ConfigError(f"a schema id is 1 to 128 visible ASCII characters, not {schema_id!r}")
    return write_headers(PackHeaders(count, zlib.crc32(payload), schema_id))


# Below this size not even one-bit values reach ReadLimits.max_values.
_UNCHECKED_BYTES = _DEFAULTS.max_values // 8


def _is_small(form: _Form, batches: list[pa.RecordBatch]) -> bool:
    """Whether it is one small batch that any reader accepts, and that `auto` does not compress."""
    first = batches[0]
    return (
        len(batches) == 1
        and first.num_rows > 0
        and not form.lists_of_lists
        # Not the memory that it takes: columns may share some.
        and form.size + int(pa.ipc.get_record_batch_size(first)) < AUTO_BYTES_MIN
    )


def _needs_check(form: _Form, batches: list[pa.RecordBatch], size: int) -> bool:
    """Whether readers might refuse the pack; never for one batch of flat columns."""
    return (
        size > _UNCHECKED_BYTES
        or len(batches) > 1
        or batches[0].num_rows == 0
        or form.lists_of_lists
    )


def _readable(payload: pa.Buffer, count: int) -> bool:
    """Whether readers with default limits accept it; False: empty columns do not start at 0."""
    try:
        if count > _DEFAULTS.max_rows:
            raise PackError(f"{count:,} events; readers accept {_DEFAULTS.max_rows:,}", "limit")
        return has_clean_offsets(payload, _DEFAULTS, count)
    except PackError as error:
        raise ConfigError(f"{error.text}. Split the events over several packs") from error


def _fresh(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch in new memory. Data of other libraries may have empty lists that do not start at 0,
    which Arrow writes unchanged and cannot read back safely."""
    rows = pa.array(range(batch.num_rows), pa.int32())
    return pa.RecordBatch.from_arrays(
        [column.take(rows) for column in batch.columns], schema=batch.schema
    )


# -- columns ----------------------------------------------------------------------------------

# Serialized schema -> form. Producers use few schemas; 64 of at most 16 KiB: 1 MiB of keys.
_CACHED_SCHEMAS = 64
_CACHED_SCHEMA_BYTES = 16 * 1024
_forms: OrderedDict[bytes, _Form] = OrderedDict()
_forms_lock = Lock()
_recent: _Form | None = None  # to compare two schemas is faster than to write one


@dataclass(frozen=True, slots=True)
class _Form:
    """How batches of one schema are written."""

    schema: pa.Schema  # plain types, no metadata
    message: bytes  # the schema in the stream
    size: int  # bytes of the stream without record batches
    lists_of_lists: bool


def _form(schema: pa.Schema) -> _Form:
    token = schema.serialize().to_pybytes()
    known = _forms.get(token)
    if known is not None:
        return known
    plain = plain_schema(schema)
    message = plain.serialize().to_pybytes()
    try:
        layout = layout_of(message)
    except PackError as error:
        raise Unfit("value", "a schema that packs can hold", error.text) from error
    form = _Form(plain, message, len(message) + len(END_OF_STREAM), layout.lists_of_lists)
    if len(token) <= _CACHED_SCHEMA_BYTES:
        with _forms_lock:
            _forms[token] = form
            while len(_forms) > _CACHED_SCHEMAS:
                _forms.popitem(last=False)
    return form


def _uniform(batches: list[pa.RecordBatch]) -> tuple[_Form, list[pa.RecordBatch]]:
    """The batches in plain types and under one schema."""
    plain = [_plain(batch) for batch in batches]
    form = plain[0][0]
    if all(other.schema.equals(form.schema) for other, _ in plain[1:]):
        return form, [batch for _, batch in plain]
    present = {name for other, _ in plain for name in other.schema.names}
    names = [name for name in ENVELOPE if name in present]
    same = [complete(batch).select(names) for _, batch in plain]
    for batch in same[1:]:
        if not batch.schema.equals(same[0].schema):
            expected, found = same[0].schema.field("value").type, batch.schema.field("value").type
            raise Unfit("value", f"the same type in all batches, {expected}", str(found))
    return _form(same[0].schema), same


def _plain(batch: pa.RecordBatch) -> tuple[_Form, pa.RecordBatch]:
    global _recent
    schema, recent = batch.schema, _recent
    if recent is not None and schema.equals(recent.schema):
        return recent, batch
    form = _form(schema)
    if schema.equals(form.schema):
        _recent = form
        return form, batch
    columns = [
        cast_column(name, column) for name, column in zip(schema.names, batch.columns, strict=True)
    ]
    return form, pa.RecordBatch.from_arrays(columns, schema=form.schema)


# -- bytes --------------------------------------------------------------------------------------


def _raw_size(form: _Form, batches: Sequence[pa.RecordBatch]) -> int:
    """Exact size of the uncompressed stream."""
    size = form.size
    for batch in batches:
        size += pa.ipc.get_record_batch_size(batch)
    return size


def _write(
    form: _Form, batches: Sequence[pa.RecordBatch], compression: Compression, size: int
) -> tuple[pa.Buffer, bool]:
    """The stream, and whether compressing it was not worth it; `size` is uncompressed."""
    if compression != "none":
        codec, most = ("lz4", size * _AUTO_WORTH) if compression == "auto" else (compression, size)
        # Packs are too small for Arrow's thread pool: one thread takes half the time.
        options = pa.ipc.IpcWriteOptions(compression=codec, use_threads=False)
        grown = pa.BufferOutputStream()
        _write_stream(grown, form.schema, batches, options)
        compressed = grown.getvalue()
        if compressed.size < most:
            return compressed, False
    payload = pa.allocate_buffer(size)
    with pa.FixedSizeBufferWriter(payload) as sink:
        _write_stream(sink, form.schema, batches, pa.ipc.IpcWriteOptions(use_threads=False))
    return payload, compression != "none"


def _write_stream(
    sink: pa.NativeFile,
    schema: pa.Schema,
    batches: Sequence[pa.RecordBatch],
    options: pa.ipc.IpcWriteOptions,
) -> None:
    with pa.ipc.new_stream(sink, schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)


def split(
    batch: pa.RecordBatch, max_events: int, max_bytes: int, max_alone: int = 0
) -> list[pa.RecordBatch]:
    """The batch as slices (views, nothing is copied) that each fit one pack, in order.

    An event that is larger than `max_bytes` is a pack of its own, of up to `max_alone`. Sizes are
    uncompressed, so a compressed pack fits as well. Raises `PayloadTooLarge` when a single event
    does not fit, before anything was sent.
    """
    if max_events < 1 or max_bytes <= HEADER_BYTES:
        raise ConfigError(
            f"packs of at most {max_events:,} events and {max_bytes:,} bytes: the least is 1 event "
            f"and {HEADER_BYTES + 1:,} bytes"
        )
    form, plain = _plain(batch)
    room, alone = max_bytes - HEADER_BYTES, max(max_bytes, max_alone) - HEADER_BYTES
    slices: list[pa.RecordBatch] = []
    start = 0
    guess = max_events
    while start < plain.num_rows:
        most = min(max_events, plain.num_rows - start)
        rows = _rows_that_fit(form, plain.slice(start, most), room, alone, min(guess, most))
        slices.append(plain.slice(start, rows))
        start += rows
        # Events are similar: start near the size that fitted last, so that few checks are needed.
        guess = 2 * rows
    return slices


def _rows_that_fit(form: _Form, batch: pa.RecordBatch, room: int, alone: int, guess: int) -> int:
    rows = guess
    while True:
        size = _raw_size(form, [batch.slice(0, rows)])
        if size <= (alone if rows == 1 else room):
            return rows
        if rows == 1:
            raise PayloadTooLarge(size, alone)
        # At least a halving every second step, so at most 2 log2(rows) checks.
        rows = max(1, min(rows - 1, rows * room // size, rows // 2 + rows // 4))
