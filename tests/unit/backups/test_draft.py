"""A backup that is being written: it gets its name complete, or not at all."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest

from millstream.backups import manifest
from millstream.backups.manifest import Draft, read_checked
from millstream.errors import ConfigError


class Small(msgspec.Struct):
    format: int = manifest.FORMAT


def test_ctrl_c_while_it_is_finished_does_not_take_it_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go_on = threading.Event(), threading.Event()
    sync = manifest.sync_folder

    def slow_disk(path: Path) -> None:
        writing.set()
        go_on.wait(60)
        sync(path)

    monkeypatch.setattr(manifest, "sync_folder", slow_disk)
    draft = Draft(tmp_path / "b")
    draft.begin()
    (draft.path / "orders.archive").write_bytes(b"events")
    finishing = threading.Thread(target=draft.finish, args=(Small(),))
    removing = threading.Thread(target=draft.remove)
    finishing.start()
    assert writing.wait(60)
    removing.start()
    removing.join(0.2)  # time to do the wrong thing
    go_on.set()
    finishing.join()
    removing.join()
    assert read_checked(tmp_path / "b", manifest.MANIFEST, manifest.SUM, Small) == Small()
    assert (tmp_path / "b" / "orders.archive").read_bytes() == b"events"
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_a_mount_point_is_refused_before_anything_is_copied() -> None:
    with pytest.raises(ConfigError, match="name a new folder in it, like /proc/monday"):
        Draft(Path("/proc")).begin()
