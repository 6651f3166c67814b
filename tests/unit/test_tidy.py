"""The house numbers and the things that must not be in the tree."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.unit.dead_code import Code, unused, unused_modules

ROOT = Path(__file__).parents[2]

FILE_LINES = 500
FUNCTION_LINES = 70
WIDTH = 100
POSITIONAL = 6  # parameters that may be given by position
PARAMETERS = 8  # keyword-only ones included; more means a missing value type

PYTHON = sorted(
    path
    for folder in ("millstream", "tests", "bench", "examples", "tools")
    for path in (ROOT / folder).rglob("*.py")
)
PACKAGE = [path for path in PYTHON if path.is_relative_to(ROOT / "millstream")]
TEXTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "*.toml", "Makefile", ".ci/*", "examples/**/*")
    for path in ROOT.glob(pattern)
    if path.is_file() and "__pycache__" not in path.parts
)

Check = Callable[[ast.AST, Path], Iterator[str]]
Function = ast.FunctionDef | ast.AsyncFunctionDef
QUEUES = {"Queue", "LifoQueue", "PriorityQueue", "JoinableQueue"}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an attribute chain, "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def long_functions(tree: ast.AST, _: Path) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, Function):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES:
                yield f"line {node.lineno}: {node.name} has {lines} lines"


def many_parameters(tree: ast.AST, _: Path) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, Function):
            positional = [*node.args.posonlyargs, *node.args.args]
            positional = [arg for arg in positional if arg.arg not in {"self", "cls"}]
            total = len(positional) + len(node.args.kwonlyargs)
            if len(positional) > POSITIONAL or total > PARAMETERS:
                yield f"line {node.lineno}: {node.name} has {total} parameters"


def prints(tree: ast.AST, _: Path) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and dotted(node.func) == "print":
            yield f"line {node.lineno}: print"


def swallowing_excepts(tree: ast.AST, _: Path) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        if node.type is None:
            yield f"line {node.lineno}: bare except"
        elif dotted(node.type).endswith("Exception") and isinstance(node.body[0], ast.Pass):
            yield f"line {node.lineno}: every error is swallowed"


def asserts(tree: ast.AST, _: Path) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield f"line {node.lineno}: assert vanishes under -O; raise"


def wall_clocks(tree: ast.AST, path: Path) -> Iterator[str]:
    if path.name == "deadline.py":
        return
    for node in ast.walk(tree):
        if dotted(node) in {"time.time", "time.time_ns"}:
            yield f"line {getattr(node, 'lineno', '?')}: only deadline.py reads the wall clock"


# Besides settings.py: scripts of their own that load no other module of the package and hand their
# environment on, and what sets the environment of Spark's processes.
READS_ENVIRONMENT = {
    "millstream/settings.py",
    "millstream/broker/keeper.py",
    "millstream/spark/python_stand_in.py",
    "millstream/spark/worker_python.py",
}


def environments(tree: ast.AST, path: Path) -> Iterator[str]:
    if path.is_absolute() and name_of(path) in READS_ENVIRONMENT:
        return
    for node in ast.walk(tree):
        if dotted(node) in {"os.environ", "os.getenv", "os.putenv", "os.environb"}:
            yield f"line {getattr(node, 'lineno', '?')}: only settings.py reads the environment"


def endless_queues(tree: ast.AST, _: Path) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            kind = dotted(node.func).rpartition(".")[2]
            sized = node.args or any(item.arg == "maxsize" for item in node.keywords)
            if kind == "SimpleQueue" or (kind in QUEUES and not sized):
                yield f"line {node.lineno}: {kind} without a size"


PACKAGE_CHECKS = [
    long_functions,
    many_parameters,
    prints,
    swallowing_excepts,
    asserts,
    wall_clocks,
    environments,
    endless_queues,
]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@pytest.mark.parametrize("check", PACKAGE_CHECKS, ids=lambda check: check.__name__)
def test_the_package_has_no(check: Check) -> None:
    faults = [
        f"{name_of(path)}: {fault}" for path in PACKAGE for fault in check(parsed(path), path)
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("check", "source"),
    [
        (long_functions, "def f():\n" + "    x = 1\n" * FUNCTION_LINES),
        (many_parameters, "def f(a, b, c, d, e, f, g): ..."),
        (many_parameters, "def f(a, *, b, c, d, e, f, g, h, i): ..."),
        (many_parameters, "@app.command()\ndef up(a, *, b, c, d, e, f, g, h, i): ..."),
        (prints, "print('x')"),
        (swallowing_excepts, "try:\n    x()\nexcept:\n    raise"),
        (swallowing_excepts, "try:\n    x()\nexcept Exception:\n    pass"),
        (asserts, "assert x"),
        (wall_clocks, "import time\nnow = time.time()"),
        (environments, "import os\nhome = os.environ['HOME']"),
        (endless_queues, "import asyncio\nq = asyncio.Queue()"),
        (endless_queues, "import queue\nq = queue.SimpleQueue()"),
    ],
)
def test_a_fault_is_found(check: Check, source: str) -> None:
    assert list(check(ast.parse(source), Path("millstream/x.py")))


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_a_file_is_within_the_length_and_width_limits(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= FILE_LINES, f"{len(lines)} lines"
    wide = [number for number, line in enumerate(lines, 1) if len(line) > WIDTH]
    assert not wide, f"wider than {WIDTH}: lines {wide}"


LEFTOVER = re.compile(r"\b(TO" + "DO|FIX" + r"ME|X" + r"XX)\b")


@pytest.mark.parametrize("path", [*PYTHON, *TEXTS], ids=name_of)
def test_nothing_is_left_to_do(path: Path) -> None:
    assert not LEFTOVER.findall(path.read_text())


# Folders of one machine; an example may use a relative path or one of the system's own.
MACHINE = re.compile(r"(?<![\w.$])/(?:work|root|home|Users|mnt|opt/wheels)/")


@pytest.mark.parametrize("path", [*PYTHON, *TEXTS], ids=name_of)
def test_a_text_names_no_folder_of_one_machine(path: Path) -> None:
    assert not MACHINE.findall(path.read_text())


BARE_TEST = re.compile(r"`(test_\w+)`")
NAMED_TEST = re.compile(r"\b(tests/[\w/]+\.py)(?:::(\w+))?")


def missing_tests(text: str) -> list[str]:
    """Missing tests that a text names (`tests/x.py`, `tests/x.py::test_y`, `test_y`)."""
    missing = [
        f"{file}::{test}" if test else file
        for file, test in NAMED_TEST.findall(text)
        if not (ROOT / file).is_file() or (test and f"def {test}(" not in (ROOT / file).read_text())
    ]
    return missing + [name for name in BARE_TEST.findall(text) if name not in all_tests()]


@cache
def all_tests() -> set[str]:
    files = (path for path in PYTHON if path.is_relative_to(ROOT / "tests"))
    return {name for path in files for name in re.findall(r"def (test_\w+)\(", path.read_text())}


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_a_test_that_a_page_names_exists(path: Path) -> None:
    assert missing_tests(path.read_text()) == []


def test_a_named_test_that_does_not_exist_is_found() -> None:
    this = "tests/unit/test_tidy.py"
    assert missing_tests(f"{this}, {this}::test_a_fault_is_found") == []
    assert missing_tests("`test_a_fault_is_found`") == []
    for wrong in ("tests/unit/test_untidy.py", f"{this}::test_a_fault", "test_a_fault"):
        assert missing_tests(f"see `{wrong}`.") == [wrong]


# -- dead code --------------------------------------------------------------------------------

# What people import; its names, and the public methods of its classes, are used by them.
DOORS = ["", ".blocking", ".broker", ".cdc", ".errors", ".pipelines", ".spark", ".testing"]
# Not found by the check, but used. Each has its reason.
USED_ALL_THE_SAME = {
    # Keeps the task alive: the event loop has only a weak reference to it.
    "millstream.blocking.grouping.GroupLeaving._leaving",
    # Found in its module by the library, which `PERSISTENCE_MODULE` names it to.
    "millstream.eventsourcing.factory.MillstreamFactory",
    # Run by its path, as a process of its own; see broker/server_process.py.
    "millstream.broker.keeper",
    # Of asyncio's class that it inherits from, which uses them.
    "millstream.gateways.tls._Tls._get_write_buffer_size",
    "millstream.gateways.tls._Tls._ssl_buffer",
    "millstream.gateways.tls._Tls._ssl_buffer_view",
    # Called by the script that a project is submitted with; see pipelines/shipping.py.
    "millstream.pipelines.submitted",
    "millstream.pipelines.submitted.run_submitted",
}


def code_in(*folders: str) -> Code:
    sources: dict[str, str] = {}
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            stub = path.with_suffix(".pyi")  # the names of a room that are loaded when used
            text = path.read_text() + ("\n" + stub.read_text() if stub.is_file() else "")
            sources[".".join(parts).removesuffix(".__init__")] = text
    return Code(sources)


def entry_points() -> set[str]:
    """Dotted names that the installed package is called by, and the commands of its CLI."""
    from millstream.cli.app import COMMANDS

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["scripts"], *project["entry-points"].values()]
    named = {target.replace(":", ".") for group in groups for target in group.values()}
    modules = {target.partition(":")[0] for group in groups for target in group.values()}
    return named | modules | {f"millstream.cli.commands.{name}" for name in COMMANDS.values()}


def test_the_package_has_no_dead_code() -> None:
    code, users = code_in("millstream"), code_in("bench", "examples", "tools")
    public = entry_points()
    for door in DOORS:
        module = importlib.import_module(f"millstream{door}")
        public |= {f"{module.__name__}.{name}" for name in module.__all__}
    found = {str(one) for one in unused(code, users, public)}
    found |= unused_modules(code, users, public)
    dead = sorted(found - USED_ALL_THE_SAME)
    assert not dead, "used by tests at most: remove it, or add it to USED_ALL_THE_SAME"
    needless = sorted(USED_ALL_THE_SAME - found)
    assert not needless, "exceptions that are not needed any more"


DEAD = {
    "p": "from p.used import shown\n__all__ = ['shown']",
    "p.used": """
