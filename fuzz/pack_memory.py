"""Decode mutated packs in a process with limited memory: python -m fuzz.pack_memory SECONDS SEED

The process limits its own address space to what it has plus the bound `ReadLimits` promises, so
that any allocation beyond it fails immediately. Exits with 0 and prints a line of counts.
"""

from __future__ import annotations

import random
import resource
import struct
import sys
import time
from collections import Counter
from pathlib import Path

from fuzz.pack_target import MEMORY, check, seeds

__all__ = ["main", "mutate"]

NUMBERS = (0, 1, -1, -2, 3, 7, 8, 64, 65_536, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63))


def mutate(data: bytes, chance: random.Random) -> bytes:
    """The input with one to six faults: bits, bytes, numbers, moved blocks, cuts."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 6))):
        if len(changed) < 32:
            break
        at = chance.randrange(len(changed) - 16)
        match chance.randrange(6):
            case 0:
                changed[at] ^= 1 << chance.randrange(8)
            case 1:
                changed[at] = chance.randrange(256)
            case 2:
                struct.pack_into("<q", changed, at // 8 * 8 + 4, chance.choice(NUMBERS))
            case 3:
                struct.pack_into("<i", changed, at // 4 * 4, chance.choice(NUMBERS[:10]))
            case 4:
                struct.pack_into("<H", changed, at // 2 * 2, chance.choice((0, 4, 8, 16, 65_535)))
            case 5:
                source = chance.randrange(len(changed) - 16)
                changed[at : at + 8] = changed[source : source + 8]
    if chance.random() < 0.02:
        del changed[chance.randrange(len(changed)) :]
    return bytes(changed)


def main() -> None:
    """Limit this process and decode until the time is over."""
    seconds, seed = float(sys.argv[1]), int(sys.argv[2])
    inputs = [data for _, data in seeds()]
    for data in inputs:
        check(data)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    chance = random.Random(seed)
    found: Counter[str] = Counter()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found[check(mutate(chance.choice(inputs), chance))] += 1
    sys.stdout.write(f"{found.total():,} inputs: {dict(found.most_common())}\n")


if __name__ == "__main__":
    main()
