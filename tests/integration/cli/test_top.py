"""`millstream top` on a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import termios

from millstream.testing import AccountPool
from tests.integration.cli.conftest import MILLSTREAM


def test_q_ends_it_and_leaves_the_terminal_as_it_was(millstream_accounts: AccountPool) -> None:
    ours, its = pty.openpty()
    before = termios.tcgetattr(its)
    command = [MILLSTREAM, "top", "-i", "100ms", "-s", millstream_accounts.url()]
    with subprocess.Popen(command, stdin=its, stdout=its, stderr=its) as running:
        seen = b""
        while b"Topics of" not in seen:
            seen += os.read(ours, 65536)
        os.write(ours, b"q")
        assert running.wait(30) == 0
    assert termios.tcgetattr(its) == before
    os.close(ours)
    os.close(its)
