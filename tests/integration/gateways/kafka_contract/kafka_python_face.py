"""kafka-python behind the face of all clients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

from tests.integration.gateways.kafka_contract.face import (
    Failure,
    Got,
    Place,
    Record,
    Settings,
    Where,
)
from tests.kafka_python import (
    BrokerResponseError,
    ConfigResource,
    KafkaAdminClient,
    KafkaConsumer,
    KafkaError,
    KafkaProducer,
    NewPartitions,
    NewTopic,
    OffsetAndMetadata,
    TopicPartition,
    for_code,
)

__all__ = ["KafkaPython"]

SECONDS = 60.0


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except KafkaError as error:
        raise _failure(error) from error


def _failure(error: Any) -> Failure:
    code = error.errno if isinstance(error, BrokerResponseError) else -1
    return Failure(int(code), f"{type(error).__name__}: {error}")


class KafkaPythonMember:
    """See `Member`."""

    def __init__(self, topic: str, bootstrap: str, settings: Settings) -> None:
        self._topic = topic
        given: dict[str, Any] = {
            "bootstrap_servers": bootstrap,
            "group_id": settings.group,
            "auto_offset_reset": settings.reset,
            "enable_auto_commit": False,
            "session_timeout_ms": settings.session_ms,
            "metadata_max_age_ms": 2_000,
            "allow_auto_create_topics": False,
            **settings.more,
        }
        if settings.static_id:
            given["group_instance_id"] = settings.static_id
        if settings.fetch_bytes:
            given["max_partition_fetch_bytes"] = settings.fetch_bytes
        if settings.wait_ms:
            given["fetch_max_wait_ms"] = settings.wait_ms
        self.consumer = KafkaConsumer(**given)

    def _place(self, partition: int) -> TopicPartition:
        return TopicPartition(self._topic, partition)

    def poll(self, seconds: float) -> list[Got]:
        with _failures():
            found = self.consumer.poll(timeout_ms=int(seconds * 1000))
        return [_got(one) for batch in found.values() for one in batch]

    def assignment(self) -> list[int]:
        return sorted(one.partition for one in self.consumer.assignment())

    def seek(self, partition: int, offset: int) -> None:
        self.consumer.seek(self._place(partition), offset)

    def position(self, partition: int) -> int:
        return int(self.consumer.position(self._place(partition)))

    def commit(self, offsets: Mapping[int, int] | None = None) -> None:
        given = {
            self._place(number): OffsetAndMetadata(offset, "", -1)
            for number, offset in (offsets or {}).items()
        }
        with _failures():
            self.consumer.commit(given or None)

    def committed(self, partition: int) -> int | None:
        with _failures():
            found = self.consumer.committed(self._place(partition))
        return None if found is None else int(found)

    def close(self) -> None:
        self.consumer.close(autocommit=False)


def _got(one: Any) -> Got:
    return Got(
        one.partition,
        one.offset,
        None if one.key is None else bytes(one.key),
        None if one.value is None else bytes(one.value),
        tuple((name, None if value is None else bytes(value)) for name, value in one.headers),
        one.timestamp,
    )


class KafkaPythonAdmin:
    """See `Admin`."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap

    def _call(self, name: str, *given: Any, **options: Any) -> Any:
        with _failures():
            admin = KafkaAdminClient(bootstrap_servers=self._bootstrap)
            try:
                return getattr(admin, name)(*given, **options)
            finally:
                admin.close()

    def create(self, topic: str, partitions: int = 1, copies: int = 1, **config: str) -> None:
        settings = {name.replace("_", "."): value for name, value in config.items()}
        new = NewTopic(topic, partitions, copies, topic_configs=settings)
        self._call("create_topics", [new])

    def delete(self, topic: str) -> None:
        self._call("delete_topics", [topic])

    def topics(self) -> list[str]:
        return sorted(self._call("list_topics"))

    def partitions(self, topic: str) -> int:
        (found,) = self._call("describe_topics", [topic])
        if found["error_code"]:
            raise Failure(found["error_code"])
        return len(found["partitions"])

    def grow(self, topic: str, partitions: int) -> None:
        self._call("create_partitions", {topic: NewPartitions(partitions)})

    def configs(self, topic: str) -> dict[str, str | None]:
        resource = ConfigResource("TOPIC", topic)
        found = self._call("describe_configs", [resource], config_filter="all")
        ((_, entries),) = found["topic"].items()
        return {name: entry["value"] for name, entry in entries.items()}

    def alter(self, topic: str, config: Mapping[str, str | None]) -> None:
        # A name that the server does not list is still sent, so that the server refuses it.
        changes = {name: ("DELETE" if v is None else "SET", v) for name, v in config.items()}
        resource = ConfigResource("TOPIC", topic, changes)
        found = self._call("alter_configs", [resource], raise_on_unknown=False)
        ((_, result),) = found["topic"].items()
        if result != "OK":
            raise _named(result)

    def delete_records(self, topic: str, partition: int, before: int) -> int:
        place = TopicPartition(topic, partition)
        found = self._call("delete_records", {place: before})[place]
        return int(found["low_watermark"])

    def groups(self) -> list[str]:
        return sorted(one["group_id"] for one in self._call("list_groups"))

    def group_state(self, group: str) -> tuple[str, int]:
        found = self._call("describe_groups", [group])[group]
        return found["group_state"].lower(), len(found["members"])

    def group_offsets(self, group: str, topic: str) -> dict[int, int]:
        found = self._call("list_group_offsets", group)[group]
        own = {place: one for place, one in found.items() if place.topic == topic}
        return {place.partition: one.offset for place, one in own.items() if one.offset >= 0}

    def set_group_offsets(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        given = {
            TopicPartition(topic, number): OffsetAndMetadata(offset, "", -1)
            for number, offset in offsets.items()
        }
        for error in self._call("alter_group_offsets", group, given).values():
            if error.errno:
                raise Failure(error.errno)

    def delete_group(self, group: str) -> None:
        result = self._call("delete_groups", [group])[group]
        if result != "OK":
            raise _named(result)

    def brokers(self) -> int:
        return len(self._call("describe_cluster")["brokers"])


def _named(result: Any) -> Failure:
    """A failure that the client puts in words, which begin with the name of the class."""
    text = str(result)
    for code in range(130):
        if text.partition(":")[0].partition("(")[0].endswith(for_code(code).__name__):
            return Failure(code, text)
    return Failure(-1, text)


class KafkaPython:
    """See `Client`."""

    name = "kafka-python"
    codecs: Sequence[str] = ("none", "gzip")  # for others it needs libraries of their own

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
            "bootstrap_servers": self._bootstrap,
            "compression_type": None if codec == "none" else codec,
            "acks": acks,
            "enable_idempotence": idempotent,
            "linger_ms": 20,
            "delivery_timeout_ms": 60_000,
        }
        if max_bytes:
            given["max_request_size"] = max_bytes
        with _failures():
            producer = KafkaProducer(**given)
            try:
                sent = [
                    producer.send(
                        topic,
                        value=one.value,
                        key=one.key,
                        headers=list(one.headers),
                        partition=one.partition,
                        timestamp_ms=one.time_ms,
                    )
                    for one in records
                ]
                producer.flush(SECONDS)
                done = [future.get(SECONDS) for future in sent]
            finally:
                producer.close(SECONDS)
        return [Place(one.partition, one.offset) for one in done]

    def reader(
        self, topic: str, starts: Mapping[int, Where], settings: Settings | None = None
    ) -> KafkaPythonMember:
        member = self._member(topic, settings or Settings())
        places = {number: TopicPartition(topic, number) for number in starts}
        member.consumer.assign(list(places.values()))
        for number, at in starts.items():
            if isinstance(at, int):
                member.consumer.seek(places[number], at)
            elif at == "earliest":
                member.consumer.seek_to_beginning(places[number])
            else:
                member.consumer.seek_to_end(places[number])
        return member

    def join(self, topic: str, settings: Settings) -> KafkaPythonMember:
        member = self._member(topic, settings)
        member.consumer.subscribe([topic])
        return member

    def _member(self, topic: str, settings: Settings) -> KafkaPythonMember:
        member = KafkaPythonMember(topic, self._bootstrap, settings)
        self._open.callback(member.close)  # closing it twice does no harm
        return member

    def ends(self, topic: str, partition: int) -> tuple[int, int]:
        place = TopicPartition(topic, partition)
        member = self._member(topic, Settings())
        try:
            with _failures():
                low = member.consumer.beginning_offsets([place])[place]
                high = member.consumer.end_offsets([place])[place]
        finally:
            member.close()
        return low, high

    def offset_at(self, topic: str, partition: int, time_ms: int) -> int | None:
        place = TopicPartition(topic, partition)
        member = self._member(topic, Settings())
        try:
            with _failures():
                found = member.consumer.offsets_for_times({place: time_ms})[place]
        finally:
            member.close()
        return None if found is None else int(found.offset)

    def admin(self) -> KafkaPythonAdmin:
        return KafkaPythonAdmin(self._bootstrap)

    def close(self) -> None:
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
