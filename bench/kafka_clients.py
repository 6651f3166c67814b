"""How the bench uses confluent-kafka, with any server that speaks Kafka's protocol."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

from bench.harness import PeerAbsent

__all__ = ["KafkaClients", "kafka_client"]

QUIET = {"log_level": 0}  # its words about the server that ends at the end
PRODUCER = {"acks": "all", "linger.ms": 50, "queue.buffering.max.messages": 1_000_000, **QUIET}
# So many are fetched ahead that the client's own threads never wait for the application.
TUNED_FETCH = {
    "queued.min.messages": 1_000_000,
    "queued.max.messages.kbytes": 512 * 1024,
    "fetch.queue.backoff.ms": 5,
}


def kafka_client() -> Any:
    """The module of confluent-kafka; PeerAbsent if it is not installed."""
    try:
        return import_module("confluent_kafka")
    except ImportError as error:
        raise PeerAbsent(
            "confluent-kafka is not installed: pip install 'millstream[bench]'"
        ) from error


class KafkaClients:
    """Producers, consumers and topics of the server at `bootstrap`."""

    def __init__(self, bootstrap: str = "") -> None:
        self.bootstrap = bootstrap
        self._client = kafka_client()
        self._admin_module = import_module("confluent_kafka.admin")
        self._producers: dict[str, Any] = {}

    def admin(self) -> Any:
        """A client for topics. Keep it until its answers are here: without it there are none."""
        return self._admin_module.AdminClient({"bootstrap.servers": self.bootstrap, **QUIET})

    def make_topic(self, partitions: int = 1, settings: Mapping[str, str] | None = None) -> str:
        """A new topic with a name of its own."""
        name = f"t{uuid.uuid4().hex[:12]}"
        topic = self._admin_module.NewTopic(name, partitions, 1, config=dict(settings or {}))
        admin = self.admin()
        for done in admin.create_topics([topic]).values():
            done.result(30)
        return name

    def producer(self, **settings: Any) -> Any:
        """A connected producer with these settings, the same one for every round."""
        name = repr(settings)
        if name not in self._producers:
            made = self._client.Producer(
                {"bootstrap.servers": self.bootstrap, **PRODUCER, **settings}
            )
            made.list_topics(timeout=10)
            self._producers[name] = made
        return self._producers[name]

    def forget(self) -> None:
        """Let go of the producers."""
        self._producers.clear()

    def consumer(self, topic: str, **settings: Any) -> Any:
        """A connected consumer of the first partition, from its first event on."""
        made = self._client.Consumer(
            {
                "bootstrap.servers": self.bootstrap,
                "group.id": uuid.uuid4().hex,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                **TUNED_FETCH,
                **QUIET,
                **settings,
            }
        )
        made.list_topics(topic, timeout=10)
        return made

    def start_of(self, topic: str) -> list[Any]:
        """What `consumer.assign` takes to begin with the first event."""
        return [self._client.TopicPartition(topic, 0, self._client.OFFSET_BEGINNING)]

    def end_of(self, topic: str) -> list[Any]:
        """What `consumer.assign` takes to begin with the next event."""
        return [self._client.TopicPartition(topic, 0, self.stored(topic))]

    def stored(self, topic: str) -> int:
        """How many events and transaction marks the first partition has."""
        consumer = self.consumer(topic)
        try:
            _, end = consumer.get_watermark_offsets(self._client.TopicPartition(topic, 0))
        finally:
            consumer.close()
        return int(end)

    def send(self, producer: Any, topic: str, values: Iterable[bytes], keys: Sequence[str]) -> None:
        """Hand over all values and wait until they are stored."""
        produce = producer.produce
        for value, key in zip(values, keys, strict=True):
            try:
                produce(topic, value, key)
            except BufferError:  # its queue is full
                producer.poll(0.01)
                self._send_slowly(producer, topic, value, key)
        if producer.flush(60):
            raise RuntimeError("Kafka did not store everything within a minute")

    def _send_slowly(self, producer: Any, topic: str, value: bytes, key: str) -> None:
        while True:
            try:
                producer.produce(topic, value, key)
                return
            except BufferError:
                producer.poll(0.01)
