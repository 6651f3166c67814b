"""The messaging demo."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_demo_ends_with_every_acknowledged_event_in_the_log() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.messaging_demo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # It kills the broker once, which is one warning in the log.
    assert re.fullmatch(r"(the connection to \S+ was lost.*\n)?", done.stderr)
    for words in (
        "read back: ann ordered 3 sacks of flour",
        "fails on the order of ben",
        "bills ben (delivery 2)",
        "a sack of flour costs",
        "2,000 acknowledged: 0 missing, 0 stored twice",
    ):
        assert words in done.stdout
