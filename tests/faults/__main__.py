"""Inject faults and count: python -m tests.faults --seed N --minutes M --scenario NAME"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.faults.catalogue import SCENARIOS, why_not
from tests.faults.report import summary_of, total_of, write_report
from tests.faults.supervisor import Orders


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    known = ", ".join(SCENARIOS)
    parser.add_argument("--seed", type=int, default=1, help="decides the faults and the workload")
    parser.add_argument("--minutes", type=float, default=1.0, help="of faults, for each scenario")
    parser.add_argument(
        "--scenario",
        action="append",
        choices=[*SCENARIOS, "all"],
        metavar="NAME",
        help=f"one of {known}, or all; may be given several times",
    )
    parser.add_argument(
        "--retention",
        choices=["limits", "interest", "workqueue"],
        help="of the topics in publish, pauses and groups (default: the seed decides)",
    )
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    parser.add_argument("--folder", type=Path, help="where reports go (default: a temporary one)")
    return parser.parse_args()


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _run(name: str, arguments: argparse.Namespace, base: Path) -> dict[str, Any]:
    folder = base / f"{name}-{arguments.seed}"
    shutil.rmtree(folder, ignore_errors=True)
    seconds = arguments.minutes * 60
    orders = Orders(name, arguments.seed, seconds, folder, arguments.retention)
    started = time.monotonic()
    findings = asyncio.run(SCENARIOS[name](orders))
    summary = summary_of(orders, findings, time.monotonic() - started)
    page = write_report(folder, summary)
    if findings.sound:
        shutil.rmtree(folder / "data", ignore_errors=True)  # after problems it is kept as evidence
    if not arguments.json:
        verdict = "sound" if findings.sound else f"PROBLEMS {dict(findings.problems)}"
        faults = sum(summary["faults"].values())
        _say(
            f"{name} ({summary['retention']}): {verdict}; {faults} faults, "
            f"{summary['operations']:,} operations, {summary['events']:,} events, "
            f"lost {summary['lost']}, doubled {summary['doubled']}, "
            f"out of order {summary['reordered']}; {summary['seconds']} s; {page}"
        )
    return summary


def main() -> int:
    """Run the scenarios one after the other; 1 if a promise was broken."""
    arguments = _arguments()
    chosen = arguments.scenario or ["all"]
    names = list(SCENARIOS) if "all" in chosen else chosen
    base = arguments.folder or Path(tempfile.mkdtemp(prefix="millstream-faults-"))
    base.mkdir(parents=True, exist_ok=True)
    runs: list[dict[str, Any]] = []
    for name in names:
        reason = why_not(name)
        if reason is None:
            runs.append(_run(name, arguments, base))
        elif not arguments.json:
            _say(f"{name}: skipped: {reason}")
    total = total_of(runs)
    if arguments.json:
        _say(json.dumps({"total": total, "runs": runs}, indent=2))
    else:
        _say(f"total: {json.dumps(total)}")
    return 0 if all(run["sound"] for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
