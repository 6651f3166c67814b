"""`millstream up --foreground`: a broker for a service manager, stopped by a signal."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import typer

from millstream.cli.output import print_json, say
from millstream.cli.views.broker import describe, report_gateways
from millstream.errors import BrokerError, ConfigError, NotRunning
from millstream.settings import environment, parse_duration

if TYPE_CHECKING:
    from millstream.broker import Broker, BrokerSettings, Cluster
    from millstream.cli.options.broker import LaunchOptions

__all__ = ["notify", "serve"]

TAKEOVER_WAIT = 60.0  # seconds of one wait; waiting as such has no limit
GONE_POLL = 0.5  # seconds between checks of the nodes of a cluster


class _Stop(BaseException):
    """SIGTERM arrived: not an error, so no `except Exception` may catch it."""


def serve(settings: BrokerSettings, launch: LaunchOptions, *, as_json: bool) -> None:
    """Serve until SIGTERM (exit 0) or Ctrl-C (exit 130); a server that dies is an error.

    Prints one line when ready and notifies systemd (`Type=notify`).
    """
    from millstream.broker import Broker, Cluster, read_state

    if launch.nodes > 1 and launch.standby:
        raise ConfigError("--standby is for one node; a cluster survives the loss of a node anyway")
    if launch.nodes > 1 and launch.set_aside:
        raise ConfigError("--set-aside is for one node; a cluster has other copies of a stream")
    timeout = parse_duration(launch.timeout)
    with _stop_on_sigterm():
        held = Cluster(settings, nodes=launch.nodes) if launch.nodes > 1 else Broker(settings)
        try:
            if isinstance(held, Cluster):
                held.start(timeout=timeout)
            else:
                aside = tuple(launch.set_aside or ())
                held.start(timeout=timeout, standby=launch.standby, set_aside=aside)
                _stand_by(held)
            state = read_state(settings.data)
            if as_json:
                print_json(state, line=True)
            else:
                say(describe(state))
            report_gateways(state)
            notify("READY=1\nSTATUS=serving")
            _wait_until_gone(held, settings.data)
            raise BrokerError(
                f"the server is gone: it crashed or was stopped from elsewhere. "
                f"Its last output is in {state.nodes[0].log}"
            )
        except _Stop:
            notify("STOPPING=1")
        finally:
            held.stop()


def _stand_by(held: Broker) -> None:
    """Return when the broker owns the folder; a service manager counts waiting as ready."""
    if not held.standing_by:
        return
    typer.echo(f"{held.data} has another owner; waiting to take over", err=True)
    notify("READY=1\nSTATUS=standing by")
    while not held.await_takeover(TAKEOVER_WAIT):
        continue


def _wait_until_gone(held: Broker | Cluster, data: Path) -> None:
    """Block until none of its servers is running."""
    from millstream.broker import Broker, read_state

    if isinstance(held, Broker):
        held.wait()
        return
    with suppress(NotRunning):
        while read_state(data).nodes:
            time.sleep(GONE_POLL)


@contextmanager
def _stop_on_sigterm() -> Iterator[None]:
    def stop(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough; the stop must finish
        raise _Stop

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def notify(message: str) -> None:
    """Notify systemd, if it started this process (sd_notify)."""
    address = environment("NOTIFY_SOCKET")
    if address is None:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.sendto(message.encode(), address)
