"""Runs tests while their processes are stopped at random, as on an overloaded machine.

`python -m tests.stalls [--seed N] [--longest SECONDS] -- tests/integration ...` gives everything
after `--` to pytest. Meanwhile its child processes, chosen at random, are stopped for a moment:
a test process, a broker, a worker, a JVM. A test that fails only here has a race.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

STOPPERS: Final = (
    2  # so that two processes can be stopped at the same time, as two cores can be busy
)
PAUSE_SECONDS: Final = 0.5  # on average, between two stops
STOP_SECONDS: Final = 0.5  # on average, for which a process is stopped


def descendants(root: int) -> list[int]:
    """The descendants of a process that are neither dead nor stopped by another process."""
    children: dict[int, list[tuple[int, str]]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # it has ended
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                children.setdefault(int(parent), []).append((int(folder.name), state))
    found, ahead = [], [root]
    while ahead:
        for pid, state in children.get(ahead.pop(), []):
            ahead.append(pid)
            if state not in "TZ":
                found.append(pid)
    return found


def stop_now_and_then(root: int, seed: int, longest: float, over: threading.Event) -> None:
    """Stop random processes below `root` until it ends; each is always continued."""
    chance = random.Random(seed)
    while not over.wait(chance.expovariate(1 / PAUSE_SECONDS)):
        living = descendants(root)
        if not living:
            continue
        pid = chance.choice(living)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            try:
                over.wait(min(longest, chance.expovariate(1 / STOP_SECONDS)))
            finally:
                os.kill(pid, signal.SIGCONT)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stalls", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="which stops (default 1)")
    parser.add_argument("--longest", type=float, default=1.5, help="seconds (default 1.5)")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    chosen = parser.parse_args()
    tests = subprocess.Popen([sys.executable, "-m", "pytest", *chosen.pytest])
    over = threading.Event()
    stoppers = [
        threading.Thread(
            target=stop_now_and_then,
            args=(tests.pid, chosen.seed * STOPPERS + number, chosen.longest, over),
        )
        for number in range(STOPPERS)
    ]
    for stopper in stoppers:
        stopper.start()
    try:
        return tests.wait()
    finally:
        over.set()
        for stopper in stoppers:
            stopper.join()


if __name__ == "__main__":
    sys.exit(main())
