"""A handler that raises leaves a line in the log: which event, which attempt, and what follows."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from millstream import Mill, Reject, Topic, blocking
from millstream.errors import ServiceError
from millstream.messaging import HttpPushSettings
from millstream.messaging.topics.choices import Storage
from tests.integration.messaging.conftest import Until
from tests.integration.messaging.subscriptions.http_endpoint import Say, endpoint

SECRET = "the-key"


def fail(_: Any) -> None:
    raise ValueError("no price")


def lines(caplog: pytest.LogCaptureFixture, start: str) -> list[logging.LogRecord]:
    """The warnings that start like this; none of them shows a key or a value."""
    assert SECRET not in caplog.text
    return [
        record
        for record in caplog.records
        if record.levelno == logging.WARNING and record.getMessage().startswith(start)
    ]


def trace(record: logging.LogRecord) -> str:
    assert record.exc_info is not None
    assert record.exc_info[1] is not None
    return f"{type(record.exc_info[1]).__name__}: {record.exc_info[1]}"


@pytest.fixture
async def orders(mill: Mill) -> Topic:
    topic = await mill.create_topic("orders", storage=Storage.MEMORY)
    await topic.publish(b"the-key in the value", SECRET)
    return topic


async def running(run: Callable[[], Any], until: Until, done: Callable[[], object]) -> None:
    task = asyncio.create_task(run())
    try:
        await until(done)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_of_a_subscription(
    orders: Topic, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    start = "subscription 'billing': the handler failed on orders/0, offset 1, index 0, attempt "
    async with orders.subscribe("billing", max_deliver=2, backoff=["10ms"]) as billing:
        await running(lambda: billing.run(fail), until, lambda: len(lines(caplog, start)) == 2)
    first, last = lines(caplog, start)
    assert first.getMessage() == f"{start}1 of 2; the next attempt is due in 0.01 s"
    assert last.getMessage() == f"{start}2 of 2; it becomes a dead letter in 'orders-billing-dead'"
    assert trace(first) == trace(last) == "ValueError: no price"


async def test_of_a_rejected_event(
    orders: Topic, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    async def reject(_: Any) -> None:
        raise Reject("unknown product")

    start = "subscription 's': the handler failed on orders/0, offset 1, index 0, attempt 1; "
    async with orders.subscribe("s", dead_letter="bad") as subscription:
        await running(lambda: subscription.run(reject), until, lambda: lines(caplog, start))
    [line] = lines(caplog, start)
    assert line.getMessage().endswith("it becomes a dead letter in 'bad'")
    assert trace(line) == "Reject: unknown product"


async def test_of_an_event_that_nobody_settled(
    orders: Topic, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    async with orders.subscribe("s", max_deliver=1, ack_wait="200ms") as first:
        assert await first.pull()
    async with orders.subscribe("s") as second:
        await running(lambda: second.pull(timeout=None), until, lambda: lines(caplog, "subscr"))
    [line] = lines(caplog, "subscription 's': ")
    assert line.getMessage() == (
        "subscription 's': orders/0, offset 1, index 0 becomes a dead letter in 'orders-s-dead', "
        "attempt 2: not settled in 1 deliveries"
    )


async def test_of_a_group(orders: Topic, until: Until, caplog: pytest.LogCaptureFixture) -> None:
    start = "group 'g': the handler failed on orders/0, offset 1, index 0, attempt "
    async with orders.group("g", max_attempts=2, backoff=["10ms"]) as group:
        await running(lambda: group.run(fail), until, lambda: len(lines(caplog, start)) == 2)
    first, last = lines(caplog, start)
    assert first.getMessage() == f"{start}1 of 2; the next attempt is due in 0.01 s"
    assert last.getMessage() == f"{start}2 of 2; it becomes a dead letter in 'orders-g-dead'"
    assert trace(first) == trace(last) == "ValueError: no price"


async def test_of_a_process(mill: Mill, orders: Topic, caplog: pytest.LogCaptureFixture) -> None:
    target = await mill.create_topic("out", storage="memory")
    await orders.process(target, fail, name="p", on_error="dead_letter").run(once=True)
    [line] = lines(caplog, "process 'p': ")
    assert line.getMessage() == (
        "process 'p': the function failed on orders/0, offset 1, index 0, attempt 1; "
        "it becomes a dead letter in 'orders-p-dead'"
    )
    assert trace(line) == "ValueError: no price"


async def test_of_an_http_push(
    orders: Topic, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(_: Any, tries: int) -> Say:
        return Say(500 if tries == 1 else 422, body=b"the-key is wrong")

    with endpoint(answer) as server:
        settings = HttpPushSettings(f"{server.url}/in?token=hush")
        async with orders.http_push("hook", settings, backoff=["10ms"]) as push:
            await running(push.run, until, lambda: len(lines(caplog, "push 'hook'")) == 2)
        where = f"push 'hook': posting orders/0, offset 1, index 0 to {server.url}/in failed, "
    retried, rejected = (record.getMessage() for record in lines(caplog, "push 'hook'"))
    assert retried.startswith(f"{where}attempt 1: HTTP 500")
    assert retried.endswith("; it is posted again")
    assert rejected.startswith(f"{where}attempt 2: HTTP 422")
    assert rejected.endswith("; it becomes a dead letter in 'orders-hook-dead'")


async def test_of_a_subject_and_of_an_endpoint(
    mill: Mill, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    async with mill.subscribe("weather", handler=fail):
        await mill.publish("weather", SECRET)
        await until(lambda: lines(caplog, "the handler of 'weather' failed"))
    service = mill.service("prices", "1.0.0")
    service.endpoint("price")(fail)
    async with service:
        with pytest.raises(ServiceError):
            await mill.request("price", SECRET)
    found = [*lines(caplog, "the handler of 'weather'"), *lines(caplog, "endpoint 'price'")]
    assert [trace(record) for record in found] == ["ValueError: no price"] * 2


async def test_of_the_blocking_twin(
    millstream_url: str, orders: Topic, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    failed = threading.Event()

    def work() -> None:
        with (
            blocking.connect(millstream_url) as mill,
            mill.topic("orders").subscribe("s", max_deliver=1) as subscription,
        ):

            def handle(delivery: Any) -> None:
                failed.set()
                subscription.close()
                fail(delivery)

            subscription.run(handle)

    await asyncio.to_thread(work)
    assert failed.is_set()
    [line] = lines(caplog, "subscription 's': the handler failed on orders/0, offset 1")
    assert trace(line) == "ValueError: no price"
    assert "in handle" in caplog.text


async def test_a_tight_loop_of_failures_does_not_flood_the_log(
    mill: Mill, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    calls = 0

    def count(_: Any) -> None:
        nonlocal calls
        calls += 1
        raise ValueError(calls)

    async with mill.subscribe("storm", handler=count):
        for _ in range(5000):
            await mill.publish("storm")
        await until(lambda: calls == 5000)
    assert 100 <= len(lines(caplog, "the handler of 'storm'")) < 2000
