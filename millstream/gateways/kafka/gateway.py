"""The Kafka gateway: its parts, put together."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace
from typing import Any, Final

from millstream.gateways.access import Logins
from millstream.gateways.kafka.batch_cache import BatchCache
from millstream.gateways.kafka.calls import Call, Handler, KafkaSession
from millstream.gateways.kafka.catalog import KafkaTopic, TopicCatalog
from millstream.gateways.kafka.checkpoints import Checkpoints
from millstream.gateways.kafka.cluster_id import cluster_id
from millstream.gateways.kafka.coordinator import Coordinator
from millstream.gateways.kafka.data_calls import DataCalls
from millstream.gateways.kafka.group_calls import GroupCalls
from millstream.gateways.kafka.partition_log import PartitionLog
from millstream.gateways.kafka.producer_ids import ProducerIds
from millstream.gateways.kafka.protocol import Api, api_versions, schemas_loaded
from millstream.gateways.kafka.sasl_calls import SaslCalls
from millstream.gateways.kafka.server import KafkaConnection
from millstream.gateways.kafka.settings import KafkaSettings
from millstream.gateways.kafka.topic_calls import TopicCalls
from millstream.gateways.kafka.values import skips_guard
from millstream.gateways.overload import Books
from millstream.gateways.transport import FrameHandler, Transport
from millstream.gateways.values import ValueForm, topic_values
from millstream.mill import Mill
from millstream.wire.aio.publisher import StreamPublisher

__all__ = ["KafkaGateway"]

# This gateway's number as a "broker" of Kafka; several gateways will have one each.
NODE_ID: Final = 1
LOADING_PAUSE: Final = 0.03  # seconds; each step takes some milliseconds


class KafkaGateway:
    """Serves Kafka's clients; see `protocols.Gateway`."""

    def __init__(self, mill: Mill, settings: KafkaSettings, logins: Logins, books: Books) -> None:
        self._mill = mill
        self._settings = settings
        self._logins = logins
        self._books = books
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._cache = BatchCache(settings.cache_bytes)
        self._checkpoints = Checkpoints(mill)
        self._catalog = TopicCatalog(mill, self._open_log)
        self._coordinator = Coordinator(mill)
        self._form = ValueForm(settings.values.value, settings.values_prefix)
        self._handlers: dict[Api, Handler] = {}
        self._loading: asyncio.Task[None] | None = None
        # What was checked here need not go through a guard again.
        self._direct = StreamPublisher(mill.connection, guarded=False)

    async def start(self, port: int) -> None:
        """Read the groups; connections to this port are accepted when it returns."""
        host, port = self._settings.advertised(port)
        node = (NODE_ID, host, port)
        await self._coordinator.start()
        self._coordinator.failed.add_done_callback(self._group_failed)
        topics = TopicCalls(
            self._catalog,
            self._topic_defaults(),
            node_id=NODE_ID,
            host=host,
            port=port,
            cluster_id=await cluster_id(self._mill),
        )
        self._handlers = {
            Api.API_VERSIONS: _api_versions,
            **SaslCalls(self._logins).handlers(),
            **topics.handlers(),
            **GroupCalls(self._coordinator, self._catalog, node).handlers(),
            **DataCalls(self._catalog, ProducerIds(self._mill), self._books).handlers(),
        }

        self._loading = asyncio.create_task(_load_schemas(self._books))

    async def stop(self) -> None:
        """Write checkpoints, so that the next gateway knows all offsets."""
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        await self._coordinator.stop()
        await self._catalog.close()
        self._direct.close()

    def make_handler(self, transport: Transport) -> FrameHandler:
        """What handles the requests of a new connection."""
        session = KafkaSession(transport.host)
        if not self._logins.required:
            session.access = self._logins.open_access()
        return KafkaConnection(transport, session, self._handlers)

    def status(self) -> dict[str, Any]:
        """The protocol's part of `gateway status`."""
        return {
            "cache": {
                "bytes": self._cache.size,
                "hits": self._cache.hits,
                "misses": self._cache.misses,
            },
            **self._coordinator.status(),
        }

    def _topic_defaults(self) -> KafkaSettings:
        """The settings, with as many replicas as the cluster can have."""
        if self._settings.default_replicas is not None:
            return self._settings
        nodes = len(self._mill.connection.info.connect_urls)
        return replace(self._settings, default_replicas=3 if nodes >= 3 else 1)

    def _group_failed(self, done: asyncio.Future[None]) -> None:
        if not done.cancelled() and done.exception() is not None and not self.failed.done():
            self.failed.set_exception(done.exception() or RuntimeError())

    async def _open_log(self, topic: KafkaTopic, number: int) -> PartitionLog:
        async def record(partitioner: str) -> None:
            await self._catalog.record_partitioner(topic.topic, partitioner)

        values = await topic_values(self._mill, topic.info, self._form)
        is_direct = skips_guard(self._logins.own, topic.subjects.prefixes[number])
        log = PartitionLog(
            await self._mill.topic(topic.topic, bytes),
            number,
            self._checkpoints,
            values if values.typed else None,
            self._cache,
            self._books,
            record_partitioner=record,
            publisher=self._direct if is_direct else None,
        )
        await log.open()
        return log


async def _api_versions(_: Call) -> dict[str, Any]:
    return api_versions()


async def _load_schemas(books: Books) -> None:
    """Load what requests need while there are none, so that the next clients need not wait for it.

    What a request needs earlier is loaded with it.
    """
    for _ in schemas_loaded():
        seen = -1
        while seen != books.requests:
            seen = books.requests
            await asyncio.sleep(LOADING_PAUSE)
    # What was loaded stays: looking for garbage in it would only cause pauses.
    gc.collect()
    gc.freeze()
