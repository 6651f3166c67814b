"""Who may import whom: the tables of tools/rooms.py are the rule; docs/ARCHITECTURE.md explains."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools.rooms import EDGES, FOUNDATION, INNER, MAY_IMPORT

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "millstream"

# Class name -> why two rooms may define it. The blocking twins of `blocking.generated` mirror
# classes by name and are not counted.
SAME_NAME: dict[str, str] = {
    "EndpointGroup": "the blocking form of the asynchronous one, written by hand",
}

# Library -> the rooms that may import it. `nats` is a peer in bench/ and tests/, never used inside.
LIBRARIES: dict[str, set[str]] = {
    # Modules of broker/, as the keeper loads them when it runs as a script.
    "child_process": {"broker"},
    "kept_files": {"broker"},
    "log_ends": {"broker"},
    "monitoring": {"broker"},
    "loss_notes": {"broker"},
    "private_files": {"broker"},
    "process_keeper": {"broker"},
    "rotated_log": {"broker"},
    "server_memory": {"broker"},
    "nats": set(),
    "nkeys": {"broker", "wire"},
    "msgspec": INNER | EDGES | {"bulk"},
    "pyarrow": INNER - {"broker", "wire"} | {"blocking", "cli", "bulk"},
    "typer": {"cli"},
    "click": {"cli"},
    "rich": {"cli"},
    "pytest": {"testing_plugin"},
    "fastavro": {"schemas"},
    "google": {"schemas"},
    "proto_schema_parser": {"schemas"},
    "antlr4": {"schemas"},
    "pydantic": {"schemas"},
    "cryptography": {"event_store"},
    "pyspark": {"spark", "pipelines"},
    "py4j": {"spark", "pipelines"},
    "pandas": {"spark", "pipelines"},
    "numpy": {"spark", "cdc", "gateways"},
    "kio": {"gateways"},
    "aiokafka": {"gateways"},
    "cramjam": {"gateways"},
    "crc32c": {"gateways"},
    "yaml": {"pipelines"},
    "eventsourcing": {"eventsourcing"},
    "psycopg": {"cdc"},
    "adbc_driver_postgresql": {"cdc"},
    "adbc_driver_manager": {"cdc"},
    "pymysqlreplication": {"cdc"},
    "pymysql": {"cdc"},
}


MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


@dataclass(frozen=True)
class Import:
    """One import statement, wherever in a file it is."""

    module: str  # absolute and dotted
    for_types: bool  # under TYPE_CHECKING


def imports_of(source: str, package: str) -> Iterator[Import]:
    """Every module a file imports, inside functions too."""
    tree = ast.parse(source)
    guarded = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node in guarded) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: -node.level + 1 or None] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                # `from room import module` is an import of the module.
                inner = f"{module}.{alias.name}"
                known = inner in MODULES or module == "millstream"
                yield Import(inner if known else module, node in guarded)


def room_of(module: str) -> str:
    """The room or sub-room of a module of the package: its folder, or itself at the top."""
    name = module.removeprefix("millstream").lstrip(".")
    path = MODULES.get(module)
    if path is None or not name:  # a name of the front door, such as millstream.connect
        return "__init__"
    if path.name == "__init__.py" or path.parent == PACKAGE:
        return name
    return name.rpartition(".")[0]


def fault_of(room: str, found: Import) -> str | None:
    """Why this room must not import this module, or None when it may."""
    top = found.module.partition(".")[0]
    if top == "millstream":
        target = room_of(found.module)
        if target in {room, *FOUNDATION}:
            return None
        if room not in MAY_IMPORT:
            return f"room '{room}' is not in the table MAY_IMPORT"
        if target in MAY_IMPORT[room]:
            return None
        return f"'{room}' may not import '{target}'"
    if top in sys.stdlib_module_names or top == "__future__":
        return None
    if top not in LIBRARIES:
        return f"the library '{top}' is not in the table LIBRARIES"
    if room.partition(".")[0] in LIBRARIES[top]:
        return None
    return f"'{room}' may not import the library '{top}'"


def package_of(path: Path) -> str:
    return ".".join(path.parent.relative_to(ROOT).parts)


@pytest.mark.parametrize("module", MODULES)
def test_a_file_imports_only_what_its_room_may(module: str) -> None:
    path = MODULES[module]
    found = imports_of(path.read_text(), package_of(path))
    faults = {fault_of(room_of(module), one) for one in found} - {None}
    assert not faults, f"{module}: {faults}"


def test_every_room_is_in_the_table_and_every_entry_is_a_room() -> None:
    rooms = {room_of(module) for module in MODULES} - {"__init__"}
    assert rooms <= MAY_IMPORT.keys()
    named = {*MAY_IMPORT, *(room for rooms in MAY_IMPORT.values() for room in rooms)}
    assert named - {"__init__"} <= rooms


def test_nothing_imports_an_edge() -> None:
    for room, others in MAY_IMPORT.items():
        if room.partition(".")[0] not in EDGES:
            assert not {other.partition(".")[0] for other in others} & EDGES, room


# -- cycles -------------------------------------------------------------------------------


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The sets of modules that import each other in a circle (Tarjan's algorithm)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        path.append(module)
        for other in sorted(graph.get(module, ())):
            if other not in order:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in path:
                lowest[module] = min(lowest[module], order[other])
        if lowest[module] == order[module]:
            at = path.index(module)
            if len(path) - at > 1:
                found.append(sorted(path[at:]))
            del path[at:]

    for module in graph:
        if module not in order:
            visit(module)
    return found


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions count; those for type checkers alone do not."""
    graph: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        found = imports_of(path.read_text(), package_of(path))
        graph[module] = {
            one.module for one in found if not one.for_types and one.module in MODULES
        } - {module}
    assert not cycles(graph)


def test_a_cycle_is_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert cycles({"a": {"b"}, "b": {"c"}, "c": set()}) == []


# -- names --------------------------------------------------------------------------------


def test_a_class_name_belongs_to_one_room() -> None:
    homes: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        if room_of(module) == "blocking.generated":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, set()).add(module)
    twice = {name: sorted(found) for name, found in homes.items() if len(found) > 1}
    assert not {name: found for name, found in twice.items() if name not in SAME_NAME}
    assert SAME_NAME.keys() <= twice.keys(), "an exception that is not needed any more"


# -- the checks themselves ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("room", "module"),
    [
        ("wire", "millstream.messaging"),
        ("wire.sync", "millstream.wire.aio.connection"),
        ("broker", "millstream.wire"),
        ("events", "millstream.wire.aio.jetstream"),
        ("messaging.core", "millstream.messaging.groups.group"),
        ("messaging", "millstream.schemas.codecs"),
        ("spark", "millstream.wire.aio.connection"),
        ("messaging", "pyspark.sql"),
        ("wire", "nats"),
        ("settings", "msgspec"),
        ("attic", "millstream.wire"),
        ("wire", "somelibrary"),
    ],
)
def test_a_forbidden_import_is_found(room: str, module: str) -> None:
    assert fault_of(room, Import(module, for_types=False))


def test_relative_nested_and_type_only_imports_are_seen() -> None:
    source = (
        "from . import a\nfrom .b import c\nfrom ..x import y\n"
        "def f():\n    import deep.er\n"
        "if TYPE_CHECKING:\n    from z import Z\n"
    )
    assert set(imports_of(source, "millstream.wire")) == {
        Import("millstream.wire", False),
        Import("millstream.wire.b", False),
        Import("millstream.x", False),
        Import("deep.er", False),
        Import("z", True),
    }


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
