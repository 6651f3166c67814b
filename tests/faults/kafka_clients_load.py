"""The Kafka clients that a run starts: python -m tests.faults.kafka_clients_load ROLE PLAN

PLAN is JSON: bootstrap, topic, partitions, group, folder (for the history), name, life, and what
the role needs. A role works until SIGTERM and finishes its work; SIGKILL and SIGSTOP may come at
any line. What they note is described in kafka_clients_checker.py.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from tests.faults.history import History, body_of, id_of
from tests.faults.kafka_clients_checker import Logged

__all__ = ["read_all"]

BURST: Final = 30  # values handed over at a time, at most
IN_FLIGHT: Final = 500  # values without an answer, at most
FLUSH_SECONDS: Final = 50.0  # for the last answers; who ends it waits a little longer
READ: Final = 50  # records at a time
COMMIT_EVERY: Final = 200  # records: at most moments there is something that is not committed
COMMIT_SECONDS: Final = 0.5  # after a smaller number
LOOK_SECONDS: Final = 0.2  # between two look-ups of the committed offsets
LOOK_TIMEOUT: Final = 1.0  # while the gateway is away
POLL: Final = 0.1
QUICK: Final = {
    "reconnect.backoff.ms": 20,
    "reconnect.backoff.max.ms": 200,
    "retry.backoff.ms": 20,
    "retry.backoff.max.ms": 200,
    "allow.auto.create.topics": False,
}


def _kafka() -> Any:
    """Without types: those that the library has are wrong in places."""
    return import_module("confluent_kafka")


class Load:
    """One process."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.who = f"{plan['name']}.{plan['life']}"
        self.history = History(Path(plan["folder"]), self.who)
        self.chance = random.Random(f"{plan['seed']}.{self.who}")
        self.stopping = False
        self.number = 0
        self.fatal = ""

    def stop(self, *_: object) -> None:
        self.stopping = True

    def settings(self, **more: Any) -> dict[str, Any]:
        """Of a client of librdkafka."""
        return {
            "bootstrap.servers": self.plan["bootstrap"],
            "error_cb": self._failed,
            **QUICK,
            **{name.replace("_", "."): value for name, value in more.items()},
        }

    def _failed(self, error: Any) -> None:
        if error.fatal():
            self.fatal = str(error)

    def check(self) -> None:
        """What cannot go on ends the process, and so the run has a problem."""
        if self.fatal:
            raise RuntimeError(self.fatal)

    def burst(self) -> list[tuple[int, str]]:
        """The next values, with their partitions."""
        first = self.number + 1
        self.number += self.chance.randint(1, BURST)
        self.history.note("sent", first=first, last=self.number)
        return [
            (number % self.plan["partitions"], f"{self.who}:{number}")
            for number in range(first, self.number + 1)
        ]

    def acked(self, name: str, partition: int, offset: int | None) -> None:
        place = -1 if offset is None else offset
        self.history.note("ok", kafka=True, id=name, partition=partition, offset=place)

    def refused(self, name: str, error: object) -> None:
        self.history.note("refused", id=name, error=str(error))


# -- producers ------------------------------------------------------------------------------


def produce(load: Load) -> None:
    """An idempotent producer of librdkafka, that tries for as long as it takes."""
    producer = _kafka().Producer(
        load.settings(enable_idempotence=True, linger_ms=2, message_timeout_ms=0)
    )

    def answer(name: str) -> Callable[[Any, Any], None]:
        def answered(error: Any, message: Any) -> None:
            if error is not None:
                load.refused(name, error)
            else:
                load.acked(name, message.partition(), message.offset())

        return answered

    while not load.stopping:
        load.check()
        if len(producer) < IN_FLIGHT:
            for partition, name in load.burst():
                producer.produce(
                    load.plan["topic"],
                    body_of(name),
                    f"k{partition}",
                    partition=partition,
                    on_delivery=answer(name),
                )
        producer.poll(load.plan["pace"] * load.chance.random() * 2)
    producer.flush(FLUSH_SECONDS)
    load.check()


def produce_too(load: Load) -> None:
    """An idempotent producer of aiokafka."""
    asyncio.run(_produce_too(load))


async def _produce_too(load: Load) -> None:
    producer = import_module("aiokafka").AIOKafkaProducer(
        bootstrap_servers=load.plan["bootstrap"],
        enable_idempotence=True,
        linger_ms=2,
        retry_backoff_ms=20,
    )
    await producer.start()
    open_: set[asyncio.Task[None]] = set()

    async def answer(name: str, future: Any) -> None:
        try:
            place = await future
            load.acked(name, place.partition, place.offset)
        except Exception as error:
            load.refused(name, repr(error))

    while not load.stopping:
        for partition, name in load.burst() if len(open_) < IN_FLIGHT else ():
            future = await producer.send(
                load.plan["topic"], body_of(name), b"k%d" % partition, partition=partition
            )
            task = asyncio.create_task(answer(name, future))
            open_.add(task)
            task.add_done_callback(open_.discard)
        await asyncio.sleep(load.plan["pace"] * load.chance.random() * 2)
    if open_:
        await asyncio.wait(open_, timeout=FLUSH_SECONDS)
    await producer.stop()


