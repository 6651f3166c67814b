"""Fuzz every decoder with atheris: python -m fuzz.decoders SECONDS [libFuzzer options]

The first byte of an input chooses the decoder. Inputs that break one are written to the working
folder as crash-*; rerun one by giving its path.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["millstream"]):
    from fuzz.decoder_targets import TARGETS, check

__all__ = ["main"]

LARGEST_INPUT = 8 * 1024  # structures are small; nesting is bounded long before
MEMORY_MB = 1024
NAMES = list(TARGETS)


def main() -> None:
    """Run libFuzzer on all decoders, starting with valid inputs."""
    seconds, *options = sys.argv[1:] or ["60"]
    with tempfile.TemporaryDirectory() as folder:
        for number, target in enumerate(TARGETS.values()):
            for index, seed in enumerate(target.seeds):
                (Path(folder) / f"{number}-{index}").write_bytes(bytes([number]) + seed)
        arguments = [
            sys.argv[0],
            f"-max_total_time={int(seconds)}",
            f"-max_len={LARGEST_INPUT}",
            f"-rss_limit_mb={MEMORY_MB}",
            "-print_final_stats=1",
            *options,
        ]
        if not any(Path(option).is_file() for option in options):
            arguments.append(folder)
        atheris.Setup(arguments, _one)
        atheris.Fuzz()


def _one(data: bytes) -> None:
    if data:
        check(NAMES[data[0] % len(NAMES)], data[1:])


if __name__ == "__main__":
    main()
