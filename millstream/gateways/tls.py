"""TLS of accepted connections, with little memory for each.

asyncio's own gives every connection a buffer of 256 KiB, which is 2.5 GB for 10,000 that are idle,
and does not count what it has handed to the socket's transport as unsent.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from asyncio.sslproto import SSLProtocol
from typing import Any, Final

__all__ = ["BUFFER_BYTES", "open_tls"]

BUFFER_BYTES: Final = 64 * 1024
# What the socket's transport takes before it pauses the encryption. It must be less than the limit
# at which the connection counts as not read, or that would never be noticed to end.
SOCKET_UNSENT_MAX: Final = 32 * 1024


class _Tls(SSLProtocol):
    """The server's side of one connection."""

    max_size = BUFFER_BYTES

    def __init__(self, buffer: bytearray, *args: Any, **values: Any) -> None:
        super().__init__(*args, **values)
        self._ssl_buffer = buffer
        self._ssl_buffer_view = memoryview(buffer)

    def connection_made(self, transport: Any) -> None:
        """The socket is there; the handshake begins."""
        transport.set_write_buffer_limits(high=SOCKET_UNSENT_MAX)
        super().connection_made(transport)

    def _get_write_buffer_size(self) -> int:
        """Bytes that the client has not read, of both layers."""
        transport: Any = self._transport
        below: int = 0 if transport is None else transport.get_write_buffer_size()
        size: int = super()._get_write_buffer_size()  # type: ignore[misc]
        return size + below


async def open_tls(
    connection: asyncio.BufferedProtocol,
    client: socket.socket,
    context: ssl.SSLContext,
    buffer: bytearray,
    seconds: tuple[float, float],
) -> None:
    """Give an accepted client its connection, when its handshake is done.

    All connections of an event loop may share the buffer: what was read there is taken at once.
    `seconds` are those for the handshake and, at the end, for the shutdown of TLS.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    handshake, shutdown = seconds

    def make() -> _Tls:
        return _Tls(
            buffer,
            loop,
            connection,
            context,
            done,
            server_side=True,
            ssl_handshake_timeout=handshake,
            ssl_shutdown_timeout=shutdown,
        )

    transport, _ = await loop.connect_accepted_socket(make, client)
    try:
        await done
    except BaseException:
        transport.abort()
        raise
