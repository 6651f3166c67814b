"""Connecting: `mill = millstream.blocking.connect()`."""

from __future__ import annotations

from typing import Any

from millstream import mill as async_mill
from millstream.blocking.generated.mill import Mill
from millstream.blocking.loop import loop_thread
from millstream.settings import ConnectionSettings

__all__ = ["connect"]


def connect(
    url: str | None = None,
    *,
    client_id: str | None = None,
    settings: ConnectionSettings | None = None,
    **changes: Any,
) -> Mill:
    """Connect to a broker, for code without `await`: scripts, notebooks, threads.

    The same arguments as `millstream.connect`. Use it as `with connect() as mill`, or close it when
    done; at the end of the process it is closed automatically. Threads may share it. After a fork
    the child must connect again.
    """
    connecting = async_mill.connect(url, client_id=client_id, settings=settings, **changes)
    loop = loop_thread()
    return Mill(loop, loop.call(connecting.open()))
