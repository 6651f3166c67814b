"""Services: shared load, errors, and discovery as the standard (ADR-32) and its tools want it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import nats.micro
import pytest
from nats.aio.client import Client
from nats.micro.request import Request
from nats.micro.service import EndpointConfig, ServiceInfo, ServicePing, ServiceStats

from millstream.broker import Permissions, User
from millstream.deadline import Deadline
from millstream.errors import ConfigError, NoResponders, PermissionDenied, ServiceError
from millstream.messaging.core.message import Message
from millstream.messaging.core.request import gather, request
from millstream.messaging.core.service import EndpointSettings, Service
from millstream.settings import Secret
from millstream.testing import running_broker
from millstream.wire.aio.connection import Connection

Connect = Callable[..., Awaitable[Connection]]
Until = Callable[..., Awaitable[None]]


def sums(connection: Connection, **options: Any) -> Service:
    service = Service(connection, "sums", "1.2.3", **options)

    @service.endpoint("sums.add")
    async def add(message: Message) -> str:
        return str(sum(map(int, message.text.split())))

    @service.endpoint("sums.halve", EndpointSettings(name="half", metadata={"unit": "one"}))
    def halve(message: Message) -> bytes:
        number = int(message.text)
        if number % 2:
            raise ServiceError(message.subject, "422", f"{number} is odd")
        return b"%d" % (number // 2)

    return service


async def reports(connection: Connection, subject: str, count: int = 1) -> list[dict[str, Any]]:
    """The answers of all instances; asked again until all of them have answered."""
    deadline = Deadline(30)
    while True:
        answers = await gather(connection, subject, quiet=0.1)
        if len(answers) >= count or deadline.passed:
            return [json.loads(answer.data) for answer in answers]


async def test_endpoints_answer_and_errors_reach_the_caller(
    connection: Connection, other: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    async with sums(connection) as service:
        assert (await request(other, "sums.add", "1 2 3")).text == "6"
        assert (await request(other, "sums.halve", "8")).text == "4"
        with pytest.raises(ServiceError, match="422: 3 is odd"):
            await request(other, "sums.halve", "3")
        with pytest.raises(ServiceError) as caught:
            await request(other, "sums.add", "one two")
        assert caught.value.code == "500"
        assert "invalid literal" not in caught.value.description  # details stay in the log
        assert "invalid literal" in caplog.text
        add, halve = service.endpoints[0].stats, service.endpoints[1].stats
        assert (add.num_requests, add.num_errors) == (2, 1)
        assert (halve.num_requests, halve.num_errors) == (2, 1)
        assert halve.last_error == "422:3 is odd"
    with pytest.raises(NoResponders):
        await request(other, "sums.add", "1")


async def test_instances_share_the_load_and_one_can_leave(
    connection: Connection, other: Connection
) -> None:
    handled: Counter[str] = Counter()

    def instance(connection: Connection) -> Service:
        service = Service(connection, "work", "1.0.0")

        @service.endpoint("work.do")
        async def do(_: Message) -> bytes:
            handled[service.id] += 1
            return b"done"

        return service

    async with instance(connection) as first:
        async with instance(other):
            await asyncio.gather(*(request(connection, "work.do") for _ in range(200)))
            assert sum(handled.values()) == 200
            assert len(handled) == 2
            assert min(handled.values()) > 20
            asked = [asyncio.create_task(request(connection, "work.do")) for _ in range(100)]
            await asyncio.sleep(0)
        await asyncio.gather(*asked)  # the one that left answered what it had
        before = handled[first.id]
        for _ in range(20):
            await request(connection, "work.do")
        assert handled[first.id] == before + 20


async def test_all_instances_answer_without_a_queue_group(
    connection: Connection, other: Connection
) -> None:
    async with sums(connection, queue=""), sums(other, queue=""):
        answers = await gather(connection, "sums.add", "2 3", limit=2, quiet=20, timeout=30)
    assert [answer.text for answer in answers] == ["5", "5"]


async def test_discovery_finds_every_instance_by_kind_and_by_id(
    connection: Connection, other: Connection
) -> None:
    async with sums(connection) as first, sums(other) as second:
        ids = {first.id, second.id}
        for verb in ("PING", "INFO", "STATS"):
            for subject in (f"$SRV.{verb}", f"$SRV.{verb}.sums"):
                found = await reports(connection, subject, 2)
                assert {report["id"] for report in found} == ids
            one = await reports(connection, f"$SRV.{verb}.sums.{first.id}")
            assert [report["id"] for report in one] == [first.id]
            assert one[0]["type"] == f"io.nats.micro.v1.{verb.lower()}_response"
            assert (one[0]["name"], one[0]["version"]) == ("sums", "1.2.3")
    with pytest.raises(NoResponders):
        await gather(connection, "$SRV.PING")


async def test_info_and_stats_say_what_the_standard_wants(connection: Connection) -> None:
    begun = datetime.now(UTC)
    async with sums(connection, description="adds", metadata={"team": "a"}) as service:
        await request(connection, "sums.add", "1")
        (info,) = await reports(connection, "$SRV.INFO.sums")
        (stats,) = await reports(connection, "$SRV.STATS.sums")
        assert info == {
            "type": "io.nats.micro.v1.info_response",
            "name": "sums",
            "id": service.id,
            "version": "1.2.3",
            "metadata": {"team": "a"},
            "description": "adds",
            "endpoints": [
                {
                    "name": "sums-add",
                    "subject": "sums.add",
                    "queue_group": "q",
                    "metadata": {},
                },
                {
                    "name": "half",
                    "subject": "sums.halve",
                    "queue_group": "q",
                    "metadata": {"unit": "one"},
                },
            ],
        }
        assert datetime.fromisoformat(stats["started"]) >= begun.replace(microsecond=0)
        add = stats["endpoints"][0]
        assert (add["num_requests"], add["num_errors"], add["last_error"]) == (1, 0, "")
        assert add["average_processing_time"] == add["processing_time"] > 0
        assert add["data"] is None
        service.reset()
        (stats,) = await reports(connection, "$SRV.STATS.sums")
        assert stats["endpoints"][0]["num_requests"] == 0


async def test_another_library_can_read_the_reports(connection: Connection, peer: Client) -> None:
    ask = partial(peer.request, timeout=15)
    async with sums(connection) as service:
        ping = ServicePing.from_dict(json.loads((await ask("$SRV.PING.sums")).data))
        info = ServiceInfo.from_dict(json.loads((await ask("$SRV.INFO.sums")).data))
        stats = ServiceStats.from_dict(json.loads((await ask("$SRV.STATS.sums")).data))
    assert ping.id == info.id == stats.id == service.id
    assert [endpoint.subject for endpoint in info.endpoints] == ["sums.add", "sums.halve"]
    assert stats.endpoints[1].name == "half"


async def test_another_library_calls_our_service_and_we_call_theirs(
    connection: Connection, peer: Client
) -> None:
    async def answer(asked: Request) -> None:
        if asked.data == b"bad":
            await asked.respond_error("400", "bad request")
        else:
            await asked.respond(b"theirs")

    theirs = await nats.micro.add_service(peer, name="theirs", version="0.1.0")
    await theirs.add_endpoint(EndpointConfig(name="ask", subject="theirs.ask", handler=answer))
    await peer.flush()
    async with sums(connection):
        assert (await peer.request("sums.add", b"40 2", timeout=15)).data == b"42"
        refused = await peer.request("sums.halve", b"5", timeout=15)
        assert refused.headers == {
            "Nats-Service-Error": "5 is odd",
            "Nats-Service-Error-Code": "422",
        }
        assert (await request(connection, "theirs.ask")).data == b"theirs"
        with pytest.raises(ServiceError, match="400: bad request"):
            await request(connection, "theirs.ask", "bad")
        found = await reports(connection, "$SRV.INFO", 2)
        assert {report["name"] for report in found} == {"sums", "theirs"}
        # Both libraries use the same names for the same things.
        ours, other = sorted(found, key=lambda report: str(report["name"]))
        assert ours.keys() == other.keys()
        assert ours["endpoints"][0].keys() == other["endpoints"][0].keys()
    await theirs.stop()


async def test_an_overloaded_endpoint_answers_with_503_immediately(connection: Connection) -> None:
    gate = asyncio.Event()
    service = Service(connection, "slow", "1.0.0")

    @service.endpoint("slow.do", EndpointSettings(concurrency=1, pending_max=2))
    async def do(_: Message) -> bytes:
        await gate.wait()
        return b"done"

    async with service:
        asked = [asyncio.create_task(request(connection, "slow.do", timeout=20)) for _ in range(6)]
        refused, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        gate.set()
        results = await asyncio.gather(*asked, return_exceptions=True)
    errors = [result for result in results if isinstance(result, ServiceError)]
    assert refused
    assert waiting
    assert 1 <= len(errors) <= 4
    assert {error.code for error in errors} == {"503"}
    assert service.endpoints[0].stats.num_errors == len(errors)


async def test_groups_prefix_subjects_and_hand_down_their_queue(connection: Connection) -> None:
    service = Service(connection, "grouped", "1.0.0")
    orders = service.group("v1").group("orders", queue="o")

    @orders.endpoint("get")
    def get(message: Message) -> str:
        return message.subject

    async with service:
        assert (await request(connection, "v1.orders.get")).text == "v1.orders.get"
        assert service.info["endpoints"][0]["queue_group"] == "o"


async def test_an_endpoint_can_be_added_while_the_service_runs(connection: Connection) -> None:
    async with Service(connection, "grows", "1.0.0") as service:

        @service.endpoint("grows.*", EndpointSettings(data=lambda: {"size": 3}))
        async def late(message: Message) -> None:
            message.respond(b"late")

        assert (await request(connection, "grows.x")).data == b"late"
        (stats,) = await reports(connection, "$SRV.STATS.grows")
        assert stats["endpoints"][0]["data"] == {"size": 3}
        assert stats["endpoints"][0]["name"] == "grows-any"


async def test_a_service_survives_a_restart_of_the_broker(connect: Connect, until: Until) -> None:
    async with running_broker() as broker:
        connection, caller = await connect(broker.url), await connect(broker.url)
        async with sums(connection):
            await asyncio.to_thread(broker.restart)
            await until(lambda: connection.reconnects and caller.reconnects)
            await caller.flush()
            await connection.flush()
            assert (await request(caller, "sums.add", "1 1")).text == "2"
            assert len(await reports(caller, "$SRV.PING")) == 1


async def test_a_forbidden_endpoint_is_an_error_at_the_start(connect: Connect) -> None:
    user = User(
        "limited", Secret("pw"), permissions=Permissions(subscribe=("$SRV.>", "_INBOX.>", "a"))
    )
    async with running_broker(users=(user,)) as broker:
        connection = await connect(broker.url, user="limited", password=Secret("pw"))
        with pytest.raises(PermissionDenied, match=r"'sums\.add'"):
            await sums(connection).start()


async def test_stopped_returns_when_the_service_or_its_connection_ends(connect: Connect) -> None:
    connection = await connect()
    first, second = sums(connection), sums(connection)
    await first.start()
    await second.start()
    waiting = [asyncio.create_task(service.stopped()) for service in (first, second)]
    await first.stop()
    await asyncio.wait_for(waiting[0], 15)
    assert not waiting[1].done()
    await connection.close()
    await asyncio.wait_for(waiting[1], 15)
    with pytest.raises(ConfigError, match="started before"):
        await first.start()


def test_names_versions_and_metadata_are_checked(connection: Connection) -> None:
    with pytest.raises(ConfigError, match="service name"):
        Service(connection, "two words", "1.0.0")
    with pytest.raises(ConfigError, match="service version"):
        Service(connection, "a", "1.0")
    with pytest.raises(ConfigError, match="metadata"):
        Service(connection, "a", "1.0.0", metadata={"n": 1})  # type: ignore[dict-item]
