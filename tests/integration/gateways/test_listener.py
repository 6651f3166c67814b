"""The listener under clients that are many, greedy or hostile. No broker is needed."""

from __future__ import annotations

import asyncio
import gc
import resource
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from millstream.gateways.framed import REQUEST_COST
from millstream.gateways.listener import Listener
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
    until,
)

__all__ = ["certificate", "quick"]  # fixtures


# -- many clients -----------------------------------------------------------------------------

# Opens connections, asks once over each, says so and waits until its input is closed.
CROWD = """
import resource, socket, ssl, sys
port, number, trusted = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
context = ssl.create_default_context(cafile=trusted) if trusted else None
clients = []
for _ in range(number):
    client = socket.create_connection(("127.0.0.1", port))
    if context is not None:
        client = context.wrap_socket(client, server_hostname="127.0.0.1")
    client.sendall(b"\\0\\0\\0\\5hello")
    clients.append(client)
for client in clients:
    answer = b""
    while len(answer) < 9:
        answer += client.recv(9) or sys.exit("closed")
print("asked", flush=True)
sys.stdin.read()
"""


@asynccontextmanager
async def crowd(one: Listener, number: int, trusted: str = "") -> AsyncIterator[None]:
    """That many connections from another process, each idle after a request."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CROWD, str(one.port), str(number), trusted),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"asked\n"
        yield
    finally:
        process.stdin.close()
        await process.wait()


def resident() -> int:
    """Bytes of this process in memory."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * KIB


