"""Capture, sink, broker and database are killed while they work: nothing is lost or doubled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults.cdc import TARGETS, run
from tests.faults.cdc_stage import Plan
from tests.faults.checker import Findings
from tools.postgres_server import PostgresAbsent


async def killed(plan: Plan, folder: Path) -> Findings:
    try:
        findings = await run(plan, folder)
    except PostgresAbsent as error:
        pytest.skip(str(error))
    shown = {"problems": findings.problems, "examples": findings.examples}
    assert findings.sound, json.dumps(shown, indent=1, default=str)
    kills = {target: findings.counts[f"kill: {target}"] for target in TARGETS}
    assert sum(kills.values()) == plan.kills
    assert all(kills.values()), kills
    assert findings.counts["transactions after the snapshot"] > 10
    return findings


async def test_every_version_of_every_row_is_captured_once_though_all_are_killed(
    tmp_path: Path,
) -> None:
    plan = Plan(seed=1, kills=8, rows=15_000, snapshot_kills=3, pause=0.2, fsync=False)
    findings = await killed(plan, tmp_path)
    assert findings.counts["attempts of snapshots"] > 2  # two tables, so one was interrupted


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2])
async def test_nothing_is_lost_or_doubled_by_many_kills(tmp_path: Path, seed: int) -> None:
    findings = await killed(
        Plan(seed, kills=32, rows=80_000, snapshot_kills=8, pause=0.1), tmp_path
    )
    assert findings.counts["attempts of snapshots"] > 4
    assert findings.counts["unchanged values"]
