"""Writes the figures of docs/performance.json into the tables of docs/PERFORMANCE.md and README.md.

    python -m bench peers --json > peers.jsonl
    python -m tools.performance_page --add peers peers.jsonl   # stores the figures, writes the page
    python -m tools.performance_page --check                   # fails if the page is stale

Figures come from the bench only: nothing in these tables is typed by hand. A new figure replaces
the one of the same name and peer; others stay, so that rows may be measured in several runs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "docs" / "PERFORMANCE.md", ROOT / "README.md")
FIGURES = ROOT / "docs" / "performance.json"
CPU = ", CPU of all processes"
SERVER_CPU = ", CPU of "
BUSY = ", share of one core that the gateway used"
STEP = ", step of the gateway: "
MARKED = re.compile(r"(<!-- figures: (\S+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
QOS = {
    "rate": "rate, events/s",
    "latency, p50": "p50, us",
    "latency, p99": "p99, us",
    "CPU of the client": "CPU client, us",
    "CPU of the servers": "CPU servers, us",
    "on disk": "disk, B",
    "on the wire": "wire, B",
}

# What README.md says, in its own words; of several peers the first.
SUMMARY = {
    "produce objects, fsync: send": "objects produced one by one",
    "produce objects, fsync: send_many": "objects produced in lists",
    "produce Arrow batches, fsync": "Arrow batches produced (Kafka: objects)",
    "exactly once, objects, fsync: write": "objects written exactly once (Kafka: transactions)",
    "one awaited publish, fsync, p50": "one awaited publish, median",
    "read objects: read, typed": "objects read one by one",
    "read objects: read_many, typed": "objects read in lists",
    "read Arrow batches": "Arrow batches read (Kafka: objects)",
    "Spark aggregate, tuned, 1 partition": "aggregate in Spark (Kafka: from_json)",
    "Spark topic to topic, key and value": "topic to topic in Spark (Kafka: no fsync)",
    "disk, default settings": "bytes on disk",
}

Results = list[dict[str, Any]]


def short(value: float | None) -> str:
    """Three digits that matter; thousands as k, millions as M."""
    if value is None:
        return ""
    for limit, divisor, name in ((1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= limit:
            return f"{value / divisor:.3g}{name}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _with_unit(value: float | None, unit: str) -> str:
    return f"{short(value)} {unit}" if value is not None else ""


def _ratio(result: dict[str, Any]) -> str:
    if result.get("ratio") is None:
        return ""
    between = result.get("ratio_spread")
    text = f" ({between[0]:.2f}-{between[1]:.2f})" if between else ""
    return f"**{result['ratio']:.2f}**{text}"


def _table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(headings)
    lines = [f"| {' | '.join(names)} |", f"| {' | '.join('---' for _ in names)} |"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def beside_peers(results: Results) -> str:
    """Ours and the peer's; the CPU of an event stands in the row of its rate."""
    cpu = {(r["name"].removesuffix(CPU), r.get("peer")): r for r in results if CPU in r["name"]}
    rows = []
    for result in results:
        if CPU in result["name"]:
            continue
        used = cpu.get((result["name"], result.get("peer")))
        rows.append(
            [
                result["name"],
                _with_unit(result["value"], result["unit"]),
                result.get("peer") or "",
                _with_unit(result.get("peer_value"), result["unit"]),
                _ratio(result),
                f"{short(used['value'])} / {short(used.get('peer_value'))}" if used else "",
            ]
        )
    return _table(("work", "Millstream", "peer", "peer's", "ratio (rounds)", "CPU, us"), rows)


def beside_kafka(results: Results) -> str:
    """The gateway and its peers; what a record costs the servers stands in the row of its rate."""
    found = {result["name"]: result for result in results}
    rows = []
    for result in results:
        name = result["name"]
        if SERVER_CPU in name or STEP in name or BUSY in name:
            continue
        used = found.get(f"{name}{SERVER_CPU}the server", {})
        gateway = found.get(f"{name}{SERVER_CPU}the gateway", {})
        rows.append(
            [
                name,
                _with_unit(result["value"], result["unit"]),
                result.get("peer") or "",
                _with_unit(result.get("peer_value"), result["unit"]),
                _ratio(result),
                f"{short(used['value'])} / {short(used.get('peer_value'))}" if used else "",
                short(gateway.get("value")),
                _with_unit(found.get(name + BUSY, {}).get("value"), "%"),
            ]
        )
    cpu = ("CPU of the servers, us", "of it gateway", "of a core")
    return _table(("work", "gateway", "peer", "peer's", "ratio (rounds)", *cpu), rows)


