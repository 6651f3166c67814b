"""The result of a run, as JSON and as an HTML page."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any, Final

from tests.faults.checker import Findings
from tests.faults.history import Record, read_histories
from tests.faults.supervisor import Orders

__all__ = ["summary_of", "total_of", "write_report"]

WIDTH: Final = 1100
LANE: Final = 18
BUCKETS: Final = 220  # columns of the operations' timeline
LOST: Final = ("lost", "skipped")

STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem }
table { border-collapse: collapse } td, th { padding: .15rem .8rem; text-align: left }
td.number { text-align: right; font-variant-numeric: tabular-nums }
.bad { color: #b00020; font-weight: 600 } .good { color: #1b6e3c; font-weight: 600 }
svg text { font-size: 11px; fill: #555 } svg .fault { fill: #d9480f } svg .work { fill: #4c8bf5 }
pre { background: #f5f5f5; padding: .8rem; overflow: auto }
"""


def summary_of(orders: Orders, findings: Findings, seconds: float) -> dict[str, Any]:
    """The figures of one run."""
    problems, counts = findings.problems, findings.counts
    faults = {
        kind.removeprefix("fault: "): count
        for kind, count in sorted(counts.items())
        if kind.startswith("fault: ")
    }
    return {
        "scenario": orders.scenario,
        "seed": orders.seed,
        "retention": findings.facts.get("retention", "limits"),
        "seconds": round(seconds, 1),
        "sound": findings.sound,
        "faults": faults,
        "operations": counts["operations"],
        "events": counts["events"],
        "lost": sum(problems[kind] for kind in LOST),
        "doubled": problems["doubled"],
        "reordered": problems["reordered"],
        "problems": dict(problems),
        "examples": dict(findings.examples),
        "counts": {k: v for k, v in sorted(counts.items()) if not k.startswith("fault: ")},
        "again": f"python -m tests.faults --seed {orders.seed} --scenario {orders.scenario} "
        f"--minutes {round(orders.seconds / 60, 2):g}"
        + (f" --retention {orders.retention}" if orders.retention else ""),
    }


def total_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The sums over several runs."""
    faults: dict[str, int] = {}
    for run in runs:
        for kind, count in run["faults"].items():
            faults[kind] = faults.get(kind, 0) + count
    figures = ("operations", "events", "lost", "doubled", "reordered")
    return {
        "runs": len(runs),
        "minutes": round(sum(run["seconds"] for run in runs) / 60, 1),
        "faults": dict(sorted(faults.items())),
        **{name: sum(run[name] for run in runs) for name in figures},
        "problems": sum(sum(run["problems"].values()) for run in runs),
    }


def write_report(folder: Path, summary: dict[str, Any]) -> Path:
    """Write report.json and report.html into the folder of a run; the path of the page."""
    (folder / "report.json").write_text(json.dumps(summary, indent=2) + "\n")
    page = folder / "report.html"
    page.write_text(_page(summary, read_histories(folder)))
    return page


def _page(summary: dict[str, Any], records: list[Record]) -> str:
    title = f"{summary['scenario']}, seed {summary['seed']}, retention {summary['retention']}"
    verdict = (
        '<p class="good">Everything held.</p>'
        if summary["sound"]
        else f'<p class="bad">{html.escape(json.dumps(summary["problems"]))}</p>'
    )
    figures = {k: summary[k] for k in ("operations", "events", "lost", "doubled", "reordered")}
    examples = "".join(
        f"<h3>{html.escape(kind)}</h3><pre>{html.escape(chr(10).join(texts))}</pre>"
        for kind, texts in summary["examples"].items()
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style><h1>{html.escape(title)}</h1>{verdict}"
        f"<p>{summary['seconds']} s. Again: <code>{html.escape(summary['again'])}</code></p>"
        f"<h2>Figures</h2>{_table(figures)}<h2>Faults</h2>{_table(summary['faults'])}"
        f"<h2>Timeline</h2>{_timeline(records)}<h2>Counts</h2>{_table(summary['counts'])}"
        f"{examples}</html>\n"
    )


def _table(facts: dict[str, Any]) -> str:
    rows = "".join(
        f'<tr><td>{html.escape(str(name))}</td><td class="number">{value:,}</td></tr>'
        for name, value in facts.items()
    )
    return f"<table>{rows}</table>"


def _timeline(records: list[Record]) -> str:
    """Faults as bars, one row for each kind, above the operations finished over time."""
    if not records:
        return "<p>No history.</p>"
    first, last = records[0]["t"], max(records[-1]["t"], records[0]["t"] + 1)
    scale = (WIDTH - 180) / (last - first)
    kinds = sorted({r["kind"] for r in records if r["what"] == "fault"})
    parts = [
        f'<text x="0" y="{LANE * row + 13}">{html.escape(kind)}</text>'
        for row, kind in enumerate(kinds)
    ]
    started: dict[str, int] = {}
    for record in records:
        if record["what"] == "fault":
            started[record["kind"]] = record["t"]
        elif record["what"] == "healed" and record["kind"] in started:
            x = 180 + (started[record["kind"]] - first) * scale
            wide = max(2.0, (record["t"] - started.pop(record["kind"])) * scale)
            y = LANE * kinds.index(record["kind"]) + 3
            parts.append(
                f'<rect class="fault" x="{x:.1f}" y="{y}" width="{wide:.1f}" height="12"/>'
            )
    buckets = [0] * BUCKETS
    for record in records:
        if record["what"] in ("ok", "delivered", "flushed", "end", "read-ok"):
            buckets[min(BUCKETS - 1, (record["t"] - first) * BUCKETS // (last - first))] += 1
    top, high = LANE * len(kinds) + 10, max(1, *buckets)
    wide = (WIDTH - 180) / BUCKETS
    for number, count in enumerate(buckets):
        tall = 80 * count / high
        parts.append(
            f'<rect class="work" x="{180 + number * wide:.1f}" y="{top + 80 - tall:.1f}" '
            f'width="{wide:.1f}" height="{tall:.1f}"/>'
        )
    parts.append(f'<text x="0" y="{top + 45}">operations</text>')
    return f'<svg viewBox="0 0 {WIDTH} {top + 90}" role="img">{"".join(parts)}</svg>'
