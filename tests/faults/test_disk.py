"""The simulated power loss keeps what was synced; otherwise it would prove nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults.disk import Disk, can_mount, lose_power

CUTS = 8
RECORD = 160
SECONDS = 60.0
# Two threads, so that one writes while the other syncs, as streams of one server do. What was
# synced is written to a pipe: like an ack, it is sent before the power fails.
WRITER = f"""
import os, sys, threading
def work(name):
    file = os.open(os.path.join(sys.argv[1], name), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in range(10**9):
        os.write(file, b"%0{RECORD}d" % number)
        os.fsync(file)
        os.write(1, b"%s %d\\n" % (name.encode(), number))
for name in ("one", "two"):
    threading.Thread(target=work, args=(name,)).start()
"""


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    reason = can_mount()
    if reason is not None:
        pytest.skip(reason)
    return Disk(tmp_path / "disk.img", tmp_path / "disk", megabytes=32)


def synced_before_the_cut(disk: Disk) -> dict[str, int]:
    """Let a process write until it has synced some records, then cut the power."""
    with subprocess.Popen(
        [sys.executable, "-I", "-c", WRITER, str(disk.at)], stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        said = b""
        deadline = time.monotonic() + SECONDS
        try:
            while said.count(b"\n") < 20:
                assert time.monotonic() < deadline, "nothing gets synced"
                said += os.read(writer.stdout.fileno(), 65_536)
            lose_power([writer.pid], [disk])
        finally:
            writer.kill()
        said += writer.stdout.read()
    pairs = (line.split() for line in said.split(b"\n")[:-1])
    return {name.decode(): int(number) for name, number in pairs}


def test_what_was_synced_survives_the_simulated_power_loss(disk: Disk) -> None:
    """power, seed 109: running processes saw syncs succeed that a real power loss undoes."""
    try:
        for _ in range(CUTS):
            synced = synced_before_the_cut(disk)
            disk.unmount()
            disk.mount()
            for name, last in synced.items():
                content = (disk.at / name).read_bytes()
                assert len(content) // RECORD > last, f"{name}: {last} was synced and is gone"
                records = [int(content[n : n + RECORD]) for n in range(0, last * RECORD, RECORD)]
                assert records == list(range(last))
            for name in (
                "one",
                "two",
            ):  # also the one that had written nothing when the power failed
                (disk.at / name).unlink(missing_ok=True)
    finally:
        disk.close()
