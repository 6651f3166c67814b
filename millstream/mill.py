"""The connection that application code holds: `mill = await millstream.connect()`."""

from __future__ import annotations

from typing import Any

from millstream.messaging import Client, Connecting
from millstream.settings import ConnectionSettings

__all__ = ["Mill", "connect"]


def connect(
    url: str | None = None,
    *,
    client_id: str | None = None,
    settings: ConnectionSettings | None = None,
    **changes: Any,
) -> Connecting[Mill]:
    """Connect to a broker: `mill = await connect()`, or `async with connect() as mill`.

    The address is `url`, else `NATS_URL`, else `url` in millstream.toml, else the broker that
    `millstream up` started on this folder's data, else nats://127.0.0.1:4222. Other settings are
    those of ConnectionSettings, as keywords. A `client_id` is claimed for this connection alone.
    """
    return Connecting(Mill, settings or ConnectionSettings.load(url, **changes), client_id)


class Mill(Client):
    """A connection to a broker, for one event loop: subjects, topics, schemas and tables.

    Reconnects by itself; close it when done.
    """
