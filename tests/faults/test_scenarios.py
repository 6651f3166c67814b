"""The scenarios on one broker, short.

Each kind of fault once, in the midst of work, with a fixed seed; `make faults` runs them long.
Nothing in them hurries: a slow machine takes its time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.catalogue import KINDS, SCENARIOS
from tests.faults.clustered import CLUSTERED, PARTITIONED
from tests.faults.hardware import CLUSTER_POWER
from tests.faults.kafka import KAFKA
from tests.faults.short import hold
from tests.faults.sparked import SPARKED
from tests.faults.storing import CLUSTER_STORES
from tests.faults.supervisor import REPOSITORY

ELSEWHERE = {
    *CLUSTERED,
    *CLUSTER_STORES,
    *PARTITIONED,
    *CLUSTER_POWER,
    *SPARKED,
    *KAFKA,
}  # in the files next to this one


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in ELSEWHERE])
async def test_a_scenario_keeps_its_promises_through_each_kind_of_fault(
    name: str, tmp_path: Path
) -> None:
    await hold(name, tmp_path)


def test_the_kinds_of_every_scenario_are_known() -> None:
    assert KINDS.keys() == SCENARIOS.keys()


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
