"""Clients of Kafka that are killed and paused: python -m tests.faults.kafka_worker ROLE PLAN

PLAN is JSON: bootstrap, topic, folder (for the history), name, life, and what the role needs. A
role works until SIGTERM, finishes its work and leaves; SIGKILL may come at any line.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError
from confluent_kafka import Consumer, KafkaException, Message, Producer, TopicPartition
from confluent_kafka import KafkaError as Error

from millstream.deadline import Deadline
from tests.faults.history import History, body_of, id_of
from tests.faults.kafka_checker import Seen

__all__ = ["SESSION_SECONDS", "committed_offsets", "scan"]

SESSION_SECONDS: Final = 6.0  # the shortest that Kafka's own brokers allow
PAUSE: Final = 0.1
FLUSH_SECONDS: Final = 50.0
IN_FLIGHT_MAX: Final = 300  # events of one producer
READ_AT_ONCE: Final = 50
SCAN_SECONDS: Final = 60.0
_OLDEST: Final = 0


@dataclass(frozen=True)
class Client:
    """One process: its records and its plan."""

    history: History
    plan: dict[str, Any]
    stopping: threading.Event
    chance: random.Random

    @property
    def topic(self) -> str:
        return str(self.plan["topic"])

    @property
    def sender(self) -> str:
        return f"{self.plan['name']}.{self.plan['life']}"

    def settings(self, **more: Any) -> dict[str, Any]:
        return librdkafka(self.plan["bootstrap"], **more)


def librdkafka(bootstrap: str, **more: Any) -> dict[str, Any]:
    """Settings that notice a lost connection in seconds, and are the defaults otherwise."""
    return {
        "bootstrap.servers": bootstrap,
        "reconnect.backoff.ms": 50,
        "reconnect.backoff.max.ms": 500,
        "socket.timeout.ms": 10_000,
        "log_level": 3,
        **more,
    }


class _Numbers:
    """The ids of a producer's events: of each key one after the other."""

    def __init__(self, sender: str, keys: int, chance: random.Random) -> None:
        self._sender, self._keys, self._chance = sender, keys, chance
        self._last: dict[str, int] = defaultdict(int)

    def next(self) -> tuple[str, str]:
        key = f"k{self._chance.randrange(self._keys)}"
        self._last[key] += 1
        return key, f"{self._sender}:{key}:{self._last[key]}"


# -- producers --------------------------------------------------------------------------------


def produce(client: Client) -> None:
    """An idempotent producer of librdkafka: many events under way."""
    life = 0
    while not client.stopping.is_set():
        _produce(client, f"{client.sender}x{life}" if life else client.sender)
        life += 1  # after a fatal error, which a program answers with a new producer


def _produce(client: Client, sender: str) -> None:
    note, ended = client.history.note, threading.Event()

    def failed(error: Error) -> None:
        if error.fatal():
            note("fatal", via="kafka", error=str(error))
            ended.set()

    producer = Producer(
        client.settings(
            **{"enable.idempotence": True, "linger.ms": 5, "batch.num.messages": 40},
            error_cb=failed,
        )
    )
    numbers = _Numbers(sender, client.plan["keys"], client.chance)
    while not client.stopping.is_set() and not ended.is_set():
        if len(producer) < IN_FLIGHT_MAX:
            key, name = numbers.next()
            note("invoke", id=name, via="kafka")
            producer.produce(client.topic, body_of(name), key, on_delivery=_told(client, name))
        producer.poll(client.plan["pace"] * client.chance.random() * 2)
    left = producer.flush(FLUSH_SECONDS)
    if left:
        note("unflushed", count=left)


def _told(client: Client, name: str) -> Callable[[Error | None, Message], None]:
    def told(error: Error | None, message: Message) -> None:
        note = client.history.note
        if error is not None:
            note("unknown", id=name, via="kafka", error=str(error))
        else:
            offset = message.offset()
            place = {"partition": message.partition(), "offset": -1 if offset is None else offset}
            note("ok", id=name, via="kafka", **place)

    return told


def produce_async(client: Client) -> None:
    """An idempotent producer of aiokafka."""
    asyncio.run(_produce_async(client))


