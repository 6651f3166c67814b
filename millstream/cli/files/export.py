"""Events to files: JSON lines, CSV, Parquet. Blocking; a file is complete or absent."""

from __future__ import annotations

import csv
import gzip
import io
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Final, cast

import msgspec

from millstream.cli.options.reading import VALUE_FORMS
from millstream.cli.views.event_text import event_record, json_line, value_bytes
from millstream.errors import ConfigError
from millstream.events.escapes import escaped, header_pairs
from millstream.messaging import Event

__all__ = ["EventFile", "open_file"]

# What Parquet readers hold in memory; fewer rows make larger files, more make slow ones.
GROUP_EVENTS: Final = 50_000
GROUP_BYTES: Final = 64 * 1024 * 1024
CSV_COLUMNS: Final = ("partition", "offset", "index", "timestamp", "key", "key_base64", "id",
                      "id_base64", "headers", "headers_base64", "value", "value_base64",
                      "value_null")  # fmt: skip
# What nanoseconds in 64 bits can express.
_EARLIEST_NS: Final = -(2**63)
_LATEST_NS: Final = 2**63 - 1

# Called with an event that the format cannot hold, and the reason.
Unwritable = Callable[[Event, Exception], None]


class EventFile(ABC):
    """A file that appears under its name when it is complete; `-` is stdout."""

    def __init__(self, file: str, unwritable: Unwritable, *, force: bool) -> None:
        self.path = None if file == "-" else Path(file)
        self._unwritable = unwritable
        self._draft: Path | None = None
        if self.path is not None:
            if self.path.exists() and not force:
                raise ConfigError(f"{file} exists. Choose another name, or replace it with --force")
            self._draft = self.path.with_name(f".{self.path.name}.{os.getpid()}.part")

    def write(self, events: Sequence[Event]) -> int:
        """Add events; returns how many. Those that the format cannot hold are left out."""
        rows: list[Any] = []
        for event in events:
            try:
                rows.append(self._row(event))
            except ConfigError as error:
                self._unwritable(event, error)
        self._add(rows)
        return len(rows)

    @abstractmethod
    def _row(self, event: Event) -> Any:
        """The event in the format of the file; ConfigError if that cannot hold it."""

    @abstractmethod
    def _add(self, rows: list[Any]) -> None:
        """Write rows, now or later."""

    @abstractmethod
    def _finish(self) -> None:
        """Write what is still buffered."""

    @abstractmethod
    def _close(self) -> None:
        """Close the file; harmless if it is closed already."""

    def complete(self) -> None:
        """All events are written: give the file its name."""
        self._finish()
        if self._draft is not None and self.path is not None:
            self._close()
            self._draft.replace(self.path)
            self._draft = None

    def abandon(self) -> None:
        """Remove an incomplete file; harmless after `complete`."""
        if self._draft is not None:
            self._close()
            self._draft.unlink(missing_ok=True)

    def _open(self, file: str) -> IO[bytes]:
        if self._draft is None:
            return sys.stdout.buffer
        if file.endswith(".gz"):
            return cast(IO[bytes], gzip.open(self._draft, "wb"))
        return self._draft.open("wb")


class _JsonLines(EventFile):
    def __init__(self, file: str, value: str, unwritable: Unwritable, *, force: bool) -> None:
        super().__init__(file, unwritable, force=force)
        self._value = value
        self._bytes = self._open(file)

    def _row(self, event: Event) -> bytes:
        return json_line(event_record(event, self._value))

    def _add(self, rows: list[bytes]) -> None:
        self._bytes.write(b"".join(rows))

    def _finish(self) -> None:
        self._bytes.flush()

    def _close(self) -> None:
        self._bytes.close()


