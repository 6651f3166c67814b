"""The columns of an event store's types of events: every version as the one that a query reads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TypeAlias

import pyarrow as pa

from millstream.errors import SchemaError
from millstream.event_store.event_types import EventTypes, Upcasters
from millstream.event_store.format import read_tag, tag_of
from millstream.events.undecodable import DECODE_FAILURES, reason_of
from millstream.schemas import ColumnBuilder, Schema
from millstream.schemas import types as t
from millstream.schemas.column_resolution import ColumnResolution
from millstream.schemas.formats.json_columns import JsonColumns, NotFast
from millstream.schemas.registry.records import Version
from millstream.schemas.registry.stores import RegisteredEvent
from millstream.schemas.resolution import matching_field
from millstream.spark.source.event_schema import event_columns
from millstream.spark.source.plain_texts import PlainTexts
from millstream.spark.stores import StoreSnapshot, read_upcasters

__all__ = ["EventColumns", "Find", "KnownEvents", "check_versions"]

Find: TypeAlias = Callable[[str], tuple[str, ...] | None]


class EventColumns:
    """Reads one type of event as its latest version when the query was built."""

    def __init__(
        self,
        store: str,
        name: str,
        schemas: list[Schema],
        upcasters: Upcasters,
        asked: Collection[str] | None = None,
    ) -> None:
        """`asked`: the fields that are asked for, others may be null; None: all of them."""
        self.name = name
        self._asked = asked
        self._store = store
        self._schemas = schemas
        self._record = schemas[-1].record
        self._builder = ColumnBuilder(self._record)
        own = {key: function for key, function in upcasters.items() if key[0] == name}
        latest = Version(len(schemas), 0, schemas[-1].fingerprint)
        event = RegisteredEvent(name, tuple(schemas), latest)
        # Refuses a version from which neither a rule nor a function leads to the latest.
        self._types = EventTypes(store, [event], {}, own)
        self._types.check()
        self._upcast = {version for _, version in own}
        self._latest = len(schemas)
        self._reads: dict[int, Callable[[bytes, int], pa.StructArray]] = {}

    @property
    def type(self) -> pa.DataType:
        """The type of the columns that are built."""
        return self._builder.type

    def knows(self, version: int) -> bool:
        """Whether a version was registered when it was last looked up."""
        return version <= len(self._schemas)

    def learn(self, schemas: list[Schema]) -> None:
        """Take in versions that were registered since; the columns stay the same."""
        self._schemas = schemas

    def column(self, version: int, texts: bytes, count: int) -> pa.StructArray:
        """Events of one version, each with a line end; fails if one of them is not of it."""
        read = self._reads.get(version)
        if read is None:
            read = self._reads[version] = self._reader(version)
        return read(texts, count)

    def column_and_reasons(
        self, version: int, texts: bytes, count: int
    ) -> tuple[pa.Array, dict[int, str]]:
        """The same, with null for each event that cannot be decoded, and the reasons."""
        try:
            return self.column(version, texts, count), {}
        except DECODE_FAILURES:
            pass
        parts: list[pa.Array] = []
        reasons: dict[int, str] = {}
        for number, text in enumerate(texts.split(b"\n", count)[:count]):
            try:
                parts.append(self.column(version, text + b"\n", 1))
            except DECODE_FAILURES as error:
                parts.append(pa.nulls(1, self.type))
                reasons[number] = reason_of(error)
        return pa.concat_arrays(parts), reasons

    def _reader(self, version: int) -> Callable[[bytes, int], pa.StructArray]:
        if any(version <= step < self._latest for step in self._upcast):
            return self._by_functions(tag_of(self.name, version))
        written = self._schemas[version - 1]
        try:
            convert = ColumnResolution(written.record, self._record).column
        except SchemaError as error:
            if version < self._latest:  # from version to version it can be read
                return self._by_functions(tag_of(self.name, version))
            raise SchemaError(
                f"store '{self._store}': version {version} of event '{self.name}', registered "
                f"after the query was started, cannot be read as version {self._latest}: {error}. "
                f"Start the query again"
            ) from error
        read = _text_reader(written, self._needed(written.record))
        return lambda texts, count: convert(read(texts, count))

    def _needed(self, written: t.Record) -> set[str]:
        """The fields of a version that lead to a field that is asked for."""
        if self._asked is None:
            return {field.name for field in written.fields}
        asked = (field for field in self._record.fields if field.name in self._asked)
        found = (matching_field(field, written) for field in asked)
        return {field.name for field in found if field is not None}

    def _by_functions(self, tag: str) -> Callable[[bytes, int], pa.StructArray]:
        decode, build = self._types.decode, self._builder.build

        def read(texts: bytes, count: int) -> pa.StructArray:
            return build([decode(tag, text) for text in texts.split(b"\n", count)[:count]])

        return read


def _text_reader(schema: Schema, needed: Collection[str]) -> Callable[[bytes, int], pa.StructArray]:
    """Reads events of one version: quickly if all have the form in which most are written."""
    every = JsonColumns(schema).column
    try:
        plain = PlainTexts(schema.record, needed).column
    except NotFast:
        return every

    def read(texts: bytes, count: int) -> pa.StructArray:
        try:
            return plain(texts, count)
        except (NotFast, pa.ArrowException, UnicodeDecodeError):
            return every(texts, count)

    return read


def check_versions(store: StoreSnapshot, upcasters: str | None, chosen: Collection[str]) -> None:
    """Refuse chosen columns of events with a version that nothing leads on from."""
    known = KnownEvents(store, upcasters, store.events.get)
    for column, event in event_columns(store).items():
        if column in chosen:
            known.columns(event)


class KnownEvents:
    """The types of events of a store, and the tags under which they are written."""

    def __init__(
        self,
        snapshot: StoreSnapshot,
        upcasters: str | None,
        find: Find,
        asked: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        """`find`: the versions of a type of event as they are registered now, or None.

        `asked`: the fields of each event that are asked for; all of an event that is not in it.
        """
        self._asked = asked or {}
        self.snapshot = snapshot
        self._find = find
        self._upcasters = read_upcasters(upcasters)
        self._columns: dict[str, EventColumns] = {}
        self.names: list[str] = []  # of the event of each tag
        self.versions: list[int] = []
        self.tags: list[str] = []
        for name, texts in snapshot.events.items():
            # The latest first: most events have it.
            for version in range(len(texts), 0, -1):
                self._add(name, version)

    def _add(self, name: str, version: int) -> None:
        self.tags.append(tag_of(name, version))
        self.names.append(name)
        self.versions.append(version)

    def columns(self, name: str) -> EventColumns:
        """The reader of one type of event."""
        found = self._columns.get(name)
        if found is None:
            schemas = self.snapshot.schemas(name)
            made = (self.snapshot.store, name, schemas, self._upcasters, self._asked.get(name))
            found = self._columns[name] = EventColumns(*made)
        return found

    def learn(self, tag: str) -> str | None:
        """Look a tag up that was not known when the query was built; the reason if it is none."""
        if tag in self.tags:
            return None
        try:
            name, version = read_tag(tag)
        except ValueError as error:
            return reason_of(error)
        texts = self._find(name)
        if texts is None or not 1 <= version <= len(texts):
            return f"'{tag:.80}' is not an event of the store '{self.snapshot.store}'"
        self._add(name, version)
        if name in self.snapshot.events:
            self.columns(name).learn([Schema.from_json(text) for text in texts])
        return None
