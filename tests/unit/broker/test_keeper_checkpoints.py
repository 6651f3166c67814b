"""Checkpoints of logs while the server is slow to answer."""

from __future__ import annotations

import http.server
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.broker.keeper import Keeper
from millstream.broker.log_ends import Cut

STREAM = {"name": "log", "created": "then", "state": {"first_seq": 1, "last_seq": 7}}
ANSWER = {"account_details": [{"name": "main", "stream_detail": [STREAM]}]}


class SlowMonitor(http.server.BaseHTTPRequestHandler):
    """A monitor that drops the first requests and answers the later ones."""

    dropped = 0

    def do_GET(self) -> None:
        if SlowMonitor.dropped < 2:
            SlowMonitor.dropped += 1
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(ANSWER).encode())

    def log_message(self, *_: Any) -> None:
        return


class Serving(Keeper):
    """A keeper whose server is alive."""

    def server_gone(self) -> int | None:
        return None


@pytest.fixture
def monitor() -> Iterator[dict[str, Any]]:
    SlowMonitor.dropped = 0
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), SlowMonitor)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield {"http": f"http://127.0.0.1:{server.server_port}"}
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def keeper(tmp_path: Path, monitor: dict[str, Any]) -> Iterator[Keeper]:
    read, write = os.pipe()
    plan = {
        "folder": str(tmp_path),
        "embedded": False,
        "single": True,
        "remove": [],
        "guards": [[], ""],
        "captures": [[], ""],
        "gateways": [[], ""],
        "log": [1000, 1],
        "monitor": monitor,
        "lost_key": "millstream.lost",
    }
    keeper = Serving(plan, read)
    keeper.owner_open = False
    keeper.cut = {"main/log": Cut(True, 40, torn=True)}
    yield keeper
    os.close(read)
    os.close(write)


def test_a_cut_log_is_reported_although_the_server_answers_late(keeper: Keeper) -> None:
    keeper.save_checkpoint(seconds=30)
    (warning,) = keeper.warnings
    assert "the log of 'log'" in warning
    assert keeper.cut == {}


def test_a_cut_log_is_reported_by_a_later_checkpoint_if_the_first_failed(keeper: Keeper) -> None:
    keeper.save_checkpoint()
    assert not keeper.warnings
    keeper.save_checkpoint(seconds=30)
    assert len(keeper.warnings) == 1
    keeper.save_checkpoint(seconds=30)
    assert len(keeper.warnings) == 1, "reported once"
