"""What the asynchronous reader of a range makes of the leader's answers, without a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest.mock import Mock

import pytest

from millstream.errors import ApiError, MillstreamError
from millstream.settings import ConnectionSettings
from millstream.wire.aio.connection import Connection
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.aio.ordered_consumer import OrderedConsumer
from millstream.wire.api import ClusterInfo, ConsumerInfo
from millstream.wire.message import RawMessage, StoredMessage
from millstream.wire.range_cursor import Range, RangeCursor


class Leader(JetStream):
    """A leader that has no message of the rest of a range."""

    async def get_message(self, stream: str, ask: Mapping[str, Any]) -> StoredMessage | None:
        return None


class BrokenLeader(JetStream):
    async def get_message(self, stream: str, ask: Mapping[str, Any]) -> StoredMessage | None:
        raise MillstreamError("not to be waited out")


def reader_of(pending: int, leader: type[JetStream] = Leader) -> OrderedConsumer:
    """A reader in a cluster whose consumer counts `pending` messages and sends none."""
    reader = OrderedConsumer(leader(Connection(ConnectionSettings())), "s", Range(1, 11))
    reader._cursor.opened(ConsumerInfo(num_pending=pending, cluster=ClusterInfo(name="C")))
    reader._pull = Mock()
    reader._pull.peek.return_value = reader._pull.stop.return_value = []
    return reader


async def test_messages_that_are_counted_and_not_given_are_unreadable() -> None:
    assert await reader_of(3).ends_unreadable()


async def test_a_range_whose_end_is_being_confirmed_is_not_damaged() -> None:
    """The same answer of the leader ends it; whichever question is answered first."""
    reader = reader_of(0)
    assert not await reader.ends_unreadable()
    await reader._confirm_end()
    assert reader.done


async def test_an_error_while_the_end_is_confirmed_reaches_the_reader() -> None:
    reader = reader_of(0, BrokenLeader)
    await reader._confirm_end()
    with pytest.raises(MillstreamError, match="waited out"):
        reader.take_now(1)


async def test_consumers_that_all_fall_silent_end_a_range_with_an_error() -> None:
    now = 0.0
    reader = reader_of(3)
    reader._cursor = RangeCursor(Range(1, 11), 120, 5, lambda: now)
    silent = ApiError(503, 0, "no sign of life")
    for _ in range(8):
        reader._cursor.opened(ConsumerInfo(num_pending=3))
        reader._pull = Mock(**{"stop.return_value": [], "take_now.side_effect": silent})
        reader._opening = Mock(**{"done.return_value": False})  # it is being replaced
        assert reader.take_now(1) == []
        now += 15
    reader._pull = Mock(**{"stop.return_value": [], "take_now.side_effect": silent})
    with pytest.raises(ApiError, match="sign of life"):
        reader.take_now(1)


async def test_a_reader_that_skips_what_it_had_does_not_wait_with_more_in_the_buffer() -> None:
    jetstream = Leader(Connection(ConnectionSettings()))
    reader = OrderedConsumer(jetstream, "s", Range(1, 11, deliver="last_per_subject"))
    messages = [
        RawMessage(b"s", b"$JS.ACK.s.c.1.%d.%d.1700000000000000000.1" % (n, n), b"", b"")
        for n in (1, 2)
    ]
    for expected in (messages, []):
        reader._cursor.consumer_lost()
        reader._cursor.opened(ConsumerInfo(num_pending=3))
        reader._pull = Mock(**{"stop.return_value": [], "take_now.return_value": messages})
        assert reader.take_now(2) == expected
    assert await reader.signal.wait(0)
