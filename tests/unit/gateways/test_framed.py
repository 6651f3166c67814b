"""Requests are found in a stream however it is cut, and within the limits."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from millstream.gateways.framed import REQUEST_COST, FramedConnection, Shared
from millstream.gateways.overload import Books, Budget, Closed
from millstream.gateways.settings import GatewaySettings
from millstream.gateways.transport import Transport

LARGEST = 200_000


class Socket:
    """The transport of a client that reads everything at once."""

    def __init__(self) -> None:
        self.paused = False
        self.closed = False
        self.written = bytearray()

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    abort = close

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int) -> None:
        """It is never full."""

    def get_extra_info(self, _name: str) -> Any:
        return ("127.0.0.1", 1234)


class Handler:
    """Keeps requests until they are given back."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.frames: list[bytes] = []
        self.open: list[bytes] = []
        self.reasons: list[str] = []

    def frame(self, data: bytes) -> None:
        self.frames.append(data)
        self.open.append(data)

    def lost(self, reason: str) -> None:
        self.reasons.append(reason)

    def answer(self) -> None:
        data = self.open.pop(0)
        self.transport.send(struct.pack(">i", len(data)), data, frees=len(data))


class Feed:
    """A connection, and the bytes that come for it."""

    def __init__(self, **limits: int) -> None:
        self.handlers: list[Handler] = []
        self.books = Books()
        settings = GatewaySettings(**limits)  # type: ignore[arg-type]
        self.shared = Shared(settings, self.make, self.books)
        self.connection = FramedConnection(self.shared)
        self.socket = Socket()
        self.connection.connection_made(self.socket)

    def make(self, transport: Transport) -> Handler:
        self.handlers.append(Handler(transport))
        return self.handlers[-1]

    async def feed(self, data: bytes, sizes: list[int]) -> None:
        """Let the bytes arrive in parts; requests are answered when nothing more is read."""
        (handler,) = self.handlers
        turn = 0
        while data:
            await asyncio.sleep(0)
            if self.socket.closed:
                return
            if self.socket.paused:
                handler.answer()
                continue
            buffer = self.connection.get_buffer(-1)
            size = min(len(buffer), sizes[turn % len(sizes)], len(data))
            turn += 1
            buffer[:size] = data[:size]
            data = data[size:]
            self.connection.buffer_updated(size)
        while handler.open:
            handler.answer()
            await asyncio.sleep(0)


REQUESTS = st.lists(
    st.integers(1, 300) | st.integers(1, LARGEST) | st.just(LARGEST), min_size=1, max_size=12
)
SIZES = st.lists(st.integers(1, 9) | st.integers(1, 100_000), min_size=1, max_size=8)


@given(REQUESTS, SIZES, st.sampled_from([1, 50_000, 10_000_000]))
def test_requests_arrive_in_order_however_the_stream_is_cut(
    lengths: list[int], sizes: list[int], limit: int
) -> None:
    if sum(lengths) > 20_000:  # byte by byte, that would be many turns
        sizes = [*sizes, 50_000]
    requests = [bytes([number]) * length for number, length in enumerate(lengths)]
    stream = b"".join(struct.pack(">i", len(one)) + one for one in requests)

    async def run() -> None:
        feed = Feed(max_connection_bytes=limit, max_frame=LARGEST)
        await feed.feed(stream, sizes)
        (handler,) = feed.handlers
        assert handler.frames == requests
        assert feed.socket.written == stream
        assert feed.shared.budget.used == 0
        assert not feed.shared.arriving
        assert feed.books.in_flight == 0
        feed.connection.connection_lost(None)
        assert handler.reasons == [Closed.CLIENT]
        assert not feed.shared.connections
        assert feed.shared.opening == 0

    asyncio.run(run())


@given(st.binary(max_size=300), SIZES)
def test_any_bytes_are_requests_or_end_the_connection(data: bytes, sizes: list[int]) -> None:
    async def run() -> None:
        feed = Feed(max_frame=100)
        await feed.feed(data, sizes)
        assert feed.shared.budget.used <= 100 + REQUEST_COST
        assert all(1 <= len(frame) <= 100 for frame in feed.handlers[0].frames)
        feed.connection.connection_lost(None)
        assert feed.shared.budget.used == 0
        assert not feed.shared.arriving
        assert not feed.shared.unsent

    asyncio.run(run())


class Waiter:
    def __init__(self) -> None:
        self.taken: list[int] = []

    def granted(self, size: int) -> None:
        self.taken.append(size)


def test_those_that_wait_for_room_are_served_in_their_order() -> None:
    budget, one, two, three = Budget(100), Waiter(), Waiter(), Waiter()
    assert budget.take(80, one)
    assert not budget.take(50, two)
    assert not budget.take(1, three)  # though there is room for it: two is first
    assert budget.room == 0
    budget.give(10)
    assert (two.taken, three.taken) == ([], [])
    budget.give(20)
    assert (two.taken, three.taken) == ([50], [])
    budget.give(1)
    assert three.taken == [1]
    assert budget.used == 100
    assert not budget.waiting


def test_one_that_leaves_lets_the_next_have_the_room() -> None:
    budget, one, two, three = Budget(100), Waiter(), Waiter(), Waiter()
    assert budget.take(80, one)
    assert not budget.take(50, two)
    assert not budget.take(20, three)
    budget.leave(two)
    assert three.taken == [20]
    budget.leave(two)
    assert budget.used == 100


def test_what_is_larger_than_the_limit_fits_alone() -> None:
    budget, one, two = Budget(100), Waiter(), Waiter()
    assert budget.take(500, one)
    assert not budget.take(1, two)
    budget.force(10)
    budget.give(510)
    assert two.taken == [1]
