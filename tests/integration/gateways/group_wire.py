"""The calls of groups as clients send them, without a socket: bytes in, bytes out."""

from __future__ import annotations

import dataclasses
import io
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast
from uuid import UUID, uuid4

from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_reader, entity_writer

from millstream.errors import MillstreamError
from millstream.gateways.kafka.calls import Call, KafkaSession
from millstream.gateways.kafka.catalog import TopicCatalog
from millstream.gateways.kafka.coordinator import Coordinator
from millstream.gateways.kafka.group_calls import GroupCalls
from millstream.gateways.kafka.protocol import VERSIONS, Api, read_request, write_response
from millstream.gateways.rights import Rights, TopicSubjects
from millstream.gateways.user_access import Access

__all__ = ["NODE", "FakeCatalog", "Wire", "access"]

NODE = (1, "127.0.0.1", 9092)


@dataclass
class FakeTopic:
    """As much of a topic as groups need."""

    name: str
    partitions: int
    id: UUID
    subjects: TopicSubjects


class FakeCatalog:
    """Topics that exist because a test says so."""

    def __init__(self, **partitions: int) -> None:
        self.topics: dict[str, FakeTopic] = {}
        self.broken = False
        for name, count in partitions.items():
            self.make(name, count)

    def make(self, name: str, count: int) -> None:
        """A topic, or another one of the same name."""
        subjects = TopicSubjects((name,), (name,))
        self.topics[name] = FakeTopic(name, count, uuid4(), subjects)

    async def find_many(self, names: Sequence[str]) -> dict[str, FakeTopic]:
        if self.broken:
            raise MillstreamError("the broker does not answer")
        return {name: self.topics[name] for name in names if name in self.topics}


def access(user: str = "", publish: tuple[str, ...] | None = None) -> Access:
    return Access(user, Rights(user, "main", publish))


class Wire:
    """A client; each call is encoded in a version, served, and its answer decoded."""

    def __init__(
        self, coordinator: Coordinator, catalog: FakeCatalog, rights: Access | None = None
    ) -> None:
        self._handlers = GroupCalls(coordinator, cast(TopicCatalog, catalog), NODE).handlers()
        self.session = KafkaSession("10.0.0.1", access=rights or access())
        self.version: dict[Api, int] = {}  # other than the highest

    async def __call__(self, api: Api, version: int | None = None, **fields: Any) -> Any:
        if version is None:
            version = self.version.get(api, VERSIONS[api][1])
        request = read_request(encoded(api, version, fields))
        answer = await self._handlers[api](Call(request, self.session))
        assert answer is not None
        frame = bytes(write_response(api, version, 7, answer))
        kind = load_response_schema(int(api), version)
        _, size = entity_reader(kind.__header_schema__)(frame, 4)
        body, used = entity_reader(kind)(frame, 4 + size)
        assert 4 + size + used == len(frame)
        return body

    # -- what members do ------------------------------------------------------------------

    async def join(self, group: str = "g", **fields: Any) -> Any:
        """As a client joins: again, with the id that it is given."""
        given = {
            "group_id": group,
            "member_id": "",
            "session_timeout": timedelta(seconds=10),
            "rebalance_timeout": timedelta(seconds=60),
            "protocol_type": "consumer",
            "protocols": [{"name": "range", "metadata": b"\0\1\0\0\0\1\0\1t\0\0\0\0"}],
            **fields,
        }
        found = await self(Api.JOIN_GROUP, **given)
        if found.error_code.name == "member_id_required":
            found = await self(Api.JOIN_GROUP, **{**given, "member_id": found.member_id})
        return found

    async def sync(self, joined: Any, group: str = "g", **fields: Any) -> Any:
        shares = [
            {"member_id": one.member_id, "assignment": f"for {one.member_id}".encode()}
            for one in joined.members
        ]
        return await self(
            Api.SYNC_GROUP,
            **{
                "group_id": group,
                "generation_id": joined.generation_id,
                "member_id": joined.member_id,
                "assignments": shares,
                **fields,
            },
        )

    async def member(self, group: str = "g", **fields: Any) -> Any:
        """One that has joined and got its assignment."""
        joined = await self.join(group, **fields)
        assert joined.error_code.name == "none"
        synced = await self.sync(joined, group)
        assert synced.error_code.name == "none"
        return joined

    async def beat(self, joined: Any, group: str = "g") -> str:
        found = await self(
            Api.HEARTBEAT,
            group_id=group,
            generation_id=joined.generation_id,
            member_id=joined.member_id,
        )
        return str(found.error_code.name)

    async def commit(
        self, offsets: Mapping[tuple[str, int], int], joined: Any = None, group: str = "g"
    ) -> dict[tuple[str, int], str]:
        """The error of each partition, by name."""
        found = await self(
            Api.OFFSET_COMMIT,
            group_id=group,
            generation_id_or_member_epoch=-1 if joined is None else joined.generation_id,
            member_id="" if joined is None else joined.member_id,
            retention_time=timedelta(milliseconds=-1),
            topics=[
                {
                    "name": topic,
                    "partitions": [
                        {
                            "partition_index": partition,
                            "committed_offset": offset,
                            "committed_leader_epoch": 3,
                            "committed_metadata": f"note {offset}",
                        }
                    ],
                }
                for (topic, partition), offset in offsets.items()
            ],
        )
        return {
            (topic.name, part.partition_index): part.error_code.name
            for topic in found.topics
            for part in topic.partitions
        }

    async def fetch(
        self, *parts: tuple[str, int], group: str = "g", version: int | None = None
    ) -> dict[tuple[str, int], int | str]:
        """Offsets, or the error of a partition; without partitions: all."""
        version = version or VERSIONS[Api.OFFSET_FETCH][1]
        topics = [{"name": topic, "partition_indexes": (number,)} for topic, number in parts]
        asked: dict[str, Any] = {"group_id": group, "topics": topics or None}
        if version >= 8:
            asked = {"groups": [asked]}
        found = await self(Api.OFFSET_FETCH, version, **asked)
        found = found.groups[0] if version >= 8 else found
        error = getattr(found, "error_code", None)
        assert error is None or error.name == "none", error
        return {
            (topic.name, part.partition_index): part.error_code.name
            if part.error_code.name != "none"
            else part.committed_offset
            for topic in found.topics
            for part in topic.partitions
        }


def encoded(api: Api, version: int, fields: Mapping[str, Any]) -> bytes:
    """A request, with those of the fields that the version has."""
    kind = load_request_schema(int(api), version)
    header = kind.__header_schema__
    buffer = io.BytesIO()
    head: dict[str, Any] = {
        "request_api_key": int(api),
        "request_api_version": version,
        "correlation_id": 7,
        "client_id": "client",
    }
    entity_writer(header)(buffer, header(**head))
    entity_writer(kind)(buffer, _built(kind, fields))
    return buffer.getvalue()


def _built(kind: Any, fields: Mapping[str, Any]) -> Any:
    hints = typing.get_type_hints(kind)
    given = {}
    for field in dataclasses.fields(kind):
        if field.name in fields:
            value, inner = fields[field.name], _inner(hints[field.name])
            if isinstance(value, list):
                value = tuple(value if inner is None else (_built(inner, one) for one in value))
            given[field.name] = value
    return kind(**given)


def _inner(hint: Any) -> Any:
    if dataclasses.is_dataclass(hint):
        return hint
    return next((found for one in typing.get_args(hint) if (found := _inner(one))), None)
