"""Drawing a pipeline."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from millstream.errors import PipelineInvalid
from millstream.pipelines.graph import Graph, GraphNode, layers, to_svg, to_text


def graph() -> Graph:
    made = Graph()
    for name, kind, outside in (
        ("orders", "topic", True),
        ("people", "table", True),
        ("paid", "view", False),
        ("totals", "table", False),
        ("lake", "files", False),
    ):
        made.add(GraphNode(name, kind, outside))
    made.edges = {("orders", "paid"), ("paid", "totals"), ("people", "totals"), ("paid", "lake")}
    return made


def test_each_node_is_to_the_right_of_its_inputs() -> None:
    assert layers(graph()) == [["orders", "people"], ["paid"], ["lake", "totals"]]


def test_everything_upstream_is_found() -> None:
    assert graph().upstream("totals") == {"orders", "people", "paid"}


def test_the_terminal_shows_a_tree_for_each_result() -> None:
    assert to_text(graph()) == (
        "{lake}\n└─ (paid)\n   └─ [orders]\n[[totals]]\n├─ (paid)\n│  └─ [orders]\n"
        "└─ [[people]]\n\n[topic]  [[table]]  (view)  {files}  <sink>  <postgres>  [store]\n"
    )


def test_the_picture_is_valid_and_shows_every_node_and_edge() -> None:
    made = graph()
    made.add(GraphNode("a<b", "sink"))
    picture = ET.fromstring(to_svg(made, "p & q"))
    texts = [item.text for item in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"orders", "people", "paid", "totals", "lake", "a<b", "p & q"} <= set(texts)
    paths = list(picture.iter("{http://www.w3.org/2000/svg}path"))
    assert len(paths) == 2 * len(made.edges)


def test_a_cycle_is_named() -> None:
    made = graph()
    made.edges.add(("totals", "paid"))
    with pytest.raises(PipelineInvalid, match="paid -> totals -> paid"):
        layers(made)


def test_a_node_that_the_pipeline_writes_wins_over_one_that_it_only_reads() -> None:
    made = Graph()
    made.add(GraphNode("a", "topic", outside=True))
    made.add(GraphNode("a", "table"))
    made.add(GraphNode("a", "topic", outside=True))
    assert made.nodes["a"] == GraphNode("a", "table")
