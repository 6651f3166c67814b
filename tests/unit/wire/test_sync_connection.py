"""The blocking connection of one thread."""

from __future__ import annotations

import socket

import pytest

from millstream.deadline import Deadline
from millstream.settings import ConnectionSettings
from millstream.wire.sync.connection import BlockingConnection


def test_an_interrupted_connect_leaves_no_half_open_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: object) -> bool:
        raise KeyboardInterrupt

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connection = BlockingConnection(ConnectionSettings(urls=(f"nats://127.0.0.1:{port}",)))
        monkeypatch.setattr(connection, "wait", interrupt)  # instead of the server's greeting
        with pytest.raises(KeyboardInterrupt):
            connection.open(Deadline(30))
        assert not connection.is_open
