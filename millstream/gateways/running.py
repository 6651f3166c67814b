"""One gateway from start to end: connected, named, listening, answering for itself, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Coroutine
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from millstream.deadline import now_ns
from millstream.errors import (
    ConnectionClosed,
    GatewayBusy,
    IdentityTaken,
    MillstreamError,
    NotReplicated,
)
from millstream.gateways.access import Logins
from millstream.gateways.listener import Listener
from millstream.gateways.overload import Books
from millstream.gateways.protocols import ProtocolEntry
from millstream.gateways.settings import GatewaySettings
from millstream.gateways.status import Answering, GatewayStatus
from millstream.messaging import IdentitySettings
from millstream.mill import Mill, connect
from millstream.settings import ConnectionSettings

__all__ = ["serve_gateway"]

_log = logging.getLogger("millstream.gateways")

# Of a gateway that was killed: its connection is gone at once, so that there is no answer. One that
# only lost its connection for longer is replaced, and then ends when it is connected again.
PROBE_SECONDS: Final = 1.0
CLUSTER_REPLICAS: Final = 3  # of the names, so that they are there when a node is not
STOP_SECONDS: Final = 10.0  # for each part of a gateway to end; more would only be a deadlock


async def serve_gateway(
    entry: ProtocolEntry,
    settings: GatewaySettings,
    connection: ConnectionSettings,
    stop: asyncio.Event,
    on_listening: Callable[[GatewayStatus], None] | None = None,
    *,
    data: Path | None = None,
) -> None:
    """Run a gateway until the event is set; then answer what was asked, and return.

    `data` is the data folder of the broker, where it is on this machine: clients can then log in
    by SCRAM. Raises GatewayBusy if one of its name runs, PortTaken, MissingExtra, and whatever it
    fails with while it runs: the caller starts it again then.
    """
    entry.check()
    who = replace(connection, name=f"millstream gateway {settings.name}")
    async with connect(settings=who) as mill:
        await _claim(mill, settings.name)
        await _Serving(entry, settings, mill, data).serve(stop, on_listening)
    _log.info("%s gateway '%s' has stopped", entry.name, settings.name)


async def _claim(mill: Mill, name: str) -> None:
    """Take the name. It is given back when the connection is closed."""
    replicas = 1 if mill.connection.info.cluster is None else CLUSTER_REPLICAS
    for copies in dict.fromkeys((replicas, 1)):
        how = IdentitySettings(probe_timeout=PROBE_SECONDS, replicas=copies)
        try:
            await mill.claim(f"gateway {name}", how)
            return
        except IdentityTaken as error:
            raise GatewayBusy(name, error.holder, error.since) from error
        except NotReplicated:  # a cluster of two
            if copies == 1:
                raise


class _Serving:
    """The parts of a running gateway."""

    def __init__(
        self, entry: ProtocolEntry, settings: GatewaySettings, mill: Mill, data: Path | None
    ) -> None:
        self._entry, self._settings, self._mill = entry, settings, mill
        self._started = datetime.fromtimestamp(now_ns() // 1_000_000_000, UTC)
        self._state = "starting"
        self._books = Books()
        self._logins = Logins(mill, settings, data)
        self._gateway = entry.make(mill, settings, self._logins, self._books)
        self._listener = Listener(settings, self._gateway.make_handler, self._books)
        self._undo = contextlib.AsyncExitStack()  # what was started, to be ended in reverse order
        self._grace: float | None = None  # for requests in progress; None: that of the settings

    async def serve(
        self, stop: asyncio.Event, on_listening: Callable[[GatewayStatus], None] | None
    ) -> None:
        """Start everything, wait for the end, and stop everything."""
        ended = asyncio.ensure_future(self._ended(stop))
        starting = asyncio.ensure_future(self._start())
        try:
            await asyncio.wait((ended, starting), return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                self._listening(on_listening)
            await ended
        except BaseException:
            self._grace = 0.0  # it cannot answer any more
            raise
        finally:
            for task in (starting, ended):
                task.cancel()
            await asyncio.gather(starting, ended, return_exceptions=True)
            await self._undo.aclose()

    async def _start(self) -> None:
        """In this order: who connects is served, and who asks for the status gets an answer."""
        await self._listener.bind()
        self._after("listener", self._stop_listener)
        self._after("logins", self._logins.stop)
        await self._logins.start()
        answering = Answering(self._mill, self._settings.name, self.status)
        await self._undo.enter_async_context(answering)
        self._after("protocol", self._gateway.stop)
        await self._gateway.start(self._listener.port)
        # Once more, as the first to be stopped: the protocol ends after its last connection.
        self._after("listener", self._stop_listener)
        await self._listener.start()

    def _listening(self, on_listening: Callable[[GatewayStatus], None] | None) -> None:
        self._state = "listening"
        status = self.status()
        more = "" if status.advertised == status.address else f", as {status.advertised}"
        name, address = self._settings.name, status.address
        _log.info("%s gateway '%s' listens on %s%s", self._entry.name, name, address, more)
        if on_listening is not None:
            on_listening(status)

    async def _ended(self, stop: asyncio.Event) -> None:
        """Return when it was asked to stop; raise the reason when it cannot go on."""
        closed = asyncio.Event()
        self._mill.connection.on_closed.append(closed.set)
        if self._mill.connection.closed:
            closed.set()
        asked, lost = (asyncio.ensure_future(event.wait()) for event in (stop, closed))
        failed = self._gateway.failed
        try:
            await asyncio.wait((asked, lost, failed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (asked, lost):
                task.cancel()
        if failed.done():
            failed.result()
        if stop.is_set():
            return
        if self._mill.identity is not None:
            self._mill.identity.check()  # another one has its name
        self._mill.connection.check_open()  # it says why it is closed
        raise ConnectionClosed("the connection to the broker is closed")

    # -- ending -------------------------------------------------------------------------------

    def _after(self, part: str, stop: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Stop a part at the end; a fault there must not keep the others from ending."""

        async def end() -> None:
            try:
                async with asyncio.timeout(STOP_SECONDS + self._settings.stop_grace):
                    await stop()
            except (MillstreamError, OSError) as error:
                _log.warning("the %s did not stop cleanly: %s", part, error)
            except Exception:
                _log.exception("the %s did not stop cleanly", part)

        self._undo.push_async_callback(end)

    async def _stop_listener(self) -> None:
        await self._listener.stop(self._grace)

    # -- its status -----------------------------------------------------------------------------

    def status(self) -> GatewayStatus:
        """What it says about itself."""
        settings, port = self._settings, self._listener.port
        return GatewayStatus(
            name=settings.name,
            protocol=self._entry.name,
            state=self._state,
            address=_address(settings.host, port),
            advertised=_address(*settings.advertised(port)),
            tls=settings.tls,
            login=self._logins.required,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=self._started.strftime("%Y-%m-%dT%H:%M:%SZ"),
            books=self._books.to_json(),
            details=self._gateway.status(),
        )


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
