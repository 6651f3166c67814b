"""confluent-kafka, that is librdkafka, behind the face of all clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any, Self

from tests.integration.gateways.kafka_contract.face import (
    Failure,
    Got,
    Place,
    Record,
    Settings,
    Where,
)

__all__ = ["Confluent"]

# Without types: those that the library has are wrong in places.
kafka: Any = import_module("confluent_kafka")
admin: Any = import_module("confluent_kafka.admin")
TopicPartition: Any = kafka.TopicPartition
SECONDS = 60.0
QUIET = {"log_level": 0}
STARTS = {"earliest": kafka.OFFSET_BEGINNING, "latest": kafka.OFFSET_END}
RESETS = {"earliest": "earliest", "latest": "latest", "none": "error"}


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except kafka.KafkaException as error:
        raise _failure(error.args[0]) from error


def _failure(error: Any) -> Failure:
    return Failure(int(error.code()), error.str())


class ConfluentMember:
    """See `Member`."""

    def __init__(self, topic: str, bootstrap: str, settings: Settings) -> None:
        self._topic = topic
        given: dict[str, Any] = {
            "bootstrap.servers": bootstrap,
            "group.id": settings.group or "unused",
            "auto.offset.reset": RESETS[settings.reset],
            "enable.auto.commit": False,
            "session.timeout.ms": settings.session_ms,
            # Partitions that a topic has now; and what a member sees soon after a change.
            "topic.metadata.refresh.interval.ms": 2_000,
            **QUIET,
            **settings.more,
        }
        if settings.static_id:
            given["group.instance.id"] = settings.static_id
        if settings.fetch_bytes:
            given["max.partition.fetch.bytes"] = settings.fetch_bytes
        if settings.wait_ms:
            given["fetch.wait.max.ms"] = settings.wait_ms
        self.consumer = kafka.Consumer(given)

    def poll(self, seconds: float) -> list[Got]:
        found = []
        with _failures():
            messages = self.consumer.consume(1, seconds)
            messages += self.consumer.consume(1000, 0.05) if messages else []
        for message in messages:
            if message.error():
                raise _failure(message.error())
            found.append(
                Got(
                    message.partition(),
                    message.offset(),
                    message.key(),
                    message.value(),
                    tuple(message.headers() or ()),
                    message.timestamp()[1],
                )
            )
        return found

    def assignment(self) -> list[int]:
        return sorted(one.partition for one in self.consumer.assignment())

    def seek(self, partition: int, offset: int) -> None:
        with _failures():
            self.consumer.seek(TopicPartition(self._topic, partition, offset))

    def position(self, partition: int) -> int:
        (found,) = self.consumer.position([TopicPartition(self._topic, partition)])
        return int(found.offset)

    def commit(self, offsets: Mapping[int, int] | None = None) -> None:
        with _failures():
            if offsets is None:
                self.consumer.commit(asynchronous=False)
                return
            places = [TopicPartition(self._topic, *one) for one in offsets.items()]
            for done in self.consumer.commit(offsets=places, asynchronous=False) or ():
                if done.error:
                    raise _failure(done.error)

    def committed(self, partition: int) -> int | None:
        with _failures():
            (found,) = self.consumer.committed([TopicPartition(self._topic, partition)], SECONDS)
        return None if found.offset == kafka.OFFSET_INVALID else int(found.offset)

    def close(self) -> None:
        self.consumer.close()


class ConfluentAdmin:
    """See `Admin`."""

    def __init__(self, bootstrap: str) -> None:
        self._admin = admin.AdminClient({"bootstrap.servers": bootstrap, **QUIET})

    def _wait(self, futures: Mapping[Any, Any]) -> Any:
        with _failures():
            (future,) = futures.values()
            return future.result(SECONDS)

    def create(self, topic: str, partitions: int = 1, copies: int = 1, **config: str) -> None:
        settings = {name.replace("_", "."): value for name, value in config.items()}
        new = admin.NewTopic(topic, partitions, copies, config=settings)
        self._wait(self._admin.create_topics([new]))

    def delete(self, topic: str) -> None:
        self._wait(self._admin.delete_topics([topic]))

    def topics(self) -> list[str]:
        return sorted(self._admin.list_topics(timeout=SECONDS).topics)

    def partitions(self, topic: str) -> int:
        # Not by `list_topics`: it makes a topic that is missing, and may see it then or not yet.
        asked = kafka.TopicCollection([topic])
        return len(self._wait(self._admin.describe_topics(asked)).partitions)

    def grow(self, topic: str, partitions: int) -> None:
        self._wait(self._admin.create_partitions([admin.NewPartitions(topic, partitions)]))

    def configs(self, topic: str) -> dict[str, str | None]:
        resource = admin.ConfigResource(admin.ResourceType.TOPIC, topic)
        found = self._wait(self._admin.describe_configs([resource]))
        return {name: entry.value for name, entry in found.items()}

    def alter(self, topic: str, config: Mapping[str, str | None]) -> None:
        entries = [
            admin.ConfigEntry(
                name,
                value,
                incremental_operation=(
                    admin.AlterConfigOpType.DELETE if value is None else admin.AlterConfigOpType.SET
                ),
            )
            for name, value in config.items()
        ]
        resource = admin.ConfigResource(
            admin.ResourceType.TOPIC, topic, incremental_configs=entries
        )
        self._wait(self._admin.incremental_alter_configs([resource]))

    def delete_records(self, topic: str, partition: int, before: int) -> int:
        place = TopicPartition(topic, partition, before)
        return int(self._wait(self._admin.delete_records([place])).low_watermark)

    def groups(self) -> list[str]:
        with _failures():
            found = self._admin.list_consumer_groups().result(SECONDS)
        return sorted(one.group_id for one in found.valid)

    def group_state(self, group: str) -> tuple[str, int]:
        found = self._wait(self._admin.describe_consumer_groups([group]))
        return found.state.name.lower(), len(found.members)

    def group_offsets(self, group: str, topic: str) -> dict[int, int]:
        asked = kafka.ConsumerGroupTopicPartitions(group)
        found = self._wait(self._admin.list_consumer_group_offsets([asked]))
        own = [one for one in found.topic_partitions if one.topic == topic]
        return {one.partition: one.offset for one in own if one.offset >= 0}

    def set_group_offsets(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        places = [TopicPartition(topic, *one) for one in offsets.items()]
        asked = kafka.ConsumerGroupTopicPartitions(group, places)
        found = self._wait(self._admin.alter_consumer_group_offsets([asked]))
        for one in found.topic_partitions:
            if one.error:
                raise _failure(one.error)

    def delete_group(self, group: str) -> None:
        self._wait(self._admin.delete_consumer_groups([group]))

    def brokers(self) -> int:
        with _failures():
            return len(self._admin.describe_cluster().result(SECONDS).nodes)


class Confluent:
    """See `Client`."""

    name = "confluent-kafka"
    codecs: Sequence[str] = ("none", "gzip", "snappy", "lz4", "zstd")

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._open = ExitStack()  # what is closed at the end, also when a behaviour failed

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
            "bootstrap.servers": self._bootstrap,
            "compression.type": codec,
            "acks": acks,
            "enable.idempotence": idempotent,
            "linger.ms": 20,
            "message.timeout.ms": 60_000,
            **QUIET,
        }
        if max_bytes:
            given["message.max.bytes"] = max_bytes
        producer = kafka.Producer(given)
        places: list[Place | None] = [None] * len(records)
        failures: list[Failure] = []

        def report(number: int) -> Callable[[Any, Any], None]:
            def noted(error: Any, message: Any) -> None:
                if error:
                    failures.append(_failure(error))
                else:
                    offset = -1 if message.offset() is None else message.offset()
                    places[number] = Place(message.partition(), offset)

            return noted

        with _failures():
            for number, record in enumerate(records):
                producer.produce(topic, on_delivery=report(number), **_fields(record))
        left = producer.flush(SECONDS)
        if failures:
            raise failures[0]
        if left:
            raise Failure(-185, f"{left} records without an answer")
        return [place for place in places if place is not None]

    def reader(
        self, topic: str, starts: Mapping[int, Where], settings: Settings | None = None
    ) -> ConfluentMember:
        member = self._member(topic, settings or Settings())
        member.consumer.assign(
            [
                TopicPartition(topic, number, at if isinstance(at, int) else STARTS[at])
                for number, at in starts.items()
            ]
        )
        return member

    def join(self, topic: str, settings: Settings) -> ConfluentMember:
        member = self._member(topic, settings)
        member.consumer.subscribe([topic])
        return member

    def _member(self, topic: str, settings: Settings) -> ConfluentMember:
        member = ConfluentMember(topic, self._bootstrap, settings)
        self._open.callback(member.close)  # closing it twice does no harm
        return member

    def ends(self, topic: str, partition: int) -> tuple[int, int]:
        member = self._member(topic, Settings())
        try:
            with _failures():
                place = TopicPartition(topic, partition)
                low, high = member.consumer.get_watermark_offsets(place, SECONDS, cached=False)
        finally:
            member.close()
        return int(low), int(high)

    def offset_at(self, topic: str, partition: int, time_ms: int) -> int | None:
        member = self._member(topic, Settings())
        try:
            with _failures():
                asked = TopicPartition(topic, partition, time_ms)
                (found,) = member.consumer.offsets_for_times([asked], SECONDS)
        finally:
            member.close()
        return None if found.offset < 0 else int(found.offset)

    def admin(self) -> ConfluentAdmin:
        return ConfluentAdmin(self._bootstrap)

    def close(self) -> None:
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _fields(record: Record) -> dict[str, Any]:
    given: dict[str, Any] = {
        "value": record.value,
        "key": record.key,
        "headers": list(record.headers),
    }
    if record.time_ms is not None:
        given["timestamp"] = record.time_ms
    if record.partition is not None:
        given["partition"] = record.partition
    return given
