"""Fuzz the pack decoder with atheris: python -m fuzz.pack SECONDS [libFuzzer options]

Inputs that break it are written to the working folder as crash-*; rerun one by giving its path.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["millstream.messaging"]):
    from fuzz.pack_target import check, seeds

__all__ = ["main"]

LARGEST_INPUT = 64 * 1024  # large enough for every structure, small enough for thousands a second
MEMORY_MB = 1024  # of the process; the decoder's own bound is checked for every input


def main() -> None:
    """Run libFuzzer on `check`, starting with the test vectors."""
    seconds, *options = sys.argv[1:] or ["60"]
    with tempfile.TemporaryDirectory() as folder:
        for name, data in seeds():
            (Path(folder) / name).write_bytes(data)
        arguments = [
            sys.argv[0],
            f"-max_total_time={int(seconds)}",
            f"-max_len={LARGEST_INPUT}",
            f"-rss_limit_mb={MEMORY_MB}",
            f"-malloc_limit_mb={MEMORY_MB}",
            "-print_final_stats=1",
            *options,
        ]
        if not any(Path(option).is_file() for option in options):
            arguments.append(folder)
        atheris.Setup(arguments, _one)
        atheris.Fuzz()


def _one(data: bytes) -> None:
    check(data)


if __name__ == "__main__":
    main()
