"""When a server counts as gone, without a server."""

from __future__ import annotations

from unittest.mock import Mock

from millstream.wire.aio.link import (
    BROKEN_LINKS_MAX,
    BROKEN_LINKS_SECONDS,
    PINGS_UNANSWERED_MAX,
    BrokenLinks,
    Link,
)


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


async def test_links_that_are_dropped_again_and_again_end_the_connection() -> None:
    now = 0.0
    links = BrokenLinks(lambda: now)
    lost, dropped = Link({}, {}, Mock()), Link({}, {}, Mock())
    dropped.get_buffer(0)[:7] = b"MSG a\r\n"
    dropped.buffer_updated(7)
    for _ in range(3):  # far enough apart, it is tried again for ever
        now += BROKEN_LINKS_SECONDS + 1
        for _ in range(BROKEN_LINKS_MAX - 1):
            assert links.add(dropped) is None
            assert links.add(lost) is None
    closed = links.add(dropped)
    assert closed is not None
    assert "not a message: b'MSG a'" in str(closed)
