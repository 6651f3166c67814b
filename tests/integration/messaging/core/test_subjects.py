"""Core subjects against a real broker: wildcards, queue groups, headers, drain, restart."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from millstream.broker import Limits, Permissions, User
from millstream.errors import (
    ConfigError,
    ConnectError,
    ConnectionClosed,
    NoMessage,
    PayloadTooLarge,
    PermissionDenied,
    RequestTimeout,
    SubscriberClosed,
)
from millstream.messaging.core.message import Message, publish
from millstream.messaging.core.overload import SubscriberSettings
from millstream.messaging.core.subscriber import Subscriber
from millstream.settings import Reconnect, Secret
from millstream.testing import running_broker
from millstream.wire.aio.connection import Connection
from tests.books import balanced
from tests.integration.messaging.cut_proxy import proxy

Connect = Callable[..., Awaitable[Connection]]
Until = Callable[..., Awaitable[None]]


async def test_messages_arrive_in_order_with_headers_and_reply(
    connection: Connection, other: Connection
) -> None:
    async with Subscriber(connection, "prices.eu") as subscriber:
        for number in range(1000):
            await publish(other, "prices.eu", str(number))
        await publish(other, "prices.eu", b"\x00\xff", {"Unit": "EUR", "Note": "Köln"}, "here")
        texts = [(await subscriber.next(5)).text for _ in range(1000)]
        last = await subscriber.next(5)
    assert texts == [str(number) for number in range(1000)]
    assert (last.subject, last.reply, last.data) == ("prices.eu", "here", b"\x00\xff")
    assert dict(last.headers) == {"Unit": "EUR", "Note": "Köln"}


async def test_repeated_headers_keep_their_order(connection: Connection) -> None:
    async with Subscriber(connection, "many") as subscriber:
        await publish(connection, "many", b"", [("Tag", "b"), ("Tag", "a"), ("Other", "")])
        message = await subscriber.next(5)
    assert message.header_items == [("Tag", "b"), ("Tag", "a"), ("Other", "")]
    assert message.headers["Tag"] == "b"


@pytest.mark.parametrize(
    ("pattern", "subjects"),
    [
        ("a.*.c", ["a.b.c", "a.x.c"]),
        ("a.>", ["a.b", "a.b.c", "a.x.c", "a.b.c.d"]),
        ("a.b", ["a.b"]),
        ("*.b", ["a.b"]),
    ],
)
async def test_wildcards_choose_subjects(
    connection: Connection, pattern: str, subjects: list[str]
) -> None:
    async with Subscriber(connection, pattern) as subscriber:
        for subject in ("a", "a.b", "a.b.c", "a.x.c", "a.b.c.d", "z"):
            await publish(connection, subject)
        await subscriber.flush()
        assert subscriber.counters.received == len(subjects)
        assert [(await subscriber.next(5)).subject for _ in subjects] == subjects


async def test_members_of_a_queue_group_share_and_others_get_all(
    connection: Connection, other: Connection
) -> None:
    group = SubscriberSettings(queue="workers")
    async with (
        Subscriber(connection, "jobs.*", group) as first,
        Subscriber(other, "jobs.*", group) as second,
        Subscriber(other, "jobs.*") as everything,
    ):
        for number in range(200):
            await publish(connection, f"jobs.{number}")
        await connection.flush()
        await other.flush()
        shares = first.counters.received, second.counters.received
        assert sum(shares) == everything.counters.received == 200
        assert min(shares) > 20
        seen = Counter([(await s.next(5)).subject for s in (first, second) for _ in range(20)])
    assert max(seen.values()) == 1


async def test_a_message_without_a_subscriber_is_gone(connection: Connection) -> None:
    await publish(connection, "nobody", b"lost")
    async with Subscriber(connection, "nobody") as subscriber:
        await publish(connection, "nobody", b"seen")
        assert (await subscriber.next(5)).data == b"seen"


async def test_next_without_a_message_raises_and_can_be_called_again(
    connection: Connection,
) -> None:
    async with Subscriber(connection, "later") as subscriber:
        for _ in range(3):
            with pytest.raises(NoMessage, match=r"'later' within 0\.01 s"):
                await subscriber.next(0.01)
        await publish(connection, "later", b"x")
        assert (await subscriber.next(5)).data == b"x"
        assert not subscriber._waiters


async def test_several_readers_of_one_subscriber_share_and_a_cancelled_one_loses_nothing(
    connection: Connection,
) -> None:
    async with Subscriber(connection, "shared") as subscriber:
        readers = [asyncio.create_task(subscriber.next()) for _ in range(3)]
        await asyncio.sleep(0)
        await publish(connection, "shared", b"1")
        await subscriber.flush()  # the first reader is woken and has not run yet
        await publish(connection, "shared", b"2")
        readers[2].cancel()
        done = await asyncio.gather(*readers, return_exceptions=True)
        assert [m.data for m in done if isinstance(m, Message)] == [b"1", b"2"]
        waiting = asyncio.create_task(subscriber.next())
        second = asyncio.create_task(subscriber.next())
        await asyncio.sleep(0)
        subscriber._take(b"shared", b"", b"", b"3")
        waiting.cancel()  # after it was woken for a message
        assert (await asyncio.wait_for(second, 5)).data == b"3"
        assert balanced(subscriber.counters)


async def test_a_busy_reader_lets_other_tasks_run(connection: Connection) -> None:
    async with Subscriber(connection, "busy") as subscriber:
        for number in range(2000):
            subscriber._take(b"busy", b"", b"", b"%d" % number)
        turns = 0

        async def other_task() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other_task())
        for _ in range(2000):
            await subscriber.next()
        task.cancel()
    assert turns >= 5


async def test_a_handler_gets_every_message_in_order(connection: Connection) -> None:
    seen: list[str] = []

    async def handle(message: Message) -> None:
        await asyncio.sleep(0)
        seen.append(message.text)

    async with Subscriber(connection, "h", handler=handle):
        for number in range(300):
            await publish(connection, "h", str(number))
    assert seen == [str(number) for number in range(300)]


async def test_handlers_run_at_the_same_time_up_to_the_limit(
    connection: Connection, until: Until
) -> None:
    running = most = 0
    gate = asyncio.Event()

    async def handle(_: Message) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await gate.wait()
        running -= 1

    settings = SubscriberSettings(concurrency=4)
    async with Subscriber(connection, "c", settings, handle) as subscriber:
        for _ in range(20):
            await publish(connection, "c")
        await until(lambda: running == 4)
        await subscriber.flush()
        assert subscriber.counters.pending == 16
        gate.set()
    assert most == 4
    assert subscriber.counters.delivered == 20


async def test_a_failing_handler_is_logged_and_counted_and_handling_continues(
    connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[bytes] = []

    def handle(message: Message) -> None:
        seen.append(message.data)
        if message.data == b"bad":
            raise ValueError("cannot handle this")

    async with Subscriber(connection, "f", handler=handle) as subscriber:
        for data in (b"good", b"bad", b"good"):
            await publish(connection, "f", data)
    assert seen == [b"good", b"bad", b"good"]
    assert subscriber.counters.failed == 1
    assert "the handler of 'f' failed" in caplog.text


async def test_drain_gives_the_reader_the_rest_and_then_the_end(
    connection: Connection, other: Connection
) -> None:
    subscriber = await Subscriber(connection, "d")
    for number in range(50):
        await publish(other, "d", str(number))
    await other.flush()
    await subscriber.drain()
    await publish(other, "d", "too late")
    await other.flush()
    await connection.flush()
    assert [message.text async for message in subscriber] == [str(n) for n in range(50)]
    with pytest.raises(SubscriberClosed, match="'d' is closed"):
        await subscriber.next()


@pytest.mark.parametrize("silent", [False, True], ids=["handlers run", "the server is silent"])
async def test_a_drain_that_takes_too_long_raises_and_counts_the_rest(
    connect: Connect, millstream_url: str, until: Until, silent: bool
) -> None:
    async def handle(_: Message) -> None:
        await asyncio.sleep(3600)

    async with proxy(millstream_url) as (line, url):
        connection = await connect(url)
        subscriber = await Subscriber(connection, "slow", handler=handle)
        for _ in range(10):
            await publish(connection, "slow")
        await subscriber.flush()
        await until(lambda: subscriber.counters.delivered == 1)
        if silent:
            line.freeze()
        with pytest.raises(
            RequestTimeout,
            match=r"'slow' within .*: (handlers were still running|the server did not answer)",
        ):
            await subscriber.drain(0.1)
        counters = subscriber.counters
        assert (counters.delivered, counters.dropped, counters.pending) == (1, 9, 0)


async def test_close_counts_what_was_pending_as_dropped(connection: Connection) -> None:
    subscriber = await Subscriber(connection, "e")
    for _ in range(7):
        await publish(connection, "e")
    await connection.flush()
    await subscriber.next()
    await subscriber.close()
    counters = subscriber.counters
    assert (counters.delivered, counters.dropped, counters.pending) == (1, 6, 0)
    assert balanced(counters)
    assert [message async for message in subscriber] == []


async def test_a_closed_connection_ends_readers_with_an_error(connect: Connect) -> None:
    connection = await connect()
    subscriber = await Subscriber(connection, "x")
    reader = asyncio.create_task(subscriber.next())
    await asyncio.sleep(0)
    await connection.close()
    with pytest.raises(ConnectionClosed, match="subscriber of 'x' was closed"):
        await reader


async def test_a_large_payload_passes_and_a_larger_one_is_refused(connection: Connection) -> None:
    limit = connection.info.max_payload
    async with Subscriber(connection, "big") as subscriber:
        await publish(connection, "big", b"x" * limit)
        assert len((await subscriber.next(10)).data) == limit
        with pytest.raises(PayloadTooLarge):
            await publish(connection, "big", b"x" * (limit + 1))
        await publish(connection, "big", b"still here")
        assert (await subscriber.next(5)).data == b"still here"


async def test_wildcards_and_broken_subjects_are_refused_for_publishing(
    connection: Connection,
) -> None:
    for subject in ("a.*", "a.>", "", "a..b", "a b", "a\r\nPUB b 0"):
        with pytest.raises(ConfigError):
            await publish(connection, subject)
    with pytest.raises(ConfigError, match="a dict or a list"):
        await publish(connection, "a", 5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        Subscriber(connection, "a.>.b")


async def test_a_forbidden_subject_raises_instead_of_staying_silent(connect: Connect) -> None:
    user = User(
        "limited",
        Secret("pw"),
        permissions=Permissions(
            publish=("open.>",),
            subscribe=("open.>", "_INBOX.>"),
            subscribe_deny=("open.> team",),
        ),
    )
    async with running_broker(users=(user,)) as broker:
        connection = await connect(broker.url, user="limited", password=Secret("pw"))
        with pytest.raises(PermissionDenied, match="may not subscribe to 'secret'"):
            await Subscriber(connection, "secret")
        async with Subscriber(connection, "open.a") as plain:
            with pytest.raises(PermissionDenied, match="in queue group 'team'"):
                await Subscriber(connection, "open.a", SubscriberSettings(queue="team"))
            await publish(connection, "open.a", b"fine")
            assert (await plain.next(5)).data == b"fine"


async def test_a_permission_withdrawn_later_ends_the_reader_with_an_error(
    connect: Connect,
) -> None:
    everything = User("limited", Secret("pw"), permissions=Permissions())
    nothing = User("limited", Secret("pw"), permissions=Permissions(subscribe_deny=("news",)))
    limits = Limits(max_file_store=2**30, max_memory_store=2**28)  # the same after the reload
    async with running_broker(users=(everything,), limits=limits) as broker:
        connection = await connect(broker.url, user="limited", password=Secret("pw"))
        subscriber = await Subscriber(connection, "news")
        await publish(connection, "news", b"last")
        await subscriber.flush()
        await asyncio.to_thread(broker.reload, replace(broker.settings, users=(nothing,)))
        assert (await subscriber.next(5)).data == b"last"
        with pytest.raises(PermissionDenied):
            await subscriber.next(10)
        await subscriber.close()


@pytest.mark.parametrize("how", ["restart", "kill"])
async def test_subscribers_continue_after_the_broker_comes_back(
    connect: Connect, until: Until, how: str
) -> None:
    async with running_broker() as broker:
        connection, sender = await connect(broker.url), await connect(broker.url)
        async with (
            Subscriber(connection, "r.>") as plain,
            Subscriber(connection, "r.*", SubscriberSettings(queue="q")) as shared,
        ):
            await publish(sender, "r.1", b"before")
            assert (await plain.next(5)).data == (await shared.next(5)).data == b"before"
            if how == "restart":
                await asyncio.to_thread(broker.restart)
            else:
                await asyncio.to_thread(broker.kill)
                await asyncio.to_thread(broker.start)
            await until(lambda: connection.reconnects and sender.reconnects)
            await connection.flush()
            await publish(sender, "r.2", b"after")
            assert (await plain.next(5)).data == (await shared.next(5)).data == b"after"
            assert plain.counters.interruptions >= 1
            assert balanced(plain.counters)


async def test_what_is_published_while_disconnected_is_sent_afterwards(
    connect: Connect, until: Until
) -> None:
    async with running_broker() as broker:
        connection = await connect(broker.url)
        async with Subscriber(connection, "kept") as subscriber:
            await asyncio.to_thread(broker.kill)
            await until(lambda: not connection.connected)
            for number in range(100):
                await publish(connection, "kept", str(number))
            await asyncio.to_thread(broker.start)
            texts = [(await subscriber.next(10)).text for _ in range(100)]
    assert texts == [str(number) for number in range(100)]


async def test_a_full_buffer_while_disconnected_is_an_error_and_not_a_silent_loss(
    connect: Connect, until: Until
) -> None:
    async with running_broker() as broker:
        short = Reconnect(wait=0.02, wait_max=0.1, give_up_after=20, buffer_bytes=1000)
        connection = await connect(broker.url, reconnect=short)
        await asyncio.to_thread(broker.kill)
        await until(lambda: not connection.connected)
        with pytest.raises(ConnectError, match="buffer of 1,000 bytes is full"):
            await publish(connection, "x", b"x" * 1001)


async def test_another_library_reads_what_we_publish_and_vice_versa(
    connection: Connection, peer: Client
) -> None:
    theirs = await peer.subscribe("to.them")
    await peer.flush()
    async with Subscriber(connection, "to.us") as ours:
        await publish(connection, "to.them", "hello", {"From": "us"}, reply="answers")
        got: Msg = await theirs.next_msg(5)
        assert (got.data, got.headers, got.reply) == (b"hello", {"From": "us"}, "answers")
        await peer.publish("to.us", b"hello", reply="answers", headers={"From": "them"})
        message = await ours.next(5)
    assert (message.text, dict(message.headers), message.reply) == (
        "hello",
        {"From": "them"},
        "answers",
    )


async def test_a_queue_group_is_shared_with_another_library(
    connection: Connection, peer: Client, until: Until
) -> None:
    theirs: list[bytes] = []

    async def take(message: Msg) -> None:
        theirs.append(message.data)

    await peer.subscribe("mixed", queue="g", cb=take)
    await peer.flush()
    async with Subscriber(connection, "mixed", SubscriberSettings(queue="g")) as ours:
        for _ in range(100):
            await publish(connection, "mixed")
        await connection.flush()
        await peer.flush()
        await until(lambda: ours.counters.received + len(theirs) == 100)
        assert min(ours.counters.received, len(theirs)) > 5


async def test_a_failing_drop_hook_does_not_break_the_connection(
    connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Message) -> None:
        raise RuntimeError("hook")

    caplog.set_level(logging.WARNING)
    settings = SubscriberSettings(messages_max=1, on_drop=fail)
    async with Subscriber(connection, "o", settings) as subscriber:
        await publish(connection, "o")
        await publish(connection, "o")
        await subscriber.flush()
        assert subscriber.counters.dropped == 1
    assert connection.connected
    assert "on_drop" in caplog.text
