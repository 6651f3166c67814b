"""Every scenario, short and with a fixed seed: each kind of its faults once, in the midst of work.

`make faults` runs them long.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.catalogue import KINDS, SCENARIOS, why_not
from tests.faults.hardware import UNCOUNTED
from tests.faults.supervisor import REPOSITORY, Orders


# Seconds, not minutes, on a quiet machine; nothing in them hurries, so a slow one takes its time.
@pytest.mark.timeout(480)
@pytest.mark.parametrize("name", list(SCENARIOS))
async def test_a_scenario_holds_through_each_kind_of_its_faults(name: str, tmp_path: Path) -> None:
    reason = why_not(name)
    if reason is not None:
        pytest.skip(reason)
    findings = await SCENARIOS[name](Orders(name, 1, 0, tmp_path / "run"))
    assert findings.sound, json.dumps(dict(findings.examples), indent=1)
    worked = findings.counts["events"] or findings.counts["operations"]
    assert worked or findings.counts[UNCOUNTED]
    missed = [kind for kind in KINDS[name] if not findings.counts[f"fault: {kind}"]]
    assert not missed


def test_the_kinds_of_every_scenario_are_known() -> None:
    assert KINDS.keys() == SCENARIOS.keys()


@pytest.mark.timeout(120)
def test_the_program_runs_a_scenario_and_writes_its_report(tmp_path: Path) -> None:
    words = ["--seed", "5", "--minutes", "0.03", "--scenario", "tables", "--folder", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults", *words, "--json"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["runs"][0]["scenario"] == "tables"
    assert report["total"]["problems"] == 0
    assert (tmp_path / "tables-5" / "report.html").is_file()
