"""When a keeper calls its server ready, by what the server's health says."""

from __future__ import annotations

import http.server
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.broker import keeper as module
from millstream.broker.keeper import Keeper, fetch

BEHIND = b"""{"error":"JetStream stream 'main > events' is not current: group node unhealthy"}"""
ALONE = b'{"error":"JetStream has not established contact with a meta leader"}'


class Unwell(http.server.BaseHTTPRequestHandler):
    """A monitor whose health never gets well."""

    body = b""

    def do_GET(self) -> None:
        self.send_response(503)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: Any) -> None:
        return


class Waiting(Keeper):
    """A keeper whose server listens and lives, as a fake monitor says."""

    monitor = ""
    told: list[tuple[str, dict[str, Any]]]

    def read_ports(self) -> dict[str, Any]:
        return {"monitoring": [self.monitor]}

    def server_gone(self) -> int | None:
        return None

    def report(self, event: str, **facts: Any) -> None:
        self.told.append((event, facts))


class Clock:
    """The time, until the monitor has answered once: then every deadline has passed."""

    ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead

    def fetch(self, *args: Any) -> tuple[int, str]:
        code, body = fetch(*args)
        if code:
            self.ahead = 1000.0
        return code, body


@pytest.fixture
def monitor() -> Iterator[http.server.HTTPServer]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Unwell)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("body", "single", "ready"),
    [(BEHIND, False, True), (BEHIND, True, False), (ALONE, False, False)],
    ids=["a copy that is behind", "of a single server", "no leader"],
)
def test_a_node_of_a_cluster_whose_copy_is_behind_serves_all_the_same(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    monitor: http.server.HTTPServer,
    body: bytes,
    single: bool,
    ready: bool,
) -> None:
    """cluster-power-periodic, seed 111: to stop the nodes made it impossible to heal the topic."""
    Unwell.body = body
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module, "fetch", clock.fetch)
    read, write = os.pipe()
    plan = {
        "folder": str(tmp_path),
        "embedded": False,
        "single": single,
        "remove": [],
        "log": [1000, 1],
        "timeout": 60.0,
        "health": "/healthz",
    }
    try:
        keeper = Waiting(plan, read)
        keeper.owner_open = False
        keeper.told = []
        keeper.monitor = f"http://127.0.0.1:{monitor.server_port}"
        found = keeper.await_ready()
    finally:
        os.close(read)
        os.close(write)
    assert (found is not None) == ready
    assert len(keeper.warnings) == ready
    assert [event for event, _ in keeper.told] == ([] if ready else ["failed"])
