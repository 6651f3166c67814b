"""The peers of the benchmark: the same appends on SQLite, PostgreSQL and a topic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from eventsourcing.persistence import ApplicationRecorder

from bench import eventsourcing_peer as peer
from bench.harness import PeerAbsent
from tools import postgres_server as tool


@pytest.fixture(params=["sqlite", "postgres", "millstream"])
def recorder(request: pytest.FixtureRequest, millstream_url: str) -> Iterator[ApplicationRecorder]:
    with ExitStack() as stack:
        if request.param == "sqlite":
            yield stack.enter_context(peer.sqlite_recorder())
        elif request.param == "millstream":
            yield stack.enter_context(peer.millstream_recorder(millstream_url))
        else:
            try:
                port = stack.enter_context(peer.postgres_server())
            except PeerAbsent as error:
                pytest.skip(str(error))
            yield stack.enter_context(peer.postgres_recorder(port, connections=4))


def test_every_event_is_appended_once(recorder: ApplicationRecorder) -> None:
    one_by_one = peer.append_events(recorder, aggregates=3, each=4)
    together = peer.append_events(recorder, aggregates=8, each=2, threads=4)
    assert (len(one_by_one.latencies), len(together.latencies)) == (12, 16)
    assert 0 < together.median <= together.quantile(0.99) <= together.seconds
    assert one_by_one.per_second > 0
    found = recorder.select_notifications(None, 100)
    assert sorted(one.originator_version for one in found) == sorted([1, 2, 3, 4] * 3 + [1, 2] * 8)


def test_without_postgresql_the_peer_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(tool, "PROGRAMS", str(tmp_path))
    with pytest.raises(PeerAbsent, match="make system-deps"), peer.postgres_server():
        pytest.fail("started")
