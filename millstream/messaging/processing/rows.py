"""Outputs that are rows of a table: the last one of a key counts."""

from __future__ import annotations

from collections.abc import Iterator

from millstream.errors import ConfigError
from millstream.events.classify import NULL_HEADER
from millstream.events.encoding import HEADER_BYTES_MAX, check_headers, value_bytes
from millstream.events.event import (
    OWN_ID_HEADER,
    SCHEMA_HEADER,
    TIME_HEADER,
    NewEvent,
    nanoseconds_of,
)
from millstream.events.json_value import as_json
from millstream.messaging.processing.settings import ProcessTarget
from millstream.wire.message import OutgoingMessage
from millstream.wire.protocol import encode_headers

__all__ = ["NewRows"]


class NewRows:
    """The rows for one table that wait for the next commit."""

    def __init__(self, output: ProcessTarget) -> None:
        self._output = output
        self._rows: dict[bytes, tuple[int, OutgoingMessage]] = {}  # by subject

    def encode(self, new: NewEvent) -> tuple[int, OutgoingMessage]:
        """The partition and message of a row; without a value it deletes its key."""
        if new.key is None:
            raise ConfigError(
                f"an output for table '{self._output.name}' needs a key: NewEvent(value, key)"
            )
        partition, subject = self._output.target.shape.route(new.key)
        values = self._output.target.value_type
        value, headers = new.value, new.headers
        pairs: list[tuple[str, str]] = []
        if new.timestamp is not None:
            pairs.append((TIME_HEADER, str(nanoseconds_of(new.timestamp))))
        if value is None:
            pairs.append((NULL_HEADER, "1"))
            data = b""
        elif values is None:
            value, headers = as_json(value, headers)
            data = value_bytes(value)
        else:
            pairs.append((SCHEMA_HEADER, values.schema_id))
            data = values.encode(value)
        if new.id is not None:
            # Not the server's header: a known id would make it refuse the whole commit.
            pairs.append((OWN_ID_HEADER, new.id))
        if headers is not None:
            check_headers(headers)
            pairs.extend(headers.items())
        block = encode_headers(pairs, foreign=True)
        if len(block) > HEADER_BYTES_MAX:
            raise ConfigError(
                f"headers of {len(block):,} bytes: the server accepts {HEADER_BYTES_MAX:,}. "
                f"Put large data into the value"
            )
        self._output.check_row(len(block) + len(data))
        return partition, OutgoingMessage(subject, block, data)

    def put(self, partition: int, row: OutgoingMessage) -> None:
        """Store a row with the next commit, instead of an earlier one of its key."""
        self._rows[row.subject] = partition, row

    def take(self) -> Iterator[tuple[int, OutgoingMessage]]:
        """The rows that wait; then none do."""
        rows, self._rows = self._rows, {}
        return iter(rows.values())

    def clear(self) -> None:
        """Forget the rows that wait."""
        self._rows.clear()