async def _produce_async(client: Client) -> None:
    life = 0
    while not client.stopping.is_set():
        sender = f"{client.sender}x{life}" if life else client.sender
        life += 1
        producer = AIOKafkaProducer(
            bootstrap_servers=client.plan["bootstrap"],
            enable_idempotence=True,
            linger_ms=5,
            request_timeout_ms=120_000,  # also how long an event is sent again and again
        )
        try:
            await producer.start()
        except KafkaError as error:
            client.history.note("failed", error=repr(error))
            await producer.stop()
            await asyncio.sleep(PAUSE)
            continue
        try:
            await _send_all(client, producer, _Numbers(sender, client.plan["keys"], client.chance))
        finally:
            try:
                async with asyncio.timeout(FLUSH_SECONDS):
                    await producer.stop()
            except (TimeoutError, KafkaError) as error:
                client.history.note("unflushed", error=repr(error))


async def _send_all(client: Client, producer: AIOKafkaProducer, numbers: _Numbers) -> None:
    note = client.history.note
    under_way: set[asyncio.Task[None]] = set()
    ended = asyncio.Event()

    async def wait_for(name: str, sent: asyncio.Future[Any]) -> None:
        try:
            told = await sent
        except KafkaError as error:
            note("unknown", id=name, via="kafka", error=repr(error))
            ended.set()
        else:
            note("ok", id=name, via="kafka", partition=told.partition, offset=told.offset)

    while not client.stopping.is_set() and not ended.is_set():
        if len(under_way) < IN_FLIGHT_MAX:
            key, name = numbers.next()
            note("invoke", id=name, via="kafka")
            try:
                sent = await producer.send(client.topic, body_of(name), key.encode())
            except KafkaError as error:
                note("unknown", id=name, via="kafka", error=repr(error))
                break
            task = asyncio.create_task(wait_for(name, sent))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
        await asyncio.sleep(client.plan["pace"] * client.chance.random() * 2)
    if under_way:
        await asyncio.wait(under_way, timeout=FLUSH_SECONDS)


# -- consumers --------------------------------------------------------------------------------


def tail(client: Client) -> None:
    """Read all partitions from their beginning, without a group."""
    consumer = Consumer(_without_group(client.plan["bootstrap"]))
    try:
        consumer.assign(
            [TopicPartition(client.topic, n, _OLDEST) for n in range(client.plan["partitions"])]
        )
        while not client.stopping.is_set():
            _note_events(client, "seen", consumer.consume(READ_AT_ONCE, PAUSE))
    finally:
        consumer.close()


def _without_group(bootstrap: str, **more: Any) -> dict[str, Any]:
    return librdkafka(
        bootstrap,
        **{"group.id": "none", "enable.auto.commit": False, "auto.offset.reset": "earliest"},
        **more,
    )


def _note_events(client: Client, what: str, messages: Sequence[Message]) -> dict[int, int]:
    """Note what came; the offset after it by partition."""
    events: dict[int, list[tuple[int, str | None]]] = defaultdict(list)
    for message in messages:
        if message.error() is None:
            partition, offset, name = _seen(message)
            events[partition].append((offset, name))
        else:
            client.history.note("trouble", error=str(message.error()))
    for partition, found in events.items():
        client.history.note(what, partition=partition, events=found)
    return {partition: found[-1][0] + 1 for partition, found in events.items()}


def _seen(message: Message) -> Seen:
    return Seen(message.partition() or 0, message.offset() or 0, id_of(message.value() or b""))


