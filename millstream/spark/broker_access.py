"""What Spark's processes ask the broker: one connection each, a topic's streams, its schema."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from millstream.deadline import Deadline
from millstream.errors import MillstreamError, TopicNotFound
from millstream.messaging.topics.demand import (
    ALL_SERVERS,
    ALL_SERVERS_BODY,
    OWN_SERVER,
    Server,
    ServerAnswer,
)
from millstream.messaging.topics.missing import NAMES_SECONDS, no_such_topic
from millstream.messaging.topics.stream_config import identity_of, topic_streams
from millstream.settings import ConnectionSettings
from millstream.wire.api import ErrorCode, StreamInfo
from millstream.wire.listing import NamesPage
from millstream.wire.protocol import pub
from millstream.wire.sync.connection import BlockingConnection, BlockingJetStream
from millstream.wire.sync.streams import find_streams, get_message, get_messages

if TYPE_CHECKING:
    from millstream.schemas import Schema
    from millstream.schemas.codecs import WireFormat

__all__ = [
    "PATIENCE_SECONDS",
    "SchemaSnapshot",
    "connection_to",
    "find_schema",
    "find_server",
    "find_topics",
    "jetstream_to",
    "load_schema",
    "missing_topic",
]

# How long a broker may be away before a call fails. Spark ends a query at the first error of a
# driver-side call, so these outlast a restart or a change of leader.
PATIENCE_SECONDS = 60.0
# For a server's answer about itself: it comes at once, or never.
SERVER_SECONDS = 1.0
SERVER_TRIES = 4

# -- connections ----------------------------------------------------------------------------

# Spark forks its workers: a socket opened before the fork belongs to the parent.
_open: dict[tuple[int, ConnectionSettings], BlockingConnection] = {}


def connection_to(settings: ConnectionSettings) -> BlockingConnection:
    """This process's connection; if it was lost, its next call opens it again."""
    key = (os.getpid(), settings)
    known = _open.get(key)
    if known is None:
        known = _open[key] = BlockingConnection(settings)
    return known


def jetstream_to(settings: ConnectionSettings) -> BlockingJetStream:
    """The JetStream API over this process's connection."""
    return BlockingJetStream(connection_to(settings))


# -- servers --------------------------------------------------------------------------------


def find_server(connection: BlockingConnection, name: str | None) -> Server:
    """What a node of the cluster says about itself; without a name, the only server.

    An empty value if it does not answer.
    """
    connection.open(Deadline(connection.settings.request_timeout))
    if name is None or name == connection.info.server_name:
        own = connection.info.server_id
        return _server(connection, OWN_SERVER, b"", lambda server: server.id == own)
    return _server(connection, ALL_SERVERS, ALL_SERVERS_BODY, lambda server: server.name == name)


def _server(
    connection: BlockingConnection, subject: str, body: bytes, wanted: Callable[[Server], bool]
) -> Server:
    """The first answer of a wanted server; others answer too."""
    found: list[Server] = []

    def answered(_subject: bytes, _reply: bytes, _headers: bytes, payload: bytes) -> None:
        try:
            server = msgspec.json.decode(payload, type=ServerAnswer).server
        except msgspec.DecodeError:  # nobody listens
            return
        if wanted(server):
            found.append(server)

    inbox = connection.new_inbox()
    sid = connection.subscribe(inbox, answered)
    for _ in range(SERVER_TRIES):
        connection.send(pub(subject.encode(), inbox.encode(), body))
        if connection.wait(lambda: bool(found), Deadline(SERVER_SECONDS)):
            break
    connection.unsubscribe(sid)
    return found[0] if found else Server()


# -- streams --------------------------------------------------------------------------------


def find_topics(jetstream: BlockingJetStream, topics: Iterable[str]) -> dict[str, list[StreamInfo]]:
    """The streams of topics, which must exist, in the order of partitions.

    Two round trips for all of them: this is asked every 10 ms while a query is idle.
    """
    steps = {topic: topic_streams(topic) for topic in topics}
    wanted = {topic: next(step) for topic, step in steps.items()}
    result: dict[str, list[StreamInfo]] = {}
    while wanted:
        names = [name for some in wanted.values() for name in some]
        found = iter(find_streams(jetstream, names, PATIENCE_SECONDS))
        following = {}
        for topic, some in wanted.items():
            try:
                following[topic] = steps[topic].send(list(islice(found, len(some))))
            except StopIteration as end:
                result[topic] = end.value
        wanted = following
    for topic, streams in result.items():
        if not streams:
            raise missing_topic(jetstream, topic)
        _check_complete(topic, streams)
    return result


def _check_complete(topic: str, streams: list[StreamInfo]) -> None:
    identities = [identity_of(info.config) for info in streams]
    missing = set(range(identities[0].partitions)) - {one.partition for one in identities}
    # A partition's stream can also be read alone, by its own name.
    if missing and identities[0].topic == topic:
        raise TopicNotFound(
            0,
            ErrorCode.STREAM_NOT_FOUND,
            f"topic '{topic}' is incomplete: partition {min(missing)} is missing",
            "Declare it again to complete it",
        )


def missing_topic(jetstream: BlockingJetStream, name: str) -> TopicNotFound:
    """The error for a name that is neither a topic nor a stream, with the names that are near."""
    try:
        answer = jetstream.call("STREAM.NAMES", {}, NamesPage, NAMES_SECONDS)
    except MillstreamError:  # the error is the one about the name
        return no_such_topic(name)
    return no_such_topic(name, answer.streams or ())


# -- schemas --------------------------------------------------------------------------------


@dataclass(frozen=True)
class SchemaSnapshot:
    """A topic's schema as it was when a query was built; travels to the workers."""

    topic: str
    format: WireFormat
    latest_id: str  # of the version that values are read as, and written with
    texts: Mapping[str, str]  # every version known at that time, as the registry stores it, by id

    @property
    def latest(self) -> Schema:
        """The version that values are read as, and written with."""
        from millstream.schemas import Schema

        return Schema.from_json(self.texts[self.latest_id])


def find_schema(jetstream: BlockingJetStream, topic: str) -> SchemaSnapshot | None:
    """A topic's schema with all its versions, or None if it has none."""
    # Loaded only for topics that have one: every Python process that Spark starts pays for it.
    from millstream.schemas.registry.records import (
        TABLE,
        record_key,
        record_of,
        record_query,
        schema_of,
    )

    try:
        record = record_of(
            get_message(jetstream, TABLE, record_query(record_key(topic)), PATIENCE_SECONDS)
        )
    except TopicNotFound:
        return None
    if record is None or not record.versions:
        return None
    queries = [{"seq": version.id} for version in record.versions]
    messages = get_messages(jetstream, TABLE, queries, PATIENCE_SECONDS)
    texts = {
        str(version.id): schema_of(version.id, message, version.fingerprint).to_json()
        for version, message in zip(record.versions, messages, strict=True)
    }
    return SchemaSnapshot(topic, record.format, str(record.latest.id), texts)


def load_schema(jetstream: BlockingJetStream, id_: int) -> Schema:
    """One schema of the registry; SchemaNotFound if there is none with that id."""
    from millstream.schemas.registry.records import TABLE, schema_of

    return schema_of(id_, get_message(jetstream, TABLE, {"seq": id_}, PATIENCE_SECONDS))
