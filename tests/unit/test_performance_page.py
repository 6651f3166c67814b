"""The tables of docs/PERFORMANCE.md are written from the figures of the bench."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import performance_page
from tools.performance_page import FIGURES, PAGES, main, merged, rendered, short

MARKS = "<!-- figures: {} -->\nold words\n<!-- end of figures -->"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_page_is_up_to_date(page: Path) -> None:
    figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    text = page.read_text()
    assert rendered(text, figures) == text, "run: python -m tools.performance_page"


def test_the_summary_has_the_first_ratio_of_each_chosen_row() -> None:
    name = "produce Arrow batches, fsync"
    results = [
        {"name": name, "value": 1.0, "unit": "1/s", "peer": peer, "ratio": ratio}
        for peer, ratio in (("objects", 7.79), ("bytes", 5.0))
    ]
    results.append({"name": "another", "value": 1.0, "unit": "1/s", "peer": "x", "ratio": 9.0})
    figures = {"peers": {"taken": "today", "results": results}}
    text = rendered(MARKS.format("summary"), figures)
    assert "| Arrow batches produced (Kafka: objects) | 7.8 |" in text
    assert "5.0" not in text
    assert "9.0" not in text


def test_a_rate_and_its_cpu_are_one_row() -> None:
    common = {"peer": "them", "peer_value": 20_000.0, "ratio": 2.5, "ratio_spread": [2.0, 3.0]}
    results = [
        {"name": "send", "value": 50_000.0, "unit": "events/s", **common},
        {
            "name": "send, CPU of all processes",
            "value": 1.5,
            "unit": "us/event",
            "peer": "them",
            "peer_value": 3.0,
            "ratio": 2.0,
        },
        {"name": "alone", "value": 7.0, "unit": "B/event"},
    ]
    figures = {"peers": {"taken": "today", "results": results}}
    text = rendered(MARKS.format("peers"), figures)
    assert "| send | 50k events/s | them | 20k events/s | **2.50** (2.00-3.00) | 1.5 / 3 |" in text
    assert "| alone | 7 B/event |  |  |  |  |" in text
    assert "Measured on today." in text
    assert "old words" not in text
    assert rendered(text, figures) == text


def test_the_price_of_a_guarantee_is_one_row() -> None:
    results = [
        {"name": "packs, fsync: rate", "value": 2_500_000.0, "unit": "events/s"},
        {"name": "packs, fsync: on disk", "value": 50.2, "unit": "B/event"},
    ]
    text = rendered(MARKS.format("qos"), {"qos": {"taken": "today", "results": results}})
    assert "| packs, fsync | 2.5M |  |  |  |  | 50.2 |  |" in text


def test_what_a_record_costs_the_gateway_stands_beside_its_rate() -> None:
    peer = {"peer": "Kafka", "peer_value": 0.9, "ratio": 0.75}
    results = [
        {"name": "produce", "value": 9e5, "unit": "records/s", **peer, "peer_value": 1e6},
        {"name": "produce, CPU of the server", "value": 1.2, "unit": "us/record", **peer},
        {"name": "produce, CPU of the gateway", "value": 0.4, "unit": "us/record"},
        {"name": "produce, CPU of its broker", "value": 0.8, "unit": "us/record"},
        {"name": "produce, share of one core that the gateway used", "value": 36.0, "unit": "%"},
        {"name": "produce, step of the gateway: packs", "value": 0.3, "unit": "us/record"},
        {"name": "echo, p50", "value": 2.0, "unit": "ms", "peer": "Kafka", "ratio": 0.5},
        {"name": "echo, p50", "value": 2.0, "unit": "ms", "peer": "batches", "ratio": 30.0},
    ]
    figures = {"kafka": {"taken": "today", "results": results}}
    text = rendered(MARKS.format("kafka"), figures)
    row = "| produce | 900k records/s | Kafka | 1M records/s | **0.75** | 1.2 / 0.9 | 0.4 | 36 % |"
    assert row in text
    assert text.count("| echo, p50 |") == 2
    assert "broker" not in text
    assert "packs" not in text
    assert "| produce | packs | 0.3 |" in rendered(MARKS.format("kafka-steps"), figures)


def test_a_table_without_figures_says_so() -> None:
    assert "(not measured yet)" in rendered(MARKS.format("compare"), {})


def test_new_figures_replace_those_of_the_same_name_and_peer() -> None:
    old = [{"name": "a", "peer": "x", "value": 1}, {"name": "b", "value": 2}]
    new = [{"name": "a", "peer": "x", "value": 3}, {"name": "a", "peer": "y", "value": 4}]
    assert [one["value"] for one in merged(old, new)] == [3, 2, 4]


def test_figures_are_added_and_the_page_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text(MARKS.format("compare"))
    monkeypatch.setattr(performance_page, "PAGES", [page])
    monkeypatch.setattr(performance_page, "FIGURES", tmp_path / "figures.json")
    lines = tmp_path / "lines"
    result = {"name": "n", "value": 2.0, "unit": "ms", "peer": "before", "peer_value": 4.0}
    lines.write_text(f"some words\n{json.dumps({**result, 'ratio': 2.0})}\n")
    assert main(["--check"]) == 1
    assert main(["--add", "compare", str(lines)]) == 0
    assert "| n | 4 ms | 2 ms | **2.00** |" in page.read_text()
    assert main(["--check"]) == 0


@pytest.mark.parametrize(
    ("value", "text"), [(None, ""), (0.407, "0.407"), (9_999.0, "9,999"), (142_005.0, "142k")]
)
def test_figures_are_short(value: float | None, text: str) -> None:
    assert short(value) == text