# -- readers --------------------------------------------------------------------------------


def _note_seen(load: Load, messages: Iterable[Any]) -> dict[int, int]:
    """Note what was read; the offsets to commit for it."""
    events: dict[int, list[tuple[int, str | None]]] = defaultdict(list)
    for message in messages:
        if message.error() is not None:
            load.history.note("failed", error=str(message.error()))
        else:
            events[message.partition()].append((message.offset(), id_of(message.value())))
    for partition, some in events.items():
        load.history.note("seen", partition=partition, events=some)
    return {partition: some[-1][0] + 1 for partition, some in events.items()}


def consume(load: Load) -> None:
    """A member of the group, that commits what it has processed."""
    consumer = _kafka().Consumer(
        load.settings(
            group_id=load.plan["group"],
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            session_timeout_ms=int(load.plan["lease"] * 1000),
            heartbeat_interval_ms=500,
        )
    )
    pending: dict[int, int] = {}

    def assigned(_: Any, parts: Any) -> None:
        pending.clear()
        load.history.note("assigned", partitions=[part.partition for part in parts])

    def revoked(_: Any, parts: Any) -> None:
        pending.clear()
        load.history.note("revoked", partitions=[part.partition for part in parts])

    consumer.subscribe([load.plan["topic"]], assigned, revoked, revoked)
    count, since = 0, time.monotonic()
    while not load.stopping:
        load.check()
        messages = consumer.consume(READ, POLL)
        pending.update(_note_seen(load, messages))
        count += len(messages)
        if pending and (count >= COMMIT_EVERY or time.monotonic() > since + COMMIT_SECONDS):
            _commit(load, consumer, pending)
            count, since = 0, time.monotonic()
    if pending:
        _commit(load, consumer, pending)
    consumer.close()


def _commit(load: Load, consumer: Any, pending: dict[int, int]) -> None:
    kafka = _kafka()
    start, offsets = time.monotonic_ns(), dict(pending)
    pending.clear()
    places = [kafka.TopicPartition(load.plan["topic"], *place) for place in offsets.items()]
    try:
        done = consumer.commit(offsets=places, asynchronous=False)
    except kafka.KafkaException as error:
        load.history.note("uncommitted", error=str(error))
        return
    good = [(one.partition, one.offset) for one in done if one.error is None]
    load.history.note("settled", start=start, offsets=good)


def follow(load: Load) -> None:
    """A reader of all partitions from the beginning, that also looks up the group's offsets."""
    kafka = _kafka()
    consumer = kafka.Consumer(
        load.settings(
            group_id=load.plan["group"], enable_auto_commit=False, auto_offset_reset="error"
        )
    )
    parts = [kafka.TopicPartition(load.plan["topic"], p, 0) for p in range(load.plan["partitions"])]
    consumer.assign(parts)
    looked = time.monotonic()
    while not load.stopping:
        load.check()
        _note_seen(load, consumer.consume(200, POLL))
        if time.monotonic() > looked + LOOK_SECONDS:
            start = time.monotonic_ns()
            try:
                found = consumer.committed(parts, timeout=LOOK_TIMEOUT)
            except kafka.KafkaException:  # the gateway is away
                continue
            finally:
                looked = time.monotonic()
            offsets = [(one.partition, one.offset) for one in found if one.offset >= 0]
            load.history.note("committed", start=start, offsets=offsets)
    consumer.close()


def read_all(bootstrap: str, topic: str, partitions: int, seconds: float) -> list[Logged]:
    """Everything in a topic, from the beginning to its end of now, by a consumer of its own."""
    kafka = _kafka()
    consumer = kafka.Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "last-reader",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            **QUICK,
        }
    )
    found: list[Logged] = []
    deadline = time.monotonic() + seconds
    try:
        consumer.assign([kafka.TopicPartition(topic, p, 0) for p in range(partitions)])
        left = set(range(partitions))
        while left:
            for message in consumer.consume(1000, POLL):
                if message.error() is None:
                    place = message.partition(), message.offset()
                    found.append(Logged(*place, id_of(message.value())))
                elif message.error().code() == kafka.KafkaError._PARTITION_EOF:
                    left.discard(message.partition())
                elif message.error().fatal() or not message.error().retriable():
                    raise kafka.KafkaException(message.error())
            if time.monotonic() > deadline:
                raise TimeoutError(f"partitions {left} were not read in {seconds:g} s")
    finally:
        consumer.close()
    return found


ROLES: Final[dict[str, Callable[[Load], None]]] = {
    "produce": produce,
    "produce-too": produce_too,
    "consume": consume,
    "follow": follow,
}


def _main(role: str, plan: dict[str, Any]) -> None:
    load = Load(plan)
    signal.signal(signal.SIGTERM, load.stop)
    load.history.note("started", role=role)
    ROLES[role](load)
    load.history.note("end")


if __name__ == "__main__":
    _main(sys.argv[1], json.loads(sys.argv[2]))
