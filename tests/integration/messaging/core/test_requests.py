"""Request and answer, one and many, with our own and another library on the other side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import NoRespondersError

from millstream.broker import Permissions, User
from millstream.deadline import Deadline
from millstream.errors import (
    ConfigError,
    ConnectionClosed,
    NoResponders,
    PermissionDenied,
    RequestTimeout,
    ServiceError,
)
from millstream.messaging.core import request as requests
from millstream.messaging.core.message import Message, publish
from millstream.messaging.core.request import gather, request
from millstream.messaging.core.subscriber import Subscriber
from millstream.settings import Secret
from millstream.testing import running_broker
from millstream.wire.aio.connection import Connection

Connect = Callable[..., Awaitable[Connection]]
Until = Callable[..., Awaitable[None]]


async def test_a_request_is_answered_with_data_and_headers(
    connection: Connection, other: Connection
) -> None:
    def answer(message: Message) -> None:
        message.respond(message.data.upper(), {"Seen": message.headers["Who"]})

    async with Subscriber(other, "shout", handler=answer):
        reply = await request(connection, "shout", "hello", {"Who": "ann"})
    assert (reply.text, dict(reply.headers)) == ("HELLO", {"Seen": "ann"})


async def test_the_first_answer_wins_and_later_ones_are_discarded(
    connection: Connection, other: Connection, until: Until
) -> None:
    answered = 0
    late = asyncio.Event()

    async def quick(message: Message) -> None:
        message.respond(b"quick")

    async def slow(message: Message) -> None:
        nonlocal answered
        await late.wait()
        message.respond(b"slow")
        message.respond(b"slower")
        answered += 1

    async with Subscriber(other, "race", handler=slow), Subscriber(other, "race", handler=quick):
        for _ in range(3):
            assert (await request(connection, "race")).data == b"quick"
        late.set()
        await until(lambda: answered == 3)
        await other.flush()
        await connection.flush()
        late.clear()
        assert (await request(connection, "race")).data == b"quick"
        late.set()
    assert not connection._replies


async def test_a_request_without_subscribers_fails_immediately(connection: Connection) -> None:
    deadline = Deadline(60)
    with pytest.raises(NoResponders, match="no service or subscriber listens on 'empty'"):
        await request(connection, "empty", timeout=60)
    with pytest.raises(NoResponders, match="no service or subscriber listens on 'empty'"):
        await gather(connection, "empty", timeout=60)
    assert not deadline.passed


async def test_a_listener_that_stays_silent_is_a_timeout(connection: Connection) -> None:
    async with Subscriber(connection, "mute"):
        with pytest.raises(RequestTimeout, match=r"'mute' within 0\.05 s"):
            await request(connection, "mute", timeout=0.05)
        with pytest.raises(RequestTimeout, match=r"'mute' within 0\.05 s"):
            await gather(connection, "mute", timeout=0.05)


async def test_many_concurrent_requests_get_their_own_answers(
    connection: Connection, other: Connection
) -> None:
    async with Subscriber(other, "echo", handler=lambda message: message.respond(message.data)):
        asked = [str(number) for number in range(500)]
        answers = await asyncio.gather(*(request(connection, "echo", text) for text in asked))
    assert [answer.text for answer in answers] == asked


async def test_an_error_answer_is_raised(connection: Connection) -> None:
    def refuse(message: Message) -> None:
        message.respond_error(404, "no such\r\norder", b"detail")

    async with Subscriber(connection, "orders.get", handler=refuse):
        with pytest.raises(ServiceError) as caught:
            await request(connection, "orders.get")
        answers = await gather(connection, "orders.get", limit=1)
    assert (caught.value.code, caught.value.description) == ("404", "no such order")
    error = answers[0].service_error
    assert error is not None
    assert error.code == "404"
    assert answers[0].data == b"detail"


async def test_answering_what_was_only_published_is_refused(connection: Connection) -> None:
    async with Subscriber(connection, "p") as subscriber:
        await publish(connection, "p")
        message = await subscriber.next(5)
    with pytest.raises(ConfigError, match="expects no answer"):
        message.respond(b"x")


Delays = list[float | None]


async def listeners(stack: AsyncExitStack, connection: Connection, delays: Delays) -> None:
    """Subscribers of `who`, each answering with its number after its own delay (None: never)."""
    for number, delay in enumerate(delays):

        async def answer(message: Message, number: int = number, delay: float = delay or 0) -> None:
            await asyncio.sleep(delay)
            message.respond(str(number))

        handler = None if delay is None else answer
        await stack.enter_async_context(Subscriber(connection, "who", handler=handler))


async def test_gather_collects_until_it_is_quiet(connection: Connection, other: Connection) -> None:
    async with AsyncExitStack() as stack:
        await listeners(stack, other, [0, 0, 0, None])
        answers = await gather(connection, "who", quiet=1, timeout=60)
    assert sorted(answer.text for answer in answers) == ["0", "1", "2"]


async def test_the_quiet_time_starts_with_the_first_answer(
    connection: Connection, other: Connection
) -> None:
    async with AsyncExitStack() as stack:
        await listeners(stack, other, [0.3])
        answers = await gather(connection, "who", quiet=0.05, timeout=60)
    assert [answer.text for answer in answers] == ["0"]


async def test_gather_stops_at_the_limit(connection: Connection, other: Connection) -> None:
    async with AsyncExitStack() as stack:
        await listeners(stack, other, [0, 0, 0, 0, None])
        deadline = Deadline(50)
        answers = await gather(connection, "who", limit=3, quiet=50, timeout=60)
    assert len(answers) == 3
    assert not deadline.passed


async def test_gather_ends_at_its_timeout_with_what_it_has(
    connection: Connection, other: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def answer(message: Message) -> None:
        nonlocal now
        now = 59.9  # of the time for all answers a tenth of a second is left
        message.respond(b"0")

    monkeypatch.setattr(requests, "Deadline", partial(Deadline, clock=lambda: now))
    async with Subscriber(other, "who", handler=answer), Subscriber(other, "who"):
        answers = await gather(connection, "who", quiet=60, timeout=60)
    assert [answer.text for answer in answers] == ["0"]
    assert not connection.on_closed
    assert len(connection._interests) == 1  # only its inbox is left


def stand_still(seconds: float) -> None:
    time.sleep(seconds)


async def test_an_answer_that_comes_with_the_end_of_the_quiet_time_counts(
    connection: Connection,
) -> None:
    """After a stall the program finds both together; the answer comes first."""
    gathering = requests._Gathering(connection, "who", 10)
    gathering._take(b"inbox", b"", b"", b"first")
    waiting = asyncio.create_task(gathering.wait(Deadline(60), 0.5))
    for _ in range(3):
        await asyncio.sleep(0)  # it waits for another one now
    loop = asyncio.get_running_loop()
    loop.call_at(loop.time(), gathering._take, b"inbox", b"", b"", b"second")
    stand_still(0.6)
    stood_still = time.monotonic()
    await waiting
    gathering.close()
    assert [answer.text for answer in gathering.answers] == ["first", "second"]
    assert time.monotonic() - stood_still >= 0.5, "the quiet time begins again with it"


async def test_gather_refuses_limits_that_mean_nothing(connection: Connection) -> None:
    with pytest.raises(ConfigError, match="limit"):
        await gather(connection, "x", limit=0)
    with pytest.raises(ConfigError, match="quiet"):
        await gather(connection, "x", quiet=0)


async def test_a_connection_closed_while_waiting_is_an_error(
    connect: Connect, other: Connection
) -> None:
    connection = await connect()
    async with Subscriber(other, "silent"):
        tasks = [
            asyncio.create_task(request(connection, "silent")),
            asyncio.create_task(gather(connection, "silent")),
        ]
        await asyncio.sleep(0.05)
        await connection.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [ConnectionClosed, ConnectionClosed]


async def test_a_forbidden_request_fails_immediately(connect: Connect) -> None:
    user = User(
        "limited", Secret("pw"), permissions=Permissions(publish=("open",), subscribe=("_INBOX.>",))
    )
    async with running_broker(users=(user,)) as broker:
        connection = await connect(broker.url, user="limited", password=Secret("pw"))
        with pytest.raises(PermissionDenied, match="may not publish to 'closed'"):
            await request(connection, "closed", timeout=5)
        with pytest.raises(PermissionDenied, match="may not publish to 'closed'"):
            await gather(connection, "closed", timeout=5)


async def test_another_library_asks_us_and_answers_us(connection: Connection, peer: Client) -> None:
    async def answer(message: Msg) -> None:
        await message.respond(b"theirs: " + message.data)

    await peer.subscribe("them", cb=answer)
    await peer.flush()

    def ours(message: Message) -> None:
        message.respond(b"ours: " + message.data)

    async with Subscriber(connection, "us", handler=ours):
        assert (await request(connection, "them", b"1")).data == b"theirs: 1"
        assert (await peer.request("us", b"2", timeout=15)).data == b"ours: 2"
    with pytest.raises(NoRespondersError):
        await peer.request("us", b"3", timeout=15)