class _Member:
    """A member of a group that commits what it has handled every so often."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._note = client.history.note
        self._taken: list[Message] = []  # and not noted as handled
        self._positions: dict[int, int] = {}  # handled and not committed
        self._consumer = Consumer(
            client.settings(
                **{
                    "group.id": "team",
                    "enable.auto.commit": False,
                    "auto.offset.reset": "earliest",
                    "session.timeout.ms": int(SESSION_SECONDS * 1000),
                    "heartbeat.interval.ms": 1000,
                    "partition.assignment.strategy": client.plan["strategy"],
                }
            )
        )

    def work(self) -> None:
        self._consumer.subscribe(
            [self._client.topic],
            on_assign=self._assigned,
            on_revoke=self._revoked,
            on_lost=self._lost,
        )
        try:
            while not self._client.stopping.is_set():
                # One by one: what `consume` returns may be of partitions that were taken away while
                # it collected the rest.
                message = self._consumer.poll(PAUSE)
                if message is not None:
                    self._taken.append(message)
                if message is None or len(self._taken) >= READ_AT_ONCE:
                    self._handle()
                    if self._client.chance.random() < 0.3:
                        self._commit()
            self._handle()
            self._commit()
        finally:
            self._consumer.close()

    def _handle(self) -> None:
        taken, self._taken = self._taken, []
        self._positions |= _note_events(self._client, "handled", taken)

    def _commit(self) -> None:
        offsets = sorted(self._positions.items())
        if not offsets:
            return
        self._note("committing", offsets=offsets)
        wanted = [TopicPartition(self._client.topic, *place) for place in offsets]
        try:
            told = self._consumer.commit(offsets=wanted, asynchronous=False)
        except KafkaException as error:
            self._note("unsettled", error=str(error))
            return
        stored = [(one.partition, one.offset) for one in told if one.error is None]
        for one in told:
            if one.error is not None:
                self._note("unsettled", error=str(one.error))
        for place in stored:
            if self._positions.get(place[0]) == place[1]:
                del self._positions[place[0]]
        if stored:
            self._note("settled", offsets=stored)

    # -- called while it waits for messages -----------------------------------------------

    def _assigned(self, _: Consumer, partitions: Sequence[TopicPartition]) -> None:
        self._note("assigned", partitions=[one.partition for one in partitions])

    def _revoked(self, _: Consumer, partitions: Sequence[TopicPartition]) -> None:
        self._handle()
        if self._client.chance.random() < 0.5:
            self._commit()
        self._lost(self._consumer, partitions)

    def _lost(self, _: Consumer, partitions: Sequence[TopicPartition]) -> None:
        self._handle()
        for one in partitions:
            self._positions.pop(one.partition, None)
        self._note("revoked", partitions=[one.partition for one in partitions])


def join(client: Client) -> None:
    """Be a member of a group."""
    _Member(client).work()


# -- for the supervisor -----------------------------------------------------------------------


def scan(bootstrap: str, topic: str, partitions: int) -> tuple[list[Seen], dict[int, int]]:
    """All events of a topic, and where its partitions begin."""
    consumer = Consumer(_without_group(bootstrap, **{"enable.partition.eof": True}))
    found: list[Seen] = []
    try:
        starts = {
            number: consumer.get_watermark_offsets(TopicPartition(topic, number), SCAN_SECONDS)[0]
            for number in range(partitions)
        }
        consumer.assign([TopicPartition(topic, n, start) for n, start in starts.items()])
        left = set(starts)
        deadline = Deadline(SCAN_SECONDS)
        while left:
            if deadline.passed:
                raise TimeoutError(f"partitions {left} of {topic} were not read to their end")
            for message in consumer.consume(500, PAUSE):
                error = message.error()
                if error is None:
                    found.append(_seen(message))
                elif error.code() == Error._PARTITION_EOF:
                    left.discard(message.partition() or 0)
        return found, starts
    finally:
        consumer.close()


def committed_offsets(bootstrap: str, topic: str, partitions: int) -> dict[int, int]:
    """What the group has committed."""
    consumer = Consumer(_without_group(bootstrap) | {"group.id": "team"})
    try:
        asked = [TopicPartition(topic, number) for number in range(partitions)]
        told = consumer.committed(asked, timeout=SCAN_SECONDS)
        return {one.partition: one.offset for one in told if one.offset >= 0}
    finally:
        consumer.close()


ROLES: Final[dict[str, Callable[[Client], None]]] = {
    "kafka-produce": produce,
    "kafka-produce-async": produce_async,
    "kafka-tail": tail,
    "kafka-join": join,
}


def _main(role: str, plan: dict[str, Any]) -> None:
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    history = History(Path(plan["folder"]), f"{plan['name']}.{plan['life']}")
    history.note("started", role=role)
    chance = random.Random(f"{plan['seed']}.{plan['name']}.{plan['life']}")
    ROLES[role](Client(history, plan, stopping, chance))
    history.note("ended")


if __name__ == "__main__":
    _main(sys.argv[1], json.loads(sys.argv[2]))
