"""Types of events: classes to lines of JSON and back, whichever version they were written with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeAlias

from millstream.errors import ConfigError, NoUpcaster, SchemaError, UnknownEvent
from millstream.event_store.events import NamedEvent
from millstream.event_store.format import check_event_name, read_tag, tag_of
from millstream.event_store.personal import PersonalData
from millstream.event_store.privacy import SEALED_MARK, Personal, personal_fields
from millstream.schemas import types as t
from millstream.schemas.codecs import make_codec
from millstream.schemas.declaration import declare
from millstream.schemas.formats.python import is_schema_class
from millstream.schemas.registry.stores import NewEventType, RegisteredEvent
from millstream.schemas.resolution import Resolution
from millstream.schemas.schema import Schema
from millstream.schemas.values.fast_json import fast_load_into
from millstream.schemas.values.fit import field_names
from millstream.schemas.values.rows import object_maker, takes_by_position

__all__ = [
    "EventTypes",
    "LineReader",
    "Upcasters",
    "classes_by_name",
    "new_types",
    "schema_of",
    "upcast_versions",
]

# From a version of an event, as a dict, to a dict of the next version.
Upcaster: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]
Upcasters: TypeAlias = Mapping[tuple[str, int], Upcaster]
_Read: TypeAlias = Callable[[bytes], Any]

# An event may say everything by its name alone, and a schema has at least one field.
_NO_FIELDS: Final = t.Field("_", t.Nullable(t.Bool()), default=None)


def classes_by_name(events: Iterable[type] | Mapping[str, type]) -> dict[str, type]:
    """The classes of events by name: the class's own name, unless another one is given."""
    if isinstance(events, type):
        raise ConfigError(f"events: give a list of classes, found one: events=[{events.__name__}]")
    pairs = events.items() if isinstance(events, Mapping) else ((c.__name__, c) for c in events)
    found: dict[str, type] = {}
    for name, cls in pairs:
        if not isinstance(cls, type):
            raise ConfigError(f"events: {cls!r:.60} is not a class")
        if name in found or cls in found.values():
            raise ConfigError(f"events: '{name}' ({cls.__name__}) is given twice")
        found[check_event_name(name)] = cls
    return found


def upcast_versions(upcasters: Upcasters, names: Iterable[str]) -> dict[str, frozenset[int]]:
    """For each event the versions that a function leads on from; a wrong name is refused."""
    known = {name: set[int]() for name in names}
    for key in upcasters:
        if not (isinstance(key, tuple) and len(key) == 2 and isinstance(key[1], int)):
            raise ConfigError(
                f"upcasters: {key!r:.60} is not an event's name and version. Write "
                f"{{('Deposited', 1): function}}, which converts version 1 to version 2"
            )
        if key[0] not in known or key[1] < 1:
            names_text = ", ".join(sorted(known)) or "none"
            raise ConfigError(f"upcasters: no event is {key!r:.60}; the events are {names_text}")
        known[key[0]].add(key[1])
    return {name: frozenset(versions) for name, versions in known.items()}


def new_types(classes: Mapping[str, type], upcasters: Upcasters) -> dict[str, NewEventType]:
    """What to register for classes of events."""
    upcast = upcast_versions(upcasters, classes)
    return {
        name: NewEventType(schema_of(name, cls), upcast[name], _marks_of(cls))
        for name, cls in classes.items()
    }


def _marks_of(cls: type) -> dict[str, tuple[str | None, str]]:
    """The personal fields of a class, as they are registered."""
    return {name: (mark.of, mark.erased) for name, mark in personal_fields(cls).items()}


def schema_of(name: str, cls: type) -> Schema:
    """The schema of a class of events; one without fields gets one that is never written."""
    if is_schema_class(cls) and not field_names(cls):
        return Schema(t.Record(name, (_NO_FIELDS,)))
    return declare(cls, name=name)


def _nothing(event: object) -> bytes:
    """The JSON of an event without fields."""
    return b"{}"


def _encoder(schema: Schema) -> Callable[[object], bytes]:
    """From an event to its JSON."""
    is_empty = schema.record.fields == (_NO_FIELDS,)
    return _nothing if is_empty else make_codec(schema, "json").encode


