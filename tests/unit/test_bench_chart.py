"""Pictures of the bench: plain SVG that any browser shows, on light and on dark pages."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from bench.chart import Line, chart, short

SVG = "{http://www.w3.org/2000/svg}"


def test_a_chart_has_its_words_its_lines_and_colours_for_dark_pages() -> None:
    lines = [
        Line("a & b", [(1.0, 10.0), (100.0, 1000.0)], ["one", ""]),
        Line("c", [(10.0, 500.0)]),
    ]
    text = chart("Speed <fast>", "size in bytes", "events a second", lines)
    root = ElementTree.fromstring(text)
    words = [element.text for element in root.iter(f"{SVG}text")]
    assert words[0] == "Speed <fast>"
    assert {"size in bytes", "events a second", "a & b", "c", "one", "1k"} <= set(words)
    assert "" not in words
    assert len(list(root.iter(f"{SVG}circle"))) == 3
    assert "prefers-color-scheme: dark" in text


def test_points_are_placed_by_their_logarithm() -> None:
    root = ElementTree.fromstring(chart("t", "x", "y", [Line("a", [(1, 1), (10, 10), (100, 100)])]))
    across = [float(circle.attrib["cx"]) for circle in root.iter(f"{SVG}circle")]
    up = [float(circle.attrib["cy"]) for circle in root.iter(f"{SVG}circle")]
    assert across[1] - across[0] == pytest.approx(across[2] - across[1], abs=0.2)
    assert up[0] > up[1] > up[2]


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match="greater than zero"):
        chart("t", "x", "y", [Line("a", [(0.0, 1.0)])])
    with pytest.raises(ValueError, match="3 lines at most"):
        chart("t", "x", "y", [Line("a", [(1.0, 1.0)])] * 4)


@pytest.mark.parametrize(
    ("value", "text"), [(0.1, "0.1"), (20, "20"), (5000, "5k"), (1.5e6, "1.5M")]
)
def test_figures_of_an_axis_are_short(value: float, text: str) -> None:
    assert short(value) == text
