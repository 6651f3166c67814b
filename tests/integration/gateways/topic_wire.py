"""The calls about topics without a socket: requests and answers as they go over the wire."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_reader, entity_writer

import millstream
from millstream.gateways.access import Access
from millstream.gateways.kafka.calls import Call, KafkaSession
from millstream.gateways.kafka.catalog import KafkaTopic, TopicCatalog
from millstream.gateways.kafka.protocol import (
    VERSIONS,
    Api,
    _build,
    read_request,
    write_response,
)
from millstream.gateways.kafka.topic_calls import TopicCalls
from millstream.gateways.rights import Rights
from millstream.mill import Mill

__all__ = [
    "CLUSTER",
    "NODE",
    "Defaults",
    "FakeLog",
    "Kafka",
    "MakeKafka",
    "as_user",
    "kafka",
    "make",
    "mill",
    "named",
    "native",
    "new_topic",
]

NODE = 7
CLUSTER = "p0mZ3mDiQhKTFgTrcQ6rTw"
# What requests say unless a test wants something else.
USUAL = {
    "include_cluster_authorized_operations": False,
    "include_topic_authorized_operations": False,
    "timeout": timedelta(seconds=30),
    "validate_only": False,
}


class FakeLog:
    """What the catalog needs of an open partition."""

    def __init__(self, topic: KafkaTopic, index: int) -> None:
        self.topic, self.index = topic, index
        self.failed = False
        self.closed = 0
        self.leader_epoch = 3
        self.recording: asyncio.Task[None] | None = None

    async def close(self) -> None:
        if self.recording is not None:
            await self.recording
        self.closed += 1


@dataclass(frozen=True)
class Defaults:
    auto_create: bool = True
    default_partitions: int = 2
    default_replicas: int | None = None
    max_frame: int = 1024 * 1024 * 16


@dataclass
class Kafka:
    """A gateway without its server: requests and answers go over the wire and back."""

    calls: TopicCalls
    catalog: TopicCatalog
    logs: list[FakeLog] = field(default_factory=list)
    access: Access = field(default_factory=lambda: Access("", Rights("", "")))

    @property
    def open_logs(self) -> int:
        return sum(not log.closed for log in self.logs)

    async def ask(self, api: Api, version: int | None = None, /, **fields: Any) -> Any:
        version = VERSIONS[api][1] if version is None else version
        request = read_request(_request(api, version, fields))
        session = KafkaSession("127.0.0.1", access=self.access)
        answer = await self.calls.handlers()[api](Call(request, session))
        assert answer is not None
        frame = bytes(write_response(api, version, 1, answer))
        schema = load_response_schema(int(api), version)
        flexible = schema.__header_schema__.__flexible__
        body, size = entity_reader(schema)(frame, 9 if flexible else 8)
        assert size + (9 if flexible else 8) == len(frame)
        return body

    async def topic(self, name: str, **choices: Any) -> Any:
        body = await self.ask(Api.METADATA, topics=[named(name)], **choices)
        return body.topics[0]

    async def names(self) -> list[str]:
        return [one.name for one in (await self.ask(Api.METADATA, topics=None)).topics]

    async def create(self, name: str, partitions: int = 1, copies: int = 1, **more: Any) -> Any:
        check = more.pop("validate_only", False)
        new = new_topic(name, partitions, copies, **more)
        body = await self.ask(Api.CREATE_TOPICS, topics=[new], validate_only=check)
        return body.topics[0]

    async def configs(self, name: str, kind: int = 2, keys: Any = None) -> Any:
        asked = {"resource_type": kind, "resource_name": name, "configuration_keys": keys}
        return (await self.ask(Api.DESCRIBE_CONFIGS, resources=[asked])).results[0]

    async def values(self, name: str) -> dict[str, str]:
        return {one.name: one.value for one in (await self.configs(name)).configs}

    async def alter(self, name: str, check: bool = False, **given: str | None) -> Any:
        """Set some; None: by default."""
        entries = [
            {
                "name": key.replace("_", "."),
                "config_operation": 1 if value is None else 0,
                "value": value,
            }
            for key, value in given.items()
        ]
        return await self.alter_with(name, entries, check)

    async def alter_with(self, name: str, entries: list[dict[str, Any]], check: bool) -> Any:
        resource = {"resource_type": 2, "resource_name": name, "configs": entries}
        body = await self.ask(
            Api.INCREMENTAL_ALTER_CONFIGS, resources=[resource], validate_only=check
        )
        return body.responses[0]

    async def delete(self, *names: str) -> list[int]:
        body = await self.ask(Api.DELETE_TOPICS, topic_names=names)
        return [one.error_code for one in body.responses]


def _request(api: Api, version: int, fields: dict[str, Any]) -> bytes:
    schema = load_request_schema(int(api), version)
    header = schema.__header_schema__
    buffer = io.BytesIO()
    fields = USUAL | fields
    given = {
        "request_api_key": int(api),
        "request_api_version": version,
        "correlation_id": 1,
        "client_id": "test",
    }
    entity_writer(header)(buffer, _build(header, given))
    entity_writer(schema)(buffer, _build(schema, fields))
    return buffer.getvalue()


def named(name: str | None, id: UUID | None = None) -> dict[str, Any]:
    return {"name": name, "topic_id": id}


def new_topic(name: str, partitions: int = 1, copies: int = 1, **more: Any) -> dict[str, Any]:
    configs = [{"name": key, "value": value} for key, value in more.pop("configs", {}).items()]
    return {
        "name": name,
        "num_partitions": partitions,
        "replication_factor": copies,
        "assignments": (),
        "configs": configs,
        **more,
    }


def as_user(*publish: str) -> Access:
    return Access("ann", Rights("ann", "main", publish))


@pytest.fixture
async def mill(millstream_url: str) -> AsyncIterator[Mill]:
    async with millstream.connect(millstream_url) as mill:
        yield mill


@pytest.fixture
async def native(millstream_url: str) -> AsyncIterator[Mill]:
    """Another client of the same broker."""
    async with millstream.connect(millstream_url) as mill:
        yield mill


MakeKafka = Callable[..., Kafka]


@pytest.fixture
async def make(mill: Mill) -> AsyncIterator[MakeKafka]:
    made: list[Kafka] = []

    def one(defaults: Defaults | None = None, **limits: Any) -> Kafka:
        logs: list[FakeLog] = []

        async def make_log(topic: KafkaTopic, index: int) -> Any:
            logs.append(FakeLog(topic, index))
            return logs[-1]

        catalog = TopicCatalog(mill, make_log, **limits)
        calls = TopicCalls(
            catalog,
            defaults or Defaults(),
            node_id=NODE,
            host="mill.example.org",
            port=9092,
            cluster_id=CLUSTER,
        )
        made.append(Kafka(calls, catalog, logs))
        return made[-1]

    yield one
    for kafka in made:
        await kafka.catalog.close()


@pytest.fixture
def kafka(make: MakeKafka) -> Kafka:
    return make(fresh_seconds=0.0, missing_seconds=0.0)  # nothing is remembered
