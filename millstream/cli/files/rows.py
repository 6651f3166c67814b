"""Rows of a file, in groups, each with its number: JSON lines, CSV, Parquet. Blocking."""

from __future__ import annotations

import csv
import io
from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from millstream.cli.files.formats import open_input
from millstream.cli.options.times import time_text
from millstream.errors import ConfigError

__all__ = ["FileRowReader", "Row", "open_rows"]

ROWS_PER_GROUP: Final = 1000
FIELD_BYTES_MAX: Final = 64 * 1024 * 1024  # the server's hard limit for a message

# The number from 1, the row as Python values, and its own bytes when it is JSON already.
Row = tuple[int, Any, bytes | None]


class FileRowReader(ABC):
    """The rows of one file. `total` and `position` are in one unit, bytes or rows."""

    total: int | None = None  # None: unknown, as in a pipe

    def __init__(self, file: str) -> None:
        self.file = file

    @property
    @abstractmethod
    def position(self) -> int:
        """How far it has read."""

    @abstractmethod
    def rows(self) -> Iterator[Row]:
        """Every row; a row that cannot be read is a ConfigError with its number."""

    @abstractmethod
    def close(self) -> None:
        """Close the file."""

    def groups(self, first: int) -> Iterator[list[Row]]:
        """The rows from a number on, in groups of ROWS_PER_GROUP."""
        rows = (row for row in self.rows() if row[0] >= first)
        while group := list(islice(rows, ROWS_PER_GROUP)):
            yield group

    def fault(self, number: int, what: object) -> ConfigError:
        """The error that reports what is wrong with a row."""
        return ConfigError(f"{self.file}, row {number:,}: {what}")


class _StreamReader(FileRowReader):
    def __init__(self, file: str) -> None:
        super().__init__(file)
        self._bytes, self._raw = open_input(file)
        if file != "-":
            self.total = Path(file).stat().st_size

    @property
    def position(self) -> int:
        return 0 if self.total is None else self._raw.tell()

    def close(self) -> None:
        if self.file != "-":
            self._bytes.close()
            self._raw.close()


class _JsonLines(_StreamReader):
    def rows(self) -> Iterator[Row]:
        decode = msgspec.json.Decoder().decode
        for number, line in enumerate(_lines(self._bytes), 1):
            text = line.strip()
            if not text:
                continue
            try:
                yield number, decode(text), text
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise self.fault(number, f"not JSON: {error}") from error


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    while line := stream.readline(FIELD_BYTES_MAX):
        yield line


class _Csv(_StreamReader):
    def __init__(self, file: str, delimiter: str) -> None:
        super().__init__(file)
        self._delimiter = delimiter

    def rows(self) -> Iterator[Row]:
        csv.field_size_limit(FIELD_BYTES_MAX)
        text = io.TextIOWrapper(self._bytes, encoding="utf-8-sig", newline="")
        reader = csv.DictReader(text, delimiter=self._delimiter, strict=True)
        number = 0
        try:
            if reader.fieldnames is None:
                return
            if len(set(reader.fieldnames)) != len(reader.fieldnames):
                raise self.fault(
                    0, f"two columns have the same name: {', '.join(reader.fieldnames)}"
                )
            for number, row in enumerate(reader, 1):
                if None in row or None in row.values():
                    raise self.fault(number, "it has more or fewer fields than the first line")
                yield number, row, None
        except (csv.Error, UnicodeDecodeError) as error:
            raise self.fault(number + 1, error) from error
        finally:
            text.detach()


class _Parquet(FileRowReader):
    def __init__(self, file: str) -> None:
        super().__init__(file)
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            self._file = pq.ParquetFile(file)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise ConfigError(f"{file} is not a Parquet file: {error}") from error
        self.total = self._file.metadata.num_rows
        self._read = 0

    @property
    def position(self) -> int:
        return self._read

    def close(self) -> None:
        self._file.close()

    def rows(self) -> Iterator[Row]:
        for batch in self._file.iter_batches(batch_size=ROWS_PER_GROUP):
            plain, exact = self._plain(batch)
            for row in plain.to_pylist():
                self._read += 1
                for name in exact:
                    if row[name] is not None:
                        row[name] = time_text(row[name])
                yield self._read, row, None

    def _plain(self, batch: Any) -> tuple[Any, list[str]]:
        """The batch with times of nanoseconds, which Python has no type for, as numbers.

        They are listed, so that they are written as text that keeps the nanoseconds.
        """
        import pyarrow as pa

        columns, exact = {}, []
        for field, column in zip(batch.schema, batch.columns, strict=True):
            kind = field.type
            if pa.types.is_timestamp(kind) and kind.unit == "ns":
                column = column.cast(pa.int64())
                exact.append(field.name)
            columns[field.name] = column
        return pa.RecordBatch.from_pydict(columns), exact


def open_rows(file: str, form: str, delimiter: str | None) -> FileRowReader:
    """The rows of a file of that format."""
    if form in ("csv", "tsv"):
        sign = delimiter or ("\t" if form == "tsv" else ",")
        if len(sign) != 1:
            raise ConfigError(f"--delimiter is one character, not {sign!r}")
        return _Csv(file, sign)
    if delimiter is not None:
        raise ConfigError(f"--delimiter applies to CSV only, and this is {form}")
    return _Parquet(file) if form == "parquet" else _JsonLines(file)
