"""An account of its own for each test of the persistence module; connections are closed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from millstream.eventsourcing import MillstreamDatastore
from millstream.settings import ConnectionSettings


@pytest.fixture(autouse=True)
def settings(
    millstream_url: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[ConnectionSettings]:
    """The environment that the library reads, and the settings of a connection."""
    opened: list[MillstreamDatastore] = []
    connect = MillstreamDatastore.__init__

    def remembered(self: MillstreamDatastore, settings: ConnectionSettings) -> None:
        connect(self, settings)
        opened.append(self)

    monkeypatch.setattr(MillstreamDatastore, "__init__", remembered)  # the library's tests leave it
    monkeypatch.setenv("PERSISTENCE_MODULE", "millstream.eventsourcing")
    monkeypatch.setenv("NATS_URL", millstream_url)
    monkeypatch.setenv("NATS_TIMEOUT", "30s")  # a busy broker is no fault of the test
    found = ConnectionSettings.load()
    if request.instance is not None:
        request.instance.settings = found
    yield found
    for datastore in opened:
        datastore.close()
