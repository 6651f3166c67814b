"""Translates the types in signatures of asynchronous classes for their blocking twins."""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import inspect
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tools.blocking_plan import FILES, HANDLERS, PLANS, SEVERAL

__all__ = ["EXISTING", "ITERATORS", "Imports", "Types", "Undecided", "names_of", "twin_in"]

ITERATORS = {"AsyncIterator", "AsyncGenerator"}
EXISTING = {plan.name: plan for plan in PLANS if importlib.util.find_spec(plan.home) is not None}
ORDER = {name: index for index, name in enumerate(FILES)}


class Undecided(Exception):
    """The generator does not know what the twin should do; the plan has to decide."""


# -- where names come from ----------------------------------------------------------------


@cache
def names_of(module: str) -> dict[str, tuple[str, str]]:
    """Name in a module -> (home, name there); also what it imports for type checkers only."""
    file = Path(inspect.getfile(importlib.import_module(module)))
    stub = file.with_suffix(".pyi")  # a room whose names are loaded when they are used
    tree = ast.parse((stub if stub.is_file() else file).read_text())
    found: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                found.setdefault(alias.asname or alias.name, (node.module, alias.name))
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef):
            found[statement.name] = (module, statement.name)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            found.update((t.id, (module, t.id)) for t in targets if isinstance(t, ast.Name))
    return found


@dataclass
class Imports:
    """What one generated file imports, and from where."""

    file: str
    now: set[tuple[str, str]] = field(default_factory=set)
    later: set[tuple[str, str]] = field(default_factory=set)  # of files that import this one

    def add(self, home: str, name: str) -> None:
        self.now.add((home, name))

    def twin(self, name: str, used_at_once: bool) -> str:
        """Make a twin class known; the import statement that a call needs first, if any."""
        plan = EXISTING[name]
        home = f"millstream.blocking.generated.{plan.file}"
        if plan.file == self.file:
            return ""
        if ORDER[plan.file] < ORDER[self.file]:
            self.now.add((home, name))
            return ""
        self.later.add((home, name))
        return f"from {home} import {name}\n" if used_at_once else ""

    def render(self, used_at_runtime: set[str]) -> str:
        """The import statements; what only types need is for type checkers alone."""
        types = [(home, name) for home, name in self.now if _local(name) not in used_at_runtime]
        lines = [f"from {home} import {name}" for home, name in self.now - set(types)]
        if types or self.later:
            lines += ["from typing import TYPE_CHECKING", "if TYPE_CHECKING:"]
            lines += [f"    from {home} import {name}" for home, name in {*types, *self.later}]
        return "\n".join(lines)


def _local(name: str) -> str:
    return name.rpartition(" as ")[2]


# -- types --------------------------------------------------------------------------------


class Types:
    """Translates the types in one module's signatures."""

    def __init__(self, module: str, imports: Imports, members: set[str]) -> None:
        self._module = module
        self._imports = imports
        self._members = members  # of the class: they hide builtins of the same name

    def text(self, annotation: str) -> str:
        return ast.unparse(_Translation(self).visit(ast.parse(annotation, mode="eval").body))

    def name(self, name: str) -> str:
        """Make a name of the module known here."""
        if name in HANDLERS:
            self._imports.add("collections.abc", "Callable")
            return self._plain(HANDLERS[name][0])
        if name in SEVERAL:
            return self._plain(SEVERAL[name])
        if name in EXISTING and self._home(name) == (EXISTING[name].home, name):
            self._imports.twin(name, used_at_once=False)
            return name
        if name in ITERATORS:
            self._imports.add("collections.abc", "Iterator")
            return "Iterator"
        if name == "asyncio.Future":
            self._imports.add("millstream.blocking.sending", "Pending")
            return "Pending"
        if hasattr(builtins, name):
            if name not in self._members:
                return name
            self._imports.add("builtins", f"{name} as builtin_{name}")
            return f"builtin_{name}"
        home, original = self._home(name)
        check_no_async(home, original)
        self._imports.add(home, name if name == original else f"{original} as {name}")
        return name

    def _home(self, name: str) -> tuple[str, str]:
        # The plan's types of attributes may be types that the module never imports.
        known = {**names_of("millstream.messaging"), **names_of(self._module)}
        if name not in known:
            raise Undecided(f"{self._module}: where does {name} come from?")
        home, original = known[name]
        # A package's `__init__` re-exports names; the file that defines them counts.
        while home.startswith("millstream.") and home not in (self._module, "millstream.errors"):
            inner = names_of(home).get(original)
            if inner is None or inner == (home, original):
                break
            home, original = inner
        return home, original

    def _plain(self, plain: str) -> str:
        """Make the names in a type of the plan known here."""
        for used in re.findall(r"\w+", plain):
            if used in EXISTING:
                self._imports.twin(used, used_at_once=False)
            elif used in {"Event", "GroupEvent"}:
                home = {"Event": "events.event", "GroupEvent": "messaging.groups.event"}[used]
                self._imports.add(f"millstream.{home}", used)
            elif used == "Any":
                self._imports.add("typing", "Any")
            elif used in {"Mapping", "Sequence"}:
                self._imports.add("collections.abc", used)
        return plain


class _Translation(ast.NodeTransformer):
    def __init__(self, types: Types) -> None:
        self._types = types

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.parse(self._types.name(node.id), mode="eval").body

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return ast.parse(self._types.name(ast.unparse(node)), mode="eval").body

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id == "Literal":
            self._types.name("Literal")
            return node
        if isinstance(node.value, ast.Name) and node.value.id == "AsyncGenerator":
            if not isinstance(node.slice, ast.Tuple):
                raise Undecided(f"{ast.unparse(node)}: what does it yield?")
            node.slice = node.slice.elts[0]
        return self.generic_visit(node)


def check_no_async(home: str, name: str) -> None:
    """An asynchronous object must not be returned to code that cannot use it."""
    if not home.startswith("millstream."):
        return
    found = getattr(importlib.import_module(home), name, None)
    if inspect.isclass(found) and not name.endswith(("Settings", "Error")):
        waits = [n for n, m in vars(found).items() if inspect.iscoroutinefunction(m)]
        if [n for n in waits if not n.startswith("_")]:
            raise Undecided(f"{home}.{name} has async methods {waits} and no plan: add one")


def twin_in(annotation: str) -> tuple[str, str] | None:
    """(shape, class) when the type is a twin class, a list or an iterator of it, or it or None."""
    name = r"(?P<name>\w+)"
    for shape, pattern in {
        "one": name,
        "optional": rf"{name} \| None",
        "list": rf"list\[{name}\]",
        "iterator": rf"Async\w+\[{name}(?:, None)?\]",
    }.items():
        match = re.fullmatch(pattern, annotation)
        if match and match["name"] in EXISTING:
            return shape, match["name"]
    mentioned = set(re.findall(r"\w+", annotation)) & EXISTING.keys()
    if mentioned:
        raise Undecided(f"{annotation}: how is {sorted(mentioned)} wrapped in that?")
    return None
