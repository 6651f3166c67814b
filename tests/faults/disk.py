"""Disks for servers that can lose power or fill up.

A disk is a file with an ext4 file system, mounted through a loop device over a node's store. Power
loss is the kernel's own: the file system is shut down in one instant (FS_IOC_SHUTDOWN without a
flush of its log, what the tests of Linux file systems use), everything that was only in the page
cache is gone, and mounting it again replays the journal. Before that moment an fsync is a real one.
What is not simulated: a disk that loses writes it said were flushed, or reorders between flushes.

Processes must have stopped by then, as they would with the power. To a process that still runs the
kernel says of an fsync under way while the file system goes down that it was done, though what it
wrote is not there afterwards: about one cut in ten, with nothing but write and fsync at work.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

__all__ = ["Disk", "can_mount", "lose_power"]

FS_IOC_SHUTDOWN: Final = 0x8004587D
WITHOUT_LOG_FLUSH: Final = 2
UNMOUNT_SECONDS: Final = 60.0  # until killed processes have ended
STOP_SECONDS: Final = 30.0


def can_mount() -> str | None:
    """None if this machine can; otherwise why not."""
    if os.geteuid() != 0:
        return "a disk of its own needs root, for mount"
    for command in ("mkfs.ext4", "mount", "umount", "losetup", "sync"):
        if shutil.which(command) is None:
            return f"a disk of its own needs '{command}'"
    found = subprocess.run(["losetup", "-f"], capture_output=True, check=False)
    return None if found.returncode == 0 else "there is no free loop device"


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


class Disk:
    """A file system in a file."""

    def __init__(self, image: Path, at: Path, megabytes: int = 256) -> None:
        self._image, self.at = image, at
        with image.open("wb") as file:
            file.truncate(megabytes * 1024 * 1024)
        # Lazily written tables would be lost with the power and slow down the first mount.
        _run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", str(image))
        at.mkdir(parents=True, exist_ok=True, mode=0o700)
        # One device as long as the disk exists: a second one would not see the first one's data.
        found = subprocess.run(
            ["losetup", "--find", "--show", str(image)], check=True, capture_output=True, text=True
        )
        self._device = found.stdout.strip()
        try:
            self.mount()
        except BaseException:
            self._detach()
            raise

    def mount(self) -> None:
        _run("mount", self._device, str(self.at))

    def unmount(self) -> None:
        """Unmount; a process that was just killed may hold it a little longer."""
        deadline = time.monotonic() + UNMOUNT_SECONDS
        while True:
            done = subprocess.run(["umount", str(self.at)], capture_output=True, check=False)
            if done.returncode == 0:
                return
            if time.monotonic() > deadline:
                raise OSError(f"{self.at} cannot be unmounted: {done.stderr.decode().strip()}")
            time.sleep(0.05)

    def sync(self) -> None:
        """Sync this disk, and no other."""
        _run("sync", "-f", str(self.at))

    def lose_power(self) -> None:
        """From now on nothing reaches the disk; what has not reached it yet is lost."""
        folder = os.open(self.at, os.O_RDONLY)
        try:
            fcntl.ioctl(folder, FS_IOC_SHUTDOWN, struct.pack("I", WITHOUT_LOG_FLUSH))
        finally:
            os.close(folder)

    def fill(self) -> int:
        """Fill the disk; returns how many bytes that took."""
        block, total = b"\0" * 65_536, 0
        file = os.open(self.at / "filler", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            while block:
                try:
                    total += os.write(file, block)
                except OSError:
                    block = block[: len(block) // 2]
            return total
        finally:
            os.close(file)

    def free(self) -> None:
        (self.at / "filler").unlink(missing_ok=True)

    def close(self) -> None:
        try:
            self.unmount()
        except OSError:
            _run("umount", "--lazy", str(self.at))  # the kernel unmounts it when its last user ends
            raise
        finally:
            self._detach()

    def _detach(self) -> None:
        _run("losetup", "-d", self._device)
        self._image.unlink()


def lose_power(pids: Sequence[int], disks: Sequence[Disk]) -> None:
    """Stop processes, then cut the power of their disks; the processes stay stopped."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        _await_stopped(pid)
    for disk in disks:
        disk.lose_power()


def _await_stopped(pid: int) -> None:
    """Return when every thread has stopped, or is inside a system call that ends before it runs."""
    deadline = time.monotonic() + STOP_SECONDS
    while not all(state in "TtD" for state in _thread_states(pid)):
        if time.monotonic() > deadline:
            raise RuntimeError(f"process {pid} does not stop")
        time.sleep(0.001)


def _thread_states(pid: int) -> list[str]:
    states = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            states.append((task / "stat").read_text().rsplit(")", 1)[1].split()[0])
    return states
