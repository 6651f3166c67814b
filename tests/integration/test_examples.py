"""Every example runs and prints what it should."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

EXAMPLES = {
    "quickstart": ["stored at offset 1", "ann ordered 3 sacks of flour"],
    "service": [
        "a sack of flour costs 12.5",
        "for sale: bran, flour",
        "refused: nobody sells gold",
        "the service is gone",
    ],
    "work_queue": [
        "'grind -1' fails, delivery 2",
        "dead letter: 'grind -1' after 2 deliveries",
        "fixed and redriven: 1",
        "done: grind 1, grind 2, grind 4, grind 7",
    ],
    "flight_history": [
        "1,785 flights, 5,343 events",
        "a minute before it landed: in the air (version 2)",
        "255 past states are what the data say",
        "EWR: 402 late become 207",
        "readers now see 367 late departures",
    ],
    "import_once": [
        "the import died at line 6,543",
        "10,000 lines in the file, 10,000 events, 10,000 different ones",
    ],
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NATS_URL", raising=False)
    done = subprocess.run(
        [sys.executable, "-m", f"examples.{name}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for words in EXAMPLES[name]:
        assert words in done.stdout, done.stdout


def test_every_example_is_run() -> None:
    found = {path.stem for path in (ROOT / "examples").glob("*.py")}
    # The notebook is run by tests/docs, which has a JVM; the others have tests of their own or are
    # imported by examples.
    assert found - set(EXAMPLES) == {"messaging_demo", "notebook", "own_broker", "recipes"}
