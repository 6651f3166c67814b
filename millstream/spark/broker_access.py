"""One connection for each worker process and broker, kept from task to task."""

from __future__ import annotations

import os

from millstream.settings import ConnectionSettings
from millstream.wire.sync.connection import BlockingConnection, BlockingJetStream

__all__ = ["PATIENCE_SECONDS", "connection_to", "jetstream_to"]

# How long a broker may be away before a call fails. Spark ends a query at the first error of a
# driver-side call, so these outlast a restart or a change of leader.
PATIENCE_SECONDS = 60.0

# Spark forks its workers: a socket made before the fork belongs to the parent.
_open: dict[tuple[int, ConnectionSettings], BlockingConnection] = {}


def connection_to(settings: ConnectionSettings) -> BlockingConnection:
    """This process's connection; one that was lost is opened again by its next call."""
    place = (os.getpid(), settings)
    known = _open.get(place)
    if known is None:
        known = _open[place] = BlockingConnection(settings)
    return known


def jetstream_to(settings: ConnectionSettings) -> BlockingJetStream:
    """The JetStream API over this process's connection."""
    return BlockingJetStream(connection_to(settings))
