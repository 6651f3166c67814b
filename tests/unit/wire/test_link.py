"""When a server counts as gone, without a server."""

from __future__ import annotations

from unittest.mock import Mock

from millstream.wire.aio.link import PINGS_UNANSWERED_MAX, Link


async def test_a_server_that_sends_messages_but_no_pongs_is_alive() -> None:
    link = Link({}, {}, Mock())
    for _ in range(PINGS_UNANSWERED_MAX * 2):
        link.get_buffer(0)[:6] = b"PING\r\n"
        link.buffer_updated(6)
        assert link.check_life()
    assert not link.check_life()


async def test_a_server_that_sends_nothing_is_gone() -> None:
    link = Link({}, {}, Mock())
    for _ in range(PINGS_UNANSWERED_MAX):
        assert link.check_life()
    assert not link.check_life()
