"""Push to an HTTP endpoint: what it is sent, and what its answers do to an event."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

import millstream
from millstream.errors import ConfigError
from millstream.messaging import (
    HttpPush,
    HttpPushSettings,
    NewEvent,
    SubscriptionSettings,
    Topic,
)
from millstream.mill import Mill
from millstream.settings import Secret, Tls
from tests.certificates import make_certificate
from tests.integration.messaging.conftest import Until
from tests.integration.messaging.subscriptions.http_endpoint import Post, Say, endpoint
from tests.integration.messaging.topic_kit import eventually

QUICK = SubscriptionSettings(backoff=(0.02,), max_deliver=20)


@asynccontextmanager
async def pushing(
    topic: Topic, url: str, settings: SubscriptionSettings | None = QUICK, **changes: Any
) -> AsyncIterator[HttpPush]:
    push = await topic.http_push("hook", HttpPushSettings(url, **changes), settings)
    task = asyncio.create_task(push.run())
    try:
        yield push
    finally:
        await push.stop()
        await asyncio.wait_for(task, 30)


async def settled(topic: Topic) -> bool:
    info = await topic.subscriptions.info("hook")
    return not info.pending and not info.in_flight


async def all_settled(topic: Topic) -> None:
    await eventually(lambda: settled(topic), True)


async def test_an_event_arrives_as_a_cloud_event_in_binary_mode(topic: Topic) -> None:
    moment = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    headers = {"Content-Type": "text/plain", "traceparent": "00-1-2-01", "shop": "Köln 1"}
    await topic.publish(b"42", "k ü", headers=headers, timestamp=moment, id="id-1")
    with endpoint() as server:
        async with pushing(topic, f"{server.url}/in?x=1"):
            await all_settled(topic)
    [post] = server.posts
    assert (post.path, post.body) == ("/in?x=1", b"42")
    expected = {
        "ce-specversion": "1.0",
        "ce-id": "id-1",
        "ce-source": "/topics/orders",
        "ce-type": "millstream.event",
        "ce-time": "2026-01-02T03:04:05Z",
        "ce-partitionkey": "k%20%C3%BC",
        "ce-topic": "orders",
        "ce-partition": "0",
        "ce-offset": "1",
        "ce-index": "0",
        "ce-attempt": "1",
        "ce-subscription": "hook",
        "content-type": "text/plain",
        "traceparent": "00-1-2-01",
        "event-shop": "K%C3%B6ln%201",
    }
    assert {name: post.headers.get(name) for name in expected} == expected


async def test_headers_that_are_not_text_are_percent_encoded(topic: Topic, mill: Mill) -> None:
    block = b"NATS/1.0\r\nX-\xff: \xfe\r\nNats-Msg-Id: \xfd\r\n\r\n"
    await mill.connection.request("orders.a", b"1", block)
    with endpoint() as server:
        async with pushing(topic, server.url):
            await all_settled(topic)
    [post] = server.posts
    assert (post.headers["event-x-%ff"], post.headers["ce-id"]) == ("%FE", "%FD")


async def test_a_value_of_bytes_has_the_set_type_and_no_value_has_no_body(topic: Topic) -> None:
    await topic.publish_many([NewEvent(b"\x00\xff", "a"), NewEvent(None, "a")])
    with endpoint() as server:
        async with pushing(topic, server.url, content_type="application/x-own", concurrency=1):
            await all_settled(topic)
    assert [(p.body, p.headers.get("content-type")) for p in server.posts] == [
        (b"\x00\xff", "application/x-own"),
        (b"", None),
    ]


@pytest.mark.parametrize("status", [429, 500, 503, 408, 302, 0])
async def test_a_transient_failure_is_retried(topic: Topic, status: int) -> None:
    await topic.publish(b"a")

    def twice(_post: Post, tries: int) -> Say:
        return Say(status if tries < 3 else 204)

    with endpoint(twice) as server:
        async with pushing(topic, server.url) as push:
            await all_settled(topic)
    # A connection that breaks before its answer may be reused once without notice.
    attempts = [int(post.headers["ce-attempt"]) for post in server.posts]
    assert attempts[-1] >= 2
    assert len(attempts) == 3
    assert (push.delivered, push.rejected) == (1, 0)
    assert await (await topic.dead_letters("hook")).list() == []


async def test_a_rejected_event_becomes_a_dead_letter_immediately(topic: Topic) -> None:
    await topic.publish_many([b"bad", b"good"])

    def judge(post: Post, _tries: int) -> Say:
        return Say(422, body=b"no such\nproduct") if post.body == b"bad" else Say()

    with endpoint(judge) as server:
        async with pushing(topic, server.url) as push:
            await all_settled(topic)
    assert sorted(server.bodies()) == [b"bad", b"good"]
    assert (push.delivered, push.rejected, push.retried) == (1, 1, 0)
    [letter] = await (await topic.dead_letters("hook")).list()
    assert letter.value == b"bad"
    assert letter.cause == "HTTP 422 Unprocessable Entity: no such product"


async def test_deliveries_used_up_make_a_dead_letter_with_the_last_answer(topic: Topic) -> None:
    await topic.publish(b"a")
    with endpoint(lambda _post, _tries: Say(500, body=b"broken")) as server:
        async with pushing(topic, server.url, replace(QUICK, max_deliver=3)):
            await all_settled(topic)
    assert len(server.posts) == 3
    [letter] = await (await topic.dead_letters("hook")).list()
    assert (letter.cause, letter.attempts) == ("HTTP 500 Internal Server Error: broken", 3)


@pytest.mark.parametrize("as_date", [False, True])
async def test_retry_after_is_honoured_as_seconds_and_as_a_date(
    topic: Topic, as_date: bool
) -> None:
    await topic.publish(b"a")

    def later(_post: Post, tries: int) -> Say:
        if tries > 1:
            return Say()
        moment = datetime.now(UTC) + timedelta(seconds=2)
        return Say(503, {"Retry-After": format_datetime(moment, usegmt=True) if as_date else "1"})

    with endpoint(later) as server:
        async with pushing(topic, server.url):
            await all_settled(topic)
    first, second = server.posts
    assert 0.9 <= second.at - first.at < 20


async def test_an_endpoint_that_hangs_is_given_up_after_the_timeout(topic: Topic) -> None:
    await topic.publish(b"a")

    def hang(_post: Post, tries: int) -> Say:
        return Say(after=30.0 if tries == 1 else 0.0)

    with endpoint(hang) as server:
        async with pushing(topic, server.url, timeout=0.2, concurrency=1) as push:
            await all_settled(topic)
    # The first answer would have come after half a minute; a quick one may be late as well.
    assert server.posts[1].at - server.posts[0].at < 30
    assert push.retried >= 1
    assert push.delivered == 1


async def test_a_body_that_never_ends_is_given_up_after_the_timeout(topic: Topic) -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError, asyncio.CancelledError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n")
            for number in range(1000):
                writer.write(b"X-%d: y\r\n" % number)
                await writer.drain()
                await asyncio.sleep(0.02)
        writer.close()

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    await topic.publish(b"a")
    settings = replace(QUICK, max_deliver=2)
    url = f"http://127.0.0.1:{port}"
    async with pushing(topic, url, settings, timeout=0.2, concurrency=1):
        await all_settled(topic)
    server.close()
    [letter] = await (await topic.dead_letters("hook")).list()
    assert letter.cause == f"no answer from {url}: not within 0.2 s"


async def test_posts_are_limited_and_connections_are_reused(
    topic: Topic,
) -> None:
    await topic.publish_many([b"%d" % n for n in range(60)])
    busy = threading.Event()

    def answer(_post: Post, _tries: int) -> Say:
        if server.running == 4:
            busy.set()
        busy.wait(8)
        return Say(after=0.01)

    with endpoint(answer) as server:
        async with pushing(topic, server.url, concurrency=4) as push:
            await all_settled(topic)
    assert server.most_running == 4
    assert server.connections <= 4
    assert push.delivered == 60


async def test_a_dead_endpoint_is_not_flooded_and_events_wait_for_it(
    topic: Topic, until: Until
) -> None:
    await topic.publish_many([b"%d" % n for n in range(200)])
    settings = SubscriptionSettings(backoff=(0.01,))
    with contextlib.closing(socket.socket()) as gone:
        gone.bind(("127.0.0.1", 0))  # the port is reserved and has no listener
        url = f"http://127.0.0.1:{gone.getsockname()[1]}"
        push = await refused(topic, url, settings, until)
    with endpoint() as server:
        async with pushing(topic, server.url, settings):
            await all_settled(topic)
    assert push.delivered == 0
    assert sorted(server.bodies(), key=int) == [b"%d" % n for n in range(200)]


async def refused(topic: Topic, url: str, settings: SubscriptionSettings, until: Until) -> HttpPush:
    """Push to an endpoint that is down for a while."""
    async with pushing(topic, url, settings, concurrency=4) as push:
        await until(lambda: push.retried >= 4)
        tries, started = push.retried, asyncio.get_running_loop().time()
        await asyncio.sleep(0.6)
        took = asyncio.get_running_loop().time() - started
    # Pauses of 0.1, 0.2, 0.4 s, four posts after each, where an unbridled loop makes thousands.
    assert push.retried - tries <= 4 * (3 + took / 0.4)
    return push


async def test_stop_lets_posts_end_and_gives_the_rest_back(topic: Topic, until: Until) -> None:
    await topic.publish_many([b"%d" % n for n in range(50)])
    with endpoint(lambda _post, _tries: Say(after=0.1)) as server:
        async with pushing(topic, server.url, concurrency=2) as push:
            await until(lambda: len(server.posts) >= 2)
        assert push.delivered == len(server.posts)  # what was posted is acknowledged
        async with pushing(topic, server.url, concurrency=25):
            await all_settled(topic)
    assert sorted(server.bodies(), key=int) == [b"%d" % n for n in range(50)]


async def test_a_secret_is_sent_and_never_shown(
    topic: Topic, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await topic.publish(b"a")
    with endpoint(lambda _post, tries: Say(500 if tries == 1 else 400)) as server:
        async with pushing(
            topic, server.url, bearer=Secret("hush-hush"), headers={"X-Tenant": "7"}
        ) as push:
            await all_settled(topic)
            shown = f"{push!r} {push.settings!r} {push.settings}"
    assert {post.headers["authorization"] for post in server.posts} == {"Bearer hush-hush"}
    assert {post.headers["x-tenant"] for post in server.posts} == {"7"}
    [letter] = await (await topic.dead_letters("hook")).list()
    assert "hush" not in shown + caplog.text + repr(letter)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("tls")).parent


@pytest.fixture
def secure(certificate: Path) -> Iterator[str]:
    """The address of a server that speaks TLS and answers everything with 204."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                while True:
                    await reader.readuntil(b"\r\n\r\n")
                    await reader.readexactly(1)
                    writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
                    await writer.drain()
        finally:
            writer.transport.abort()

    async def end() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.01)  # their transports close in the next turns of the loop

    loop = asyncio.new_event_loop()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate / "server.pem", certificate / "server.key")
    server = loop.run_until_complete(asyncio.start_server(answer, "127.0.0.1", 0, ssl=context))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    server.close()
    loop.run_until_complete(end())
    loop.close()


