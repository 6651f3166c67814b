"""When a keeper reports its server as ready, depending on the server's health."""

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
from millstream.broker.keeper import Keeper
from millstream.broker.monitoring import ask_server

CATCHING_UP = (
    b"""{"error":"JetStream stream 'main > events' is not current: group node unhealthy"}"""
)
ALONE = b'{"error":"JetStream has not established contact with a meta leader"}'


class Unhealthy(http.server.BaseHTTPRequestHandler):
    """A monitor that never reports health."""

    body = b""

    def do_GET(self) -> None:
        self.send_response(503)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: Any) -> None:
        return


class Waiting(Keeper):
    """A keeper whose server listens and is alive, according to a fake monitor."""

    reports: list[tuple[str, dict[str, Any]]]

    def read_ports(self) -> dict[str, Any]:
        return {"monitoring": []}

    def server_gone(self) -> int | None:
        return None

    def report(self, event: str, **facts: Any) -> None:
        self.reports.append((event, facts))


class Clock:
    """The time, until the monitor has answered once: then every deadline has passed."""

    ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead

    def ask_server(self, *args: Any) -> tuple[int, str]:
        code, body = ask_server(*args)
        if code:
            self.ahead = 1000.0
        return code, body


@pytest.fixture
def monitor() -> Iterator[http.server.HTTPServer]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Unhealthy)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("body", "single", "ready"),
    [(CATCHING_UP, False, True), (CATCHING_UP, True, False), (ALONE, False, False)],
    ids=["a replica that catches up", "of a single server", "no leader"],
)
def test_a_cluster_node_is_ready_although_a_replica_is_catching_up(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    monitor: http.server.HTTPServer,
    body: bytes,
    single: bool,
    ready: bool,
) -> None:
    """cluster-power-periodic, seed 111: stopping the nodes made recovery impossible."""
    Unhealthy.body = body
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module, "ask_server", clock.ask_server)
    read, write = os.pipe()
    plan = {
        "folder": str(tmp_path),
        "embedded": False,
        "single": single,
        "remove": [],
        "guards": [[], ""],
        "captures": [[], ""],
        "gateways": [[], ""],
        "log": [1000, 1],
        "timeout": 60.0,
        "health": "/healthz",
        "max_memory": 0,
        "monitor": {"http": f"http://127.0.0.1:{monitor.server_port}"},
    }
    try:
        keeper = Waiting(plan, read)
        keeper.owner_open = False
        keeper.reports = []
        found = keeper.await_ready()
    finally:
        os.close(read)
        os.close(write)
    assert (found is not None) == ready
    assert len(keeper.warnings) == ready
    assert [event for event, _ in keeper.reports] == ([] if ready else ["failed"])