class _Csv(EventFile):
    def __init__(
        self, file: str, value: str, delimiter: str, unwritable: Unwritable, *, force: bool
    ) -> None:
        super().__init__(file, unwritable, force=force)
        self._value = value
        self._bytes = self._open(file)
        self._text = io.TextIOWrapper(self._bytes, encoding="utf-8", newline="")
        self._rows = csv.DictWriter(self._text, CSV_COLUMNS, restval="", delimiter=delimiter,
                                    extrasaction="ignore")  # fmt: skip
        self._rows.writeheader()

    def _add(self, rows: list[dict[str, Any]]) -> None:
        self._rows.writerows(rows)

    def _row(self, event: Event) -> dict[str, Any]:
        if event.key == "":
            raise ConfigError(
                "it has an empty key, which CSV cannot distinguish from no key. Export it as "
                "jsonl or parquet"
            )
        record = event_record(event, self._value)
        for name in ("headers", "headers_base64"):
            if name in record:
                record[name] = msgspec.json.encode(record[name]).decode()
        if event.value is None:
            record |= {"value": "", "value_null": "true"}  # CSV itself has no null
        elif "value" in record and not isinstance(record["value"], str):
            record["value"] = msgspec.json.encode(record["value"]).decode()
        return record

    def _finish(self) -> None:
        self._text.flush()
        if self._draft is None:
            self._text.detach()  # stdout is not ours to close

    def _close(self) -> None:
        self._text.close()


class _Parquet(EventFile):
    def __init__(self, file: str, value: str, unwritable: Unwritable, *, force: bool) -> None:
        super().__init__(file, unwritable, force=force)
        import pyarrow as pa
        import pyarrow.parquet as pq

        headers = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
        self._as_text = value == "text"
        self._schema = pa.schema(
            [
                ("partition", pa.int32()),
                ("offset", pa.int64()),
                ("index", pa.int32()),
                ("timestamp", pa.timestamp("ns", tz="UTC")),
                ("key", pa.binary()),
                ("id", pa.string()),
                ("headers", headers),
                ("value", pa.string() if self._as_text else pa.binary()),
            ]
        )
        self._writer = pq.ParquetWriter(self._draft, self._schema, compression="zstd")
        self._waiting: list[dict[str, Any]] = []
        self._size = 0

    def _add(self, rows: list[dict[str, Any]]) -> None:
        self._waiting += rows
        self._size += sum(len(row["value"] or b"") for row in rows)
        if len(self._waiting) >= GROUP_EVENTS or self._size >= GROUP_BYTES:
            self._put()

    def _row(self, event: Event) -> dict[str, Any]:
        key, value = event.key, value_bytes(event.value)
        if not _EARLIEST_NS <= event.timestamp_ns <= _LATEST_NS:
            raise ConfigError(
                f"its time, {event.timestamp:%Y-%m-%d}, is outside the years 1677 to 2262 that "
                f"Parquet's nanoseconds can hold. Export it as jsonl or csv"
            )
        if self._as_text:
            try:
                value.decode()
            except UnicodeDecodeError as error:
                raise ConfigError(f"its value is not UTF-8: {error}. Use --value auto") from error
        return {
            "partition": event.partition,
            "offset": event.offset,
            "index": event.index,
            "timestamp": event.timestamp_ns,
            "key": None if key is None else key.encode("utf-8", "surrogateescape"),
            "id": None if event.id is None else escaped(event.id),
            "headers": header_pairs(event.headers),
            "value": None if event.value is None else value,
        }

    def _put(self) -> None:
        import pyarrow as pa

        if not self._waiting:
            return
        binary = self._schema.set(7, pa.field("value", pa.binary()))
        table = pa.Table.from_pylist(self._waiting, schema=binary)
        self._writer.write_table(table.cast(self._schema))
        self._waiting.clear()
        self._size = 0

    def _finish(self) -> None:
        self._put()

    def _close(self) -> None:
        self._writer.close()


def open_file(
    file: str, form: str, value: str, unwritable: Unwritable, *, force: bool
) -> EventFile:
    """A new file of that format."""
    if value not in VALUE_FORMS:
        raise ConfigError(f"--value is one of {', '.join(VALUE_FORMS)}, not {value!r}")
    if form == "parquet":
        if value not in ("auto", "text"):
            raise ConfigError(
                f"--value {value} applies to text formats; Parquet takes auto and text"
            )
        return _Parquet(file, value, unwritable, force=force)
    if form in ("csv", "tsv"):
        return _Csv(file, value, "\t" if form == "tsv" else ",", unwritable, force=force)
    return _JsonLines(file, value, unwritable, force=force)
