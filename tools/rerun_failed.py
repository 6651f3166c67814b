"""Runs pytest; if only a few tests fail, runs those once more, alone.

    python -m tools.rerun_failed --at-most 5 -- [options of pytest]

Exit code 0 means that every test passed, in the first run or alone. Tests that needed the second
run are printed last, after `flaky:`, so that they are easy to find.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

SOME_FAILED = 1  # pytest's exit code for a complete run with failures; any other one is an error


def failed_tests(cache: Path) -> list[str]:
    """The node ids of the last run's failures, as pytest's own cache has them."""
    file = cache / "v" / "cache" / "lastfailed"
    return sorted(json.loads(file.read_text())) if file.exists() else []


def run_pytest(cache: Path, options: list[str]) -> int:
    command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", *options]
    return subprocess.run(command, check=False).returncode


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def run(at_most: int, options: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="rerun-failed-") as folder:
        cache = Path(folder)
        code = run_pytest(cache, options)
        failed = failed_tests(cache)
        if code != SOME_FAILED or not failed:
            return code
        if len(failed) > at_most:
            say(f"{len(failed)} tests failed; at most {at_most} are run again")
            return code
        # A file that could not be collected has no test to run alone.
        if any("::" not in name for name in failed):
            return code
        say(f"running {len(failed)} failed test(s) once more, alone")
        again = run_pytest(cache, ["--numprocesses", "0", *failed])
        if again != 0:
            return again
        say("flaky: " + ", ".join(failed))
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description="Run pytest; run a few failed tests again, alone.")
    parser.add_argument("--at-most", type=int, default=5, help="Run again up to this many.")
    parser.add_argument("options", nargs="*", help="Options of pytest, after --.")
    chosen = parser.parse_args()
    sys.exit(run(chosen.at_most, chosen.options))


if __name__ == "__main__":
    main()
