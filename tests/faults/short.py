"""One short run of a scenario as a test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults.catalogue import KINDS, SCENARIOS, why_not
from tests.faults.hardware import UNCOUNTED
from tests.faults.supervisor import Orders

__all__ = ["hold"]


async def hold(name: str, folder: Path) -> None:
    """Every kind of the scenario's faults once, with seed 1; nothing that is promised may break."""
    reason = why_not(name)
    if reason is not None:
        pytest.skip(reason)
    findings = await SCENARIOS[name](Orders(name, 1, 0, folder / "run"))
    assert findings.sound, json.dumps(dict(findings.examples), indent=1)
    worked = findings.counts["events"] or findings.counts["operations"]
    assert worked or findings.counts[UNCOUNTED]
    missed = [kind for kind in KINDS[name] if not findings.counts[f"fault: {kind}"]]
    assert not missed
