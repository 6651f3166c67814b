"""`millstream backup` and `millstream restore`."""

from __future__ import annotations

from pathlib import Path

from millstream.testing import AccountPool
from tests.integration.cli.messaging_commands import Commands


def test_a_broker_is_backed_up_and_restored_by_commands(
    millstream_accounts: AccountPool, tmp_path: Path
) -> None:
    ours, other = (Commands(millstream_accounts.url()) for _ in range(2))
    ours("topic", "create", "orders")
    ours("pub", "--topic", "orders", "hello", "--key", "a")
    folder = str(tmp_path / "b")
    said = ours("backup", folder)
    assert "Backed up 1 stream(s) of account" in said
    assert "no other account, and no users" in said
    (stream,) = other.json("restore", folder)["streams"]
    assert (stream["stream"], stream["messages"], stream["compared"]) == ("orders", 1, True)
    assert "these streams exist: orders" in other.error("restore", folder)
    assert "not empty" in ours.error("backup", folder)
    said = ours.error("backup", str(Path(folder) / "manifest.json" / "below"))
    assert "cannot write the backup to" in said
    assert "choose a folder" in said
    report = ours.json("backup", str(tmp_path / "c"), "--topic", "orders")
    assert (report["whole"], report["streams"][0]["messages"]) == (False, 1)
    third = Commands(millstream_accounts.url())
    assert "every message" in third("restore", str(tmp_path / "c"))
