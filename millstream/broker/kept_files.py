"""Protects the files of streams from the start of the server.

If the server cannot read the files of a stream, it logs a warning, deletes them, and starts as if
there had never been such a stream. So the files get a second name while it starts: a hard link,
which takes no space. What the server has deleted is put back, and the start fails.

    store/kept/<account>/<stream>/

Standard library only: the keeper loads this file.
"""

# Importing pathlib and shutil would take longer than everything else at start-up.
# ruff: noqa: PTH102, PTH103, PTH104, PTH106, PTH108, PTH110, PTH112, PTH118, PTH120, PTH123
# ruff: noqa: PTH116, PTH208
from __future__ import annotations

import contextlib
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

__all__ = ["forget_streams", "keep_streams", "put_back", "remove_unbegun", "removed_streams"]

KEPT: Final = "kept"  # in the folder of a store
FORGOTTEN: Final = "kept-old"  # while they are removed, so that half of them is never put back
GAVE_UP: Final = 'Error recreating stream "{}"'  # in the server's log, when it deletes a stream


def remove_unbegun(store: str) -> None:
    """Remove files that a killed server had just created in encrypted streams.

    A new file is there before its key. One that is empty and has no key holds nothing, but the
    server cannot read a stream with it.
    """
    for account in _names(os.path.join(store, "jetstream")):
        for stream in _names(os.path.join(store, "jetstream", account, "streams")):
            home = _home(store, f"{account}/{stream}")
            if os.path.exists(os.path.join(home, "meta.key")):  # it is encrypted
                with contextlib.suppress(OSError):
                    _remove_unbegun(os.path.join(home, "msgs"))


def _remove_unbegun(folder: str) -> None:
    names = set(_names(folder))
    for name in names:
        path = os.path.join(folder, name)
        key = name.removesuffix("blk") + "key"
        if name.endswith(".blk") and key not in names and os.stat(path).st_size == 0:
            os.unlink(path)


def keep_streams(store: str) -> None:
    """Give the files of every stream a second name; nothing where the disk has no hard links."""
    put_back(store, removed_streams(store))  # of a start that was interrupted
    forget_streams(store)
    for account in _names(os.path.join(store, "jetstream")):
        for stream in _names(os.path.join(store, "jetstream", account, "streams")):
            kept = _kept(store, f"{account}/{stream}")
            try:
                os.makedirs(os.path.dirname(kept), 0o700, exist_ok=True)
                _link(_home(store, f"{account}/{stream}"), kept)
            except OSError:
                _remove(kept)


def removed_streams(store: str, log: str = "") -> list[str]:
    """The streams, as account/stream, that were kept and are gone now.

    With the path of the server's log only those that it says it could not read: clients may have
    deleted others.
    """
    gone = [name for name in _kept_streams(store) if not os.path.exists(_home(store, name))]
    if not gone or not log:
        return gone
    with open(log, encoding="utf-8", errors="replace") as file:
        text = file.read()
    return [name for name in gone if GAVE_UP.format(name.partition("/")[2]) in text]


def put_back(store: str, streams: list[str]) -> None:
    """Move the kept files of these streams to where they were; the server must not run."""
    for name in streams:
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(_home(store, name)), 0o700, exist_ok=True)
            os.rename(_kept(store, name), _home(store, name))


def forget_streams(store: str) -> None:
    """Remove the second names; what a disk does not let go is tried again at the next start."""
    with contextlib.suppress(OSError):
        _remove(os.path.join(store, FORGOTTEN))
    with contextlib.suppress(OSError):
        os.rename(os.path.join(store, KEPT), os.path.join(store, FORGOTTEN))
        _remove(os.path.join(store, FORGOTTEN))


def _remove(root: str) -> None:
    for folder, _, files in os.walk(root, topdown=False):
        for name in files:
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)


def _link(source: str, target: str) -> None:
    os.mkdir(target, 0o700)
    with os.scandir(source) as entries:
        for entry in entries:
            name = os.path.join(target, entry.name)
            if entry.is_dir(follow_symlinks=False):
                _link(entry.path, name)
            else:
                os.link(entry.path, name)


def _kept_streams(store: str) -> list[str]:
    root = os.path.join(store, KEPT)
    accounts = _names(root)
    return [f"{account}/{name}" for account in accounts for name in _names(f"{root}/{account}")]


def _home(store: str, name: str) -> str:
    account, _, stream = name.partition("/")
    return os.path.join(store, "jetstream", account, "streams", stream)


def _kept(store: str, name: str) -> str:
    return os.path.join(store, KEPT, *name.split("/"))


def _names(folder: str) -> list[str]:
    return os.listdir(folder) if os.path.isdir(folder) else []