import p.helper as helper

LIMIT = _SPARE = 1
shown = LIMIT

def _orphan():
    return _orphan()

def lonely():
    return helper.help_out()

class Shy:
    def __init__(self):
        self._kept = self._lost = 1

    def _idle(self):
        return self._kept

    def idle(self):
        return self.busy()

    def busy(self):
        return Shy()

class Visitor(ast.NodeVisitor):
    def visit_Name(self):
        return Visitor()
""",
    "p.helper": "def help_out(): ...",
    "p.left": "import p.used",
}


def test_dead_code_is_found() -> None:
    code, nobody = Code(DEAD), Code({})
    found = {str(one) for one in unused(code, nobody, {"p.shown"})}
    assert found == {
        "p.used._SPARE",
        "p.used._orphan",
        "p.used.lonely",
        "p.used.Visitor",
        "p.used.Shy",
        "p.used.Shy._lost",
        "p.used.Shy._idle",
        "p.used.Shy.idle",
    }
    assert unused_modules(code, nobody, set()) == {"p.left"}


def test_code_that_a_program_uses_is_not_dead() -> None:
    code = Code(DEAD)
    user = Code({"program": "from p.used import Shy, lonely\nimport p.left\nlonely(Shy().idle())"})
    found = {one.name for one in unused(code, user, {"p.shown"})}
    assert found == {"_SPARE", "_orphan", "Visitor", "_lost", "_idle"}
    assert not unused_modules(code, user, set())


@pytest.mark.parametrize("text", ["see /wo" + "rk/x", "cd /ho" + "me/ann/x"])
def test_a_machine_folder_is_found(text: str) -> None:
    assert MACHINE.search(text)


def test_the_lock_file_holds_exact_versions_and_no_address() -> None:
    line = re.compile(r"[a-z0-9][a-z0-9._-]*==[^\s;]+( ; .+)?")
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    assert lines
    assert not [text for text in lines if not line.fullmatch(text) or "/" in text]


def test_every_dependency_is_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [item for items in project["optional-dependencies"].values() for item in items]
    wanted = {re.split(r"[<>=!~\[; ]", item)[0] for item in [*project["dependencies"], *extras]}
    locked = {text.partition("==")[0] for text in (ROOT / "requirements.lock").read_text().split()}
    assert wanted <= locked


def test_no_generated_file_is_committed() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    bad = re.compile(r"(\.pyc|\.jar|\.DS_Store|\.egg-info/.*|\.log|^\.venv/.*)$")
    assert not [name for name in listed.stdout.splitlines() if bad.search(name)]
