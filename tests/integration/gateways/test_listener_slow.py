"""The listener under clients that are slow, and with TLS. No broker is needed."""

from __future__ import annotations

import asyncio
import struct
from contextlib import suppress
from pathlib import Path

import pytest

from millstream.gateways import listener as listener_module
from millstream.gateways.framed import REQUEST_COST, UNSENT_MAX
from millstream.gateways.overload import Closed, Refused
from tests.integration.gateways.listener_kit import (
    KIB,
    MIB,
    PATIENCE,
    Toy,
    certificate,
    client_of,
    closed_as,
    crowd_here,
    framed,
    later,
    listening,
    quick,
    tls_of,
    trusting,
    until,
)

__all__ = ["certificate", "quick"]  # fixtures


# -- slow clients -----------------------------------------------------------------------------


async def test_a_request_that_does_not_arrive_is_not_waited_for() -> None:
    async with listening(Toy()) as one:
        for number, part in enumerate((b"\0", b"\0\0\0\5", b"\0\0\0\5hell"), 1):
            async with client_of(one) as client:
                assert await client.ask(b"a") == b"a"
                client.writer.write(part)
                await until(lambda: one._shared.arriving)
                await later(one, 31, lambda: not one.connections)
                assert await client.read() == b""
            await closed_as(one, Closed.SLOW_REQUEST, number)


async def test_a_request_that_trickles_in_is_not_waited_for() -> None:
    async with listening(Toy()) as one, client_of(one) as client:
        client.writer.write(struct.pack(">i", MIB))

        async def trickle() -> None:
            with suppress(ConnectionError):
                while True:
                    client.writer.write(b"x")
                    await client.writer.drain()
                    await asyncio.sleep(0.01)

        trickling = asyncio.create_task(trickle())
        await until(lambda: one.books.bytes_in > 10)
        await later(one, 3, lambda: not one.connections)
        assert await client.read() == b""
        trickling.cancel()
        await asyncio.gather(trickling, return_exceptions=True)
        await closed_as(one, Closed.SLOW_REQUEST)


async def test_a_client_that_does_not_read_is_closed_and_its_answers_are_bounded() -> None:
    toy, size = Toy(), 256 * KIB
    peaks: list[int] = []
    async with listening(toy) as one, client_of(one) as client:
        budget = one._shared.budget

        async def send() -> None:
            with suppress(ConnectionError):
                while True:
                    client.send(b"x" * size)
                    await client.writer.drain()
                    peaks.append(budget.used)

        sending = asyncio.create_task(send())
        await until(lambda: one._shared.unsent)
        await later(one, 31, lambda: one.books.closed[Closed.NOT_READING])
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        assert max(peaks) < UNSENT_MAX + 3 * (size + REQUEST_COST)
        await closed_as(one, Closed.NOT_READING)
        assert toy.lost == [Closed.NOT_READING]


async def test_many_clients_that_do_not_read_share_the_limit_of_all() -> None:
    """What each leaves unread is little, and counts all the same."""
    toy, size = Toy(), 60 * KIB
    toy.at_once = False
    async with listening(toy) as one, client_of(one) as client:
        transport = None
        sent = 0
        while not one._shared.unsent:
            client.send(b"x")
            await until(lambda: toy.waiting)
            transport, data = toy.waiting.pop()
            transport.send(framed(b"y" * size), frees=len(data))
            sent += 1
        assert transport is not None
        assert 0 < one._shared.budget.used <= 2 * UNSENT_MAX
        for _ in range(sent):
            assert await client.read() == b"y" * size
        await until(lambda: not one._shared.unsent)
        assert one._shared.budget.used == 0
        assert transport.writable


async def test_a_client_that_reads_slowly_gets_everything_in_order() -> None:
    toy = Toy()
    requests = [bytes([number]) * (300 * KIB + number) for number in range(60)]
    async with listening(toy) as one, client_of(one) as client:

        async def send() -> None:
            for request in requests:
                client.send(request)
                await client.writer.drain()

        sending = asyncio.create_task(send())
        await until(lambda: one._shared.unsent)  # the sockets are full
        for request in requests:
            assert await client.read() == request
        await sending
        await until(lambda: not one._shared.unsent)
        assert one._shared.budget.used == 0


# -- TLS --------------------------------------------------------------------------------------


async def test_large_requests_and_answers_pass_through_tls(certificate: Path) -> None:
    toy = Toy()
    context = await trusting(certificate)
    requests = [bytes([number]) * (200 * KIB + number) for number in range(30)]
    async with listening(toy, **tls_of(certificate)) as one, client_of(one, context) as client:

        async def send() -> None:
            for request in requests:
                client.send(request)
                await client.writer.drain()

        sending = asyncio.create_task(send())
        await until(lambda: one.books.requests > 1)
        for request in requests:
            assert await client.read() == request
        await sending
        await until(lambda: not one._shared.unsent)
        assert one._shared.budget.used == 0


async def test_answers_that_a_client_with_tls_does_not_read_count(certificate: Path) -> None:
    toy = Toy()
    context = await trusting(certificate)
    async with listening(toy, **tls_of(certificate)) as one, client_of(one, context) as client:
        client.pause()
        client.send(b"x" * 12 * MIB)  # more than the sockets take
        await until(lambda: one._shared.unsent)
        assert one._shared.budget.used
        await later(one, 31, lambda: one.books.closed[Closed.NOT_READING])
        assert one._shared.budget.used == 0


async def test_a_handshake_that_does_not_end_is_not_waited_for(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "HANDSHAKE_SECONDS", 0.1)
    async with listening(Toy(), **tls_of(certificate)) as one:
        for number, part in enumerate((b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"), 1):
            async with client_of(one) as client:
                client.writer.write(part)
                while await client.reader.read(KIB):
                    pass
            await until(lambda: not one.connections)
            assert one.books.refused[Refused.TLS] == number


async def test_handshakes_count_as_connections_and_end_when_it_stops(certificate: Path) -> None:
    values = {**tls_of(certificate), "max_connections": 2}
    async with listening(Toy(), **values) as one, crowd_here(one, 2), client_of(one) as extra:
        assert await extra.read() == b""
        assert one.connections == 2
        assert one.books.refused[Refused.CONNECTIONS] == 1
        await one.stop(PATIENCE)
        assert not one.connections