def _maker(cls: type | None, record: t.Record) -> Callable[[dict[str, Any]], Any] | None:
    """From a plain value to the reader's class; None: it stays a dict."""
    if record.fields == (_NO_FIELDS,):
        return lambda plain: {} if cls is None else cls()
    return None if cls is None else object_maker(cls, record)


@dataclass(frozen=True, slots=True)
class _Written:
    """How an event is written: by its codec, under its tag."""

    name: str
    tag: str
    encode: Callable[[object], bytes]
    fit: Callable[[object], dict[str, Any]]  # to a plain value
    marks: Mapping[str, Personal]  # its personal fields


class LineReader(NamedTuple):
    """How the lines with one tag are read when they are as this package writes them.

    Any failure means that `EventTypes.decode` must decide.
    """

    name: str
    version: int  # of the schema that they were written with
    decode: _Read
    make: Callable[[Any], Any] | None  # from what was decoded to the event; None: it is the event


class EventTypes:
    """The types of events of a store: what its classes write, and every version as they read it.

    A type without a class is read as a dict of its latest version, and written as a NamedEvent.
    """

    def __init__(
        self,
        store: str,
        events: Iterable[RegisteredEvent],
        classes: Mapping[str, type],
        upcasters: Upcasters,
        personal: PersonalData | None = None,
    ) -> None:
        self.store = store
        self._personal = personal  # None: personal fields stay sealed
        marks = {name: personal_fields(cls) for name, cls in classes.items()}
        self._marks = {name: found for name, found in marks.items() if found}
        self.classes = dict(classes)
        self.upcasters = dict(upcasters)
        self.events = {event.name: event for event in events}
        self._written: dict[type, _Written] = {}
        self._named: dict[str, _Written] = {}
        self._reads: dict[str, _Read] = {}
        self._names: dict[str, tuple[str, int]] = {}
        self.openings: dict[bytes, LineReader] = {}  # by how a line begins: {"Deposited
        for event in self.events.values():
            self._add(event)

    def _add(self, event: RegisteredEvent) -> None:
        cls = self.classes.get(event.name)
        number = event.current.version
        schema = event.schemas[number - 1]
        if cls is None and event.personal:
            names = {field.name for field in schema.record.fields}
            marks = {f: Personal(*mark) for f, mark in event.personal.items() if f in names}
            self._marks[event.name] = marks
        for version in range(1, len(event.schemas) + 1):
            tag = tag_of(event.name, version)
            self._reads[tag] = self._reader(event, version, cls)
            self._names[tag] = event.name, version
            self.openings[b'{"' + tag.encode()] = self._line_reader(event, version, cls)
        about = (event.name, tag_of(event.name, number), _encoder(schema), schema.fit)
        written = _Written(*about, self._marks.get(event.name, {}))
        self._named[event.name] = written
        if cls is not None:
            self._written[cls] = written

    def check(self) -> None:
        """Raise NoUpcaster if an older version of an event cannot be read as the one used here."""
        for name, event in self.events.items():
            last = event.current.version if name in self.classes else len(event.schemas)
            for version in range(1, last):
                self._steps(event, version, last)

    def _reader(self, event: RegisteredEvent, version: int, cls: type | None) -> _Read:
        """A function from the bytes of a version to the class, or to a dict of the latest one.

        Compiled on first use: a version that cannot be read here may never be met.
        """
        compiled: _Read | None = None

        def read(body: bytes) -> Any:
            nonlocal compiled
            if compiled is None:
                compiled = self._compiled(event, version, cls)
            return compiled(body)

        return read

    def _compiled(self, event: RegisteredEvent, version: int, cls: type | None) -> _Read:
        schemas = event.schemas
        last = len(schemas) if cls is None else event.current.version
        try:
            steps = self._steps(event, version, last)
        except NoUpcaster:
            if cls is not None:
                raise
            last, steps = version, []  # for tools: as it was written
        target = schemas[last - 1]
        load = make_codec(schemas[version - 1], "json").decode
        make = _maker(cls, target.record)
        personal, marks, name = self._personal, self._marks.get(event.name, {}), event.name

        def read(body: bytes) -> Any:
            plain = load(body)
            if personal is not None and body.find(SEALED_MARK) >= 0:
                plain = personal.revealed(plain, marks, name)
            for step in steps:
                plain = step(plain)
            return plain if make is None else make(plain)

        return read

    def _line_reader(self, event: RegisteredEvent, version: int, cls: type | None) -> LineReader:
        if cls is not None and version == event.current.version:
            record = event.schemas[version - 1].record
            fast = fast_load_into(cls, record) if takes_by_position(cls, record) else None
            if fast is not None:
                return LineReader(event.name, version, *fast)
        return LineReader(event.name, version, self._reads[tag_of(event.name, version)], None)

    def _steps(self, event: RegisteredEvent, version: int, last: int) -> list[Upcaster]:
        """The conversions from a version to the last: by functions where they are given."""
        now, steps = version, list[Upcaster]()
        while now < last:
            function = self.upcasters.get((event.name, now))
            if function is not None:
                steps += [function, event.schemas[now].fit]
                now += 1
                continue
            following = [v for v in range(now + 1, last) if (event.name, v) in self.upcasters]
            until = following[0] if following else last
            steps += self._by_rules(event, now, until)
            now = until
        if now > last:  # written by a newer program
            steps += self._by_rules(event, now, last)
        return steps

    def _by_rules(self, event: RegisteredEvent, start: int, end: int) -> list[Upcaster]:
        """The conversion by schema rules: in one step if possible, else version by version."""
        schemas = event.schemas
        try:
            return [Resolution(schemas[start - 1].record, schemas[end - 1].record).value]
        except SchemaError:
            pass
        ahead = 1 if start < end else -1
        steps = list[Upcaster]()
        for version in range(start, end, ahead):
            pair = schemas[version - 1].record, schemas[version + ahead - 1].record
            try:
                steps.append(Resolution(*pair).value)
            except SchemaError as error:
                known = (self.store, event.name, version, version + ahead)
                raise NoUpcaster(*known, str(error)) from error
        return steps

    # -- for readers and writers ------------------------------------------------------------

    async def encode_all(self, events: Sequence[object], aggregate: str) -> list[tuple[str, bytes]]:
        """Tag and JSON of the events of an append, their personal fields sealed.

        UnknownEvent or Unfit when one of them cannot be stored.
        """
        found = []
        for event in events:
            written, value = self._how(event)
            if written.marks and self._personal is not None:
                plain = written.fit(value)
                value = await self._personal.sealed(plain, written.marks, written.name, aggregate)
            found.append((written.tag, written.encode(value)))
        return found

    def _how(self, event: object) -> tuple[_Written, object]:
        """How an event is written, and its value."""
        written = self._written.get(type(event))
        if written is not None:
            return written, event
        if isinstance(event, NamedEvent):
            written = self._type_named(event.name)
            return written, written.fit(event.data)
        raise UnknownEvent(self.store, type(event).__name__, self.classes)

    def _type_named(self, name: str) -> _Written:
        written = self._named.get(name)
        if written is None:
            raise UnknownEvent(self.store, name, self.events)
        return written

    def parse(self, name: str, text: bytes) -> NamedEvent:
        """An event of a registered type from its JSON; UnknownEvent or Unfit when it is none."""
        self._type_named(name)
        event = self.events[name]
        codec = make_codec(event.schemas[event.current.version - 1], "json")
        return NamedEvent(name, codec.decode(text))

    def is_event(self, value: object) -> bool:
        """Whether a value is an object of one of the classes of events."""
        return type(value) in self._written

    def learn(self, event: RegisteredEvent) -> None:
        """Take in versions of an event that were registered since."""
        known = self.events.get(event.name)
        if known is not None:  # what is written here stays the same
            event = replace(event, current=known.current)
        self.events[event.name] = event
        self._add(event)

    def knows(self, tag: str) -> bool:
        """Whether a tag can be read; if not, the registry may know more by now."""
        return tag in self._reads

    def name_of(self, tag: str) -> tuple[str, int]:
        """Name and schema version of a tag."""
        return self._names.get(tag) or read_tag(tag)

    def decode(self, tag: str, body: bytes) -> Any:
        """The event of a line; UnknownEvent when the store has no such type or version."""
        read = self._reads.get(tag)
        if read is None:
            raise UnknownEvent(self.store, tag, self.events)
        return read(body)
