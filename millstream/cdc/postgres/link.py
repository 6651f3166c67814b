"""The replication connection: messages in, confirmations out, without blocking the event loop.

psycopg has no replication cursor; since 3.3 it lets the COPY of START_REPLICATION through, and the
calls of libpq below are public. Two kinds of messages come: data, and keepalives.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Any, Final

from millstream.closing import AsyncClosing
from millstream.deadline import now_ns
from millstream.errors import SourceUnreachable

__all__ = ["ReplicationLink"]

_DATA: Final = ord("w")
_KEEPALIVE: Final = ord("k")
_HEADER: Final = 25  # of data: kind, start, end, time
_STATUS: Final = struct.Struct(">cQQQqB")
_EPOCH: Final = 946_684_800_000_000  # microseconds from 1970 to 2000
STATUS_SECONDS: Final = 5.0  # between two confirmations; the server waits for 60


class ReplicationLink(AsyncClosing):
    """One START_REPLICATION. `drain` gives what has arrived; `wait` waits for more."""

    def __init__(self, connection: Any) -> None:
        from psycopg import Error

        self._error: type[Exception] = Error  # here, because `next` runs for every message
        self._connection = connection
        self._pg = connection.pgconn
        self._pg.nonblocking = 1
        self.end = 0  # of the log that the server has sent, by its last keepalive
        self._confirmed = 0
        self._asked = False  # the server wants a confirmation now
        self._sent = 0.0  # when the last one was sent
        self._clock = asyncio.get_running_loop().time

    async def _leave(self, error: BaseException | None) -> None:
        await asyncio.to_thread(self._connection.close)

    def next(self) -> bytes | None:
        """The payload of the next data message; None: nothing more has arrived."""
        get, error = self._pg.get_copy_data, self._error
        while True:
            try:
                size, data = get(1)
            except error as found:
                raise self._lost(found) from found
            if size > 0:
                kind = data[0]
                if kind == _DATA:
                    return bytes(data[_HEADER:])
                if kind == _KEEPALIVE:
                    self.end = max(self.end, int.from_bytes(data[1:9], "big"))
                    self._asked = self._asked or bool(data[17])
                continue
            if size == 0:
                return None
            raise self._lost(self._pg.get_error_message())

    def _lost(self, why: object) -> SourceUnreachable:
        text = str(why).strip() or "the server ended the stream"
        return SourceUnreachable(f"the replication connection was lost: {text}")

    async def wait(self, seconds: float) -> bool:
        """Wait until more has arrived, and take it in; false: nothing came in time."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._pg.socket, arrived.set)
        try:
            await asyncio.wait_for(arrived.wait(), seconds)
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(self._pg.socket)
        self.pull()
        return True

    def pull(self) -> None:
        """Take in what the socket has."""
        try:
            self._pg.consume_input()
        except self._error as found:
            raise self._lost(found) from found

    def confirm(self, lsn: int) -> None:
        """The server need not keep anything before this."""
        self._confirmed = max(self._confirmed, lsn)
        self._send()

    def keep_alive(self) -> None:
        """Say again what is confirmed, if it is time or if the server asks."""
        if self._asked or self._clock() - self._sent > STATUS_SECONDS:
            self._send()

    def _send(self) -> None:
        lsn, time = self._confirmed, now_ns() // 1000 - _EPOCH
        try:
            self._pg.put_copy_data(_STATUS.pack(b"r", lsn, lsn, lsn, time, 0))
            self._pg.flush()
        except self._error as found:
            raise self._lost(found) from found
        self._asked, self._sent = False, self._clock()
