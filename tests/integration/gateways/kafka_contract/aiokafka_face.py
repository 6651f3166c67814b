"""aiokafka behind the face of all clients: its loop runs in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self, TypeVar

from aiokafka import (
    AIOKafkaConsumer,
    AIOKafkaProducer,
    ConsumerRebalanceListener,
    TopicPartition,
)
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import BrokerResponseError, KafkaError
from aiokafka.structs import OffsetAndMetadata

from tests.integration.gateways.kafka_contract.face import (
    Failure,
    Got,
    Place,
    Record,
    Settings,
    Where,
)

__all__ = ["AioKafka"]

SECONDS = 90.0
T = TypeVar("T")


class _Loop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result(SECONDS)
        except KafkaError as error:
            code = error.errno if isinstance(error, BrokerResponseError) else -1
            raise Failure(int(code), f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(_end_tasks(), self._loop).result(SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SECONDS)
        self._loop.close()


async def _end_tasks() -> None:
    """End what a call left behind that took too long."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


class _Assigned(ConsumerRebalanceListener):  # type: ignore[misc]
    """Does nothing; aiokafka wants one for a subscription that is seen from outside."""

    async def on_partitions_revoked(self, revoked: Any) -> None: ...

    async def on_partitions_assigned(self, assigned: Any) -> None: ...


class AioKafkaMember:
    """See `Member`."""

    def __init__(self, topic: str, bootstrap: str, settings: Settings, loop: _Loop) -> None:
        self._topic, self._loop = topic, loop
        given: dict[str, Any] = {
            "bootstrap_servers": bootstrap,
            "group_id": settings.group,
            "auto_offset_reset": settings.reset,
            "enable_auto_commit": False,
            "session_timeout_ms": settings.session_ms,
            "metadata_max_age_ms": 2_000,
            **settings.more,
        }
        if settings.static_id:
            given["group_instance_id"] = settings.static_id
        if settings.fetch_bytes:
            given["max_partition_fetch_bytes"] = settings.fetch_bytes
        if settings.wait_ms:
            given["fetch_max_wait_ms"] = settings.wait_ms

        async def make() -> AIOKafkaConsumer:
            consumer = AIOKafkaConsumer(**given)
            try:
                await consumer.start()
            except BaseException:
                await consumer.stop()
                raise
            return consumer

        self.consumer = loop.run(make())

    def _place(self, partition: int) -> TopicPartition:
        return TopicPartition(self._topic, partition)

    def poll(self, seconds: float) -> list[Got]:
        found = self._loop.run(self.consumer.getmany(timeout_ms=int(seconds * 1000)))
        return [_got(one) for batch in found.values() for one in batch]

    def assignment(self) -> list[int]:
        return sorted(one.partition for one in self.consumer.assignment())

    def seek(self, partition: int, offset: int) -> None:
        async def seek() -> None:
            self.consumer.seek(self._place(partition), offset)

        self._loop.run(seek())

    def position(self, partition: int) -> int:
        return int(self._loop.run(self.consumer.position(self._place(partition))))

    def commit(self, offsets: Mapping[int, int] | None = None) -> None:
        given = {
            self._place(number): OffsetAndMetadata(offset, "")
            for number, offset in (offsets or {}).items()
        }
        self._loop.run(self.consumer.commit(given or None))

    def committed(self, partition: int) -> int | None:
        found = self._loop.run(self.consumer.committed(self._place(partition)))
        return None if found is None else int(found)

    def close(self) -> None:
        self._loop.run(self.consumer.stop())


def _got(one: Any) -> Got:
    return Got(one.partition, one.offset, one.key, one.value, tuple(one.headers), one.timestamp)


