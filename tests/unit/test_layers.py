"""Who may import whom. The tables are the rule; docs/ARCHITECTURE.md explains them."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "millstream"

FOUNDATION = {"errors", "settings", "deadline", "declared", "lazy", "closing", "version"}
EDGES = {"cli"}
INNER = {"broker", "wire", "events", "messaging", "schemas", "tables", "spark", "pipelines"}

# Room -> the rooms it may import besides the foundation and itself.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "settings": set(),
    "deadline": set(),
    "declared": set(),
    "lazy": set(),
    "closing": set(),
    "version": set(),
    "broker": set(),
    "wire": set(),
    "events": {"wire"},
    "messaging": {"wire", "events"},
    "tables": {"messaging"},
    "schemas": {"wire", "events", "messaging", "tables"},
    "spark": {"wire", "events", "messaging", "schemas"},
    "pipelines": {"wire", "spark", "schemas", "blocking"},
    "cli": INNER | {"mill"},
    # Doors beside the rooms.
    "mill": {"events", "messaging", "tables", "schemas"},
    "__init__": INNER | {"mill", "blocking"},
    "blocking": {"wire", "events", "messaging", "tables", "schemas", "mill"},
    "testing": {"broker"},
    "testing_plugin": {"broker", "testing"},
}

# Library -> the rooms that may import it. `nats` is a peer in bench/ and tests/, never used inside.
LIBRARIES: dict[str, set[str]] = {
    # Modules of broker/, as the keeper loads them when it runs as a script.
    "log_ends": {"broker"},
    "rotated_log": {"broker"},
    "nats": set(),
    "nkeys": {"broker", "wire"},
    "msgspec": INNER | EDGES,
    "pyarrow": INNER - {"broker", "wire"} | {"blocking", "cli"},
    "typer": {"cli"},
    "click": {"cli"},
    "rich": {"cli"},
    "pytest": {"testing_plugin"},
    "fastavro": {"schemas"},
    "google": {"schemas"},
    "proto_schema_parser": {"schemas"},
    "antlr4": {"schemas"},
    "pydantic": {"schemas"},
    "pyspark": {"spark", "pipelines"},
    "py4j": {"spark", "pipelines"},
    "pandas": {"spark", "pipelines"},
    "numpy": {"spark"},
    "yaml": {"pipelines"},
}


def room_of(file: Path) -> str:
    first = file.relative_to(PACKAGE).parts[0]
    return first.partition(".")[0]


def imports_of(source: str, package: str) -> Iterator[str]:
    """Every module a file imports, wherever in the file, as an absolute dotted name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: -node.level + 1 or None] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module == "millstream":
                yield from (f"millstream.{alias.name}" for alias in node.names)
            else:
                yield module


def fault_of(room: str, module: str) -> str | None:
    """Why this room must not import this module, or None when it may."""
    top, _, rest = module.partition(".")
    if top == "millstream":
        target = rest.partition(".")[0]
        if not target or target in {room, *FOUNDATION}:
            return None
        if room not in MAY_IMPORT:
            return f"room '{room}' is not in the table MAY_IMPORT"
        if target in MAY_IMPORT[room] or target == "__version__":
            return None
        return f"'{room}' may not import '{target}'"
    if top in sys.stdlib_module_names or top == "__future__":
        return None
    if top not in LIBRARIES:
        return f"the library '{top}' is not in the table LIBRARIES"
    return None if room in LIBRARIES[top] else f"'{room}' may not import the library '{top}'"


FILES = sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")])


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_file_imports_only_what_its_room_may(file: Path) -> None:
    room = room_of(file)
    package = ".".join(file.parent.relative_to(ROOT).parts)
    faults = {fault_of(room, module) for module in imports_of(file.read_text(), package)}
    assert not (faults - {None}), f"{file.relative_to(ROOT)}: {faults - {None}}"


def test_every_room_is_in_the_table() -> None:
    rooms = {room_of(file) for file in FILES}
    assert rooms <= MAY_IMPORT.keys()


def test_nothing_imports_an_edge_but_the_edges_above_it() -> None:
    for room in {*INNER, *FOUNDATION, "blocking", "testing", "__init__"}:
        assert not MAY_IMPORT[room] & EDGES


@pytest.mark.parametrize(
    ("room", "module"),
    [
        ("wire", "millstream.messaging"),
        ("broker", "millstream.wire"),
        ("messaging", "millstream.schemas.codecs"),
        ("events", "millstream.messaging"),
        ("messaging", "pyspark.sql"),
        ("wire", "nats"),
        ("settings", "msgspec"),
        ("attic", "millstream.wire"),
        ("wire", "somelibrary"),
    ],
)
def test_a_forbidden_import_is_found(room: str, module: str) -> None:
    assert fault_of(room, module)


def test_relative_and_nested_imports_are_seen() -> None:
    source = "from . import a\nfrom .b import c\nfrom ..x import y\ndef f():\n    import deep.er\n"
    assert list(imports_of(source, "millstream.wire")) == [
        "millstream.wire",
        "millstream.wire.b",
        "millstream.x",
        "deep.er",
    ]


HEAVY = ["pyspark", "pyarrow", "pandas", "typer", "rich", "nkeys", "asyncio"]


def loaded_by(statement: str, modules: list[str]) -> list[str]:
    code = f"import sys\n{statement}\nprint([m for m in {modules!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    loaded: list[str] = ast.literal_eval(done.stdout)
    return loaded


def test_import_millstream_stays_light() -> None:
    assert loaded_by("import millstream", HEAVY) == []


def test_the_light_test_can_see_a_heavy_import() -> None:
    assert loaded_by("import millstream, typer", HEAVY) != []
