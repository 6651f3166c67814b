"""What errors say is known to be true."""

from __future__ import annotations

from millstream.errors import FencedOut


def test_a_fenced_out_writer_reports_epochs_only_when_they_are_known() -> None:
    assert "its epoch is 3, the topic's is 4" in str(FencedOut("w", 3, 4))
    unknown = FencedOut("w")
    assert (unknown.writer, unknown.epoch, unknown.found) == ("w", None, None)
    assert "epoch" not in str(unknown)
