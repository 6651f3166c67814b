"""The graph of a pipeline: what reads what, as text and as a picture. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from typing import Any, Final

from millstream.errors import PipelineInvalid

__all__ = ["Graph", "GraphNode", "layers", "to_svg", "to_text"]

_SHAPES: Final = {
    "topic": ("[", "]"),
    "table": ("[[", "]]"),
    "view": ("(", ")"),
    "files": ("{", "}"),
    "sink": ("<", ">"),
    "postgres": ("<", ">"),
    "store": ("[", "]"),
}
_COLORS: Final = {
    "topic": "#dbeafe",
    "table": "#dcfce7",
    "view": "#f4f4f5",
    "files": "#fef3c7",
    "sink": "#fae8ff",
    "postgres": "#fae8ff",
    "store": "#dbeafe",
}


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A topic, table, view, folder of files, sink, table of PostgreSQL or event store."""

    name: str
    kind: str
    outside: bool = False  # read by the pipeline, written elsewhere


@dataclass(slots=True)
class Graph:
    """Nodes by name, and edges from an input to what is computed from it."""

    nodes: dict[str, GraphNode] = field(default_factory=dict)
    edges: set[tuple[str, str]] = field(default_factory=set)

    def add(self, node: GraphNode) -> None:
        """Add a node; one that the pipeline writes wins over one that it only reads."""
        known = self.nodes.get(node.name)
        if known is None or known.outside:
            self.nodes[node.name] = node

    def inputs(self, name: str) -> list[str]:
        """The names of what a node reads."""
        return sorted(start for start, end in self.edges if end == name)

    def upstream(self, name: str) -> set[str]:
        """Everything that a node reads, directly or through others."""
        found: set[str] = set()
        waiting = self.inputs(name)
        while waiting:
            near = waiting.pop()
            if near not in found:
                found.add(near)
                waiting += self.inputs(near)
        return found

    def as_dict(self) -> dict[str, Any]:
        """The graph as values for JSON."""
        return {
            "nodes": [
                {"name": node.name, "kind": node.kind, "outside": node.outside}
                for node in sorted(self.nodes.values(), key=lambda node: node.name)
            ],
            "edges": [{"from": start, "to": end} for start, end in sorted(self.edges)],
        }


def layers(graph: Graph) -> list[list[str]]:
    """The nodes in columns: each one to the right of everything it reads."""
    depth: dict[str, int] = {}

    def depth_of(name: str, path: tuple[str, ...]) -> int:
        if name in path:
            cycle = " -> ".join((*path[path.index(name) :], name))
            raise PipelineInvalid(f"the pipeline has a cycle: {cycle}")
        if name not in depth:
            depths = [depth_of(near, (*path, name)) + 1 for near in graph.inputs(name)]
            depth[name] = max(depths, default=0)
        return depth[name]

    for name in sorted(graph.nodes):
        depth_of(name, ())
    columns: list[list[str]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for name in sorted(depth):
        columns[depth[name]].append(name)
    return [_ordered(graph, column, columns[:n]) for n, column in enumerate(columns)]


def _ordered(graph: Graph, column: list[str], before: list[list[str]]) -> list[str]:
    """The column sorted by the rows of the inputs, so that few lines cross."""
    rows = {name: n for names in before for n, name in enumerate(names)}

    def middle(name: str) -> tuple[float, str]:
        near = [rows[other] for other in graph.inputs(name) if other in rows]
        return (sum(near) / len(near) if near else 0.0, name)

    return sorted(column, key=middle)


# -- text -----------------------------------------------------------------------------------


def to_text(graph: Graph) -> str:
    """The graph for a terminal: each result with its inputs below it."""
    lines: list[str] = []
    written = [name for column in layers(graph) for name in column if not graph.nodes[name].outside]
    read = {start for start, _ in graph.edges}
    roots = [name for name in written if name not in read] or written
    for root in roots:
        lines += _tree(graph, root, "", "", set())
    legend = "  ".join(f"{left}{kind}{right}" for kind, (left, right) in _SHAPES.items())
    return "\n".join([*lines, "", legend, ""])


def _tree(graph: Graph, name: str, first: str, rest: str, seen: set[str]) -> Iterable[str]:
    node = graph.nodes[name]
    left, right = _SHAPES[node.kind]
    inputs = graph.inputs(name)
    again = name in seen and inputs
    seen.add(name)
    yield f"{first}{left}{name}{right}{'  (see above)' if again else ''}"
    if again:
        return
    for n, near in enumerate(inputs):
        last = n == len(inputs) - 1
        yield from _tree(
            graph,
            near,
            rest + ("└─ " if last else "├─ "),
            rest + ("   " if last else "│  "),
            seen,
        )


# -- SVG ------------------------------------------------------------------------------------

_BOX: Final = (170, 40)
_GAP: Final = (70, 22)
_EDGE: Final = 20


def to_svg(graph: Graph, title: str) -> str:
    """The graph as a picture: inputs on the left, results on the right."""
    columns = layers(graph)
    width, height = _BOX
    gap_x, gap_y = _GAP
    rows = max((len(column) for column in columns), default=0)
    total = (
        2 * _EDGE + max(1, len(columns)) * (width + gap_x) - gap_x,
        2 * _EDGE + 24 + max(1, rows) * (height + gap_y) - gap_y,
    )
    corners: dict[str, tuple[int, int]] = {}
    for x, column in enumerate(columns):
        shift = (rows - len(column)) * (height + gap_y) // 2
        for y, name in enumerate(column):
            corners[name] = (
                _EDGE + x * (width + gap_x),
                _EDGE + 24 + shift + y * (height + gap_y),
            )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total[0]}" height="{total[1]}" '
        f'viewBox="0 0 {total[0]} {total[1]}" font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_EDGE}" y="{_EDGE + 4}" font-size="16">{escape(title)}</text>',
    ]
    parts += [_line(corners[start], corners[end]) for start, end in sorted(graph.edges)]
    parts += [_box(graph.nodes[name], corner) for name, corner in corners.items()]
    return "\n".join([*parts, "</svg>", ""])


def _line(start: tuple[int, int], end: tuple[int, int]) -> str:
    x1, y1 = start[0] + _BOX[0], start[1] + _BOX[1] // 2
    x2, y2 = end[0], end[1] + _BOX[1] // 2
    middle = (x1 + x2) // 2
    return (
        f'<path d="M{x1},{y1} C{middle},{y1} {middle},{y2} {x2 - 6},{y2}" fill="none" '
        f'stroke="#71717a"/><path d="M{x2 - 7},{y2 - 4} L{x2},{y2} L{x2 - 7},{y2 + 4} Z" '
        f'fill="#71717a"/>'
    )


def _box(node: GraphNode, corner: tuple[int, int]) -> str:
    x, y = corner
    width, height = _BOX
    dash = ' stroke-dasharray="4 3"' if node.outside or node.kind == "view" else ""
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" '
        f'fill="{_COLORS[node.kind]}" stroke="#52525b"{dash}/>'
        f'<text x="{x + width // 2}" y="{y + 17}" text-anchor="middle">{escape(node.name)}</text>'
        f'<text x="{x + width // 2}" y="{y + 32}" text-anchor="middle" font-size="10" '
        f'fill="#52525b">{escape(node.kind)}</text>'
    )
