"""What `millstream status` prints."""

from __future__ import annotations

from millstream.broker.health import NodeHealth
from millstream.cli.commands.status import _node_row


def test_of_a_node_that_does_not_answer_nothing_is_made_up() -> None:
    silent = NodeHealth("c", False, "no answer", "", 0, 0, 0, 0, 0, 0, 0, 0, 0, None, ())
    assert _node_row(silent, "a") == ("c", "unhealthy", *["-"] * 9)
    known = NodeHealth("a", True, None, "2.15.1", 61, 0, 0, 2, 0, 0, 0, 0, 0, "a", ())
    assert _node_row(known, "a")[:5] == ("a", "ok, leader", "2.15.1", "1m01s", 2)
