"""The topics that Kafka's clients see, and the partitions of them that are open.

A topic is looked up by its name whenever what is known of it is older than a moment: a topic that a
native client made a second ago is there, and one that was deleted is not. What many ask for at once
is looked up once.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar
from uuid import UUID

from millstream.errors import (
    ApiError,
    ConfigError,
    LimitReached,
    MillstreamError,
    NotReplicated,
    TopicConflict,
    TopicNotFound,
)
from millstream.gateways.kafka.kafka_topic import (
    HIDDEN,
    KafkaTopic,
    TopicRefused,
    UnknownTopic,
    id_of,
    kafka_topic,
    taken,
)
from millstream.gateways.kafka.open_logs import MakeLog, OpenLogs
from millstream.gateways.kafka.partitioners import ANY, CRC32, MURMUR2
from millstream.gateways.kafka.protocol import ErrorCode
from millstream.gateways.kafka.topic_names import (
    BadName,
    kafka_name_of,
    recorded_name,
    topic_name_of,
)
from millstream.messaging import TopicSettings
from millstream.messaging.topics import admin
from millstream.messaging.topics.info import topic_info
from millstream.messaging.topics.lookup import find_streams, side_by_side
from millstream.messaging.topics.stream_config import identity_of, to_stream_configs
from millstream.mill import Mill
from millstream.wire import api
from millstream.wire.api import StreamInfo

if TYPE_CHECKING:
    from millstream.gateways.kafka.partition_log import PartitionLog

__all__ = ["KafkaTopic", "TopicCatalog", "UnknownTopic"]

# How long what was found is relied on, and how long that nothing was found.
FRESH_SECONDS: Final = 1.5
MISSING_SECONDS: Final = 0.1
# What is remembered; beyond it the topics that were not asked for the longest are forgotten.
TOPICS_MAX: Final = 10_000
MISSING_MAX: Final = 1_000
# Names that are looked up one by one; for more, all topics are listed.
SINGLE_MAX: Final = 32
# Names of one request that are looked up at all, beyond those in the list.
LOOKED_UP_MAX: Final = 256
# How often open partitions are compared with the topics there are.
SWEEP_SECONDS: Final = 30.0
_LOCKS: Final = 64
_RECORD_ATTEMPTS: Final = 5

_STRENGTH: Final[Mapping[str | None, int]] = {None: 0, CRC32: 1, MURMUR2: 2, ANY: 3}


@dataclass(slots=True)
class _Known:
    topic: KafkaTopic
    until: float


@dataclass(eq=False, slots=True)
class _Look:
    """A look-up that others may wait for; stale when something was changed since it began."""

    task: asyncio.Task[Any]
    stale: bool = False


T = TypeVar("T")
Edit = Callable[[TopicSettings], Mapping[str, Any]]


class TopicCatalog:
    """Finds topics, changes them, and keeps their partitions open."""

    def __init__(
        self,
        mill: Mill,
        make_log: MakeLog,
        *,
        fresh_seconds: float = FRESH_SECONDS,
        missing_seconds: float = MISSING_SECONDS,
        topics_max: int = TOPICS_MAX,
    ) -> None:
        self._mill = mill
        self._fresh_seconds = fresh_seconds
        self._missing_seconds = missing_seconds
        self._topics_max = topics_max
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._missing: OrderedDict[str, float] = OrderedDict()  # until when
        self._looking: dict[str, _Look] = {}
        self._listed: tuple[float, dict[str, KafkaTopic]] = (0.0, {})  # until when, by name
        self._listing: _Look | None = None
        self._logs = OpenLogs(make_log)
        self._partitioners: dict[str, tuple[UUID, str]] = {}  # recorded here, by topic
        self._deleting: set[str] = set()
        self._locks = [asyncio.Lock() for _ in range(_LOCKS)]
        self._tasks: set[asyncio.Task[Any]] = set()
        self._sweeping: asyncio.Task[None] | None = None
        self._closed = False

    # -- finding --------------------------------------------------------------------------

    async def find(self, name: str) -> KafkaTopic | None:
        """A topic by Kafka's name; None if there is none that clients may see."""
        while True:
            now = asyncio.get_running_loop().time()
            known = self._known.get(name)
            if known is not None and now < known.until:
                return known.topic
            if now < self._missing.get(name, 0.0) or name in self._deleting:
                return None
            look = self._looking.get(name)
            if look is None:
                try:
                    topic = topic_name_of(name)
                except BadName:
                    return None
                look = self._looking[name] = _Look(self._spawn(self._look(name, topic)))
            found: KafkaTopic | None = await asyncio.shield(look.task)
            if not look.stale:
                return found

    async def find_many(self, names: Sequence[str]) -> dict[str, KafkaTopic]:
        """Those of the names that there are; for many names all topics are listed once."""
        now = asyncio.get_running_loop().time()
        names = list(dict.fromkeys(names))
        found = {
            name: known.topic
            for name in names
            if (known := self._known.get(name)) is not None and now < known.until
        }
        rest = [name for name in names if name not in found]
        if len(rest) > SINGLE_MAX:
            listed = await self._list()
            found |= {name: listed[name] for name in rest if name in listed}
            rest = [name for name in rest if name not in listed][:LOOKED_UP_MAX]
        looked_up = await side_by_side(self.find, rest)
        return found | {
            name: topic for name, topic in zip(rest, looked_up, strict=True) if topic is not None
        }

    async def all(self) -> list[KafkaTopic]:
        """Every topic that clients may see, by name."""
        listed = await self._list()
        return [listed[name] for name in sorted(listed)]

    async def _list(self) -> dict[str, KafkaTopic]:
        while True:
            until, listed = self._listed
            if asyncio.get_running_loop().time() < until:
                return listed
            if self._listing is None:
                self._listing = _Look(self._spawn(self._look_at_all()))
            look = self._listing
            found: dict[str, KafkaTopic] = await asyncio.shield(look.task)
            if not look.stale:
                return found

    async def _look(self, name: str, topic: str) -> KafkaTopic | None:
        task = asyncio.current_task()
        try:
            found = kafka_topic(topic, await find_streams(self._mill.jetstream, topic))
            if found is not None and found.name != name:
                found = None  # another of Kafka's names is that of this topic
            look = self._looking.get(name)
            if look is not None and look.task is task:
                self._keep(name, found)
            return found
        finally:
            look = self._looking.get(name)
            if look is not None and look.task is task:
                del self._looking[name]

    async def _look_at_all(self) -> dict[str, KafkaTopic]:
        task = asyncio.current_task()
        try:
            groups: dict[str, list[StreamInfo]] = {}
            for info in await self._mill.jetstream.streams():
                groups.setdefault(identity_of(info.config).topic, []).append(info)
            seen = (kafka_topic(name, streams) for name, streams in groups.items())
            gone = self._deleting
            listed = {one.name: one for one in seen if one is not None and one.name not in gone}
            if self._listing is not None and self._listing.task is task:
                until = asyncio.get_running_loop().time() + self._fresh_seconds
                self._listed = until, listed
            return listed
        finally:
            if self._listing is not None and self._listing.task is task:
                self._listing = None

    def _keep(self, name: str, topic: KafkaTopic | None) -> None:
        now = asyncio.get_running_loop().time()
        if topic is None:
            self._known.pop(name, None)
            self._missing[name] = now + self._missing_seconds
            self._missing.move_to_end(name)
            while len(self._missing) > MISSING_MAX:
                self._missing.popitem(last=False)
        else:
            self._missing.pop(name, None)
            self._known[name] = _Known(topic, now + self._fresh_seconds)
            self._known.move_to_end(name)
            while len(self._known) > self._topics_max:
                self._known.popitem(last=False)
            self._check_recorded(topic)
        self._logs.drop(name, None if topic is None else topic.id)

    def _forget(self, name: str) -> None:
        """What is known of a topic, and what is being looked up, is not so any more."""
        self._known.pop(name, None)
        self._missing.pop(name, None)
        self._listed = (0.0, {})
        for look in (self._looking.pop(name, None), self._listing):
            if look is not None:
                look.stale = True
        self._listing = None

    # -- open partitions ------------------------------------------------------------------

    async def log(self, name: str, index: int) -> PartitionLog:
        """An open partition, opened if it is not; UnknownTopic if there is none."""
        topic = await self.find(name)
        if topic is None or not 0 <= index < topic.partitions:
            raise UnknownTopic(name)
        if self._sweeping is None and not self._closed:
            self._sweeping = asyncio.create_task(self._sweep())
        return await self._logs.get(topic, index)

    def leader_epoch(self, name: str, index: int) -> int:
        """The epoch of the leader of a partition, for clients."""
        log = self._logs.opened(name, index)
        return 0 if log is None else log.leader_epoch

    async def _sweep(self) -> None:
        """Close the partitions of topics that nobody asks for any more, because they are gone."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            for name in self._logs.names:
                with suppress(MillstreamError):
                    await self.find(name)

    async def close(self) -> None:
        """Close all partitions; none can be opened afterwards."""
        self._closed = True
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.wait([self._sweeping])
        await self._logs.close()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # who waits for it has it; nobody may be waiting any more

    # -- changing topics ------------------------------------------------------------------

    async def create(
        self, name: str, settings: TopicSettings, *, validate_only: bool = False
    ) -> KafkaTopic | None:
        """Create a topic; TopicRefused if there is one. None if it was only to be checked."""
        try:
            topic = topic_name_of(name)
            settings = settings.changed({"kafka_name": recorded_name(name)})
        except (BadName, ConfigError) as error:
            raise TopicRefused(ErrorCode.invalid_topic_exception, str(error)) from error
        if topic in HIDDEN:
            text = f"'{name}' is a table that Millstream keeps its own records in"
            raise TopicRefused(ErrorCode.invalid_topic_exception, text)
        async with self._changing(topic):
            streams = await find_streams(self._mill.jetstream, topic)
            if streams:
                raise taken(name, topic, streams)
            connection = self._mill.connection
            if (
                settings.replicas > 1
                and not connection.info.cluster
                and not self._mill.jetstream.domain
            ):
                text = f"Replication factor: {settings.replicas} larger than available brokers: 1."
                raise TopicRefused(ErrorCode.invalid_replication_factor, text)
            if validate_only:
                to_stream_configs(topic, settings)
                return None
            try:
                await self._declare(topic, settings)
            finally:
                self._forget(name)
        found = await self.find(name)
        if found is None:
            text = f"topic '{name}' was deleted as soon as it was created"
            raise TopicRefused(ErrorCode.unknown_topic_or_partition, text)
        return found

    async def _declare(self, topic: str, settings: TopicSettings) -> None:
        jetstream = self._mill.jetstream
        try:
            await admin.declare(jetstream, topic, settings)
        except TopicConflict as error:
            raise TopicRefused(ErrorCode.invalid_topic_exception, str(error)) from error
        except ConfigError as error:
            raise TopicRefused(ErrorCode.invalid_config, str(error)) from error
        except ApiError as error:
            found = await find_streams(jetstream, topic)
            if found and len(found) < settings.partitions:  # all of it or nothing
                await admin.delete(jetstream, topic, missing_ok=True)
            no_peers = error.err_code == api.ErrorCode.NO_SUITABLE_PEERS
            if isinstance(error, NotReplicated) or no_peers:
                text = (
                    f"Replication factor: {settings.replicas} is larger than the number of nodes "
                    f"that the broker has for it: {error}"
                )
                raise TopicRefused(ErrorCode.invalid_replication_factor, text) from error
            if isinstance(error, LimitReached):
                raise TopicRefused(ErrorCode.policy_violation, str(error)) from error
            raise

    async def delete(self, topic: KafkaTopic) -> None:
        """Delete a topic, all its events, and its schema; TopicRefused if it is not there."""
        name, text = topic.name, f"there is no topic '{topic.name}'"
        if name in self._deleting:
            raise TopicRefused(ErrorCode.unknown_topic_or_partition, text)
        self._deleting.add(name)  # its partitions are not opened again until it is gone
        try:
            self._forget(name)
            self._logs.drop(name)
            # Without the lock: a partition that closes may be waiting for `record_partitioner`.
            await self._logs.wait_closed(name)
            async with self._changing(topic.topic):
                await self._mill.delete_topic(topic.topic)
        except TopicNotFound as error:
            raise TopicRefused(ErrorCode.unknown_topic_or_partition, text) from error
        finally:
            self._deleting.discard(name)
            self._forget(name)

    async def alter(self, topic: KafkaTopic, edit: Edit, *, validate_only: bool = False) -> None:
        """Change the settings as `edit` says, given the present ones: all of them or none."""
        async with self._changing(topic.topic):
            self._forget(topic.name)
            fresh = await self.find(topic.name)
            if fresh is None:
                text = f"there is no topic '{topic.name}'"
                raise TopicRefused(ErrorCode.unknown_topic_or_partition, text)
            try:
                changes = edit(fresh.info.settings)
                fresh.info.settings.changed(changes)
                if changes and not validate_only:
                    await self._mill.edit_topic(topic.topic, **changes)
            except (ConfigError, TopicConflict) as error:
                raise TopicRefused(ErrorCode.invalid_config, str(error)) from error
            finally:
                self._forget(topic.name)

    async def record_partitioner(self, topic: str, partitioner: str) -> None:
        """Note how clients chose partitions, in the settings of a topic (by Millstream's name).

        What is recorded only becomes less certain: murmur2 after crc32, any after both. The broker
        has no conditional change of settings: what it has is looked at again after the change, and
        whenever the topic is looked up.
        """
        jetstream = self._mill.jetstream
        async with self._changing(topic):
            for _ in range(_RECORD_ATTEMPTS):
                streams = await find_streams(jetstream, topic)
                if not streams:
                    return
                found = [topic_info(topic, [info]).settings.partitioner for info in streams]
                wanted = max([*found, partitioner], key=lambda one: _STRENGTH.get(one, 0))
                if wanted is None or all(one == wanted for one in found):
                    break
                await admin.edit(jetstream, topic, {"partitioner": wanted})
            self._partitioners[topic] = id_of(topic, streams), partitioner
        name = kafka_name_of(topic, topic_info(topic, streams).settings.kafka_name)
        self._forget(name)

    def _check_recorded(self, topic: KafkaTopic) -> None:
        """Record the partitioner again if another change of the settings has undone it."""
        recorded = self._partitioners.get(topic.topic)
        if recorded is None:
            return
        id, partitioner = recorded
        if id != topic.id:
            del self._partitioners[topic.topic]
        elif _STRENGTH.get(topic.info.settings.partitioner, 0) < _STRENGTH[partitioner]:
            self._spawn(self.record_partitioner(topic.topic, partitioner))

    @asynccontextmanager
    async def _changing(self, topic: str) -> AsyncIterator[None]:
        """One change of a topic at a time."""
        async with self._locks[hash(topic) % _LOCKS]:
            yield