class AioKafkaAdmin:
    """See `Admin`."""

    def __init__(self, bootstrap: str, loop: _Loop) -> None:
        self._bootstrap, self._loop = bootstrap, loop

    def _call(self, work: Callable[[Any], Awaitable[T]]) -> T:
        async def call() -> T:
            admin = AIOKafkaAdminClient(bootstrap_servers=self._bootstrap)
            try:
                await admin.start()
                return await work(admin)
            finally:
                await admin.close()

        return self._loop.run(call())

    def create(self, topic: str, partitions: int = 1, copies: int = 1, **config: str) -> None:
        settings = {name.replace("_", "."): value for name, value in config.items()}
        new = NewTopic(topic, partitions, copies, topic_configs=settings)
        done = self._call(lambda admin: admin.create_topics([new]))
        ((_, code, *_),) = done.topic_errors
        _check(code)

    def delete(self, topic: str) -> None:
        done = self._call(lambda admin: admin.delete_topics([topic]))
        ((_, code),) = done.topic_error_codes
        _check(code)

    def topics(self) -> list[str]:
        return sorted(self._call(lambda admin: admin.list_topics()))

    def partitions(self, topic: str) -> int:
        (found,) = self._call(lambda admin: admin.describe_topics([topic]))
        _check(found["error_code"])
        return len(found["partitions"])

    def grow(self, topic: str, partitions: int) -> None:
        given = {topic: NewPartitions(partitions)}
        self._call(lambda admin: admin.create_partitions(given))

    def configs(self, topic: str) -> dict[str, str | None]:
        resource = ConfigResource(ConfigResourceType.TOPIC, topic)
        (answer,) = self._call(lambda admin: admin.describe_configs([resource]))
        ((code, _, _, _, entries),) = answer.resources
        _check(code)
        return {entry[0]: entry[1] for entry in entries}

    def alter(self, topic: str, config: Mapping[str, str | None]) -> None:
        """This client replaces all settings at once: those that are not named get defaults."""
        kept = {name: value for name, value in config.items() if value is not None}
        resource = ConfigResource(ConfigResourceType.TOPIC, topic, kept)
        (answer,) = self._call(lambda admin: admin.alter_configs([resource]))
        ((code, *_),) = answer.resources
        _check(code)

    def delete_records(self, topic: str, partition: int, before: int) -> int:
        place = TopicPartition(topic, partition)
        given = {place: RecordsToDelete(before)}
        return int(self._call(lambda admin: admin.delete_records(given))[place])

    def groups(self) -> list[str]:
        return sorted(one[0] for one in self._call(lambda admin: admin.list_consumer_groups()))

    def group_state(self, group: str) -> tuple[str, int]:
        (answer,) = self._call(lambda admin: admin.describe_consumer_groups([group]))
        ((code, _, state, _, _, members, *_),) = answer.groups
        _check(code)
        return state.lower(), len(members)

    def group_offsets(self, group: str, topic: str) -> dict[int, int]:
        found = self._call(lambda admin: admin.list_consumer_group_offsets(group))
        own = {place: one for place, one in found.items() if place.topic == topic}
        return {place.partition: one.offset for place, one in own.items() if one.offset >= 0}

    def set_group_offsets(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        raise NotImplementedError

    def delete_group(self, group: str) -> None:
        raise NotImplementedError

    def brokers(self) -> int:
        return len(self._call(lambda admin: admin.describe_cluster())["brokers"])


def _check(code: int) -> None:
    if code:
        raise Failure(code)


class AioKafka:
    """See `Client`."""

    name = "aiokafka"
    codecs: Sequence[str] = ("none", "gzip", "snappy", "lz4", "zstd")

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._open = ExitStack()  # what is closed at the end, also when a behaviour failed
        self._loop = _Loop()
        self._open.callback(self._loop.close)

    def produce(
        self,
        topic: str,
        records: Sequence[Record],
        *,
        codec: str = "none",
        acks: int = -1,
        idempotent: bool = False,
        max_bytes: int | None = None,
    ) -> list[Place]:
        given: dict[str, Any] = {
            "bootstrap_servers": self._bootstrap,
            "compression_type": None if codec == "none" else codec,
            "acks": acks,
            "enable_idempotence": idempotent,
            "linger_ms": 20,
        }
        if max_bytes:
            given["max_request_size"] = max_bytes

        async def work() -> list[Any]:
            producer = AIOKafkaProducer(**given)
            try:
                await producer.start()
                sent = [
                    await producer.send(
                        topic,
                        value=one.value,
                        key=one.key,
                        headers=list(one.headers),
                        partition=one.partition,
                        timestamp_ms=one.time_ms,
                    )
                    for one in records
                ]
                return list(await asyncio.gather(*sent))
            finally:
                await producer.stop()

        done = self._loop.run(work())
        # Without an answer aiokafka reports nothing.
        return [Place(-1, -1) if one is None else Place(one.partition, one.offset) for one in done]

    def reader(
        self, topic: str, starts: Mapping[int, Where], settings: Settings | None = None
    ) -> AioKafkaMember:
        member = self._member(topic, settings or Settings())
        places = {number: TopicPartition(topic, number) for number in starts}

        async def begin() -> None:
            member.consumer.assign(list(places.values()))
            for number, at in starts.items():
                if isinstance(at, int):
                    member.consumer.seek(places[number], at)
                elif at == "earliest":
                    await member.consumer.seek_to_beginning(places[number])
                else:
                    await member.consumer.seek_to_end(places[number])

        self._loop.run(begin())
        return member

    def join(self, topic: str, settings: Settings) -> AioKafkaMember:
        member = self._member(topic, settings)

        async def begin() -> None:
            member.consumer.subscribe([topic], listener=_Assigned())

        self._loop.run(begin())
        return member

    def _member(self, topic: str, settings: Settings) -> AioKafkaMember:
        member = AioKafkaMember(topic, self._bootstrap, settings, self._loop)
        self._open.callback(member.close)  # closing it twice does no harm
        return member

    def _ask(self, topic: str, work: Callable[[Any], Awaitable[T]]) -> T:
        member = self._member(topic, Settings())

        async def ask() -> T:
            return await work(member.consumer)

        try:
            return self._loop.run(ask())
        finally:
            member.close()

    def ends(self, topic: str, partition: int) -> tuple[int, int]:
        place = TopicPartition(topic, partition)
        low = self._ask(topic, lambda consumer: consumer.beginning_offsets([place]))
        high = self._ask(topic, lambda consumer: consumer.end_offsets([place]))
        return low[place], high[place]

    def offset_at(self, topic: str, partition: int, time_ms: int) -> int | None:
        place = TopicPartition(topic, partition)
        found = self._ask(topic, lambda consumer: consumer.offsets_for_times({place: time_ms}))
        return None if found[place] is None else int(found[place].offset)

    def admin(self) -> AioKafkaAdmin:
        return AioKafkaAdmin(self._bootstrap, self._loop)

    def close(self) -> None:
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
