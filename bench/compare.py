"""The same measurements on an older package and on this one, in turns.

    python -m bench compare --before FOLDER packs messaging

FOLDER is another checkout, for example `git worktree add FOLDER COMMIT`. Both are measured by the
bench of this checkout, each round in fresh processes, so that nothing but the package differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness import Result, Skipped, better_of, raced

__all__ = ["Side", "arranged", "compared", "turns"]

HERE = Path(__file__).parent
PACKAGE = ("millstream", "pyspark_millstream.py")
BEFORE, AFTER = "before", "after"


@dataclass(slots=True)
class Side:
    """One of the two packages: where it is measured, and its figures, one for each round."""

    folder: Path
    units: dict[str, str] = field(default_factory=dict)
    figures: dict[str, list[float]] = field(default_factory=dict)

    def note(self, lines: Iterable[str]) -> None:
        """Take the results of one run; those of one name differ by their peer only."""
        seen = set()
        for line in lines:
            found: dict[str, Any] = json.loads(line)
            name = found["name"]
            if name not in seen:
                seen.add(name)
                self.units[name] = found["unit"]
                self.figures.setdefault(name, []).append(found["value"])


def arranged(folder: Path, package: Path) -> Path:
    """A folder in which `bench` is ours and `millstream` is that of the other folder."""
    folder.mkdir()
    for name in PACKAGE:
        if not (package / name).exists():
            raise SystemExit(f"'{package}' has no {name}; give the folder of a checkout")
        (folder / name).symlink_to((package / name).resolve())
    (folder / "bench").symlink_to(HERE.resolve())
    return folder


def turns(sides: Sequence[str], rounds: int) -> Iterator[str]:
    """Who is measured when: the other one begins each round."""
    for number in range(rounds):
        yield from sides if number % 2 == 0 else sides[::-1]


def compared(before: Side, after: Side) -> Iterator[Result | Skipped]:
    """For each measurement the figures of both; the ratio is better when higher."""
    for name, figures in after.figures.items():
        if name not in before.figures:
            yield Skipped(name, "the package before cannot do it")
            continue
        unit = after.units[name]
        own, other = figures, before.figures[name]
        if min(*own, *other) < 0 or not any(other):
            yield Skipped(name, "the figure before is zero")
            continue
        yield raced(name, unit, own, BEFORE, other, better=better_of(unit))
    for name in before.figures:
        if name not in after.figures:
            yield Skipped(name, "the package after did not do it")


def measured(folder: Path, family: str, flags: Sequence[str]) -> list[str]:
    """The lines of one run in a process of its own; its words go to stderr."""
    command = [sys.executable, "-m", "bench", family, "--json", "--no-peers", *flags]
    child = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        command, cwd=folder, env=child, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        # What was measured before it failed counts all the same.
        sys.stderr.write(f"'{family}' failed in {folder.name}, see above\n")
    return done.stdout.splitlines()


def run(
    before: Path, families: Sequence[str], rounds: int, flags: Sequence[str]
) -> Iterator[tuple[str, list[Result | Skipped]]]:
    """The comparison of each family, as they are finished."""
    with tempfile.TemporaryDirectory(prefix="millstream-bench-") as folder:
        packages: Mapping[str, Path] = {BEFORE: before, AFTER: HERE.parent}
        places = {name: arranged(Path(folder, name), at) for name, at in packages.items()}
        for family in families:
            sides = {name: Side(place) for name, place in places.items()}
            for number, name in enumerate(turns([BEFORE, AFTER], rounds)):
                sys.stderr.write(f"{family}: {name}, round {number // 2 + 1} of {rounds}\n")
                sides[name].note(measured(places[name], family, flags))
            yield family, list(compared(sides[BEFORE], sides[AFTER]))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("families", nargs="+", metavar="FAMILY")
    parser.add_argument("--before", type=Path, required=True, help="the older checkout")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each package (default 3)")
