"""Topics with a schema for clients that send and receive bytes: what they send is checked.

    values = await topic_values(mill, info, ValueForm("topic"))
    columns, schema_id = await values.take(columns)      # a column of bytes becomes a typed one
    await values.learn(messages)                         # versions that they were written with
    values.pack_values(pack)(pack.column("value"))       # and back to bytes

Values are JSON texts, Avro or Protobuf, as the topic has them or as a setting says. With the
prefix of a schema registry every value names its version, and a reader gets it as it was written;
without it a reader gets every value as the latest version. Ids are those of Millstream's registry.
A value that cannot be read is given as it is stored: other clients may store anything in a topic
that is not guarded, and a reader must get past it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import pyarrow as pa

from millstream.errors import ConfigError, MillstreamError, SchemaError, SchemaNotFound
from millstream.events.event import PlainEvent
from millstream.events.packs.pack import Pack
from millstream.gateways.typed_values import BadValue, KnownVersions, schema_id_in
from millstream.gateways.value_bytes import plain_texts
from millstream.messaging.topics.lookup import open_topic
from millstream.schemas import WIRE_FORMATS, WireFormat
from millstream.schemas.compatibility import Mode
from millstream.schemas.registry.binding import TypedValues
from millstream.schemas.registry.records import TopicSchemas
from millstream.wire.message import RawMessage

if TYPE_CHECKING:
    from millstream.messaging import TopicInfo
    from millstream.mill import Mill

__all__ = ["BadValue", "TopicValues", "ValueForm", "topic_values"]

_log = logging.getLogger("millstream.gateways")

# How old what is known of a schema may be when values are checked or given out.
REFRESH_SECONDS: Final = 5.0
# After a value was refused, or an unknown version was found, the registry is asked at once; so
# often at most.
RETRY_SECONDS: Final = 0.5
# So many rows are converted without letting others have a turn.
ROWS_AT_ONCE: Final = 4096

FORMS: Final = ("topic", *WIRE_FORMATS)


@dataclass(frozen=True, slots=True)
class ValueForm:
    """What the values of typed topics are for clients."""

    format: Literal["topic", "json", "avro", "protobuf"] = "topic"  # topic: its own wire format
    prefix: bool | None = None  # the registry's; None: before Avro and Protobuf, not before JSON

    def __post_init__(self) -> None:
        if self.format not in FORMS:
            raise ConfigError(f"values {self.format!r}: choose one of {', '.join(FORMS)}")

    def of(self, wire_format: WireFormat) -> tuple[WireFormat, bool]:
        """The format and prefix for a topic with this wire format."""
        chosen = wire_format if self.format == "topic" else self.format
        return chosen, chosen != "json" if self.prefix is None else self.prefix


class TopicValues:
    """The values of one topic, made by `topic_values`; of one without a schema they are bytes."""

    def __init__(self, mill: Mill, info: TopicInfo, form: ValueForm) -> None:
        self.topic = info.name
        self._mill = mill
        self._info = info
        self._form = form
        self._known: KnownVersions | None = None
        self._checked = -REFRESH_SECONDS
        self._looking: asyncio.Future[bool] | None = None

    @property
    def typed(self) -> bool:
        """Whether the topic has a schema: then what is stored is not what a client sent."""
        return self._known is not None

    @property
    def schema_id(self) -> str | None:
        """The version that is written; None without a schema."""
        return None if self._known is None else self._known.schema_id

    # -- from clients ---------------------------------------------------------------------

    def stored(self, columns: pa.RecordBatch) -> tuple[pa.RecordBatch, str | None]:
        """Columns with values as bytes as they are stored, and their version for `encode`.

        BadValue, with its row, if one does not fit the versions that are known now.
        """
        known = self._known
        return (columns, None) if known is None else (known.stored(columns), known.schema_id)

    async def take(self, columns: pa.RecordBatch) -> tuple[pa.RecordBatch, str | None]:
        """The same; a version that was registered a moment ago is known."""
        await self.fresh()
        try:
            return await self._stored_in_turns(columns)
        except BadValue:
            if not await self.fresh(RETRY_SECONDS):
                raise
        return await self._stored_in_turns(columns)

    async def _stored_in_turns(self, columns: pa.RecordBatch) -> tuple[pa.RecordBatch, str | None]:
        known, count = self._known, columns.num_rows
        if known is None or count <= ROWS_AT_ONCE:
            return self.stored(columns)
        parts = []
        for start in range(0, count, ROWS_AT_ONCE):
            try:
                parts.append(known.stored(columns.slice(start, ROWS_AT_ONCE)))
            except BadValue as error:
                raise BadValue(error.text, start + error.row) from None
            await asyncio.sleep(0)
        return pa.concat_batches(parts), known.schema_id

    # -- to clients -----------------------------------------------------------------------

    def pack_values(self, pack: Pack) -> Callable[[pa.Array], list[bytes | None]] | None:
        """From the value column of a pack to bytes; None: they are bytes already.

        `learn` its message first; MillstreamError if the broker did not answer that.
        """
        if self._known is not None:
            return self._known.pack_values(pack)
        # Typed columns also without a schema: rows of a data frame. Those are JSON texts.
        return plain_texts if pack.typed else None

    def event_values(self, events: Sequence[PlainEvent]) -> list[bytes | None]:
        """The bytes of events that are a message each; `learn` their messages first."""
        if self._known is not None:
            return self._known.event_values(events)
        return [None if event.is_deletion else event.data for event in events]

    async def learn(self, messages: Iterable[RawMessage]) -> None:
        """Load the versions that messages were written with, so that nothing else has to wait."""
        await self.fresh()
        known = self._known
        if known is None:
            return
        found = list(messages)
        if not {schema_id_in(raw.headers) for raw in found} <= known.ids | {None}:
            await self.fresh(RETRY_SECONDS)
            known = self._known or known
        await known.typed.learn(found)

    # -- versions -------------------------------------------------------------------------

    async def fresh(self, seconds: float = REFRESH_SECONDS) -> bool:
        """Look for new versions if that was not done for some seconds; whether there is one.

        When the broker does not answer, the versions that are known go on to be used.
        """
        if time.monotonic() - self._checked < seconds:
            return False
        if self._looking is None:
            self._looking = asyncio.ensure_future(self._look())
            self._looking.add_done_callback(self._looked)
        return await asyncio.shield(self._looking)

    async def _look(self) -> bool:
        try:
            return await self.load()
        except MillstreamError as error:
            _log.warning("the schema of topic '%s' could not be looked up: %s", self.topic, error)
            return False
        finally:
            self._checked = time.monotonic()

    def _looked(self, done: asyncio.Future[bool]) -> None:
        self._looking = None
        if not done.cancelled():
            done.exception()

    async def load(self) -> bool:
        """Read the topic's versions; whether they are others than before."""
        found = await self._find()
        known = self._known
        if found is None or (known is not None and known.record == found[0]):
            return False
        format_, prefix = self._form.of(found[0].format)
        try:
            self._known = KnownVersions(*found, format_, prefix)
        except SchemaError as error:
            raise SchemaError(
                f"the values of topic '{self.topic}' cannot be given as {format_}: {error}"
            ) from error
        self._checked = time.monotonic()
        return True

    async def _find(self) -> tuple[TopicSchemas, TypedValues] | None:
        """The topic's versions; None: it has no schema, or nothing changed."""
        registry = self._mill.schemas
        if self._info.settings.is_copy:
            return await self._of_origin()
        record = await registry.find(self.topic)
        if record is None:
            if self._known is None and self._info.settings.wire_format is not None:
                raise SchemaNotFound(
                    f"topic '{self.topic}' was created with a schema, but the registry has none"
                )
            return None
        if self._known is not None and self._known.record == record:
            return None
        if self._info.settings.wire_format is None:
            self._info = await open_topic(self._mill.jetstream, self.topic)
            if self._info.settings.wire_format is None:
                return None  # of a deleted topic of that name
        schemas = await registry.schemas_of(record)
        return record, TypedValues(record, schemas, registry.schema)

    async def _of_origin(self) -> tuple[TopicSchemas, TypedValues] | None:
        """The schema that a copy is read with."""
        typed = (await self._mill.topic(self.topic)).value_type
        if not isinstance(typed, TypedValues):
            return None
        mode = Mode.NONE  # nothing is registered for a copy
        return TopicSchemas(self.topic, typed.format, mode, (typed.version,)), typed


async def topic_values(mill: Mill, info: TopicInfo, form: ValueForm) -> TopicValues:
    """How the values of a topic are checked and given out.

    SchemaError if the chosen format cannot hold them, SchemaNotFound while a typed topic is
    being created.
    """
    values = TopicValues(mill, info, form)
    await values.load()
    return values
