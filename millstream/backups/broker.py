"""A backup of all accounts of a broker: that of each, and the files that its users need."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from millstream.backups.manifest import (
    FORMAT,
    SUM,
    Draft,
    Manifest,
    Progress,
    read,
    read_checked,
    sha256_of,
    sync_folder,
    write_durable,
)
from millstream.backups.restoring import RestoredStream, Restoring
from millstream.backups.taking import back_up, present_time, writing
from millstream.errors import BackupError, MillstreamError
from millstream.mill import connect
from millstream.settings import ConnectionSettings
from millstream.version import __version__

__all__ = [
    "FILES",
    "BrokerManifest",
    "account_folder",
    "back_up_broker",
    "is_of_a_broker",
    "read_broker",
    "restore_broker",
]

BROKER: Final = "broker.json"
BROKER_SUM: Final = "broker.sha256"
ACCOUNTS: Final = "accounts"
FILES: Final = "files"


class BrokerManifest(msgspec.Struct, frozen=True):
    """What a backup of a broker consists of; it is written last."""

    format: int
    millstream: str
    began: str
    finished: str
    accounts: dict[str, str]  # account: the checksum of its manifest
    files: dict[str, str]  # file of the broker: its checksum


@dataclass(frozen=True, slots=True)
class _Part:
    """One account that is being restored."""

    account: str
    restoring: Restoring


def account_folder(folder: Path, account: str) -> Path:
    """Where the backup of an account is; it is one of its own."""
    return folder / ACCOUNTS / account


def is_of_a_broker(folder: Path) -> bool:
    """Whether this is a backup of accounts, not of what one user sees."""
    return (folder / BROKER).exists()


async def back_up_broker(
    accounts: Mapping[str, ConnectionSettings],
    files: Sequence[Path],
    folder: Path,
    progress: Progress,
) -> dict[str, Manifest]:
    """Write a backup of these accounts, one after the other, and of the files to a new folder."""
    async with writing(folder) as draft:
        began = present_time()
        copied = await asyncio.to_thread(_copy_files, files, draft.path / FILES)
        made = {}
        for account, settings in accounts.items():
            async with connect(settings=settings) as mill:
                target = account_folder(draft.path, account)
                made[account] = await back_up(mill, target, (), _of(account, progress))
        await asyncio.to_thread(_finish, draft, began, list(made), copied)
    return made


def _finish(draft: Draft, began: str, accounts: Sequence[str], files: dict[str, str]) -> None:
    sums = {name: _sum_of(account_folder(draft.path, name)) for name in accounts}
    manifest = BrokerManifest(FORMAT, __version__, began, present_time(), sums, files)
    draft.finish(manifest, BROKER, BROKER_SUM)


def _copy_files(files: Sequence[Path], target: Path) -> dict[str, str]:
    """Copy files of the broker that exist, for their owner only; their checksums."""
    target.mkdir(mode=0o700)
    sums = {}
    for file in files:
        try:
            content = file.read_bytes()
        except FileNotFoundError:
            continue
        write_durable(target / file.name, content)
        sums[file.name] = hashlib.sha256(content).hexdigest()
    sync_folder(target)
    return sums


def _sum_of(folder: Path) -> str:
    return (folder / SUM).read_text().strip()


def read_broker(folder: Path) -> BrokerManifest:
    """The manifest of a backup of a broker; BackupError if it is not complete or damaged."""
    manifest = read_checked(folder, BROKER, BROKER_SUM, BrokerManifest)
    for account, expected in manifest.accounts.items():
        own = account_folder(folder, account)
        read(own)
        if _sum_of(own) != expected:
            raise BackupError(f"{own} is not the backup of '{account}' that belongs to {folder}")
    for name, expected in manifest.files.items():
        path = folder / FILES / name
        if not path.exists() or sha256_of(path) != expected:
            raise BackupError(f"{path} is missing, was changed or is damaged; use another backup")
    return manifest


async def restore_broker(
    accounts: Mapping[str, ConnectionSettings], folder: Path, progress: Progress
) -> dict[str, list[RestoredStream]]:
    """Restore these accounts of a backup; nothing is created before all of them were checked."""
    async with AsyncExitStack() as stack:
        parts = []
        for account, settings in accounts.items():
            mill = await stack.enter_async_context(connect(settings=settings))
            own = account_folder(folder, account)
            manifest = await asyncio.to_thread(read, own)
            parts.append(_Part(account, Restoring(mill, own, manifest, _of(account, progress))))
        for part in parts:
            try:
                await part.restoring.check(())
            except BackupError as error:
                raise BackupError(f"account '{part.account}': {error}") from error
        return await _create(parts)


async def _create(parts: Sequence[_Part]) -> dict[str, list[RestoredStream]]:
    restored: dict[str, list[RestoredStream]] = {}
    try:
        for part in parts:
            restored[part.account] = await part.restoring.create()
    except BaseException as error:  # the one that failed has removed its own
        left = await asyncio.shield(_remove([part for part in parts if part.account in restored]))
        if left and isinstance(error, MillstreamError):
            raise BackupError(
                f"{error}. These streams were restored and could not be removed again, delete "
                f"them: {', '.join(left)}"
            ) from error
        raise
    return restored


async def _remove(parts: Sequence[_Part]) -> list[str]:
    left = [(part.account, await part.restoring.remove()) for part in parts]
    return [f"{name} of account '{account}'" for account, names in left for name in names]


def _of(account: str, progress: Progress) -> Progress:
    def show(stream: str, done: int, total: int) -> None:
        progress(f"{account}: {stream}", done, total)

    return show