def gateway_steps(results: Results) -> str:
    """What each step of the gateway takes for a record."""
    rows = []
    for result in results:
        name, found, step = result["name"].partition(STEP)
        if found:
            rows.append([name, step, short(result["value"])])
    return _table(("work", "step", "CPU, us"), rows)


def before_and_after(results: Results) -> str:
    """An older commit and this one, measured by the same bench."""
    rows = [
        [
            result["name"],
            _with_unit(result.get("peer_value"), result["unit"]),
            _with_unit(result["value"], result["unit"]),
            _ratio(result),
        ]
        for result in results
    ]
    return _table(("measurement", "before", "after", "ratio (rounds)"), rows)


def prices(results: Results) -> str:
    """One row for each guarantee and storage."""
    cells: dict[str, dict[str, float]] = {}
    for result in results:
        name, _, text = result["name"].rpartition(": ")
        cells.setdefault(name, {})[text] = result["value"]
    rows = [[name, *(short(found.get(text)) for text in QOS)] for name, found in cells.items()]
    return _table(("guarantee and storage", *QOS.values()), rows)


def summary(results: Results) -> str:
    """The ratios of some rows, for people who read no further."""
    rows: dict[str, list[str]] = {}
    for result in results:
        text = SUMMARY.get(result["name"])
        if text and result.get("ratio") is not None:
            rows.setdefault(text, [text, f"{result['ratio']:.1f}"])
    ordered = [rows[text] for text in SUMMARY.values() if text in rows]
    return _table(("from Python, on one machine", "times as fast as Kafka, or as small"), ordered)


TABLES: dict[str, Callable[[Results], str]] = {
    "peers": beside_peers,
    "summary": summary,
    "qos": prices,
    "compare": before_and_after,
    "kafka": beside_kafka,
    "kafka-steps": gateway_steps,
}
SAME_FIGURES = {"summary": "peers", "kafka-steps": "kafka"}  # tables of what others have


def merged(old: Results, new: Iterable[dict[str, Any]]) -> Results:
    """Old figures, replaced by new ones of the same name and peer; further new ones come last."""
    found = {(one["name"], one.get("peer")): one for one in old}
    found.update({(one["name"], one.get("peer")): one for one in new})
    return list(found.values())


def rendered(page: str, figures: dict[str, Any]) -> str:
    """The page with its tables as the figures say."""

    def table(match: re.Match[str]) -> str:
        section = figures.get(SAME_FIGURES.get(match[2], match[2]))
        if not section:
            return f"{match[1]}\n(not measured yet)\n\n{match[3]}"
        text = TABLES[match[2]](section["results"])
        return f"{match[1]}\nMeasured on {section['taken']}.\n\n{text}\n{match[3]}"

    return MARKED.sub(table, page)


def main(arguments: list[str] | None = None) -> int:
    """Writes the page; 1 if `--check` finds it stale."""
    parser = argparse.ArgumentParser(prog="python -m tools.performance_page")
    parser.add_argument("--check", action="store_true", help="only say whether it is stale")
    parser.add_argument("--add", nargs=2, metavar=("TABLE", "FILE"), help="JSON lines of the bench")
    chosen = parser.parse_args(arguments)
    figures: dict[str, Any] = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    if chosen.add:
        name, file = chosen.add
        known = [table for table in TABLES if table not in SAME_FIGURES]
        if name not in known:
            parser.error(f"no table is called '{name}'; there are: {', '.join(known)}")
        lines = Path(file).read_text(encoding="utf-8").splitlines()
        new = [json.loads(line) for line in lines if line.startswith("{")]
        old = figures.get(name, {}).get("results", [])
        taken = datetime.now(UTC).strftime("%-d %B %Y")
        figures[name] = {"taken": taken, "results": merged(old, new)}
        FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
    stale = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        now = rendered(text, figures)
        if now != text and chosen.check:
            sys.stderr.write(f"{page.name} is stale: python -m tools.performance_page\n")
            stale = 1
        elif now != text:
            page.write_text(now, encoding="utf-8")
    return stale


if __name__ == "__main__":
    sys.exit(main())
