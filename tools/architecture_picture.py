"""Draws docs/architecture.svg from the tables of tools/rooms.py.

    python -m tools.architecture_picture            # writes the picture
    python -m tools.architecture_picture --check    # fails if it is stale

A box is a room, the small boxes in it are its sub-rooms. An arrow points to a room that may be
imported; what follows from other arrows, and the foundation that everything imports, is left out.
"""

from __future__ import annotations

import ast
import sys
from html import escape
from pathlib import Path

from tools.rooms import FOUNDATION, MAY_IMPORT

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "architecture.svg"

BOX, HIGH = 300, 74  # a room
GAP, ROW = 34, 106  # between columns; from row to row
CHIP, MARGIN, HEADER = 22, 24, 96
# Rooms beside the main column; the arrows of the chain of messaging stay straight.
LEFT, RIGHT = {"spark"}, {"broker"}
FONT = 'font-family="Helvetica, Arial, sans-serif"'
PATH = [
    *("your code", "messaging", "wire", "broker (NATS JetStream)"),
    *("wire", "spark", "pipelines", "topics, tables, files"),
]


def rooms() -> dict[str, set[str]]:
    """Each drawn room with the rooms it may import, sub-rooms counted as their room."""
    graph: dict[str, set[str]] = {}
    for room, targets in MAY_IMPORT.items():
        name = room.partition(".")[0]
        found = {target.partition(".")[0] for target in targets}
        graph.setdefault(name, set()).update(found)
    left_out = {*FOUNDATION, "__init__", "testing", "testing_plugin"}
    return {
        name: {target for target in targets if target not in {name, *left_out}}
        for name, targets in graph.items()
        if name not in left_out
    }


def sub_rooms(room: str) -> list[str]:
    return [name.partition(".")[2] for name in MAY_IMPORT if name.startswith(f"{room}.")]


def reachable(graph: dict[str, set[str]], room: str) -> set[str]:
    """Everything below a room."""
    found: set[str] = set()
    waiting = list(graph[room])
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting.extend(graph[one])
    return found


def arrows(graph: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The imports that do not follow from others."""
    return [
        (room, target)
        for room, targets in graph.items()
        for target in sorted(targets)
        if not any(target in reachable(graph, other) for other in targets - {target})
    ]


def levels(graph: dict[str, set[str]]) -> list[list[str]]:
    """Rooms by height: each is above all that it may import; the lowest row first."""
    height: dict[str, int] = {}
    while len(height) < len(graph):
        for room, targets in graph.items():
            if targets <= height.keys():
                height.setdefault(room, 1 + max((height[t] for t in targets), default=-1))
    rows: list[list[str]] = [[] for _ in range(max(height.values()) + 1)]
    for room, row in height.items():
        rows[row].append(room)
    return rows


def sentence_of(room: str) -> str:
    """The first words of a room's own docstring."""
    folder = ROOT / "millstream" / room
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    first = text.split("\n")[0].rstrip(".")
    return first if len(first) <= 46 else first[:45].rsplit(" ", 1)[0] + " …"


def text(x: float, y: float, words: str, *, size: int = 13, style: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" {FONT} font-size="{size}" {style}>{escape(words)}</text>'


def draw_box(room: str, x: float, y: float) -> list[str]:
    chips = sub_rooms(room)
    lines = [
        f'<rect x="{x:g}" y="{y:g}" width="{BOX}" height="{HIGH}" rx="8" fill="#f4f7fb" '
        f'stroke="#34506e" stroke-width="1.4"/>',
        text(x + 12, y + 22, room, size=15, style='font-weight="bold" fill="#1c2c3f"'),
    ]
    if not chips:
        lines.append(text(x + 12, y + 44, sentence_of(room), size=11, style='fill="#52647a"'))
        return lines
    left, top = x + 12, y + 34.0
    for chip in chips:
        wide = 6.0 * len(chip) + 12
        if left + wide > x + BOX - 8:
            left, top = x + 12, top + CHIP - 4
        lines.append(
            f'<rect x="{left:g}" y="{top:g}" width="{wide:g}" height="15" rx="4" fill="#dde7f3"/>'
        )
        lines.append(text(left + 6, top + 11, chip, size=10, style='fill="#1c2c3f"'))
        left += wide + 5
    return lines


def curve(start: tuple[float, float], end: tuple[float, float]) -> str:
    """From a room down to another: straight, out to a side column, or back from one."""
    (x1, y1), (x2, y2) = start, end
    middle = MARGIN + BOX + GAP
    if x1 == x2:
        return f"M{x1 + BOX / 2:g},{y1 + HIGH:g} L{x2 + BOX / 2:g},{y2:g}"
    if x1 == middle:  # outwards: leaves at the side, arrives at the top
        side, down = x1 + (BOX if x2 > x1 else 0), x2 + BOX / 2
        return f"M{side:g},{y1 + HIGH / 2:g} Q{down:g},{y1 + HIGH / 2:g} {down:g},{y2:g}"
    down, side = x1 + BOX / 2, x2 + (BOX if x1 > x2 else 0)
    return f"M{down:g},{y1 + HIGH:g} Q{down:g},{y2 + HIGH / 2:g} {side:g},{y2 + HIGH / 2:g}"


def draw() -> str:
    """The picture as SVG."""
    graph = rooms()
    rows = levels(graph)
    width = 2 * MARGIN + 3 * BOX + 2 * GAP
    height = HEADER + len(rows) * ROW + 40
    at: dict[str, tuple[float, float]] = {}
    for number, row in enumerate(reversed(rows)):
        for room in row:
            column = 0 if room in LEFT else 2 if room in RIGHT else 1
            at[room] = (MARGIN + column * (BOX + GAP), HEADER + number * ROW)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="img" aria-label="Rooms of Millstream">',
        '<defs><marker id="head" markerWidth="9" markerHeight="7" refX="8" refY="3.5" '
        'orient="auto"><path d="M0,0 L9,3.5 L0,7 z" fill="#7c8fa6"/></marker></defs>',
        f'<rect width="{width:g}" height="{height:g}" fill="white"/>',
        text(MARGIN, 34, "The path of an event", size=13, style='fill="#52647a"'),
        text(MARGIN, 56, "  →  ".join(PATH), size=15, style='fill="#1c2c3f"'),
        text(MARGIN, 84, "Rooms; an arrow means: may import", size=13, style='fill="#52647a"'),
    ]
    for room, target in arrows(graph):
        lines.append(
            f'<path d="{curve(at[room], at[target])}" fill="none" stroke="#7c8fa6" '
            f'stroke-width="1.3" marker-end="url(#head)"/>'
        )
    for room, (x, y) in at.items():
        lines += draw_box(room, x, y)
    foundation = "Every room may also import: " + ", ".join(sorted(FOUNDATION))
    lines.append(text(MARGIN, height - 16, foundation, size=13, style='fill="#52647a"'))
    lines.append("</svg>")
    return "\n".join(lines) + "\n"


def main() -> None:
    picture = draw()
    if "--check" in sys.argv:
        stale = not PICTURE.exists() or PICTURE.read_text() != picture
        sys.exit("stale: run python -m tools.architecture_picture" if stale else 0)
    PICTURE.write_text(picture)


if __name__ == "__main__":
    main()
