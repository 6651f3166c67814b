"""What a keeper notes about logs while its server is slow to answer."""

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

STREAM = {"name": "log", "created": "then", "state": {"first_seq": 1, "last_seq": 7}}
ANSWER = {"account_details": [{"name": "main", "stream_detail": [STREAM]}]}


class HeldUp(http.server.BaseHTTPRequestHandler):
    """A monitor that drops the first requests and answers the later ones."""

    dropped = 0

    def do_GET(self) -> None:
        if HeldUp.dropped < 2:
            HeldUp.dropped += 1
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(ANSWER).encode())

    def log_message(self, *_: Any) -> None:
        return


class Serving(Keeper):
    """A keeper whose server lives."""

    def server_gone(self) -> int | None:
        return None


@pytest.fixture
def ports() -> Iterator[dict[str, Any]]:
    HeldUp.dropped = 0
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), HeldUp)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield {"monitoring": [f"http://127.0.0.1:{server.server_port}"]}
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    read, write = os.pipe()
    plan = {
        "folder": str(tmp_path),
        "embedded": False,
        "single": True,
        "remove": [],
        "log": [1000, 1],
    }
    keeper = Serving(plan, read)
    keeper.owner_open = False
    keeper.cut = {"main/log": True}
    yield keeper
    os.close(read)
    os.close(write)


def test_a_cut_log_is_told_though_the_server_does_not_answer_at_once(
    keeper: Keeper, ports: dict[str, Any]
) -> None:
    keeper.mark_ends(ports, seconds=30)
    (told,) = keeper.warnings
    assert "the log of 'log'" in told
    assert keeper.cut == {}


def test_a_cut_log_is_told_by_a_later_look_when_the_first_was_in_vain(
    keeper: Keeper, ports: dict[str, Any]
) -> None:
    keeper.mark_ends(ports)
    assert not keeper.warnings
    keeper.mark_ends(ports, seconds=30)
    assert len(keeper.warnings) == 1
    keeper.mark_ends(ports, seconds=30)
    assert len(keeper.warnings) == 1, "told once"
