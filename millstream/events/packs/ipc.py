"""Check one Arrow IPC stream before Arrow touches it, then read it without copying.

The checks bound memory: frames and buffers are inside the payload and never overlap, declared
(decompressed) sizes and row counts are summed before anything is allocated, and no list of
unknown length is passed to Arrow's own parser. What remains (offsets, UTF-8, null counts, ranges)
is Arrow's full validation.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from dataclasses import dataclass, field
from threading import Lock

import pyarrow as pa

from millstream.errors import ConfigError, PackError
from millstream.events.packs.envelope import check_columns
from millstream.events.packs.flatbuffer import FlatTable, root
from millstream.events.packs.packing import PACK_BYTES_MAX, PACK_EVENTS_MAX
from millstream.events.packs.types import Node, Reading, read_fields

__all__ = [
    "END_OF_STREAM",
    "Layout",
    "ReadLimits",
    "Stream",
    "check_stream",
    "has_clean_offsets",
    "layout_of",
    "read_stream",
]

END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
MAX_BATCHES = 256  # each costs some 10 KiB of objects; writers create one, or one per input batch
MAX_METADATA_BYTES = 1024 * 1024  # MAX_FIELDS fields need less than a quarter of it

_FRAME = struct.Struct("<Ii")
_SIZE = struct.Struct("<q")
_CONTINUATION = 0xFFFFFFFF
_VERSION_V5 = 4
_SCHEMA, _DICTIONARY, _RECORD_BATCH = 1, 2, 3
_CODECS = {0: "lz4", 1: "zstd"}
_RAW = -1  # instead of a decompressed size: this buffer is not compressed


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """The limits of a reader for one pack; decoding never takes more memory than they allow.

    Decoding allocates at most `max_decoded_bytes` for decompressed columns, one aligned copy of a
    payload that does not start at a multiple of 8 bytes, and 16 MiB for metadata and codecs.
    """

    max_rows: int = PACK_EVENTS_MAX  # events in one pack; writers make packs of thousands
    max_decoded_bytes: int = PACK_BYTES_MAX
    max_values: int = 8 * 1024 * 1024  # leaves and items of all columns: bounds Python objects

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_decoded_bytes", "max_values"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be 1 or more, not {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True)
class Layout:
    """A schema and what it prescribes for every record batch."""

    schema: pa.Schema
    known: pa.Schema  # the columns this version knows, in the sender's order
    nodes: tuple[Node, ...]
    buffers: int
    lists_of_lists: bool  # whether a column with offsets may be empty in a batch with rows


@dataclass(frozen=True, slots=True)
class Stream:
    """A checked and fully validated IPC stream."""

    schema: pa.Schema
    batches: tuple[pa.RecordBatch, ...]
    compression: str | None


@dataclass(slots=True)
class _Message:
    table: FlatTable  # the Message table
    kind: int
    start: int  # of the frame, in the payload
    body: int  # of the body, in the payload
    body_size: int
    # Offsets buffers of columns without values: (index of the buffer, bytes of an offset).
    hollow: list[tuple[int, int]] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.body + self.body_size


def read_stream(payload: pa.Buffer, limits: ReadLimits, rows: int) -> Stream:
    """The record batches of a payload that holds exactly `rows` rows, as views if uncompressed.

    Raises `PackError` for anything else, before memory beyond `limits` is used.
    """
    try:
        layout, messages, codecs = check_stream(payload, limits, rows)
        batches = _load(payload, layout, messages, compressed=bool(codecs))
        for batch, message in zip(batches, messages, strict=True):
            batch.validate(full=True)
            _check_hollow(batch, message.hollow)
    except (pa.ArrowException, OSError, OverflowError) as error:  # OSError: a codec failed
        raise PackError(f"Arrow refuses its contents: {_first_line(error)}", "values") from error
    if len(layout.known) < len(layout.schema):
        batches = [batch.select(layout.known.names) for batch in batches]
    return Stream(layout.known, tuple(batches), "+".join(sorted(codecs)) or None)


def check_stream(
    payload: pa.Buffer, limits: ReadLimits, rows: int
) -> tuple[Layout, list[_Message], set[str]]:
    """Steps 1 to 3 of docs/PACKS.md, 'Reading': frames, schema, sizes; values are not checked."""
    data = memoryview(payload)
    first = _message(data, 0)
    if first is None or first.kind != _SCHEMA:
        raise PackError("the stream does not start with a schema", "framing")
    layout = layout_of(bytes(data[first.start : first.body]))
    messages, codecs = _check_batches(data, first, layout, limits, rows)
    return layout, messages, codecs


def has_clean_offsets(payload: pa.Buffer, limits: ReadLimits, rows: int) -> bool:
    """Whether the columns without values of a checked stream start at 0."""
    layout, messages, codecs = check_stream(payload, limits, rows)
    if not any(message.hollow for message in messages):
        return True
    batches = _load(payload, layout, messages, compressed=bool(codecs))
    try:
        for batch, message in zip(batches, messages, strict=True):
            _check_hollow(batch, message.hollow)
    except PackError:
        return False
    return True


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def _message(data: memoryview, at: int) -> _Message | None:
    """The message framed at `at`; None for the end of the stream."""
    if at + 8 > len(data):
        raise PackError(
            f"the payload ends at byte {len(data):,} without an end of stream", "framing"
        )
    marker, size = _FRAME.unpack_from(data, at)
    if marker != _CONTINUATION:
        raise PackError(f"no message starts at byte {at:,}", "framing")
    if size == 0:
        if at + 8 != len(data):
            raise PackError(f"{len(data) - at - 8:,} bytes follow the end of the stream", "framing")
        return None
    body = at + 8 + size
    if size < 0 or size % 8 or size > MAX_METADATA_BYTES or body > len(data):
        raise PackError(
            f"a message at byte {at:,} claims {size:,} bytes of metadata; a multiple of 8 up to "
            f"{MAX_METADATA_BYTES:,} is allowed and {len(data) - at - 8:,} are present",
            "framing",
        )
    table = root(data[at + 8 : body])
    if table.i16(0) != _VERSION_V5:
        raise PackError(f"metadata version {table.i16(0)}, not V5 ({_VERSION_V5})", "metadata")
    body_size = table.i64(3)
    if body_size < 0 or body_size % 8 or body_size > len(data) - body:
        raise PackError(
            f"a message at byte {at:,} claims a body of {body_size:,} bytes; "
            f"{len(data) - body:,} are present, and a multiple of 8 is needed",
            "framing",
        )
    return _Message(table, table.u8(1), at, body, body_size)


# -- the schema -----------------------------------------------------------------------------

# Packs of one topic have the same schema bytes. 64 schemas of at most 16 KiB: 1 MiB of keys.
_CACHED_SCHEMAS = 64
_CACHED_SCHEMA_BYTES = 16 * 1024
_layouts: OrderedDict[bytes, Layout] = OrderedDict()
_layouts_lock = Lock()


def layout_of(message: bytes) -> Layout:
    """The layout a framed schema message prescribes."""
    known = _layouts.get(message)
    if known is not None:
        return known
    layout = _read_layout(memoryview(message))
    if len(message) <= _CACHED_SCHEMA_BYTES:
        with _layouts_lock:
            _layouts[message] = layout
            while len(_layouts) > _CACHED_SCHEMAS:
                _layouts.popitem(last=False)
    return layout


def _read_layout(message: memoryview) -> Layout:
    table = root(message[8:])
    declared = table.table(2)
    if declared is None or table.i64(3) != 0:
        raise PackError("the schema message has a body, or no schema", "framing")
    if declared.i16(0) != 0:
        raise PackError("the stream is big-endian; packs are little-endian", "schema")
    reading = Reading([])
    fields = read_fields(declared, 1, reading)
    if not fields:
        raise PackError("the schema has no columns", "schema")
    schema = pa.schema(fields)
    buffers = sum(node.buffers for node in reading.nodes)
    known = pa.schema([schema.field(name) for name in check_columns(schema)])
    return Layout(schema, known, tuple(reading.nodes), buffers, _lists_of_lists(reading.nodes))


def _lists_of_lists(nodes: list[Node]) -> bool:
    inside: list[bool] = []
    for node in nodes:
        inside.append(node.factor == 0 or (node.parent >= 0 and inside[node.parent]))
    return any(within and node.offset_bytes for within, node in zip(inside, nodes, strict=True))


# -- record batches ---------------------------------------------------------------------------


@dataclass(slots=True)
class _Budget:
    """The rest of the limits while the batches of one pack are checked."""

    rows: int
    decoded_bytes: int
    values: int


def _check_batches(
    data: memoryview, first: _Message, layout: Layout, limits: ReadLimits, rows: int
) -> tuple[list[_Message], set[str]]:
    budget = _Budget(rows, limits.max_decoded_bytes, limits.max_values)
    messages: list[_Message] = []
    codecs: set[str] = set()
    message = _message(data, first.end)
    while message is not None:
        if len(messages) >= MAX_BATCHES:
            raise PackError(f"the stream has more than {MAX_BATCHES} record batches", "limit")
        codec = _check_batch(data, message, layout, budget)
        if codec:
            codecs.add(codec)
        messages.append(message)
        message = _message(data, message.end)
    if budget.rows:
        raise PackError(
            f"Mill-Count says {rows:,} events, the record batches hold {rows - budget.rows:,}",
            "count",
        )
    return messages, codecs


def _check_batch(
    data: memoryview, message: _Message, layout: Layout, budget: _Budget
) -> str | None:
    if message.kind != _RECORD_BATCH:
        found = "dictionaries" if message.kind == _DICTIONARY else f"message kind {message.kind}"
        raise PackError(f"the stream holds {found}; packs hold record batches only", "framing")
    # Arrow copies these lists, and their entries may all point to the same large text.
    if message.table.count(4):
        raise PackError(
            "a record batch carries custom metadata, which packs do not have", "metadata"
        )
    batch = message.table.table(2)
    if batch is None:
        raise PackError("a record batch message without its record batch", "metadata")
    if batch.count(4):
        raise PackError(
            "a record batch lists variadic buffers, which no type of a pack has", "metadata"
        )
    message.hollow = _check_lengths(batch, layout, budget)
    compression = batch.table(3)
    if compression is None:
        codec = None
    else:
        codec = _CODECS.get(compression.u8(0))
        if codec is None or compression.u8(1) != 0:
            raise PackError("the compression is neither lz4 nor zstd by buffer", "compression")
    buffers = batch.pairs(2, layout.buffers)
    body = data[message.body : message.end]
    budget.decoded_bytes -= _decoded_size(body, buffers, codec)
    if budget.decoded_bytes < 0:
        raise PackError("the columns need more memory than max_decoded_bytes allows", "limit")
    return codec


def _check_lengths(batch: FlatTable, layout: Layout, budget: _Budget) -> list[tuple[int, int]]:
    """Check row and value counts; return the indices of the offsets buffers of empty columns."""
    rows = batch.i64(0)
    nodes = batch.pairs(1, len(layout.nodes))
    if not 0 <= rows <= budget.rows:
        raise PackError(
            f"a record batch of {rows:,} rows; Mill-Count leaves {budget.rows:,}", "count"
        )
    budget.rows -= rows
    lengths = nodes[::2]
    hollow = []
    buffer = 0
    for node, length, nulls in zip(layout.nodes, lengths, nodes[1::2], strict=True):
        if not 0 <= nulls <= length:
            raise PackError(f"a column claims {nulls:,} nulls in {length:,} values", "bounds")
        if node.factor:
            wanted = rows if node.parent < 0 else lengths[node.parent] * node.factor
            if length != wanted:
                raise PackError(f"a column has {length:,} values where {wanted:,} belong", "bounds")
        if length == 0 and node.offset_bytes:
            hollow.append((buffer + 1, node.offset_bytes))
        buffer += node.buffers
    budget.values -= sum(lengths)
    if budget.values < 0:
        raise PackError("the columns hold more values than max_values allows", "limit")
    return hollow


def _decoded_size(body: memoryview, buffers: tuple[int, ...], codec: str | None) -> int:
    """Decompressed bytes of all buffers; refuses buffers that are outside the body or overlap."""
    end = total = 0
    for offset, size in zip(buffers[::2], buffers[1::2], strict=True):
        if size == 0:
            if offset % 8:
                raise PackError(f"a buffer at byte {offset:,}, not a multiple of 8", "bounds")
            continue
        if size < 0 or offset < end or offset % 8 or offset + size > len(body):
            raise PackError(
                f"a buffer of {size:,} bytes at byte {offset:,} of a body of {len(body):,}: "
                f"it is outside, overlaps the one before or is not at a multiple of 8",
                "bounds",
            )
        end = offset + size
        total += size if codec is None else _declared(body, offset, size)
    return total


def _declared(body: memoryview, offset: int, size: int) -> int:
    if size < _SIZE.size:
        raise PackError(
            f"a compressed buffer of {size} bytes has no room for its size", "compression"
        )
    (declared,) = _SIZE.unpack_from(body, offset)
    if declared == _RAW:
        return size - _SIZE.size
    if declared < 0:
        raise PackError(f"a buffer declares {declared:,} bytes once decompressed", "compression")
    return int(declared)


def _check_hollow(batch: pa.RecordBatch, hollow: list[tuple[int, int]]) -> None:
    """Refuse a first offset other than 0 in a column without values.

    Arrow's validation skips these, and its flatten() then crashes the process.
    """
    if not hollow:
        return
    buffers = [buffer for column in batch.columns for buffer in column.buffers()]
    for index, width in hollow:
        offsets = buffers[index]
        if offsets is not None and any(memoryview(offsets)[:width]):
            raise PackError("a column without values has an offset other than 0", "values")


def _load(
    payload: pa.Buffer, layout: Layout, messages: list[_Message], *, compressed: bool
) -> list[pa.RecordBatch]:
    if not compressed:
        return [
            pa.ipc.read_record_batch(
                payload.slice(message.start, message.end - message.start), layout.schema
            )
            for message in messages
        ]
    # The direct call would decompress on a thread pool, which takes 2 to 4 times as long for
    # packs of usual size. The stream reader can avoid that, but would parse the sender's
    # schema, so it gets ours. Only compressed bytes are copied here.
    parts = [layout.schema.serialize(), payload.slice(messages[0].start)]
    joined = pa.py_buffer(b"".join(parts))
    options = pa.ipc.IpcReadOptions(use_threads=False)
    with pa.ipc.open_stream(joined, options=options) as reader:
        return list(reader)
