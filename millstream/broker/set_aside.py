"""Streams that a broker starts without: their files are kept in a folder of their own.

    data/set-aside/20261116T173000Z/n1/main/orders/

A stream whose files are damaged can keep the whole broker from starting. Nothing is deleted: to
bring a stream back, stop the broker and move its folder to where it was.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from millstream.broker.folder import NodeFolder, read_json
from millstream.broker.kept_files import forget_streams, put_back, removed_streams
from millstream.errors import ConfigError

__all__ = ["AsideStream", "aside_streams", "set_aside"]

_FOLDER: Final = "set-aside"


@dataclass(frozen=True, slots=True)
class AsideStream:
    """A stream that the broker does not have, and where its files are."""

    account: str
    stream: str
    files: Path
    home: Path  # where they were, and have to be for the broker to have it

    @property
    def text(self) -> str:
        """All of this in words, with how to bring it back."""
        return (
            f"the stream '{self.stream}' of account '{self.account}' was set aside, and its events "
            f"are missing: its files are in {self.files}. To bring it back, stop the broker and "
            f"move that folder to {self.home}; to forget it, delete the folder"
        )


def set_aside(folders: Sequence[NodeFolder], names: Sequence[str]) -> None:
    """Move the files of streams out of the store of a node that does not run."""
    if len(folders) != 1:
        raise ConfigError(
            "--set-aside is for one node. In a cluster the other nodes have the same stream: "
            "remove the data folder of the broken node instead, and it copies all from them"
        )
    (folder,) = folders
    store = str(_streams(folder).parent)
    put_back(store, removed_streams(store))  # if an earlier start was interrupted
    forget_streams(store)
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    for home in [_home(folder, name) for name in names]:
        target = folder.data / _FOLDER / moment / folder.name / home.parent.parent.name / home.name
        target.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
        home.rename(target)


def aside_streams(data: Path) -> tuple[AsideStream, ...]:
    """The streams that were set aside and not brought back."""
    found = []
    for files in sorted(data.glob(f"{_FOLDER}/*/*/*/*")):
        node, account = files.parent.parent.name, files.parent.name
        home = _streams(NodeFolder(data, node)) / account / "streams" / files.name
        found.append(AsideStream(account, files.name, files, home))
    return tuple(found)


def _streams(folder: NodeFolder) -> Path:
    return Path(read_json(folder.plan).get("store") or folder.store) / "jetstream"


def _home(folder: NodeFolder, name: str) -> Path:
    """The folder of a stream, given as STREAM or ACCOUNT/STREAM."""
    account, _, stream = name.rpartition("/")
    known = sorted(_streams(folder).glob(f"{account or '*'}/streams/*"))
    homes = [home for home in known if home.name == stream]
    if len(homes) == 1:
        return homes[0]
    there = ", ".join(f"{home.parent.parent.name}/{home.name}" for home in homes or known)
    what = "is in several accounts" if homes else "is not there"
    raise ConfigError(f"--set-aside {name}: that stream {what}. Choose one of: {there or 'none'}")
