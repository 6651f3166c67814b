"""What a backup is on disk: a folder with one archive for each stream, and a manifest."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from millstream.errors import BackupError, ConfigError
from millstream.messaging.groups.records import PartitionRecord
from millstream.wire.api import StreamState
from millstream.wire.protocol import unique_token

__all__ = [
    "Draft",
    "GroupRecord",
    "Manifest",
    "Progress",
    "Readers",
    "StreamBackup",
    "check_file",
    "read",
    "read_checked",
    "sha256_of",
    "sync_folder",
    "write_durable",
]

FORMAT: Final = 1
MANIFEST: Final = "manifest.json"
SUM: Final = "manifest.sha256"

M = TypeVar("M")

# Called with the stream that is copied, and how many bytes are done, of all.
Progress = Callable[[str, int, int], None]


class Readers(msgspec.Struct, frozen=True):
    """How far a subscription had acked everything when the backup began."""

    consumer: int
    stream: int


class StreamBackup(msgspec.Struct, frozen=True):
    """One stream of a backup."""

    name: str
    topic: str
    file: str
    bytes: int
    sha256: str
    digest: str  # of all messages in the archive
    config: dict[str, Any]
    state: StreamState  # when its copy began
    end: int  # its last sequence when the backup was complete
    at_least: int  # messages that were there both when its copy began and when it was complete
    added: int  # messages stored while it was copied, of a stream that keeps few of each subject
    readers: dict[str, Readers]


class GroupRecord(msgspec.Struct, frozen=True):
    """How far an ordered group was in one partition when the backup began."""

    topic: str
    group: str
    partition: int
    record: PartitionRecord


class Manifest(msgspec.Struct, frozen=True):
    """A whole backup."""

    format: int
    millstream: str
    server: str
    began: str
    finished: str
    account: str
    whole: bool  # all streams of the account
    topics: list[str]  # that were asked for; empty if whole
    streams: list[StreamBackup]
    groups: list[GroupRecord]
    schemas: dict[str, str]  # topic: the record of its versions

    @property
    def messages(self) -> int:
        return sum(stream.state.messages + stream.added for stream in self.streams)

    @property
    def bytes(self) -> int:
        return sum(stream.bytes for stream in self.streams)


class Draft:
    """A backup that is being written, beside its folder; it gets its name when it is complete."""

    def __init__(self, folder: Path) -> None:
        self.target = folder
        self.path = folder.with_name(f".{folder.name}.unfinished-{unique_token()[:8]}")
        # Ctrl-C does not stop a thread: what begins or finishes it ends before it is removed.
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Create its folder, beside the one whose name it gets."""
        if self.target.is_mount():  # found here, not when everything is copied
            raise ConfigError(
                f"{self.target} is where a disk is mounted, and a backup gets its name by a "
                f"rename: name a new folder in it, like {self.target / 'monday'}"
            )
        if self.target.exists() and (not self.target.is_dir() or any(self.target.iterdir())):
            raise ConfigError(
                f"{self.target} exists and is not empty: a backup is never written over another. "
                f"Choose another folder"
            )
        with self._lock:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700)  # events may be anything

    def finish(self, manifest: msgspec.Struct, name: str = MANIFEST, sum_name: str = SUM) -> None:
        """Make it durable and give it its name."""
        text = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
        with self._lock:
            write_durable(self.path / name, text)
            write_durable(self.path / sum_name, hashlib.sha256(text).hexdigest().encode() + b"\n")
            sync_folder(self.path)
            os.rename(self.path, self.target)  # noqa: PTH104  (replaces an empty folder)
            sync_folder(self.target.parent)

    def remove(self) -> None:
        """Remove what is there of an unfinished one."""
        with self._lock, contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.path)


def write_durable(path: Path, content: bytes) -> None:
    """Write a new file that only its owner can read, and that a crash does not lose."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read(folder: Path) -> Manifest:
    """The manifest of a complete backup; BackupError if there is none, or it is damaged."""
    return read_checked(folder, MANIFEST, SUM, Manifest)


def read_checked(folder: Path, name: str, sum_name: str, kind: type[M]) -> M:
    """A manifest of that kind, compared with its checksum."""
    try:
        text = (folder / name).read_bytes()
        expected = (folder / sum_name).read_text().strip()
    except OSError as error:
        raise BackupError(
            f"{folder} is not a complete backup: {error.strerror} ({error.filename})"
        ) from error
    if hashlib.sha256(text).hexdigest() != expected:
        raise BackupError(f"{folder / name} was changed or is damaged; use another backup")
    version = msgspec.json.decode(text, type=dict[str, Any]).get("format")
    if version != FORMAT:
        raise BackupError(
            f"{folder} has format {version}, and this version of Millstream reads {FORMAT}"
        )
    return msgspec.json.decode(text, type=kind)


def check_file(folder: Path, stream: StreamBackup) -> None:
    """BackupError if the archive of a stream is not the one that was written."""
    path = folder / stream.file
    try:
        size, found = path.stat().st_size, sha256_of(path)
    except OSError as error:
        raise BackupError(f"{path} cannot be read: {error.strerror}") from error
    if size != stream.bytes:
        raise BackupError(
            f"{path} has {size:,} bytes instead of {stream.bytes:,}: the backup is damaged. "
            f"Nothing was restored; use another backup"
        )
    if found != stream.sha256:
        raise BackupError(
            f"{path} was changed or is damaged: its checksum does not match. Nothing was "
            f"restored; use another backup"
        )


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def topics_of(streams: Iterable[StreamBackup]) -> list[str]:
    """The topics that have streams in a backup."""
    return sorted({stream.topic for stream in streams})