def possible(wanted: int) -> int:
    """How many connections this process may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard - 1000)


async def test_10_000_idle_connections_take_little_memory() -> None:
    number, toy = possible(10_000), Toy()
    async with listening(toy) as one:
        gc.collect()
        before = resident()
        async with crowd(one, number):
            gc.collect()
            taken = resident() - before
            assert one.connections == number
            assert one.books.requests == number
        assert taken / number < 8 * KIB  # measured: 2 KiB
        await until(lambda: not one.connections)
        assert one._shared.budget.used == 0


async def test_idle_connections_with_tls_take_little_memory(certificate: Path) -> None:
    number, toy = possible(1000), Toy()
    async with listening(toy, **tls_of(certificate)) as one:
        gc.collect()
        before = resident()
        async with crowd(one, number, str(certificate)):
            gc.collect()
            taken = resident() - before
            assert one.connections == number
        assert taken / number < 100 * KIB  # measured: 22 KiB, most of it OpenSSL's


async def test_connections_beyond_the_limit_are_refused_until_others_are_closed() -> None:
    async with listening(Toy(), max_connections=50) as one:
        async with crowd(one, 50):
            async with client_of(one) as extra:
                assert await extra.ask(b"a") == b""
            assert one.connections == 50
            assert one.books.refused[Refused.CONNECTIONS] == 1
        await until(lambda: not one.connections)
        async with client_of(one) as client:
            assert await client.ask(b"a") == b"a"


async def test_a_client_without_requests_is_closed() -> None:
    async with listening(Toy(), idle_timeout=100) as one, client_of(one) as client:
        assert await client.ask(b"a") == b"a"
        await later(one, 101, lambda: one.books.closed[Closed.IDLE])
        assert await client.read() == b""
        await closed_as(one, Closed.IDLE)


async def test_a_client_that_waits_for_its_answer_is_not_idle() -> None:
    toy = Toy()
    toy.at_once = False
    async with listening(toy, idle_timeout=100) as one, crowd_here(one, 2) as (busy, idle):
        busy.send(b"a")
        await until(lambda: toy.waiting)
        await later(one, 101, lambda: one.books.closed[Closed.IDLE])
        assert await idle.read() == b""
        toy.answer()
        assert await busy.read() == b"a"
        assert one.books.closed[Closed.IDLE] == 1


# -- lengths ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "why"),
    [
        (0, Closed.BAD_LENGTH),
        (-1, Closed.BAD_LENGTH),
        (-(2**31), Closed.BAD_LENGTH),
        (KIB + 1, Closed.TOO_LARGE),
        (2**31 - 1, Closed.TOO_LARGE),
    ],
)
async def test_a_bad_length_is_refused_before_memory_is_taken(length: int, why: Closed) -> None:
    async with listening(Toy(), max_frame=KIB) as one:
        async with client_of(one) as client:
            tracemalloc.start()
            try:
                client.writer.write(struct.pack(">i", length) + b"x" * 10)
                assert await client.read() == b""
                assert tracemalloc.get_traced_memory()[1] < MIB
            finally:
                tracemalloc.stop()
        await closed_as(one, why)
        assert not one.books.requests


async def test_the_largest_request_is_taken_also_if_nothing_else_fits() -> None:
    limits = {"max_frame": MIB, "max_connection_bytes": KIB, "max_bytes": MIB}
    async with listening(Toy(), **limits) as one, client_of(one) as client:
        for _ in range(3):
            assert await client.ask(b"x" * MIB) == b"x" * MIB


async def test_a_protocol_may_ask_for_small_requests_at_first() -> None:
    toy = Toy()
    toy.max_frame = 10
    async with listening(toy) as one:
        async with client_of(one) as client:
            assert await client.ask(b"x" * 10) == b"x" * 10
            toy.transports[0].max_frame = 20
            assert await client.ask(b"x" * 20) == b"x" * 20
            assert await client.ask(b"x" * 21) == b""
        await closed_as(one, Closed.TOO_LARGE)


# -- limits on what is in progress ------------------------------------------------------------


async def test_requests_beyond_the_limit_of_a_connection_wait() -> None:
    toy, size, number = Toy(), 40 * KIB, 10
    toy.at_once = False
    limit = 3 * (size + REQUEST_COST)
    requests = [bytes([index]) * size for index in range(number)]
    async with listening(toy, max_connection_bytes=limit) as one, client_of(one) as client:
        client.send(*requests)
        for request in requests:
            await until(lambda: toy.waiting)
            assert len(toy.waiting) <= 3
            assert one._shared.budget.used <= limit
            toy.answer()
            assert await client.read() == request
        assert one.books.waited
        assert one._shared.budget.used == 0


async def test_requests_beyond_the_limit_of_all_wait_in_line() -> None:
    toy, size, number = Toy(), 40 * KIB, 12
    toy.at_once = False
    limit = 3 * (size + REQUEST_COST)
    async with (
        listening(toy, max_frame=size, max_bytes=limit) as one,
        crowd_here(one, number) as all_,
    ):
        for index, client in enumerate(all_):
            client.send(bytes([index]) * size)
        for _ in range(number):
            await until(lambda: toy.waiting)
            assert len(toy.waiting) <= 3
            assert one._shared.budget.used <= limit
            toy.answer()
        answers = [await client.read() for client in all_]
        assert answers == [bytes([index]) * size for index in range(number)]
        assert one._shared.budget.used == 0


async def test_one_that_waits_in_line_and_leaves_does_not_hold_up_the_next() -> None:
    toy, size = Toy(), 40 * KIB
    toy.at_once = False
    limits = {"max_frame": size, "max_bytes": size + REQUEST_COST}
    async with listening(toy, **limits) as one, crowd_here(one, 3) as (first, gone, last):
        first.send(b"a" * size)
        await until(lambda: toy.waiting)
        gone.send(b"b" * size)
        await until(lambda: one._shared.budget.waiting == 1)
        last.send(b"c" * size)
        await until(lambda: one._shared.budget.waiting == 2)
        # It is not read while it waits: only writing shows that it is gone.
        toy.transports[1].send(b"x")
        gone.writer.transport.abort()
        toy.transports[1].send(b"x" * 10)
        toy.answer()
        await until(lambda: toy.waiting)
        while toy.waiting[0][1] != b"c" * size:
            toy.waiting.pop(0)[0].release(size)
            await until(lambda: toy.waiting)
        toy.answer()
        assert await last.read() == b"c" * size


async def test_the_part_of_a_request_that_never_comes_is_given_back() -> None:
    toy, size = Toy(), 40 * KIB
    limits = {"max_frame": size, "max_bytes": size + REQUEST_COST}
    async with listening(toy, **limits) as one, crowd_here(one, 2) as (greedy, other):
        greedy.writer.write(struct.pack(">i", size))
        await until(lambda: one._shared.budget.used)
        other.send(b"b" * size)
        await until(lambda: one._shared.budget.waiting)
        await later(one, 31, lambda: one.books.closed[Closed.SLOW_REQUEST])
        assert await other.read() == b"b" * size


async def test_a_protocol_can_pause_a_connection() -> None:
    toy = Toy()
    toy.at_once = False
    async with listening(toy) as one, client_of(one) as client:
        client.send(b"a")
        await until(lambda: toy.waiting)
        (transport,) = toy.transports
        transport.pause()
        client.send(b"b", b"c", b"d" * MIB)
        async with client_of(one) as other:  # all that was sent before has been seen
            other.send(b"z")
            await until(lambda: len(toy.waiting) == 2)
        assert [data for _, data in toy.waiting] == [b"a", b"z"]
        transport.resume()
        await until(lambda: len(toy.waiting) == 5)
        toy.answer(5)
        assert [await client.read() for _ in range(4)] == [b"a", b"b", b"c", b"d" * MIB]


# -- failures ---------------------------------------------------------------------------------


async def test_a_request_that_fails_closes_its_connection_only() -> None:
    toy = Toy()
    async with listening(toy) as one, crowd_here(one, 2) as (bad, good):
        assert await bad.ask(b"fail") == b""
        assert await good.ask(b"a") == b"a"
        await until(lambda: one.books.closed[Closed.FAILED] == 1)
        assert toy.lost == [Closed.FAILED]


async def test_a_connection_that_is_not_set_up_is_closed() -> None:
    toy = Toy()
    toy.fail = "make"
    async with listening(toy) as one:
        async with client_of(one) as client:
            assert await client.ask(b"a") == b""
        await closed_as(one, Closed.FAILED)
        toy.fail = ""
        async with client_of(one) as client:
            assert await client.ask(b"a") == b"a"


async def test_what_was_sent_before_a_connection_is_closed_arrives() -> None:
    async with listening(Toy()) as one, client_of(one) as client:
        assert await client.ask(b"bye") == b"goes first"
        assert await client.read() == b""
        await closed_as(one, Closed.PROTOCOL)


async def test_clients_that_leave_in_the_middle_are_forgotten() -> None:
    toy = Toy()
    toy.at_once = False
    async with listening(toy) as one:
        for part in (b"", b"\0\0", b"\0\0\0\5hel", framed(b"hello"), framed(b"x" * MIB)):
            async with client_of(one) as client:
                client.writer.write(part)
                await client.writer.drain()
        await until(lambda: one.books.accepted == 5)
        await until(lambda: not one.connections)
        assert one._shared.budget.used == 0
        assert one.books.in_flight == 0
        assert not one._shared.arriving
        toy.answer(5)  # too late, and no harm


# -- stopping ---------------------------------------------------------------------------------


async def test_what_is_in_progress_is_answered_before_it_stops() -> None:
    toy = Toy()
    toy.at_once = False
    async with listening(toy) as one, crowd_here(one, 2) as (busy, idle):
        busy.send(b"a", b"b")
        await until(lambda: len(toy.waiting) == 2)
        busy.send(b"too late")
        stopping = asyncio.create_task(one.stop(PATIENCE))
        assert await idle.read() == b""
        with pytest.raises(ConnectionError):
            await asyncio.open_connection("127.0.0.1", one.port)
        toy.answer()
        assert await busy.read() == b"a"
        assert not stopping.done()
        toy.answer()
        assert await busy.read() == b"b"
        assert await busy.read() == b""
        await stopping
        assert not one.connections
        assert not toy.waiting
        assert toy.lost == [Closed.STOPPED] * 2


async def test_what_is_not_answered_in_time_is_given_up() -> None:
    toy = Toy()
    toy.at_once = False
    async with listening(toy) as one, client_of(one) as client:
        client.send(b"a")
        await until(lambda: toy.waiting)
        await one.stop(0)
        assert await client.read() == b""
        assert one._shared.budget.used == 0
