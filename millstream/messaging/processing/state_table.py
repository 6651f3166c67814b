"""A table that a process's function reads and changes: all rows in memory, as they are stored.

Rows are kept in the table's wire format. What is read is decoded each time, so a value that the
function changes without assigning it cannot differ from what is stored, a value that does not fit
the schema fails in the event that assigns it, and the old rows are there when an event fails.

A row that has only plain fields is kept as a tuple of these from when it is assigned until it is
committed, and what is read is made of them: the same, without encoding and decoding for each event.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any, Final, TypeAlias, cast

from millstream.errors import ConfigError, Undecodable
from millstream.events.classify import NULL_HEADER, is_deletion, is_own_subject
from millstream.events.encoding import value_bytes
from millstream.events.event import SCHEMA_HEADER, PlainEvent
from millstream.events.json_value import is_json, json_bytes
from millstream.events.start import Start
from millstream.events.subject import key_of_token, key_token, not_a_key
from millstream.events.undecodable import DECODE_FAILURES, reason_of
from millstream.messaging.processing.settings import ProcessTarget
from millstream.messaging.reading.last_per_key import last_messages
from millstream.messaging.reading.replay import ReadPlan
from millstream.wire.message import OutgoingMessage, RawMessage
from millstream.wire.protocol import encode_headers

__all__ = ["Meter", "StateTable", "too_many_rows"]

# The bytes of a row, or its fields: bytes are made of them when it is committed.
Row: TypeAlias = "bytes | tuple[Any, ...]"
# Of one event: a table, a key, its row before, and whether that is the row of the last commit.
Journal: TypeAlias = "list[tuple[StateTable, str, Row | None, bool]]"

# Every table takes rows of this size, or it takes none.
SMALL_BYTES: Final = 256
# Committed rows of one table whose fields are kept, besides their bytes.
KEPT_ROWS: Final = 20_000


class Meter:
    """How much was changed since the last commit, in all tables of a process."""

    __slots__ = ("bytes", "journal", "rows")

    def __init__(self) -> None:
        self.journal: Journal = []  # of the present event
        self.rows = 0
        self.bytes = 0  # a row that changed twice counts twice

    def clear(self) -> None:
        """Everything is committed, or undone."""
        self.journal.clear()
        self.rows = self.bytes = 0


class StateTable(MutableMapping[str, Any]):
    """The rows of a table by key, like a dict; values are those of the table's schema.

    What it gives is a copy: assign a value to change it, `table[key] = value`. `del table[key]`
    deletes a row. In a table without a schema values are bytes; dicts and lists are stored as JSON.
    """

    __slots__ = (
        *("_changed", "_copies", "_decode", "_encode", "_kept", "_meter", "_output", "_rows"),
        "_schema_id",
    )

    def __init__(self, output: ProcessTarget, meter: Meter) -> None:
        values = output.target.value_type
        self._output = output
        self._meter = meter
        self._rows: dict[str, Row] = {}
        self._changed: dict[str, Row | None] = {}  # since the last commit: what was before
        self._encode = _plain_bytes if values is None else values.encode
        self._decode = None if values is None else values.decode
        self._schema_id = None if values is None else values.schema_id
        # None: its rows do not consist of plain fields, or might be too large for it.
        copies = None if values is None else values.copies
        self._copies = copies if copies is not None and output.takes(copies.size_max) else None
        self._kept: dict[str, tuple[Any, ...]] = {}  # fields of some rows that are bytes

    # -- what the function uses -----------------------------------------------------------

    def __getitem__(self, key: str) -> Any:
        found = self.get(key)
        if found is None:
            raise KeyError(key)
        return found

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, or the default."""
        row = self._rows.get(key)
        if row is None:
            return default
        copies = self._copies
        if copies is not None:
            fields = row if type(row) is tuple else self._kept.get(key)
            if fields is not None:
                return copies.make(*fields)
        if self._decode is None:
            return row
        value = self._decode(cast("bytes", row), self._schema_id)
        if copies is not None:
            self._keep(key, copies.take(value))
        return value

    def _keep(self, key: str, fields: tuple[Any, ...] | None) -> None:
        """Keep the fields of a row that is bytes, if there are any."""
        if fields is None:
            self._kept.pop(key, None)
            return
        if len(self._kept) >= KEPT_ROWS:
            self._kept.clear()
        self._kept[key] = fields

    def __setitem__(self, key: str, value: Any) -> None:
        if value is None:
            raise ConfigError(f"key {key!r}: None means deleted; use del")
        old = self._rows.get(key)
        if old is None:
            _check_key(key)
        copies, meter = self._copies, self._meter
        row: Row | None = None if copies is None else copies.take(value)
        if row is None or copies is None:
            row = self._encode(value)
            if len(row) > SMALL_BYTES:
                self._output.check_row(len(row))
            meter.bytes += len(row)
            self._kept.pop(key, None)
        else:
            meter.bytes += copies.size_max
        self._note(key, old)
        self._rows[key] = row

    def _note(self, key: str, old: Row | None) -> None:
        """A row is changed: keep what is needed to undo it."""
        first = key not in self._changed
        if first:
            self._changed[key] = old
            self._meter.rows += 1
        self._meter.journal.append((self, key, old, first))

    def __delitem__(self, key: str) -> None:
        old = self._rows.pop(key)
        self._note(key, old)

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"<StateTable {self._output.name}, {len(self._rows):,} row(s)>"

    # -- what the process uses ------------------------------------------------------------

    def changed_bytes(self) -> int:
        """Bytes of the rows changed since the last commit."""
        return sum(map(self.size_of, self._changed))

    def size_of(self, key: str) -> int:
        """Bytes of a row, its key included."""
        return len(key) + len(self._bytes(key) or b"")

    def _bytes(self, key: str) -> bytes | None:
        """A row as it is stored, from now on; None: there is none."""
        row = self._rows.get(key)
        if type(row) is tuple and self._copies is not None:
            self._keep(key, row)
            row = self._rows[key] = self._encode(self._copies.plain(row))
        return cast("bytes | None", row)

    def put_back(self, key: str, old: Row | None, first: bool) -> None:
        """Undo one change of an event that failed; `first` since the last commit."""
        self._kept.pop(key, None)
        if old is None:
            self._rows.pop(key, None)
        else:
            self._rows[key] = old
        if first:
            del self._changed[key]

    def roll_back(self) -> None:
        """Undo everything since the last commit."""
        for key, old in self._changed.items():
            self._kept.pop(key, None)
            if old is None:
                self._rows.pop(key, None)
            else:
                self._rows[key] = old
        self._changed.clear()

    def take(self) -> Iterator[tuple[int, OutgoingMessage]]:
        """The changed rows as messages, each with its partition; then they count as committed."""
        changed, self._changed = self._changed, {}
        shape = self._output.target.shape
        pairs = [] if self._schema_id is None else [(SCHEMA_HEADER, self._schema_id)]
        block, gone = encode_headers(pairs), encode_headers([*pairs, (NULL_HEADER, "1")])
        for key in changed:
            data = self._bytes(key)
            partition, subject = shape.route(key)
            headers = gone if data is None else block
            yield partition, OutgoingMessage(subject, headers, data or b"")

    async def load(self, room: int, rows_max: int) -> None:
        """Read all rows; ConfigError when there are more than there is room for."""
        target = self._output.target
        plan = ReadPlan(start=Start.LAST_PER_KEY)
        for partition in target.partitions:
            size = partition.prefix_size
            async for messages in last_messages(target.jetstream, partition, plan, None):
                for raw in messages:
                    if not is_own_subject(raw.subject, size) and not is_deletion(raw.headers):
                        key = key_of_token(raw.subject[size:])
                        if key is not None:
                            self._rows[key] = self._stored(PlainEvent(partition, raw), raw)
                if len(self._rows) > room:
                    raise too_many_rows(rows_max)

    def _stored(self, event: PlainEvent, raw: RawMessage) -> bytes:
        """A row as the table's present schema version writes it."""
        if self._decode is None or event.header(SCHEMA_HEADER) == self._schema_id:
            return raw.payload
        try:
            return self._encode(event.value)
        except DECODE_FAILURES as error:
            raise Undecodable(event.topic, *event.position, reason_of(error)) from error


def too_many_rows(rows_max: int) -> ConfigError:
    """The error for tables that do not fit the memory that a process may use."""
    return ConfigError(
        f"the tables of a process are held in memory, at most {rows_max:,} rows (rows_max), and "
        f"there are more: raise rows_max if the memory is there, or use a Spark pipeline, whose "
        f"state may be larger"
    )


def _check_key(key: object) -> None:
    if not isinstance(key, str):
        raise not_a_key(key)
    key_token(key)  # refuses one that is too long


def _plain_bytes(value: Any) -> bytes:
    """A value of a table without a schema."""
    return json_bytes(value) if is_json(value) else value_bytes(value)