async def test_a_certificate_is_checked_against_the_given_authorities(
    topic: Topic, secure: str, certificate: Path, until: Until
) -> None:
    await topic.publish(b"1")
    async with pushing(topic, secure, replace(QUICK, max_deliver=2)):
        await all_settled(topic)
    [letter] = await (await topic.dead_letters("hook")).list()
    assert "CERTIFICATE_VERIFY_FAILED" in letter.cause
    await topic.publish_many([b"2", b"3"])
    async with pushing(
        topic, secure, None, tls=Tls(ca=str(certificate / "server.pem"))
    ) as trusting:
        await until(lambda: trusting.delivered == 2)
        await all_settled(topic)
    await topic.publish(b"4")
    async with pushing(topic, secure, None, verify=False) as careless:
        await until(lambda: careless.delivered == 1)
        await all_settled(topic)
    assert (trusting.delivered, careless.delivered) == (2, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"url": "ftp://host/"},
        {"url": "https:///path"},
        {"url": "http://user:pass@host/"},
        {"url": "http://host/a b"},
        {"url": "http://host:99999/"},
        {"url": "http://host/", "timeout": 0},
        {"url": "http://host/", "concurrency": 0},
        {"url": "http://host/", "concurrency": 1000},
        {"url": "http://host/", "headers": {"a b": "c"}},
        {"url": "http://host/", "headers": {"a": "c\r\nd: e"}},
        {"url": "http://host/", "verify": False},
    ],
)
def test_wrong_settings_are_refused_when_they_are_created(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        HttpPushSettings(**wrong)


@dataclass
class Order:
    id: int
    at: datetime


async def test_a_typed_value_is_posted_as_json(millstream_url: str) -> None:
    async with millstream.connect(millstream_url) as mill:
        topic = await mill.create_topic("typed", schema=Order)
        moment = datetime(2026, 1, 2, tzinfo=UTC)
        await topic.publish(Order(1, moment))
        async with topic.producer() as producer:
            await producer.send(Order(2, moment))
        with endpoint() as server:
            async with pushing(topic, server.url, concurrency=1):
                await all_settled(topic)
    assert [json.loads(post.body) for post in server.posts] == [
        {"id": 1, "at": "2026-01-02T00:00:00Z"},
        {"id": 2, "at": "2026-01-02T00:00:00Z"},
    ]
    assert {post.headers["content-type"] for post in server.posts} == {"application/json"}
